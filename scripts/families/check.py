"""Captures a small model of one family and measures whether the capture tells what the model computed.

Everything is compared with something that the capture did not produce: outputs with those of a forward without a
capture, and the modules that were captured with the attention modules that ran.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import attndiag
from attndiag.errors import NothingCapturedError
from attndiag.hooks.certify import certify
from attndiag.hooks.record import AttentionCall
from families.build import BuiltFamily, CouldNotBuildError, brief, build_family, more_models, run, tensors_of
from families.reported import compare, reported_weights, shapes
from families.source import family_source, family_sources

# Above this many weights a call is certified on eight of its rows.
MAX_WEIGHTS = 30_000_000
Record = dict[str, Any]


def check_family(name: str) -> Record:
    """Build, run and capture one family.

    Parameters
    ----------
    name : str
        Folder name in ``transformers/models``.

    Returns
    -------
    dict
        One JSON-able record: `family`, `routed`, `outcome` (one of `OUTCOMES`), `reason`, what was built, and the
        measured errors, the largest over all calls.
    """
    source = family_source(name)
    record: Record = {"family": name, "routed": source.routed, "attention_classes": list(source.attention_classes)}
    try:
        built = build_family(name)
    except CouldNotBuildError as error:
        return record | {"outcome": "not built", "reason": str(error), "attempts": error.attempts[:8]}
    record |= _measure(built)
    more = [_measure(other) for other in more_models(built)]
    covered = [set(built.uncovered), *({*other["not_covered"]} for other in more)]
    return record | {"more": more, "never_ran": sorted(set.intersection(*covered))}


def _measure(built: BuiltFamily) -> Record:
    record = {
        "model": type(built.model).__name__,
        "kind": built.kind,
        "level": built.level,
        "gain": built.gain,
        "parameters": built.parameters,
        "build_seconds": round(built.build_seconds, 3),
        "forward_seconds": round(built.forward_seconds, 3),
        "not_covered": list(built.uncovered),
        "attempts": built.attempts[:3],
    }
    return record | _capture(built)


OUTCOMES = {
    "certified": "every attention call captured, certified, W_O found and additive",
    "weights only": "every attention call captured and certified, but not every one has an additive output projection",
    "partly": "some layers captured and certified, others refused with a reason",
    "refused": "no softmax attention that could be captured; the reason names the layers",
    "no attention": "no attention module ran and none was captured",
    "not certified": "a captured call does not reproduce what the model computed",
    "missed": "an attention module ran that was neither captured nor refused",
    "changed": "the output with the capture differs from the output without",
    "error": "the capture raised something unexpected",
    "not built": "no small model of the family could be built and run here",
}


def _capture(built: BuiltFamily) -> Record:
    ran, expected = _modules_that_run(built)
    repeatable = _same(expected, _outputs(built))
    started = time.perf_counter()
    refusals: list[Any] = []
    calls: list[Record] = []
    opinion: Record = {}
    try:
        with attndiag.capture(built.model) as captured:
            outputs = _outputs(built)
        calls = [_measured(call) for call in captured.calls]
        refusals = captured.refusals
        opinion = _second_opinion(built, captured.calls)
    except NothingCapturedError as error:
        seconds = round(time.perf_counter() - started, 3)
        outcome = "refused" if ran else "no attention"
        return {"outcome": outcome, "reason": str(error), "calls": 0, "ran": _classes(ran), "capture_seconds": seconds}
    except Exception as error:  # the point of the sweep is to see which families do this
        return {"outcome": "error", "reason": brief(error), "ran": _classes(ran)}
    record = _summary(calls) | {
        "second_opinion": opinion,
        "capture_seconds": round(time.perf_counter() - started, 3),
        "bit_equal": _same(expected, outputs),
        "repeatable": repeatable,
        "refusals": dict(Counter(f"{refusal.module_class}: {refusal.reason}" for refusal in refusals)),
        "missed": _missed(ran, [call["module"] for call in calls], [refusal.module_name for refusal in refusals]),
    }
    return record | _judged(record)


def _second_opinion(built: BuiltFamily, calls: list[AttentionCall]) -> Record:
    """Captured weights against those that the model reports, for calls that are small enough to hold."""
    small = [call for call in calls if call.n_queries * call.n_keys * call.n_heads * call.z.shape[0] <= 2_000_000]
    reported = reported_weights(built)
    patterns = [call.pattern for call in small]
    return compare(patterns, reported) | {
        "compared": len(small),
        "captured_shapes": shapes(patterns)[:6],
        "reported_shapes": shapes(reported)[:6],
    }


def _judged(record: Record) -> Record:
    if not record["bit_equal"] and record["repeatable"]:
        return {"outcome": "changed", "reason": "outputs differ"}
    if record["failures"]:
        return {"outcome": "not certified", "reason": next(iter(record["failures"]))}
    if record["missed"]:
        return {"outcome": "missed", "reason": ", ".join(f"{cls} x{n}" for cls, n in record["missed"].items())}
    if record["refusals"]:
        return {"outcome": "partly", "reason": next(iter(record["refusals"]))}
    if record["output_reasons"]:
        return {"outcome": "weights only", "reason": next(iter(record["output_reasons"]))}
    return {"outcome": "certified", "reason": ""}


def _outputs(built: BuiltFamily) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors_of(run(built.model, built.inputs))]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)
    )


def _modules_that_run(built: BuiltFamily) -> tuple[dict[str, str], list[Tensor]]:
    """Attention modules (by what transformers' source says of their classes) that a plain forward enters."""
    known = {(source.name, cls) for source in family_sources().values() for cls in source.attention_classes}
    ran: dict[str, str] = {}
    handles = []
    for name, module in built.model.named_modules():
        bases = [
            (base.__module__.split(".")[2], base.__name__)
            for base in type(module).__mro__
            if base.__module__.startswith("transformers.models.")
        ]
        if known.intersection(bases) or isinstance(module, nn.MultiheadAttention):
            handles.append(
                module.register_forward_pre_hook(
                    lambda m, _args, name=name: ran.setdefault(name, type(m).__name__) and None
                )
            )
    try:
        return ran, _outputs(built)
    finally:
        for handle in handles:
            handle.remove()


def _missed(ran: dict[str, str], captured: list[str], refused: list[str]) -> dict[str, int]:
    """Classes of modules that ran without a call or a refusal, of themselves, their parts or what they are part of."""
    accounted = [name for name in {*captured, *refused} if name]
    missed = [
        cls
        for name, cls in ran.items()
        if not any(name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.") for other in accounted)
    ]
    return dict(Counter(missed))


def _classes(ran: dict[str, str]) -> dict[str, int]:
    return dict(Counter(ran.values()))


def _measured(call: AttentionCall) -> Record:
    weights = call.z.shape[0] * call.n_heads * call.n_queries * call.n_keys
    certificate = call.certificate if weights <= MAX_WEIGHTS else certify(call, rows=8)
    pattern = call.pattern if weights <= MAX_WEIGHTS else None
    return {
        "module": call.module_name,
        "class": call.module_class,
        "kind": call.kind,
        "route": call.route,
        "kernel": call.kernel,
        "groups": call.n_heads // max(1, call.n_kv_heads),
        "value_error": certificate.value_error,
        "formula_error": certificate.formula_error,
        "output_error": certificate.output_error,
        "failures": list(certificate.failures),
        "output": None if call.output is None else (call.output.module_name or "").rpartition(".")[2],
        "output_reason": call.output_reason if call.output is None else "",
        "gated": call.output_gate is not None,
        "largest_weight": None if pattern is None or not pattern.numel() else float(pattern.max(-1).values.mean()),
    }


def _largest(calls: list[Record], key: str) -> float | None:
    values = [call[key] for call in calls if call[key] is not None]
    return max(values) if values else None


def _summary(calls: list[Record]) -> Record:
    def counted(key: str) -> dict[str, int]:
        return dict(Counter(str(call[key]) for call in calls if call[key]))

    return {
        "calls": len(calls),
        "modules": len({call["module"] for call in calls}),
        "classes": counted("class"),
        "kinds": counted("kind"),
        "routes": counted("route"),
        "kernels": counted("kernel"),
        "outputs": counted("output"),
        "output_reasons": dict(Counter(f"{c['class']}: {c['output_reason']}" for c in calls if c["output"] is None)),
        "gated": sum(call["gated"] for call in calls),
        "grouped": sum(call["groups"] > 1 for call in calls),
        "value_error": _largest(calls, "value_error"),
        "formula_error": _largest(calls, "formula_error"),
        "output_error": _largest(calls, "output_error"),
        "failures": dict(Counter(f"{call['class']}: {failure}" for call in calls for failure in call["failures"])),
        "largest_weight": _largest(calls, "largest_weight"),
    }
