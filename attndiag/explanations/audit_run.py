"""`audit`: are the masks and the scale of a model what they should be?

Every answer is measured by intervention (`explain.mask_audit`, `explain.visible`, `explain.scale_audit`); names of
classes are read only to decide whether a model is *meant* to be causal. A fault becomes a `Finding` with its name, the
layers and the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attndiag.errors import NothingCapturedError, UnsupportedModelError
from attndiag.explanations import mask_audit
from attndiag.explanations.findings import Check, Finding
from attndiag.explanations.mask_judgement import (
    expected_causal,
    judge_batch,
    judge_blocks,
    judge_masks,
    judge_padded_masks,
    judge_padding,
    judge_tokens,
    padding_limits,
)
from attndiag.explanations.masked_rows import MaskedRow, fully_masked_rows
from attndiag.explanations.probing import Probe, as_loaded, moved, noise_level, probe_of, run_probe
from attndiag.explanations.scale_audit import ScaleAudit, scale_audit
from attndiag.explanations.visible import Visible, asking_kernels, shape_of, visible_of
from attndiag.hooks.capture_context import capture
from attndiag.models.load import LoadedModel

if TYPE_CHECKING:
    import pandas as pd

LENGTH = 12
LONGEST = 512


@dataclass(frozen=True, eq=False)
class LayerReach:
    """How far one attention call reads: what it may (its mask), in positions.

    `limited` says that the probe was too short to see an end: the reach is then at least this.
    """

    module_name: str
    layer: int | None
    kind: str
    shape: str
    past: int
    future: int
    limited: bool


@dataclass(frozen=True, eq=False)
class Audit:
    """What `audit` found.

    Attributes
    ----------
    model : name of what was audited.
    findings : the faults; empty for a sound model.
    checks : every question that was asked, with its answer.
    reach : how far each attention call reads.
    stack_reach : (positions back, positions ahead) that a token reaches through the whole model, as far as the probe
        can show; None where the model has no output at positions.
    scale : the scale audit.
    masked_rows : what implementations return for rows without an allowed key; shown, not judged.
    length : tokens of the probe of masks.
    """

    model: str
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    reach: tuple[LayerReach, ...]
    stack_reach: tuple[int, int] | None
    scale: ScaleAudit
    masked_rows: tuple[MaskedRow, ...]
    length: int

    @property
    def passed(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    def to_frame(self) -> pd.DataFrame:
        """The findings, one row each."""
        import pandas as pd

        columns = ["kind", "layers", "modules", "text"]
        return pd.DataFrame([{name: getattr(f, name) for name in columns} for f in self.findings], columns=columns)

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        return {
            "model": self.model,
            "passed": self.passed,
            "findings": [finding.to_dict() for finding in self.findings],
            "checks": [vars(check) for check in self.checks],
            "reach": [vars(layer) for layer in self.reach],
            "stack_reach": self.stack_reach,
            "scale": {
                "reference": self.scale.reference,
                "rows": self.scale.to_frame().to_dict("records"),
                "unmeasured": list(self.scale.unmeasured),
            },
            "fully_masked_rows": [vars(row) for row in self.masked_rows],
            "length": self.length,
        }

    def to_text(self) -> str:
        """A page of plain text."""
        from attndiag.explanations.audit_text import audit_text

        return audit_text(self)

    def __repr__(self) -> str:
        state = "no finding" if self.passed else "; ".join(str(finding) for finding in self.findings)
        return f"Audit({self.model}: {state})"


def audit(
    model: nn.Module | LoadedModel,
    *,
    inputs: Mapping[str, Any] | None = None,
    causal: bool | None = None,
    length: int = LENGTH,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Audit:
    """Look for faults in the masks and the scale of a model.

    Parameters
    ----------
    model : a PyTorch module or what `attndiag.load` returned.
    inputs : one example batch for models that do not run on token ids alone.
    causal : whether no output may see the future. By default asked of the model's class, then of the majority of its
        layers; encoders of encoder-decoders are never held to it, nor models given pictures or sounds.
    length : tokens of the probe; made longer where a window would not show.
    seed : of the probe.
    progress : called with (what is done, steps done, steps in all).

    Returns
    -------
    Audit, with `findings` empty for a sound model.

    Raises
    ------
    UnsupportedModelError : the model does not run on the probe; the text says what it wants.
    ValueError : `length` is too short to tell anything (below 6).
    """
    if length < 6:
        raise ValueError(f"length is {length}; expected at least 6 tokens, or leaks and windows cannot be told apart")
    lm = as_loaded(model)
    tell = progress or (lambda _what, _done, _total: None)
    findings: list[Finding] = []
    checks: list[Check] = []
    steps = iter(range(1, 7))

    def step(what: str) -> None:
        tell(what, next(steps), 6)

    step("masks")
    visible, probe, why = _visible(lm, inputs, length, seed)
    if causal is None and not getattr(lm.config, "is_encoder_decoder", False) and _holds_floats(probe):
        causal = False  # tokens of a picture or a sound may look both ways; say causal=True to hold them to it
    if visible:
        meant = {v.module_name: expected_causal(lm, v, visible, causal) for v in visible}
        _add(findings, checks, "mask of every layer", judge_masks(visible, meant), _mask_detail(visible))
    else:
        meant = {}
        checks.append(Check("mask of every layer", "not checked", why))

    step("blocks")
    short = _shorter(probe, length)
    try:
        blocks, no_blocks = mask_audit.block_reach(lm, short), "no block with [row, position, width]"
    except UnsupportedModelError as error:
        blocks, no_blocks = [], str(error)
    mixed = judge_blocks(lm, blocks, visible, meant, causal)
    if blocks:
        _add(findings, checks, "tokens mixed outside the masks", mixed, f"{len(blocks)} blocks")
    else:
        checks.append(Check("tokens mixed outside the masks", "not checked", no_blocks))

    step("tokens")
    try:
        reach, why = mask_audit.token_reach(lm, short, seed=seed)
    except UnsupportedModelError as error:
        reach, why = None, str(error)  # placeholders of a picture, for example, cannot be exchanged
    stack = None
    if reach is None:
        checks.append(Check("reach of single tokens", "not checked", why))
    else:
        stack = _offsets(reach)
        found = judge_tokens(lm, reach, meant, causal, already=findings)
        _add(findings, checks, "reach of single tokens", found, f"{stack[0]} back, {stack[1]} ahead in {len(reach)}")

    step("batch neighbours")
    try:
        batch, why = mask_audit.batch_reach(lm, short, seed=seed), "the inputs hold no token ids"
    except UnsupportedModelError as error:
        batch, why = None, str(error)
    if batch is None:
        checks.append(Check("batch neighbours", "not checked", why))
    else:
        _add(findings, checks, "batch neighbours", judge_batch(batch), f"largest change {batch.output_change:.1e}")

    step("padding")
    for side in ("right", "left"):
        _padding(lm, short, side, findings, checks)
    _determinism(lm, short, findings, checks)

    step("scale")
    scale = scale_audit(lm, short, seed=seed)
    if scale.rows:
        _add(findings, checks, "scale", list(scale.findings), f"against {scale.reference}")
    else:
        checks.append(Check("scale", "not checked", "no call with q and k was seen"))
    layers = tuple(_layer_reach(v) for v in visible)
    rows = fully_masked_rows()
    n = 0 if not visible else visible[0].keys.shape[-1]
    return Audit(lm.info.name, tuple(findings), tuple(checks), layers, stack, scale, rows, n)


def _visible(
    lm: LoadedModel, inputs: Mapping[str, Any] | None, length: int, seed: int
) -> tuple[list[Visible], Probe, str]:
    """Visible keys of every call, on a probe long enough to show windows; the probe; the reason for an empty list."""
    probe = probe_of(lm, batch=2, length=length, seed=seed, inputs=inputs)
    visible, why = ask(lm, probe)
    windows = [v.window for v in visible if v.window is not None and v.window + 4 > v.keys.shape[-1]]
    windows = [window for window in windows if window + 4 <= min(LONGEST, _positions(lm))]
    if windows and inputs is None:
        probe = probe_of(lm, batch=2, length=max(windows) + 4, seed=seed)
        visible, why = ask(lm, probe)
    return visible, probe, why


def ask(lm: LoadedModel, probe: Probe) -> tuple[list[Visible], str]:
    """Visible keys of every attention call of one forward, or the reason why there is none."""
    try:
        with asking_kernels(lm.model) as kernels, capture(lm) as captured:
            run_probe(lm, probe)
    except NothingCapturedError as error:
        return [], str(error)
    return visible_of(captured.calls, kernels), ""


def _padding(lm: LoadedModel, probe: Probe, side: str, findings: list[Finding], checks: list[Check]) -> None:
    name = f"{side} padding"
    try:
        made, real = mask_audit.padded(lm, probe, side, take=(0, 2, 4))
        visible, _ = ask(lm, made)
        found = mask_audit.padding_reach(lm, probe, side)
    except UnsupportedModelError as error:
        checks.append(Check(name, "not checked", str(error)))
        return
    masks = judge_padded_masks(lm, visible, real, side, already=findings)
    rest = judge_padding(found, already=[*findings, *masks])
    parts = [
        f"other embeddings there {_number(found.embedding_change)}",
        f"against no padding {_number(found.unpadded_change)}",
        f"padded queries {_number(found.query_change)}",
    ]
    limits = padding_limits(found)
    if limits and not masks and not rest:
        checks.append(Check(name, "limit", limits))
    else:
        _add(findings, checks, name, masks + rest, ", ".join(parts))


def _determinism(lm: LoadedModel, probe: Probe, findings: list[Finding], checks: list[Check]) -> None:
    first, second = (mask_audit.everything(run_probe(lm, probe), probe.first.shape[0]) for _ in range(2))
    change = float(moved(second.flatten(), first.flatten()))
    found = []
    if change > noise_level(first.dtype):
        text = f"two forwards of one input differ by {change:.1e} of the largest output"
        found.append(Finding("nondeterministic", (), (), text, {"change": change}))
    _add(findings, checks, "same input, same output", found, f"largest change {change:.1e}")


def _add(findings: list[Finding], checks: list[Check], name: str, found: list[Finding], detail: str) -> None:
    findings.extend(found)
    checks.append(Check(name, "failed" if found else "passed", detail))


def _shorter(probe: Probe, length: int) -> Probe:
    """The first `length` tokens of a probe of ids; anything else as it is."""
    if probe.tokens is None or set(probe.inputs) - {"input_ids", "decoder_input_ids"}:
        return probe
    return Probe({name: value[:, : max(length, 6)] for name, value in probe.inputs.items()}, probe.tokens)


def _holds_floats(probe: Probe) -> bool:
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in probe.inputs.values())


def _positions(lm: LoadedModel) -> int:
    limit = getattr(lm.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else LONGEST


def _offsets(reach: Tensor) -> tuple[int, int]:
    """Largest (observed - changed) and (changed - observed) among the pairs that reach each other."""
    changed, observed = reach.nonzero(as_tuple=True)
    if len(changed) == 0:
        return 0, 0
    return int((observed - changed).max().clamp_min(0)), int((changed - observed).max().clamp_min(0))


def _layer_reach(visible: Visible) -> LayerReach:
    n_keys = visible.keys.shape[-1]
    if visible.kind == "cross":
        return LayerReach(visible.module_name, visible.layer, "cross", f"{n_keys} keys", n_keys, n_keys, True)
    shape = shape_of(visible)
    return LayerReach(
        visible.module_name,
        visible.layer,
        visible.kind,
        shape.describe(),
        shape.past_reach,
        shape.future_reach,
        limited=shape.window is None and shape.chunk is None,
    )


def _mask_detail(visible: list[Visible]) -> str:
    kinds = sorted({shape_of(v).describe() for v in visible if v.kind == "self"})
    return f"{len(visible)} calls: {', '.join(kinds)}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"
