"""`probe_relation`: is a head that attends from one span to another about that relation?

"The subject-verb head" is a claim. What is measured for it, for every head, over the prompts that have both spans:

1. the mass, and the share of what the head writes, that goes from the query's last token to the related tokens;
2. the same for two rules that know nothing of the relation: the best fixed offset and shuffled pairs
   (`core.relations`);
3. what the target loses when exactly that edge is taken away, beside the loss when an edge of the same head to a
   shuffled place is taken away. Attending is no use by itself.

Prompts in which the related tokens are hidden from the query, or are a sink, are left out and said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from attndiag.core.contributions import head_contribution
from attndiag.core.relations import Pair
from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.head_inputs import HeadInput
from attndiag.explanations.head_measures import View
from attndiag.explanations.head_table import HeadTable
from attndiag.explanations.relation_table import Key, Progress, RelationTable, SeenPair
from attndiag.explanations.resolve import prompt_label
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.models.access import evaluating
from attndiag.models.encoding import Encoded
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target

LAST = None


def probe_relation(
    lm: LoadedModel,
    prompts: Sequence[Prompt],
    query: str | None,
    key: str,
    *,
    knock_out: int = 5,
    mode: Literal["remove", "renormalize"] = "remove",
    target: Target | None = None,
    draws: int = 2000,
    seed: int = 0,
    progress: Progress | None = None,
) -> HeadTable:
    """What every head does about one relation, and whether it is more than position.

    Parameters
    ----------
    lm : a loaded model with a tokenizer.
    prompts : those with both spans are used, one pair each.
    query : name of the span that attends; its last token is the query. None: the prompt's last token.
    key : name of the span that is attended to; all its tokens count together.
    knock_out : for how many heads, those with the most mass, the edge is taken away, one at a time and together.
    mode : of the knock-outs, see `Knockout`.
    target : what effects are measured on; each prompt's own when None.
    draws, seed : of the shuffles.
    progress : called with (what is being done, prompts done, prompts in all).

    Returns
    -------
    `HeadTable` with axes (layer, head): `relation_mass` and `relation_share` (of what the head writes), each beside
    `_best_offset` and `_shuffled`; `relation_offset`, that best offset in tokens; `relation_p`, `relation_p_any` (see
    `core.relations`); `relation_effect` and `relation_effect_shuffled` in the unit of the target, positive where the
    edge helped, nan for heads that were not knocked out. `facts` holds the relation, how many pairs and clusters of
    prompts it stands on, and `effect_together`. Intervals are over prompts; prompts of one cluster resemble each other,
    so read them with the number of clusters.

    Raises
    ------
    NotApplicableError : fewer than two usable pairs; the text says what became of the prompts.
    """
    name = f"{query or 'last token'} -> {key}"
    chosen, reasons = _pairs(lm, prompts, query, key)
    survivors: list[SeenPair] = []
    table_reasons: dict[tuple[str, Any], str] = {}
    keys: list[Key] = []
    for index, seen in enumerate(chosen):
        failures = _look(lm, seen, table_reasons)
        keys = keys or list(failures)
        why = _unusable(seen)
        if why:
            reasons[prompt_label(seen.prompt)] = why
        else:
            survivors.append(seen)
        if progress is not None:
            progress(f"relation {name}", index + 1, len(chosen))
    if len(survivors) < 2:
        said = "; ".join(f"{label}: {why}" for label, why in list(reasons.items())[:4])
        raise NotApplicableError(
            f"the relation {name} has {len(survivors)} usable pairs in {len(prompts)} prompts, and needs at least two"
            + (f" ({said})" if said else "")
        )
    return RelationTable(lm, name, survivors, reasons, keys, table_reasons, mode, target, seed).measure(
        draws, knock_out, progress
    )


def relations_in(prompts: Sequence[Prompt], *, least: int = 2) -> list[tuple[str, str]]:
    """Pairs of span names (query, key), the query later, that at least `least` prompts have: what can be asked."""
    counts: dict[tuple[str, str], int] = {}
    for prompt in prompts:
        for later, (start, _) in prompt.spans.items():
            for earlier, (_, stop) in prompt.spans.items():
                if stop <= start:
                    counts[later, earlier] = counts.get((later, earlier), 0) + 1
    return [pair for pair, count in counts.items() if count >= least]


def _pairs(
    lm: LoadedModel, prompts: Sequence[Prompt], query: str | None, key: str
) -> tuple[list[SeenPair], dict[str, str]]:
    """Prompts with both spans as tokens, and why others that have them are left out."""
    wanted = [name for name in (query, key) if name is not None]
    having = [prompt for prompt in prompts if all(name in prompt.spans for name in wanted)]
    if not having:
        known = sorted({name for prompt in prompts for name in prompt.spans})
        raise NotApplicableError(
            f"no prompt has the spans {' and '.join(wanted)}; the prompts have {', '.join(known) or 'no spans'}"
        )
    found, reasons = [], {}
    for prompt in having:
        encoded = lm.encode(prompt)
        related = _tokens_of(encoded, prompt.spans[key])
        asking = [int(encoded.last[0])] if query is None else _tokens_of(encoded, prompt.spans[query])
        if not related or not asking:
            reasons[prompt_label(prompt)] = "a span has no token of its own"
            continue
        pair = Pair(asking[-1], related[0], related[-1] + 1)
        if pair.start <= pair.query < pair.stop:
            reasons[prompt_label(prompt)] = "the query is one of the related tokens"
            continue
        sinks = encoded.special[0].cpu().clone()
        sinks[0] = True
        found.append(SeenPair(prompt, encoded, pair, sinks))
    return found, reasons


def _tokens_of(encoded: Encoded, span: tuple[int, int]) -> list[int]:
    """Positions of the tokens that share a character with a span."""
    starts, stops = encoded.offsets[0].unbind(-1)
    inside = (starts < span[1]) & (stops > span[0]) & (starts >= 0) & (stops > starts)
    return inside.nonzero()[:, 0].tolist()


def _look(lm: LoadedModel, seen: SeenPair, reasons: dict[tuple[str, Any], str]) -> dict[Key, tuple[str, ...]]:
    """One forward: the query's row of every call into `seen`. Returns the calls with their failed checks."""
    encoded, sinks = seen.encoded, seen.sinks[None]
    given = HeadInput(
        encoded.input_ids.cpu(), encoded.attention_mask.bool().cpu(), ~sinks, sinks, prompt_label(seen.prompt)
    )
    failures: dict[Key, tuple[str, ...]] = {}

    def note(call: AttentionCall) -> None:
        key = (call.module_name, call.call_index, call.layer)
        failures[key] = call.sampled_certificate.failures
        view = View(call, given)
        try:
            view.require_positions()
        except NotApplicableError as error:
            reasons.setdefault(("relation", key), str(error))
            return
        row = view.pattern[:, :, seen.pair.query : seen.pair.query + 1]
        seen.masses[key] = row[0, :, 0].double().cpu()
        seen.visible[key] = view.allowed[0, seen.pair.query].cpu()
        try:
            pattern, v, w_o = view.written
            sizes = head_contribution(pattern[:, :, seen.pair.query : seen.pair.query + 1].double(), v, w_o)
            sizes = sizes[0, :, 0].double().cpu()
            # 0 / 0 where a head writes nothing: undefined, and said so
            seen.shares[key] = sizes / sizes.sum(dim=-1, keepdim=True)
            if silent := (sizes.sum(dim=-1) == 0).nonzero()[:, 0].tolist():
                heads = ", ".join(map(str, silent))
                reasons.setdefault(("relation_share", key), f"its heads {heads} write nothing, so there is no share")
        except (NotApplicableError, UnsupportedModelError) as error:
            reasons.setdefault(("relation_share", key), str(error))

    with torch.no_grad(), evaluating(lm.model), capture(lm, on_call=note):
        lm.run(encoded.inputs)
    if not seen.visible:
        raise NotApplicableError("no attention of this model has queries and keys on the prompt's own tokens")
    return failures


def _unusable(seen: SeenPair) -> str:
    """Why a prompt's pair cannot be measured; empty where it can."""
    block = slice(seen.pair.start, seen.pair.stop)
    shown = torch.stack(list(seen.visible.values())).any(dim=0)
    if not bool(shown[block].all()):
        return "the related tokens are hidden from the query"
    if not bool(seen.usable[block].all()):
        return "the related tokens are a sink (position 0 or a special token)"
    return ""
