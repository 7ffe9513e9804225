"""Gradients of a target in every attention weight, under the model's own kernel.

One forward inside a capture, one backward to the head outputs z, and then dm/dA_ij^h = <dm/dz_i^h, v_j^h> for all edges
at once; no eager attention, no stored pattern. See `core.gradients` for what the numbers mean and what they cannot
show.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attndiag.core.attention import forbidden_entries
from attndiag.core.gradients import head_gradient, pattern_gradient
from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.forwarding import editing_embeddings
from attndiag.explanations.gradients import Prompts, Targets
from attndiag.explanations.resolve import one_target_each, prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.explanations.token_records import Progress
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.structure import module_parts
from attndiag.models.encoding import Encoded, PaddingSide
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.scores import Scores

Kind = Literal["gradient", "attribution"]
Part = Literal["encoder", "decoder", "cross"]
_AXES = ("layer", "head", "query_pos", "key_pos")


def pattern_gradients(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    kind: Kind = "attribution",
    layers: Collection[int] | None = None,
    part: Part | None = None,
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """dm/dA_ij^h of every edge, or A_ij^h * dm/dA_ij^h, the first-order effect of removing it.

    Parameters
    ----------
    kind : `"gradient"` or `"attribution"`.
    layers : all when None.
    part : in encoder-decoders, whose attention: `"encoder"`, `"decoder"` (the default) or `"cross"`.

    Returns
    -------
    One `Scores` a prompt with axes [layer, head, query_pos, key_pos], signed; unit of m (attribution), or unit of m for
    one unit of weight (gradient; nan where the mask forbids the edge). `checks["sum_error"]`: how far
    sum_j A_ij v_j misses z_i along the gradient, relative to the largest |<dm/dz_i, z_i>|; above 1e-3 is a failure.

    Raises
    ------
    UnsupportedModelError : no gradient reaches the attention outputs. NotApplicableError : the layers have different
        numbers of heads (choose some with `layers`), or there is no attention of that part.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}; expected one of {', '.join(get_args(Kind))}")
    if part is not None and part not in get_args(Part):
        raise ValueError(f"part is {part!r}; expected one of {', '.join(get_args(Part))}")
    batch = as_prompts(prompts)
    targets = one_target_each(batch, target)
    results = []
    for start in range(0, len(batch), batch_size):
        few = batch[start : start + batch_size]
        resolved = resolve_target(lm, few, targets[start : start + batch_size], padding_side=padding_side)
        calls, gradients = differentiated_calls(lm, resolved, layers=layers, part=part)
        with torch.no_grad():
            results += _records(lm, few, resolved, calls, gradients, kind, _part(lm, part))
        if progress is not None:
            progress(start + len(few), len(batch))
    return results


def differentiated_calls(
    lm: LoadedModel,
    resolved: ResolvedTarget,
    *,
    layers: Collection[int] | None = None,
    part: Part | None = None,
) -> tuple[list[AttentionCall], list[Tensor]]:
    """The attention calls of one forward, in order of layers, and dm/dz of each: [batch, query_pos, head, d_value].

    Raises
    ------
    UnsupportedModelError, NotApplicableError : see `pattern_gradients`.
    """
    ids = resolved.encoded.input_ids
    with (
        editing_embeddings(lm.model, ids, lambda own: own.detach().requires_grad_()),
        capture(lm, layers=layers) as captured,
    ):
        values = resolved.value(lm.run(resolved.inputs, grad=True))
    wanted = _part(lm, part)
    calls = [call for call in captured.calls if part_of(lm, call) == wanted]
    if not calls:
        raise NotApplicableError(
            f"no attention of the {wanted} was seen in {lm.info.architecture}; choose another part"
        )
    calls.sort(key=lambda call: (call.layer if call.layer is not None else -1, call.call_index))
    if not values.requires_grad:
        raise UnsupportedModelError(
            f"no gradient reaches the attention of {lm.info.name} (quantised or detached weights); use interventions"
        )
    # z itself where the record holds the tensor that the model went on with, else by way of the module's output
    outputs = [call.attn_out if call.attn_out is not None else call.z for call in calls]
    found = torch.autograd.grad(values.sum(), [*(call.z for call in calls), *outputs], allow_unused=True)
    gradients = []
    for index, call in enumerate(calls):
        gradient, after = found[index], found[len(calls) + index]
        if gradient is None and after is not None and call.attn_out is not None:
            gate = None if call.output_gate is None else call.output_gate.detach()
            gradient = head_gradient(after, call.w_o.to(after), gate)
        if gradient is None:
            raise UnsupportedModelError(
                f"no gradient reaches the attention output of {call.module_name}; leave its layer out, or use "
                "interventions"
            )
        gradients.append(gradient.detach())
    return calls, gradients


def _records(
    lm: LoadedModel,
    prompts: Sequence[Any],
    resolved: ResolvedTarget,
    calls: Sequence[AttentionCall],
    gradients: Sequence[Tensor],
    kind: Kind,
    part: Part | None,
) -> list[Scores]:
    shapes = {call.n_heads for call in calls}
    if len(shapes) > 1:
        counts = {call.layer: call.n_heads for call in calls}
        raise NotApplicableError(f"layers have different numbers of heads ({counts}); choose some with layers=")
    encoded = resolved.encoded
    decoder = encoded.decoder if encoded.decoder is not None else encoded
    queries = encoded if part == "encoder" else decoder
    keys = decoder if part not in ("encoder", "cross") else encoded
    layers, errors = [], []
    for call, gradient in zip(calls, gradients, strict=True):
        work = torch.float64 if call.z.dtype == torch.float64 else torch.float32
        dz, v = gradient.to(work), call.v.detach().to(work)
        slope = pattern_gradient(dz, v)
        pattern = call.pattern.to(work)
        product = pattern * slope
        expected = (dz * call.z.detach().to(work)).sum(-1).transpose(1, 2)
        real = queries.attention_mask.bool()[:, None, :].to(expected.device)
        miss = ((product.sum(-1) - expected).abs() * real).flatten(1).amax(-1)
        errors.append(miss / (expected.abs() * real).flatten(1).amax(-1).clamp_min(1e-30))
        layers.append(product if kind == "attribution" else _without_forbidden(slope, call))
    stacked, error = torch.stack(layers, dim=1), torch.stack(errors).amax(0)
    repeated = len({call.layer for call in calls}) < len(calls)
    names = [f"{call.layer}.{call.call_index}" if repeated else call.layer for call in calls]
    unit = resolved.unit if kind == "attribution" else f"{resolved.unit} per unit of weight"
    records = []
    for row, prompt in enumerate(prompts):
        here, there = queries.attention_mask[row].bool(), keys.attention_mask[row].bool()
        values = stacked[row][..., here.to(stacked.device), :][..., there.to(stacked.device)].cpu()
        wrong = float(error[row])
        failures = () if wrong <= 1e-3 else (f"the weights miss the head outputs by {wrong:.1e}, above 1e-3",)
        records.append(
            Scores(
                values=values,
                axes=_AXES,
                method=f"pattern_{kind}",
                unit=unit,
                sign="signed",
                labels={"layer": names, "query_pos": _tokens(queries, row), "key_pos": _tokens(keys, row)},
                target=resolved.targets[row],
                params={"layers": names, "part": part},
                provenance={
                    "model": lm.info.name,
                    "prompt": prompt_label(prompt),
                    "dtype": lm.info.dtype,
                    "kernel": calls[0].kernel,
                    "route": calls[0].route,
                },
                checks={"sum_error": wrong},
                failures=failures,
            )
        )
    return records


def _tokens(encoded: Encoded, row: int) -> list[str]:
    real = encoded.attention_mask[row].tolist()
    return [token for token, keep in zip(encoded.tokens[row], real, strict=True) if keep]


def _without_forbidden(slope: Tensor, call: AttentionCall) -> Tensor:
    """nan at edges that the mask does not allow: there is no weight to change."""
    forbidden = forbidden_edges(call)
    return slope if forbidden is None else slope.masked_fill(forbidden, torch.nan)


def forbidden_edges(call: AttentionCall) -> Tensor | None:
    """Edges that the mask hides, broadcastable to [batch, head, query_pos, key_pos]; None where it hides none."""
    if call.is_causal:
        places = torch.arange(call.n_keys, device=call.z.device)
        return places[None, :] > places[: call.n_queries, None]
    if call.mask is None:
        return None
    return ~call.mask if call.mask.dtype == torch.bool else forbidden_entries(call.mask)


def _part(lm: LoadedModel, part: Part | None) -> Part | None:
    """The part that is meant: encoder-decoders have three, other models none."""
    if not getattr(lm.config, "is_encoder_decoder", False):
        if part is not None:
            raise NotApplicableError(f"{lm.info.architecture} has one stack of attention; leave part= out")
        return None
    return part or "decoder"


def part_of(lm: LoadedModel, call: AttentionCall) -> Part | None:
    """Which part of an encoder-decoder a call belongs to; None for other models."""
    if not getattr(lm.config, "is_encoder_decoder", False):
        return None
    if call.kind == "cross":
        return "cross"
    return "decoder" if "decoder" in module_parts(call.module_name) else "encoder"
