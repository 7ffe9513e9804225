"""Value zeroing: what is lost when the value of one token is zero, for the block's output and for the target.

`value_zeroing` (Mohebbi 2023, arXiv 2301.12971): v_j = 0 in one layer, and how much each position's block output turns,
1 - cos(y_i, y_i with v_j = 0). About no target; rows become shares. All keys of a layer are one batched forward, ended
after the block.

`value_effects`: m(clean) - m(v_j zero, or the mean value), in one layer, one head, or everywhere at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from attndiag.core.parts import normalise_rows
from attndiag.errors import NotApplicableError, ShapeError, UnsupportedModelError
from attndiag.explanations.interventions import provenance
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.hooks.capture_context import capture
from attndiag.hooks.edit_kinds import Edit, MeanValue, Patch, ValueZeroing
from attndiag.hooks.edits import edit
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.sites import BlockSites, sites_of
from attndiag.hooks.structure import first_tensor
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

NewValue = Literal["zero", "mean"]


class _Enough(Exception):  # noqa: N818 - no error: the forward has given what was wanted
    """Ends a forward after the block."""


def value_zeroing(
    lm: LoadedModel,
    prompts: Prompt | str,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch_tokens: int = 2048,
) -> Scores:
    """Share of each position's block output that turns when the value of a token is zero.

    C_ij = 1 - cos(y_i, y_i with v_j = 0), divided by the sum of the row (Mohebbi 2023, arXiv 2301.12971).

    Parameters
    ----------
    prompts : one prompt.
    layers : all when None.
    heads : the value is zero as these query heads read it; for all of them when None.
    batch_tokens : most tokens in one batch: bounds the memory.

    Returns
    -------
    Scores [layer, batch, query_pos, key_pos], shares of the row in [0, 1]; rows that nothing moves are nan. `checks`:
    `raw`, the distances 1 - cos in [0, 2], and `relative_change`, ‖y - y'‖ / ‖y‖, both [layer, batch, query_pos,
    key_pos].

    Raises
    ------
    NotApplicableError : encoder-decoders; layers or heads that do not exist.
    UnsupportedModelError : a shared block, or attention in no numbered block.
    """
    one = as_prompts(prompts)[0]
    encoded = lm.encode(one)
    if encoded.decoder is not None:
        raise NotApplicableError("value_zeroing compares block outputs of one stack; an encoder-decoder has two")
    sites = _chosen(_sites(lm, ("self",)), layers)
    calls: dict[str, AttentionCall] = {}
    with torch.no_grad(), capture(lm, on_call=lambda call: calls.update({call.module_name: call})):
        lm.run(encoded.inputs)
    raw, change = [], []
    for site in sites:
        turned, moved = _one_layer(lm, encoded.inputs, site, calls[site.attention], heads, batch_tokens)
        raw.append(turned)
        change.append(moved)
    distances = torch.stack(raw)[:, None]
    failures = [f"layer {s.layer}: {text}" for s in sites for text in calls[s.attention].sampled_certificate.failures]
    tokens = list(encoded.tokens[0])
    return Scores(
        values=normalise_rows(distances, name="value_zeroing"),
        axes=("layer", "batch", "query_pos", "key_pos"),
        method="value_zeroing",
        unit="share of row",
        sign="non-negative",
        labels={"layer": [site.layer for site in sites], "query_pos": tokens, "key_pos": tokens},
        params={"heads": None if heads is None else list(heads)},
        provenance=provenance(lm) | {"prompt": prompt_label(one)},
        checks={"raw": distances, "relative_change": torch.stack(change)[:, None], "certificate": "sampled"},
        failures=tuple(failures),
    )


def value_effects(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    value: NewValue = "zero",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Scores:
    """m(clean) - m(v_j replaced), exact, for each token j.

    Parameters
    ----------
    value : `"zero"`, or `"mean"`: over the tokens of the prompt, each layer and head its own.
    layers : in which the value is replaced, together; all when None.
    heads : as which query heads read it; all when None.

    Returns
    -------
    Scores [position], signed, unit of the target, positive where the value helped. In encoder-decoders the values of
    source tokens, in the encoder and in the decoder's view of it.

    Raises
    ------
    NotApplicableError : layers or heads that do not exist.
    What `attndiag.edit` and `attndiag.score` raise.
    """
    if value not in get_args(NewValue):
        raise ValueError(f"value is {value!r}; expected one of {', '.join(map(repr, get_args(NewValue)))}")
    one = as_prompts(prompt)[0]
    resolved = resolve_target(lm, one, target)
    streams = ("self",) if resolved.encoded.decoder is None else ("encoder", "cross")
    sites = _chosen(_sites(lm, streams), layers)
    which = None if heads is None else list(heads)
    make: Callable[..., Edit] = ValueZeroing if value == "zero" else MeanValue
    n = resolved.encoded.input_ids.shape[1]
    with torch.no_grad():
        clean = float(resolved.value(lm.run(resolved.inputs))[0])
        effects: list[float] = []
        for key in range(n):
            edits = [make(layer=site.layer, key=key, head=which, stream=site.stream) for site in sites]
            with edit(lm, *edits):
                effects.append(clean - float(resolved.value(lm.run(resolved.inputs))[0]))
    return Scores(
        values=torch.tensor(effects, dtype=torch.float64),
        axes=("position",),
        method="value_zeroing_effect" if value == "zero" else "mean_value_effect",
        unit=resolved.unit,
        sign="signed",
        labels={"position": list(resolved.encoded.tokens[0])},
        target=resolved.targets[0],
        params={"layers": sorted({site.layer for site in sites}), "heads": which, "value": value},
        provenance=provenance(lm) | {"prompt": prompt_label(one)},
        checks={"clean": clean},
    )


def _sites(lm: LoadedModel, streams: Sequence[str]) -> list[BlockSites]:
    found = [site for site in sites_of(lm.model) if site.stream in streams and site.layer is not None]
    if not found:
        raise UnsupportedModelError(f"{lm.info.architecture} has no attention in numbered layers")
    for site in found:
        if site.calls != 1:
            raise UnsupportedModelError(f"{site.attention} runs {site.calls} times in one forward: a shared block")
    return found


def _chosen(sites: list[BlockSites], layers: Sequence[int] | None) -> list[BlockSites]:
    if layers is None:
        return sites
    there = {int(site.layer) for site in sites if site.layer is not None}
    missing = sorted({int(layer) for layer in layers} - there)
    if missing or not layers:
        raise NotApplicableError(
            f"layers {missing or list(layers)} have no attention weights; there are {sorted(there)}"
        )
    return [site for site in sites if site.layer in {int(layer) for layer in layers}]


def _one_layer(
    lm: LoadedModel,
    inputs: dict[str, Tensor],
    site: BlockSites,
    call: AttentionCall,
    heads: Sequence[int] | None,
    batch_tokens: int,
) -> tuple[Tensor, Tensor]:
    """1 - cos and relative L2 change of the output of the block without the value of each key, [query_pos, key_pos].

    z_i with v_j = 0 is z_i - A_ij v_j, so every key is a patch of the head outputs.
    """
    if site.block is None:
        raise UnsupportedModelError(f"{site.attention} sits in no numbered block, so there is no block output")
    n_heads, n = call.n_heads, call.n_queries
    chosen = list(range(n_heads)) if heads is None else list(heads)
    if not chosen or not all(0 <= head < n_heads for head in chosen):
        raise NotApplicableError(f"heads are {chosen}; layer {site.layer} has heads 0 to {n_heads - 1}")
    pattern = call.pattern[0]
    group = n_heads // call.n_kv_heads
    v = call.v.detach()[0].to(pattern.dtype).repeat_interleave(group, dim=0)
    z = call.z.detach()[0].to(pattern.dtype)
    turned, moved = [], []
    size = max(batch_tokens // n - 1, 1)
    for start in range(0, n, size):
        keys = list(range(start, min(start + size, n)))
        patched = z.expand(len(keys) + 1, -1, -1, -1).clone()
        for row, key in enumerate(keys, start=1):
            lost = pattern[chosen, :, key, None] * v[chosen, key][:, None]
            patched[row][:, chosen] -= lost.transpose(0, 1)
        outputs = _block_output(lm, inputs, site, patched.to(call.z.dtype)).double()
        clean, edited = outputs[:1], outputs[1:]
        # half the squared distance of unit vectors is 1 - cos, and exactly 0 for equal ones
        units = torch.nn.functional.normalize(outputs, dim=-1)
        turned.append((units[1:] - units[:1]).square().sum(-1) / 2)
        moved.append((edited - clean).norm(dim=-1) / clean.norm(dim=-1))
    # a key without weight moves nothing, whatever another row of the batch rounds
    read = (pattern[chosen] != 0).any(0).cpu()
    return tuple(torch.cat(part).T.cpu().where(read, 0.0) for part in (turned, moved))  # type: ignore[return-value]


def _block_output(lm: LoadedModel, inputs: dict[str, Tensor], site: BlockSites, z: Tensor) -> Tensor:
    """The block's output [row, position, d_model] when its heads return `z`; the forward ends there."""
    kept: list[Tensor] = []

    def finish(_module: nn.Module, _args: tuple, output: Any) -> None:
        hidden = first_tensor(output)
        if hidden is None or hidden.ndim != 3:
            raise ShapeError(f"{site.block} returns no [batch, position, d_model]")
        kept.append(hidden)
        raise _Enough

    rows = z.shape[0]
    given = {name: tensor.expand(rows, *tensor.shape[1:]) for name, tensor in inputs.items()}
    with edit(lm, Patch(layer=int(site.layer or 0), site="head_out", values=z)):
        handle = lm.model.get_submodule(str(site.block)).register_forward_hook(finish)
        try:
            with torch.no_grad(), suppress(_Enough):
                lm.run(given)
        finally:
            handle.remove()
    return kept[0]
