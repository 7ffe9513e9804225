"""Where a model's induction heads look: the attention of the heads with the highest prefix-matching scores.

The heads are found on the probe of repeated random tokens (`attndiag.heads`, Olsson 2022), not on the prompt, so that
the prompt cannot choose its own explanation. Their weights at the positions where the target is read are averaged.
"""

from __future__ import annotations

import hashlib
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
from attndiag.hooks.structure import first_tensor
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

Head = tuple[int, int]
THRESHOLD = 0.4
"""Prefix-matching score from which a head counts as an induction head, as in `attndiag.heads`."""
_ROWS, _LENGTH = 8, 24
_found: WeakKeyDictionary[nn.Module, tuple[str, dict[Head, float]]] = WeakKeyDictionary()


def prefix_matching(lm: LoadedModel) -> dict[Head, float]:
    """Prefix-matching score of every head, mass in [0, 1], on 8 rows of 24 random tokens; kept while nothing changes.

    Raises
    ------
    NotApplicableError : the probe cannot be run on this model; the text says why.
    """
    state = _state(lm)
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


def _state(lm: LoadedModel) -> str:
    """A checksum of what the model is now: its weights, and what it makes of one row.

    The numbers themselves: a change through `.data` raises no version, and an adapter that is switched on changes no
    weight.
    """
    kept = hashlib.sha256()
    row = (torch.arange(_LENGTH, device=lm.device) * 7 + 2).remainder(lm.vocabulary)[None]
    given = {"input_ids": row}
    if getattr(lm.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = row
    with torch.no_grad(), edits_paused():
        weights = [moment for each in lm.model.parameters() for moment in _moments(each)]
        made = first_tensor(lm.run(given))
    for part in (*weights, *([] if made is None else [made.double()])):
        kept.update(part.cpu().numpy().tobytes())
    return kept.hexdigest()


def _moments(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and sum of sizes in float64: a weight that moved has moved at least one of them."""
    values = weight.detach()
    # packed formats hold whole numbers
    values = values if values.is_floating_point() else values.long()
    return values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)


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
    Scores [position], mass in [0, 1]. `checks["heads"]`: (layer, head, prefix-matching score), highest first; for named
    heads in the given order, and None in place of the score: no probe is run.

    Raises
    ------
    NotApplicableError : no head reaches the threshold (the text names the highest), or a head does not exist.
    """
    one = as_prompts(prompt)[0]
    resolved = resolve_target(lm, one, target)
    if resolved.encoded.decoder is not None:
        raise NotApplicableError("induction heads belong to a causal model's own attention; this is an encoder-decoder")
    scores: dict[Head, float] = {} if heads is not None else prefix_matching(lm)
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
    if not chosen:
        raise NotApplicableError("heads is empty; name at least one (layer, head), or leave it out")
    rows: dict[Head, Tensor] = {}
    failures: list[str] = []
    real = resolved.encoded.attention_mask[0].bool()
    places = real.nonzero()[:, 0] if resolved.positions is None else resolved.positions[0].unique()

    def note(call: AttentionCall) -> None:
        mine = [head for head in chosen if head[0] == call.layer and 0 <= head[1] < call.n_heads]
        if mine:
            failures.extend(f"layer {call.layer}: {text}" for text in call.sampled_certificate.failures)
            pattern = call.pattern[0].double().cpu()
            rows.update({head: pattern[head[1], places.cpu()].mean(0) for head in mine})

    with torch.no_grad(), capture(lm, on_call=note):
        lm.run(resolved.inputs)
    unknown = [head for head in chosen if head not in rows]
    if unknown:
        raise NotApplicableError(f"heads are {chosen}; {lm.info.name} has no attention weights of {unknown}")
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
        checks={"heads": [(*head, scores.get(head)) for head in chosen]},
        failures=tuple(failures),
    )
