"""Which earlier heads does a head read? Q-, K- and V-composition of a model's heads, from its weights.

W_Q and W_K are found by what they do, as W_V is in `head_circuits`: q is a selection of a linear map's output columns,
up to a factor, in one of two forwards. In the first every token stands at a position of its own, which fits where
positions are not rotated into q. In the second every row holds one token, at position 0, where a rotation is the
identity. Where a norm sits between the map and q (QK-norm), the map is found behind that norm and its gain is folded
in; the division by the token's norm is left out, since a score is a ratio and knows no scale of a token. What is found
has to reproduce q and k of the forward from what the map read, or the layer has no score.

A rotary embedding turns W_Q against W_K by an angle that depends on the offset. The scores leave it out: they say what
a head looks for, not where. Elhage 2021 (A Mathematical Framework for Transformer Circuits), on composition.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attndiag.core.circuits import composition_chance, composition_ratio, reading_side, writing_side
from attndiag.errors import NotApplicableError, UndefinedScoreWarning, UnsupportedModelError
from attndiag.explanations.head_circuits import (
    Key,
    SeenForward,
    SeenMap,
    columns_of,
    folded_weights,
    inside,
    matrix_of,
    norm_before,
    output_weights,
    value_weights,
    watched_forward,
)
from attndiag.explanations.head_measures import PAIRS
from attndiag.explanations.head_table import HeadTable, labels_of
from attndiag.hooks.record import AttentionCall
from attndiag.models.load import LoadedModel
from attndiag.scores import Scores

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("q_composition", "k_composition", "v_composition")
CONTENT_ONLY = "rotations by position, so this is what a head looks for, not where"
BEFORE_NORM = "the division of q and k by their norm"
_REPRODUCES = {torch.float64: 1e-8, torch.float32: 1e-4}
_SAME_COLUMN = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Weights of one call, norms folded in: w_q [head, d_model, d_head], w_k, w_v [kv_head, ...], w_o [head, ...]."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    remarks: tuple[str, ...] = ()


def composition_scores(
    lm: LoadedModel,
    tokens: Tensor,
    *,
    draws: int = 100,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Scores], dict[Key, str]]:
    """Composition of every head with every head of an earlier layer, above that of random matrices.

    score = ‖W_b W_a‖_F / (‖W_b‖_F ‖W_a‖_F) - baseline, W_a the OV circuit of the earlier head, W_b the QK circuit of
    the later one as its queries (Q) or keys (K) read it, or its OV circuit (V); see `core.circuits.composition_score`.

    Parameters
    ----------
    lm : a loaded model.
    tokens : [1, position] different ids to find the weights on.
    draws, seed : of the random matrices.
    progress : called with (layers done, layers in all).

    Returns
    -------
    name -> `Scores` with axes (layer, head, earlier_layer, earlier_head), a ratio in [-1, 1]: 0 is chance. nan for
    pairs that are no pair, and where a circuit is ~0. `checks` hold `baseline` and `spread`, the mean and standard
    deviation for random matrices; `provenance["remarks"]` what was left out. Then why layers have no score.

    Notes
    -----
    The direct path only, biases left out. A score far above its spread says that the later head can read what the
    earlier one writes, not that it does.
    """
    weights, reasons, order = _all_weights(lm, tokens)
    labels = labels_of(order)
    found = {key: weights[key] for key in order if key in weights}
    if not found:
        return {}, reasons
    n_heads = max(each.w_o.shape[0] for each in found.values())
    shape = (len(order), n_heads, len(order), n_heads)
    values = {kind: torch.full(shape, torch.nan, dtype=torch.float64) for kind in KINDS}
    writes = {key: writing_side(each.w_v, each.w_o) for key, each in found.items()}
    chances: dict[tuple, tuple[float, float]] = {}
    undefined: set[Key] = set()
    for later, key in enumerate(order):
        if key not in found:
            continue
        mine = found[key]
        sides = {
            "q_composition": (mine.w_q, mine.w_k.transpose(-1, -2)),
            "k_composition": (mine.w_k, mine.w_q.transpose(-1, -2)),
            "v_composition": (mine.w_v, mine.w_o),
        }
        for kind, (reads, other) in sides.items():
            if reads.shape[0] > other.shape[0]:
                other = other.repeat_interleave(reads.shape[0] // other.shape[0], dim=0)
            reading = reading_side(reads, other)
            for earlier, before in enumerate(order[:later]):
                if before not in found or _stack_of(before) != _stack_of(key):
                    continue
                its = found[before]
                shapes = tuple(tuple(w.shape[1:]) for w in (its.w_v, its.w_o, reads, other))
                if shapes not in chances:
                    chances[shapes] = composition_chance(its.w_v, its.w_o, reads, other, draws=draws, seed=seed)
                ratio = composition_ratio(writes[before], reading) - chances[shapes][0]
                if not bool(ratio.isfinite().all()):
                    undefined |= {key}
                values[kind][later, : ratio.shape[0], earlier, : ratio.shape[1]] = ratio.cpu()
        if progress is not None:
            progress(later + 1, len(order))
    for key in undefined:
        warnings.warn(
            f"composition is undefined for some pairs of layer {labels[key]}: one of the two circuits is zero",
            UndefinedScoreWarning,
            stacklevel=2,
        )
    remarks = tuple(dict.fromkeys(text for each in found.values() for text in each.remarks))
    named = {axis: list(labels.values()) for axis in ("layer", "earlier_layer")}
    chance = list(chances.values())
    checks = {
        "baseline": sum(c[0] for c in chance) / len(chance) if chance else torch.nan,
        "spread": max((c[1] for c in chance), default=torch.nan),
    }
    about = {"model": lm.info.name, "architecture": lm.info.architecture, "input": "weights", "remarks": remarks}
    scores = {
        kind: Scores(values[kind], PAIRS, kind, "ratio", "signed", labels=named, provenance=about, checks=checks)
        for kind in KINDS
    }
    return scores, reasons


def strongest_pairs(table: HeadTable | Mapping[str, Scores], count: int | None = 20) -> pd.DataFrame:
    """The strongest pairs of heads: kind (q, k, v), earlier and later head, score, its multiple of the spread, next.

    `next` is the score of the earlier head that comes right after this one among all that the same later head reads
    with the same side; nan for the last of them. In a trained model nearly every pair is many spreads above random
    matrices, so a pair stands out by its distance from the next.

    Raises
    ------
    NotApplicableError : composition was not measured; the text says why where that is known.
    """
    import pandas as pd

    scores = table.scores if isinstance(table, HeadTable) else table
    if not any(kind in scores for kind in KINDS):
        if isinstance(table, HeadTable):
            table[KINDS[0]]
        raise NotApplicableError("composition was not measured; ask `attndiag.heads` for the probe composition")
    parts = []
    for kind in KINDS:
        if kind not in scores:
            continue
        each = scores[kind]
        flat = each.values.flatten()
        keep = flat.isfinite().nonzero()[:, 0]
        ranked = keep[flat[keep].argsort(descending=True)]
        if count is not None:
            ranked = ranked[:count]
        later, head, earlier, earlier_head = torch.unravel_index(ranked, each.values.shape)
        names, before = each.labels["layer"], each.labels["earlier_layer"]
        parts.append(
            pd.DataFrame(
                {
                    "kind": kind[0],
                    "earlier_layer": [before[i] for i in earlier.tolist()],
                    "earlier_head": earlier_head.tolist(),
                    "layer": [names[i] for i in later.tolist()],
                    "head": head.tolist(),
                    "score": flat[ranked].tolist(),
                    "spreads": (flat[ranked] / each.checks["spread"]).tolist(),
                    "next": _next_scores(each.values).flatten()[ranked].tolist(),
                }
            )
        )
    whole = pd.concat(parts, ignore_index=True).sort_values("score", ascending=False, kind="stable")
    return (whole if count is None else whole.head(count)).reset_index(drop=True)


def _next_scores(values: Tensor) -> Tensor:
    """For every pair the next lower score of the same later head, of the shape of `values`; nan where there is none."""
    read = values.flatten(2)
    order = read.nan_to_num(nan=-torch.inf).argsort(dim=-1, descending=True, stable=True)
    ranked = read.gather(-1, order)
    after = torch.cat([ranked[..., 1:], torch.full_like(ranked[..., :1], torch.nan)], dim=-1)
    return torch.empty_like(read).scatter_(-1, order, after).view_as(values)


# ------------------------------------------------------------------------------------------------ finding the weights
def _all_weights(lm: LoadedModel, tokens: Tensor) -> tuple[dict[Key, HeadWeights], dict[Key, str], list[Key]]:
    """Weights of the self-attention calls, why others have none, and all calls in the order in which they run."""
    apart = watched_forward(lm, tokens)
    alone: SeenForward | None = None
    weights: dict[Key, HeadWeights] = {}
    reasons: dict[Key, str] = {}
    order: list[Key] = []
    for index, call in enumerate(apart.calls):
        key = (call.module_name, call.call_index, call.layer)
        if call.kind == "cross":
            reasons[key] = "its keys come from another sequence"
            continue
        order.append(key)
        try:
            if call.q is None or call.k is None:
                raise NotApplicableError("its softmax was watched from outside, so its q and k are not known")
            found = [_reading_weights(call, apart, side) for side in ("q", "k")]
            if None in found:
                alone = alone or watched_forward(lm, tokens.T)
                found = [_reading_weights(alone.calls[index], alone, side) for side in ("q", "k")]
                if None in found:
                    raise NotApplicableError(_why_not_found(call, alone))
                rotated = (CONTENT_ONLY,)
            else:
                rotated = ()
            (w_q, normed), (w_k, _) = found[0] or (None, False), found[1] or (None, False)
            if w_q is None or w_k is None:
                raise NotApplicableError("W_Q or W_K was not found")
            remarks = rotated + ((BEFORE_NORM,) if normed else ())
            weights[key] = HeadWeights(w_q, w_k, value_weights(call, apart), output_weights(call), remarks)
        except (NotApplicableError, UnsupportedModelError) as error:
            reasons[key] = str(error)
    return weights, reasons, order


def _why_not_found(call: AttentionCall, seen: SeenForward) -> str:
    """Why q or k has no single matrix; maps behind a norm inside the attention are named, as in latent attention."""
    chained = [
        item.name
        for item in seen.linear
        if inside(item, call.module_name)
        and (norm := norm_before(item, seen)) is not None
        and inside(norm, call.module_name)
    ]
    said = "its q or k is no selection of one linear map's outputs, at position 0 neither"
    return f"{said}; a norm stands between the residual stream and {chained[0]} (a low-rank chain)" if chained else said


def _reading_weights(call: AttentionCall, seen: SeenForward, side: str) -> tuple[Tensor, bool] | None:
    """W_Q or W_K, [head, d_model, d_head], norms folded in, and whether a norm follows it; None where none fits."""
    given = call.q if side == "q" else call.k
    if given is None:
        return None
    heads = given.shape[1]
    x = given.detach().transpose(1, 2).flatten(0, 1).flatten(1)  # [token, head * d_head]
    for norm in (None, *(each for each in seen.norms if inside(each, call.module_name))):
        wanted = x if norm is None else _read_by(norm, x)
        if wanted is None:
            continue
        for item in seen.linear:
            if not inside(item, call.module_name):
                continue
            found = _columns(wanted, item.output, heads)
            if found is None:
                continue
            columns, factor = found
            matrix = matrix_of(item.module)[:, columns] * factor
            _check(matrix, item, wanted)
            matrix = folded_weights(matrix, item, call, seen)
            if norm is not None:
                matrix = _normed(matrix, norm)
            return matrix.unflatten(1, (heads, -1)).transpose(0, 1), norm is not None
    return None


def _read_by(norm: SeenMap, x: Tensor) -> Tensor | None:
    """What a norm read, laid out as x, where x is what it wrote."""
    for turned in (False, True):
        output, read = (_rows(t, len(x), turned) for t in (norm.output, norm.input))
        if output is not None and read is not None and output.shape == x.shape and torch.equal(output, x):
            return read
    return None


def _rows(tensor: Tensor, count: int, turned: bool) -> Tensor | None:
    """[token, head * d_head] from [batch, position, (head,) d_head], or with head and position turned."""
    if turned:
        if tensor.ndim != 4:
            return None
        tensor = tensor.transpose(1, 2)
    return tensor.reshape(count, -1) if tensor.numel() % count == 0 and tensor.ndim >= 3 else None


def _columns(x: Tensor, output: Tensor, heads: int) -> tuple[list[int], Tensor | float] | None:
    """Columns of a map's output that are x: side by side head after head, else in any order and up to a factor."""
    exact = columns_of(x, output, heads)
    if exact is not None:
        return exact, 1.0
    if output.ndim < 2 or output[..., 0].numel() != len(x) or output.shape[-1] < x.shape[1] or len(x) < 8:
        return None
    wide, narrow = output.reshape(len(x), -1).double(), x.double()
    sizes, wanted = wide.norm(dim=0), narrow.norm(dim=0)
    if bool((wanted == 0).any()):
        return None
    cosine = (wide / sizes.clamp(min=1e-300)).T @ (narrow / wanted)
    best = cosine.abs().argmax(dim=0)
    factor = cosine.gather(0, best[None])[0] * wanted / sizes[best].clamp(min=1e-300)
    error = ((wide[:, best] * factor - narrow).norm(dim=0) / wanted).max()
    if not float(error) <= _SAME_COLUMN.get(x.dtype, 2e-2):
        return None
    return best.tolist(), factor


def _check(matrix: Tensor, item: SeenMap, x: Tensor) -> None:
    """The matrix has to give x from what the map read, up to a bias."""
    read = item.input.reshape(len(x), -1).double()
    made = (read - read[:1]) @ matrix
    wanted = x.double() - x[:1].double()
    error = float((made - wanted).norm()) / max(float(wanted.norm()), 1e-30)
    if len(x) > 1 and not error <= _REPRODUCES.get(x.dtype, 5e-2):
        raise UnsupportedModelError(f"the weights of {item.name} do not reproduce q or k (off by {error:.1e})")


def _normed(matrix: Tensor, norm: SeenMap) -> Tensor:
    """What a norm on q or k does to the columns of the map before it, but for the division."""
    linear = norm.linearised()
    gain = linear.gain.to(matrix.dtype)
    if matrix.shape[1] % gain.shape[-1]:
        raise NotApplicableError(f"{norm.name} spans {gain.shape[-1]} of {matrix.shape[1]} features")
    parts = matrix.unflatten(1, (-1, gain.shape[-1]))
    if linear.centre:
        parts = parts - parts.mean(dim=-1, keepdim=True)
    return (parts * gain).flatten(1)


def _stack_of(key: Key) -> str:
    """The module path up to the first number: heads of an encoder and of a decoder read different streams."""
    return ".".join(itertools.takewhile(lambda part: not part.isdigit(), key[0].split(".")))


def facts_of(scores: Mapping[str, Scores]) -> dict[str, Any]:
    """What was left out, for the facts of a table."""
    remarks = next((each.provenance["remarks"] for each in scores.values()), ())
    return {"composition": "; ".join(remarks)} if remarks else {}
