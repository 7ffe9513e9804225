"""Measured calls -> rows of the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attndiag.hooks.captured import Refusal
from attndiag.models.encoding import Encoded
from attndiag.runs.call_record import CallMeasures
from attndiag.runs.measures import MEASURES
from attndiag.runs.pairs import Pair
from attndiag.runs.schemas import CHECKS, DISAGREEMENTS, HEADS, REFUSALS, SCORES, TOKENS

if TYPE_CHECKING:
    import pyarrow as pa

_SCORE_UNITS = {
    "weight": "mass",
    "head_contribution": "residual norm",
    "head_contribution_share": "share",
    "contribution": "residual norm",
}
_PLACE = ("layer", "module")
_HEAD_COLUMNS = ("kind", "head", "measure", "unit", "value", "n", "undefined", "certified", "error")
_PAIR_COLUMNS = (
    "direction",
    "key_class",
    "head",
    "query_pos",
    "key_pos",
    "weight",
    "head_contribution",
    "row_written",
    "weight_share",
    "contribution_share",
    "difference",
)
_HEADS_JOINED = '{"heads": "mean"}'


def token_rows(run: str, prompt: str, encoded: Encoded) -> pa.Table:
    """One row a token, positions those of the real input_ids; the decoder's tokens after the encoder's."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("part", "pos", "token_id", "text", "char_start", "char_end", "is_special")
    }
    sides = [("input", encoded)] + ([("decoder", encoded.decoder)] if encoded.decoder is not None else [])
    for part, side in sides:
        real = side.attention_mask[0].bool().tolist()
        offsets = side.offsets[0].tolist()
        special = side.special[0].tolist()
        for pos, token_id in enumerate(side.input_ids[0].tolist()):
            if not real[pos]:
                continue
            start, end = offsets[pos]
            columns["part"].append(part)
            columns["pos"].append(pos)
            columns["token_id"].append(token_id)
            columns["text"].append(_storable(side.tokens[0][pos]))
            columns["char_start"].append(start if start >= 0 else None)
            columns["char_end"].append(end if start >= 0 else None)
            columns["is_special"].append(special[pos])
    return TOKENS.table({"run": run, "prompt": prompt, **columns})


def head_rows(run: str, prompt: str, calls: Sequence[CallMeasures]) -> pa.Table:
    """Every measure of every head, then of every layer."""
    columns: dict[str, list[Any]] = {name: [] for name in (*_PLACE, *_HEAD_COLUMNS)}
    for call in calls:
        for of_head, group in ((True, call.per_head), (False, call.per_layer)):
            for name, found in group.items():
                size = len(found.values)
                columns["layer"] += [call.layer] * size
                columns["module"] += [call.module] * size
                columns["kind"] += [call.kind] * size
                columns["head"] += list(range(size)) if of_head else [None] * size
                columns["measure"] += [name] * size
                columns["unit"] += [MEASURES[name].unit] * size
                columns["value"] += found.values.tolist()
                columns["n"] += found.n.tolist()
                columns["undefined"] += found.undefined.tolist()
                columns["certified"] += [call.certified] * size
                columns["error"] += [_why(value) for value in found.values]
    return HEADS.table({"run": run, "prompt": prompt, **columns})


def _why(value: float) -> str | None:
    return None if np.isfinite(value) else "undefined in every row"


def score_rows(run: str, prompt: str, calls: Sequence[CallMeasures], *, strongest: int) -> pa.Table:
    """What each source token gives the last query, by layer; and the rows of heads behind the strongest pairs."""
    parts: list[_Part] = []
    for call in calls:
        for method, values in call.last_query_scores.items():
            params = None if method == "contribution" else _HEADS_JOINED
            parts.append(_Part(call, method, params, call.last_query, None, values))
    told: set[tuple[str, int, int]] = set()
    for group in strongest_pairs(calls, strongest).values():
        for call, pair in group:
            row = (call.module, pair.head, pair.query_pos)
            if row in told:
                continue
            told.add(row)
            parts.append(_Part(call, "weight", None, pair.query_pos, pair.head, pair.row_weight))
            parts.append(_Part(call, "head_contribution", None, pair.query_pos, pair.head, pair.row_contribution))
    sizes = [len(part.values) for part in parts]
    values = np.concatenate([part.values for part in parts])

    def spread(of_part: Callable[[_Part], Any]) -> list[Any]:
        return [value for part, size in zip(parts, sizes, strict=True) for value in [of_part(part)] * size]

    return SCORES.table(
        {
            "run": run,
            "prompt": prompt,
            "method": spread(lambda part: part.method),
            "params": spread(lambda part: part.params),
            "source_pos": np.concatenate([np.arange(size) for size in sizes]),
            "query_pos": spread(lambda part: part.query),
            "layer": spread(lambda part: part.call.layer),
            "module": spread(lambda part: part.call.module),
            "head": spread(lambda part: part.head),
            "unit": spread(lambda part: _SCORE_UNITS[part.method]),
            "value": values,
            "certified": spread(lambda part: part.call.certified),
            "error": [None if finite else "a head writes nothing into this query" for finite in np.isfinite(values)],
        }
    )


class _Part(NamedTuple):
    """One row of scores over the keys."""

    call: CallMeasures
    method: str
    params: str | None
    query: int
    head: int | None
    values: np.ndarray


def check_rows(run: str, prompt: str, calls: Sequence[CallMeasures]) -> pa.Table:
    """The certificate and the completeness of every call."""
    names = ("layer", "module", "kind", "call_index", "route", "kernel", "backend", "certified", "not_measured")
    columns: dict[str, list[Any]] = {name: [getattr(call, name) for call in calls] for name in names}
    for name in calls[0].checks:
        columns[name] = [call.checks[name] for call in calls]
    return CHECKS.table({"run": run, "prompt": prompt, **columns})


def disagreement_rows(
    run: str, prompt: str, calls: Sequence[CallMeasures], encoded: Encoded, *, strongest: int
) -> pa.Table:
    """The strongest pairs of the prompt, `strongest` for each direction and class of key."""
    rows: list[dict[str, Any]] = []
    for group in strongest_pairs(calls, strongest).values():
        for rank, (call, pair) in enumerate(group, 1):
            queries, keys = _texts_of(call, encoded)
            rows.append(
                {
                    "rank": rank,
                    "layer": call.layer,
                    "module": call.module,
                    "kind": call.kind,
                    "certified": call.certified,
                    "query_token": _text_at(queries, pair.query_pos),
                    "key_token": _text_at(keys, pair.key_pos),
                    **{name: getattr(pair, name) for name in _PAIR_COLUMNS},
                }
            )
    if not rows:
        return DISAGREEMENTS.empty()
    return DISAGREEMENTS.table({"run": run, "prompt": prompt, **{k: [row[k] for row in rows] for k in rows[0]}})


def strongest_pairs(
    calls: Sequence[CallMeasures], strongest: int
) -> dict[tuple[str, str], list[tuple[CallMeasures, Pair]]]:
    """For each direction and class of key, the `strongest` pairs of a prompt in falling order."""
    groups: dict[tuple[str, str], list[tuple[CallMeasures, Pair]]] = {}
    for call in calls:
        for pair in call.pairs:
            groups.setdefault((pair.direction, pair.key_class), []).append((call, pair))
    # ties stay in the order of calls and heads
    return {
        name: sorted(group, key=lambda found: -abs(found[1].difference))[:strongest] for name, group in groups.items()
    }


def refusal_rows(run: str, prompt: str, refusals: Sequence[Refusal]) -> pa.Table:
    """Layers without softmax weights."""
    return REFUSALS.table(
        {
            "run": run,
            "prompt": prompt,
            "module": [refusal.module_name for refusal in refusals],
            "module_class": [refusal.module_class for refusal in refusals],
            "reason": [refusal.reason for refusal in refusals],
        }
    )


def _texts_of(call: CallMeasures, encoded: Encoded) -> tuple[Sequence[str], Sequence[str]]:
    """Token texts of the queries and of the keys of a call."""
    if encoded.decoder is None:
        return encoded.tokens[0], encoded.tokens[0]
    if call.kind == "cross":
        return encoded.decoder.tokens[0], encoded.tokens[0]
    side = encoded.decoder if "decoder" in call.module.split(".") else encoded
    return side.tokens[0], side.tokens[0]


def _text_at(texts: Sequence[str], position: int) -> str:
    return _storable(texts[position]) if position < len(texts) else f"[{position}]"


def _storable(text: str) -> str:
    """Text that a UTF-8 file can hold: lone surrogates, which some byte tokens give, become question marks."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
