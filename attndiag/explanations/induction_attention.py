"""Where a model's induction heads look: the attention of the heads with the highest prefix-matching scores.

The heads are found on the probe of repeated random tokens (`attndiag.heads`, Olsson 2022), not on the prompt, so that
the prompt cannot choose its own explanation. Their weights at the positions where the target is read are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attndiag.errors import NotApplicableError
from attndiag.explanations.head_scores import heads as head_table
from attndiag.explanations.interventions import provenance
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.hooks.capture_context import capture
from attndiag.hooks.pausing import edits_paused
from attndiag.hooks.record import AttentionCall
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

Head = tuple[int, int]
THRESHOLD = 0.4
"""Prefix-matching score from which a head counts as an induction head, as in `attndiag.heads`."""
_ROWS, _LENGTH = 8, 24
_found: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], dict[Head, float]]] = WeakKeyDictionary()


def prefix_matching(lm: LoadedModel) -> dict[Head, float]:
    """Prefix-matching score of every head, mass in [0, 1], on 8 rows of 24 random tokens; kept while weights are equal.

    Raises
    ------
    NotApplicableError : the probe cannot be run on this model; the text says why.
    """
    # in-place changes of a parameter raise its version; a swapped one has another place
    state = tuple(number for each in lm.model.parameters() for number in (each.data_ptr(), each._version))
    if lm.model in _found and _found[lm.model][0] == state:
        return _found[lm.model][1]
    with edits_paused():
        table = head_table(lm, probes=["induction"], rows=_ROWS, length=_LENGTH, seed=0)["prefix_matching_score"]
    values = table.numpy()
    layers = list(table.labels["layer"])
    scores = {
        (int(layer), head): float(values[row, head])
        for row, layer in enumerate(layers)
        for head in range(values.shape[1])
        if not math.isnan(values[row, head])
    }
    _found[lm.model] = (state, scores)
    return scores


def induction_attention(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    heads: Sequence[Head] | None = None,
    threshold: float = THRESHOLD,
) -> Scores:
    """Mean weight of the induction heads on each token: mean over heads h and positions t of A_tj^h.

    Parameters
    ----------
    target : decides at which positions t the weights are read; its sign plays no part.
    heads : (layer, head) pairs; None takes all with a prefix-matching score of at least `threshold`.

    Returns
    -------
    Scores [position], mass in [0, 1]. `checks["heads"]`: (layer, head, prefix-matching score), highest first.

    Raises
    ------
    NotApplicableError : no head reaches the threshold (the text names the highest), or a head does not exist.
    """
    one = as_prompts(prompt)[0]
    resolved = resolve_target(lm, one, target)
    if resolved.encoded.decoder is not None:
        raise NotApplicableError("induction heads belong to a causal model's own attention; this is an encoder-decoder")
    scores = prefix_matching(lm)
    chosen = sorted(scores, key=lambda head: -scores[head]) if heads is None else [(int(a), int(b)) for a, b in heads]
    if heads is None:
        best = chosen[0] if chosen else None
        chosen = [head for head in chosen if scores[head] >= threshold]
        if not chosen:
            most = "none was measured" if best is None else f"the highest is L{best[0]}H{best[1]}, {scores[best]:.2f}"
            raise NotApplicableError(
                f"{lm.info.name} has no head with a prefix-matching score of {threshold:g} or more ({most}); name some "
                "with heads=, or lower threshold="
            )
    unknown = [head for head in chosen if head not in scores]
    if unknown or not chosen:
        raise NotApplicableError(f"heads are {list(chosen)}; the probe measured no {unknown or 'head'}")
    rows: dict[Head, Tensor] = {}
    failures: list[str] = []
    real = resolved.encoded.attention_mask[0].bool()
    places = real.nonzero()[:, 0] if resolved.positions is None else resolved.positions[0].unique()

    def note(call: AttentionCall) -> None:
        mine = [head for head in chosen if head[0] == call.layer]
        if mine:
            failures.extend(f"layer {call.layer}: {text}" for text in call.sampled_certificate.failures)
            pattern = call.pattern[0].double().cpu()
            rows.update({head: pattern[head[1], places.cpu()].mean(0) for head in mine})

    with torch.no_grad(), capture(lm, on_call=note):
        lm.run(resolved.inputs)
    return Scores(
        values=torch.stack([rows[head] for head in chosen]).mean(0),
        axes=("position",),
        method="induction",
        unit="mass",
        sign="non-negative",
        labels={"position": list(resolved.encoded.tokens[0])},
        target=resolved.targets[0],
        params={"threshold": None if heads is not None else threshold},
        provenance=provenance(lm) | {"prompt": prompt_label(one)},
        checks={"heads": [(*head, scores[head]) for head in chosen]},
        failures=tuple(failures),
    )
