"""The edits that `attndiag.edit` can make: plain descriptions, one frozen record each.

Layers, heads and positions are counted as everywhere: position 0 is the prompt's first token, -1 its last, padding
not counted. `None` means all. In encoder-decoders `stream` says which attention is meant: the decoder's own
(`"self"`), the decoder's view of the source (`"cross"`), or the encoder's (`"encoder"`).

| edit | what it changes |
|---|---|
| `Knockout` | A_ij of some edges: removed (the rest of the row untouched) or renormalised (score -inf) |
| `PatternReplacement` | A of some heads |
| `ValueZeroing`, `MeanValue` | v_j of some keys |
| `HeadAblation` | z of some heads: zero, mean, or another run's (resample) |
| `AttentionOff` | a whole layer's attention output, b_O included |
| `Patch` | any site, by another run's activation |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from attndiag.errors import ShapeError
from attndiag.hooks.live import LiveCall, PatternRows, Which

Stream = Literal["self", "cross", "encoder"]
Site = Literal["resid_pre", "resid_post", "head_out", "attn_out", "mlp_out"]


@dataclass(frozen=True, eq=False)
class Knockout:
    """Take edges away: query i of a head no longer reads key j.

    `mode="remove"` sets A_ij = 0 and leaves the rest of the row as it is; `"renormalize"` sets the score to -inf, so
    that the others share its mass. Every combination of the given heads, queries and keys is an edge.
    """

    layer: int
    head: Which = None
    query: Which = None
    key: Which = None
    mode: Literal["remove", "renormalize"] = "remove"
    stream: Stream = "self"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, ("remove", "renormalize"))


@dataclass(frozen=True, eq=False)
class PatternReplacement:
    """Attend as told: z_i = sum_j A'_ij v_j for the chosen heads.

    `pattern` is broadcastable to [batch, chosen head, query_pos, key_pos] of the call, padding included.
    """

    layer: int
    pattern: Tensor
    head: Which = None
    stream: Stream = "self"


@dataclass(frozen=True, eq=False)
class ValueZeroing:
    """v_j = 0 for the chosen keys, as the chosen heads read them (one query head of a shared key/value head alone)."""

    layer: int
    key: Which
    head: Which = None
    stream: Stream = "self"


@dataclass(frozen=True, eq=False)
class MeanValue:
    """v_j = the mean value for the chosen keys, as the chosen heads read them.

    `mean` is [kv_head, d_value]; None takes the mean over the tokens of the same prompt, each head its own.
    """

    layer: int
    key: Which
    head: Which = None
    mean: Tensor | None = None
    stream: Stream = "self"


@dataclass(frozen=True, eq=False)
class HeadAblation:
    """Replace the outputs z of heads.

    `mode="zero"`; `"mean"`: over the tokens of the same prompt, or `values`; `"resample"`: `values` of another run.
    `values` is broadcastable to [batch, query_pos, chosen head, d_value]. For heads of several layers give one edit
    each: they act together. `where` narrows it further, as in `Patch`: boolean, broadcastable to [batch, query_pos,
    chosen head], so that each row of a batch can lose heads of its own.
    """

    layer: int
    head: Which = None
    mode: Literal["zero", "mean", "resample"] = "zero"
    values: Tensor | None = None
    query: Which = None
    where: Tensor | None = None
    stream: Stream = "self"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, ("zero", "mean", "resample"))
        if self.mode == "resample" and self.values is None:
            raise ShapeError("mode='resample' needs the head outputs of another run: give values=")
        if self.mode == "zero" and self.values is not None:
            raise ShapeError("mode='zero' takes no values; use mode='resample' or 'mean'")


@dataclass(frozen=True, eq=False)
class AttentionOff:
    """The layer's attention adds nothing: its output projection returns 0, bias included."""

    layer: int
    stream: Stream = "self"


@dataclass(frozen=True, eq=False)
class Patch:
    """Put another run's activation in place of this run's.

    `site`: `"resid_pre"` and `"resid_post"` (what enters and leaves the block), `"attn_out"` (after W_O), `"mlp_out"`
    (what the feed-forward branch adds), all [batch, position, d_model]; `"head_out"` (z of one or more heads),
    [batch, position, chosen head, d_value]. `values` is broadcastable to that. `position` None patches all of them.
    `where` narrows it further: boolean, broadcastable to [batch, position] or, for heads, [batch, position, chosen
    head], so that each row of a batch can have a patch of its own.
    """

    layer: int
    site: Site
    values: Tensor
    head: Which = None
    position: Which = None
    where: Tensor | None = None
    stream: Stream = "self"

    def __post_init__(self) -> None:
        _one_of("site", self.site, get_args(Site))
        if self.head is not None and self.site != "head_out":
            raise ShapeError(f"site {self.site!r} has no heads; leave head out, or use site='head_out'")


Edit = Knockout | PatternReplacement | ValueZeroing | MeanValue | HeadAblation | AttentionOff | Patch
OF_PATTERN = (Knockout, PatternReplacement)
OF_VALUES = (ValueZeroing, MeanValue)


def acts_on_heads(edit: Edit) -> bool:
    """True for edits of the attention function's result, False for those of a module's output."""
    return not isinstance(edit, AttentionOff) and not (isinstance(edit, Patch) and edit.site != "head_out")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}")


# ------------------------------------------------------------------------------------------ head outputs under edits
def edited_heads(call: LiveCall, edits: list[Edit]) -> tuple[Tensor, list[Tensor]]:
    """Head outputs under all edits of one call, and for each edit what it had a say in: [batch, query_pos, head].

    Pattern and value edits act together: z' = z + (A' - A) v' + A (v' - v), so that untouched entries add exact zeros.
    Edits of z come after them, in the given order.
    """
    mixing = [edit for edit in edits if isinstance(edit, OF_PATTERN + OF_VALUES)]
    touched: dict[int, Tensor] = {}
    z = _remixed(call, mixing, touched) if mixing else call.z
    for edit in edits:
        if isinstance(edit, HeadAblation | Patch):
            z, touched[id(edit)] = _replaced(call, edit, z)
    return z, [touched[id(edit)] for edit in edits]


def _remixed(call: LiveCall, edits: list[Edit], touched: dict[int, Tensor]) -> Tensor:
    heads_of = {id(edit): call.head_mask(edit.head) for edit in edits}
    heads = torch.stack(list(heads_of.values())).any(0).nonzero()[:, 0]
    rows_of = {id(edit): call.query_mask(edit.query if isinstance(edit, Knockout) else None) for edit in edits}
    queries = torch.stack([rows.any(0) for rows in rows_of.values()]).any(0).nonzero()[:, 0]
    if queries.numel() == 0:  # every chosen query was read in an earlier forward and sits in the cache
        for edit in edits:
            touched[id(edit)] = torch.zeros(call.z.shape[:3], dtype=torch.bool, device=call.z.device)
        return call.z
    rows = call.rows(heads, queries)
    values = call.values_of(heads).to(rows.pattern.dtype)
    pattern, new_values = rows.pattern, values
    cut: dict[str, Tensor] = {}
    for edit in edits:
        mine = heads_of[id(edit)][heads][None, :, None, None]
        if isinstance(edit, Knockout):
            edges = mine & rows_of[id(edit)][:, None, queries, None] & call.key_mask(edit.key)[:, None, None, :]
            _check_visible(call, edit, rows, edges)
            cut[edit.mode] = cut.get(edit.mode, torch.zeros_like(edges)) | edges
            changed = (edges & rows.visible).any(-1)
        elif isinstance(edit, PatternReplacement):
            pattern = _replaced_pattern(call, edit, pattern, heads_of[id(edit)][heads], queries)
            changed = mine[..., 0].expand(pattern.shape[:3]) & rows_of[id(edit)][:, None, queries]
        else:
            keys = call.key_mask(edit.key)
            new_values = torch.where(mine & keys[:, None, :, None], _new_value(call, edit, values, heads), new_values)
            changed = mine[..., 0] & (rows.visible & keys[:, None, None, :]).any(-1)
        touched[id(edit)] = _at(call, changed, heads, queries)
    if "renormalize" in cut:
        if any(isinstance(edit, PatternReplacement) for edit in edits):
            raise ShapeError("a replaced pattern has no scores to renormalise; use Knockout(mode='remove') beside it")
        pattern = rows.without(cut["renormalize"])
    if "remove" in cut:
        pattern = pattern.masked_fill(cut["remove"], 0.0)
    change = (pattern - rows.pattern) @ new_values + rows.pattern @ (new_values - values)
    z = call.z.clone()
    moved = z[:, queries][:, :, heads] + change.transpose(1, 2).to(z.dtype)
    z[:, queries[:, None], heads[None, :]] = moved
    return z


def _check_visible(call: LiveCall, edit: Knockout, rows: PatternRows, edges: Tensor) -> None:
    if rows.scores is not None and bool(edges.any()) and not bool((edges & rows.visible).any()):
        raise ShapeError(
            f"{call.module_name}: the mask hides key {edit.key} from query {edit.query}, so there is no edge to take "
            "away"
        )


def _replaced_pattern(
    call: LiveCall, edit: PatternReplacement, pattern: Tensor, mine: Tensor, queries: Tensor
) -> Tensor:
    count, n_queries = int(mine.sum()), call.z.shape[1]
    given = edit.pattern.to(device=pattern.device, dtype=pattern.dtype)
    expected = (pattern.shape[0], count, n_queries, pattern.shape[3])
    try:
        given = torch.broadcast_to(given, expected)
    except RuntimeError as error:
        raise ShapeError(
            f"{call.module_name}: a pattern of shape {tuple(edit.pattern.shape)} does not fit [batch, chosen head, "
            f"query_pos, key_pos] = {expected}"
        ) from error
    pattern = pattern.clone()
    pattern[:, mine] = given[:, :, queries]
    return pattern


def _new_value(call: LiveCall, edit: ValueZeroing | MeanValue, values: Tensor, heads: Tensor) -> Tensor:
    if isinstance(edit, ValueZeroing):
        return torch.zeros_like(values)
    if edit.mean is None:
        weights = call.key_mask(None)[:, None, :, None].to(values)
        return ((values * weights).sum(2, keepdim=True) / weights.sum(2, keepdim=True)).expand_as(values)
    if tuple(edit.mean.shape) != (call.v.shape[1], call.v.shape[3]):
        raise ShapeError(
            f"{call.module_name}: mean has shape {tuple(edit.mean.shape)}; expected [kv_head, d_value] = "
            f"{(call.v.shape[1], call.v.shape[3])}"
        )
    shared = heads // (call.n_heads // call.v.shape[1])
    return edit.mean.to(values)[shared][None, :, None, :].expand_as(values)


def _replaced(call: LiveCall, edit: HeadAblation | Patch, z: Tensor) -> tuple[Tensor, Tensor]:
    heads = call.head_mask(edit.head)
    rows = call.query_mask(edit.query if isinstance(edit, HeadAblation) else edit.position)
    chosen = rows[:, :, None] & heads[None, None, :]
    if edit.where is not None:
        shape = (z.shape[0], z.shape[1], int(heads.sum()))
        only = torch.zeros_like(chosen)
        only[:, :, heads] = fitted(edit.where, shape, f"{call.module_name}: where", chosen)
        chosen = chosen & only
    if edit.values is not None:
        expected = (z.shape[0], z.shape[1], int(heads.sum()), z.shape[3])
        new = fitted(edit.values, expected, f"{call.module_name}: values", z)
        full = z.clone()
        full[:, :, heads] = new
    elif isinstance(edit, HeadAblation) and edit.mode == "mean":
        weights = call.query_mask(None)[:, :, None, None].to(z)
        full = ((z * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)).expand_as(z)
    else:
        full = torch.zeros_like(z)
    return torch.where(chosen[..., None], full, z), chosen


def fitted(values: Tensor, expected: tuple[int, ...], name: str, like: Tensor) -> Tensor:
    """`values` broadcast to the expected shape, on the device and in the dtype of `like`."""
    try:
        return torch.broadcast_to(values.to(device=like.device, dtype=like.dtype), expected)
    except RuntimeError as error:
        raise ShapeError(f"{name} of shape {tuple(values.shape)} do not fit {expected}") from error


def _at(call: LiveCall, chosen: Tensor, heads: Tensor, queries: Tensor) -> Tensor:
    """[batch, query_pos, head] from [batch, chosen head, chosen query]."""
    full = torch.zeros(call.z.shape[:3], dtype=torch.bool, device=call.z.device)
    full[:, queries[:, None], heads[None, :]] = chosen.transpose(1, 2)
    return full
