"""How do positions enter a layer? Asked with one token repeated.

On a sequence of one token repeated every position holds the same state, unless positions were added to the stream.
What then differs between positions tells how they enter:

- keys of different length or (beyond a rotation) content: positions are in the stream (`absolute`);
- keys of equal length that differ: they were rotated (`rope`);
- equal keys and even weights: no positions here (`none`); weights whose logarithm falls in proportion to the distance:
  `alibi`; any other uneven weights: `relative bias` (`relative` where the keys are not seen: a bias or a rotation).

Layers behind one that already made positions differ (sinks and recurrent layers do, harmlessly) cannot be asked like
that; there the rotation is looked for among the modules that ran, and said to be `by module`.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from attndiag.errors import NothingCapturedError, UnsupportedModelError
from attndiag.explanations.probing import Probe, hooked, noise_level, run_probe
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.models.load import LoadedModel

_ROTARY = re.compile("rotary|rope", re.IGNORECASE)
LENGTH = 12


def positions_of(lm: LoadedModel, probe: Probe) -> dict[tuple[str, int], str]:
    """How positions enter each attention call, by (module name, call index); empty for models without token ids."""
    if probe.tokens is None:
        return {}
    length = min(LENGTH, probe.first.shape[1])
    repeated = {
        name: value[:, :1].expand(-1, length).clone() if name in ("input_ids", "decoder_input_ids") else value
        for name, value in probe.inputs.items()
    }
    rotary_ran: list[str] = []
    rotaries = [(n, m) for n, m in lm.model.named_modules() if _ROTARY.search(type(m).__name__)]
    hooks: list[tuple[nn.Module, str, Any]] = [
        (module, "post", lambda _m, _a, _k, _o, name=name: rotary_ran.append(name)) for name, module in rotaries
    ]
    try:
        with hooked(*hooks), capture(lm) as captured:
            run_probe(lm, Probe(repeated, probe.tokens))
    except (UnsupportedModelError, NothingCapturedError):
        return {}  # inputs tied to the text (pictures), or no softmax at all
    found: dict[tuple[str, int], str] = {}
    spoiled = False
    for call in captured.calls:
        if call.kind == "cross":
            continue
        answer = "unclear" if spoiled else _answer(call)
        if answer == "differs":
            answer, spoiled = ("absolute", False) if _first_of_stack(call) else ("unclear", True)
        if answer == "unclear" and rotary_ran:
            answer = "rope (by module)"
        found[call.module_name, call.call_index] = answer
    absolute = {call.module_name for call in captured.calls if found.get((call.module_name, 0)) == "absolute"}
    if absolute:
        # what was added to the stream before the first layer is there for all layers of the stack
        for key, value in found.items():
            found[key] = "absolute" if value in ("unclear", "differs") else value
    return found


def _first_of_stack(call: AttentionCall) -> bool:
    return call.layer in (0, None)


def _answer(call: AttentionCall) -> str:
    if call.position_bias is not None:
        return "relative bias"
    near = 20 * noise_level(call.z.dtype)
    v = call.v.detach().float()
    if _spread(v) > near:
        return "differs"
    weights = call.pattern.detach().float()
    if call.k is not None:
        k = call.k.detach().float()
        if _spread(k.norm(dim=-1, keepdim=True)) > near:
            return "differs"
        if _spread(k) > near:
            return "rope"
    kind = _bias_kind(weights, near)
    # without the keys a rotation and a bias look alike
    return "relative" if kind == "relative bias" and call.k is None else kind


def _spread(tensor: Tensor) -> float:
    """Largest difference between positions (axis 2), relative to the largest entry."""
    largest = tensor.abs().amax().clamp_min(1e-30)
    return float((tensor.amax(2) - tensor.amin(2)).max() / largest)


def _bias_kind(weights: Tensor, near: float) -> str:
    """`none`, `alibi` or `relative bias`, from the last row's visible weights, head by head."""
    rows = weights[0, :, -1]  # [head, key_pos]
    seen = rows > 0
    if bool((seen.sum(-1) < 3).any()):
        return "unclear"
    kinds = set()
    for row, visible in zip(rows, seen, strict=True):
        logs = row[visible].log()
        steps = logs.diff()
        if float(logs.max() - logs.min()) <= 10 * near:
            kinds.add("none")
        elif float(steps.max() - steps.min()) <= 1e-3 * float(logs.abs().max()) + 10 * near:
            kinds.add("alibi")
        else:
            kinds.add("relative bias")
    if kinds == {"none"}:
        return "none"
    return "alibi" if kinds <= {"none", "alibi"} else "relative bias"
