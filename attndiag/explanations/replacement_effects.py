"""Counterfactual replacement: what m loses when a token, a word, a span or a set of positions is replaced.

effect = m(x) - mean_k m(x with the item replaced, draw k); positive where the item helped the target. All items and
draws of a prompt are scored together (see `variant_scoring`). Beside the mean stand the Monte-Carlo standard error, the
share of draws that change the model's first choice, and how strange the variants are to the model: the mean rise of the
loss of the untouched tokens after the replaced one (nats a token; near 0 is in distribution).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attndiag.explanations.gradients import Prompts, Targets
from attndiag.explanations.replacement import Replacement
from attndiag.explanations.replacement_items import Granularity, Item, admissible, check_sets, items_of
from attndiag.explanations.resolve import one_target_each, prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.explanations.samplers import Drawn, draw_variants
from attndiag.explanations.token_records import Progress
from attndiag.explanations.variant_scoring import VariantScorer, VariantScores
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

DEFAULT = Replacement.sampled()
_AXIS = {"token": "position", "word": "word", "span": "span"}


def replacement_effects(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    replacement: Replacement | str = DEFAULT,
    by: Granularity = "token",
    ood: bool = True,
    prefix_cache: bool = True,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """Effect of replacing each token (word, span) of each prompt.

    Parameters
    ----------
    replacement : a `Replacement`, or its name with parameters as in `Replacement.parse`.
    by : what is replaced together. Words and spans keep their number of tokens.
    ood : also measure the rise of the later tokens' loss; costs logits at every position.
    prefix_cache : share keys and values before the change where the model allows it and gives the same m.
    batch_size : variants in one forward; by default what memory and prefix suggest.

    Returns
    -------
    One `Scores` a prompt over `position`, `word` or `span`, signed, unit of m; nan where nothing could be replaced,
    with the reason in `checks["reasons"]`. Checks, per item: `se` (Monte-Carlo; 0 where there is but one replacement),
    `flip_share`, `ood`, `distinct` (different variants among the draws; a standard error from few of them says little,
    and 1 says nothing); besides `draw_effects` [item, draw], `positions`, `m`, `admissible`, `prefix`, `rows_run`.

    Raises
    ------
    PromptError : no token may be replaced, no pair, a pair of another length, no spans.
    NotApplicableError : the replacement needs something that the model does not have.
    TargetError : a named token that is not one token, or a target that cannot be measured.
    """
    chosen = Replacement.parse(replacement) if isinstance(replacement, str) else replacement
    batch = as_prompts(prompts)
    targets = one_target_each(batch, target)
    results = []
    for done, (prompt, each) in enumerate(zip(batch, targets, strict=True), start=1):
        resolved = resolve_target(lm, prompt, each)
        items = items_of(prompt, resolved, by)
        drawn = draw_variants(lm, prompt, resolved, items, chosen)
        scorer = VariantScorer(lm, resolved, losses=ood, reuse_prefix=prefix_cache)
        found = scorer.score(drawn.variants, batch_size=batch_size, per_place=chosen.draws)
        results.append(_record(lm, prompt, resolved, items, chosen, drawn, found, _AXIS[by]))
        if progress is not None:
            progress(done, len(batch))
    return results


def set_effects(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    sets: Sequence[Sequence[int]],
    replacement: Replacement | str = DEFAULT,
    ood: bool = False,
    prefix_cache: bool = True,
    batch_size: int | None = None,
) -> Scores:
    """Effect of replacing whole sets of positions of one prompt, m(x) - mean m(x with the set replaced).

    The draws of a position are the same in every set (`sampled`: given the prompt's own prefix), so that sets are
    compared on equal terms. The empty set has effect exactly 0.

    Returns
    -------
    Scores over `set`, with the checks of `replacement_effects`.

    Raises
    ------
    ValueError : a position that may not be replaced. Else as `replacement_effects`.
    """
    chosen = Replacement.parse(replacement) if isinstance(replacement, str) else replacement
    one = as_prompts(prompt)[0]
    resolved = resolve_target(lm, one, one_target_each([one], target)[0])
    places = [tuple(sorted(set(each))) for each in sets]
    check_sets(places, resolved)
    full = [index for index, each in enumerate(places) if each]
    items = [Item(str(list(places[index])), places[index]) for index in full]
    drawn = draw_variants(lm, one, resolved, items, chosen, jointly=False)
    scorer = VariantScorer(lm, resolved, losses=ood, reuse_prefix=prefix_cache)
    found = scorer.score(drawn.variants, batch_size=batch_size, per_place=chosen.draws)
    everything = [Item(str(list(each)), each) for each in places]
    moved = Drawn(
        drawn.variants,
        torch.tensor(full, dtype=torch.int64)[drawn.owner],
        {full[index]: why for index, why in drawn.reasons.items()},
    )
    return _record(lm, one, resolved, everything, chosen, moved, found, "set")


def _record(
    lm: LoadedModel,
    prompt: Prompt,
    resolved: ResolvedTarget,
    items: Sequence[Item],
    replacement: Replacement,
    drawn: Drawn,
    found: VariantScores,
    axis: str,
) -> Scores:
    count, draws = len(items), replacement.draws
    each = _by_item(found.effect, drawn, count, draws)
    flips = _by_item(found.flips, drawn, count, draws).mean(1)
    ood = _by_item(found.ood, drawn, count, draws).mean(1)
    effects = each.mean(1)
    error = each.std(1) / draws**0.5 if draws > 1 else torch.full_like(effects, torch.nan)
    if not replacement.random:
        error = torch.zeros_like(effects) if replacement.name != "neighbour" or draws == 1 else error
    error = error.masked_fill(effects.isnan(), torch.nan)
    for index, item in enumerate(items):
        if not item.positions:  # nothing was asked to be replaced: nothing changes
            effects[index] = error[index] = flips[index] = 0.0
            each[index] = 0.0
    clean = found.clean[~found.clean.isnan()]
    checks: dict[str, Any] = {
        "se": error,
        "flip_share": flips,
        "ood": ood,
        "distinct": _distinct(drawn, count),
        "draw_effects": each,
        "m": float(clean[0]) if len(clean) else torch.nan,
        "positions": [item.positions for item in items],
        "reasons": dict(drawn.reasons),
        "prefix": found.prefix,
        "rows_run": found.rows,
    }
    if axis == "position":
        checks["token_ids"] = resolved.encoded.input_ids[0].cpu()
        checks["admissible"] = admissible(resolved).cpu()
    return Scores(
        values=effects,
        axes=(axis,),
        method="replacement",
        unit=resolved.unit,
        sign="signed",
        labels={axis: [item.label for item in items]},
        target=resolved.targets[0],
        params={"replacement": replacement.label},
        provenance={
            "model": lm.info.name,
            "prompt": prompt_label(prompt),
            "dtype": lm.info.dtype,
            "kernel": lm.info.attn_implementation,
            "side": "decoder" if resolved.encoded.decoder is None else "encoder",
        },
        checks=checks,
    )


def _distinct(drawn: Drawn, count: int) -> Tensor:
    """[item]: how many different variants an item has; 0 where it has none."""
    found = torch.zeros(count, dtype=torch.int64)
    owner = drawn.owner.to(drawn.variants.ids.device)
    whose = torch.unique(torch.cat([owner[:, None], drawn.variants.key], dim=1), dim=0)[:, 0]
    return found.index_add_(0, whose.cpu(), torch.ones(len(whose), dtype=torch.int64))


def _by_item(values: Tensor, drawn: Drawn, count: int, draws: int) -> Tensor:
    """[item, draw] from [variant]; nan for items without variants."""
    table = torch.full((count, draws), torch.nan, dtype=torch.float64)
    owners = drawn.owner.reshape(-1, draws)[:, 0]
    table[owners] = values.reshape(-1, draws)
    return table
