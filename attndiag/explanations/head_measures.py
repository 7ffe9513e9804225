"""What each probe of `attndiag.heads` measures on one attention call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attndiag.core.attention import forbidden_entries
from attndiag.core.head_outputs import dormant_heads, head_output_norm, head_similarity, value_drain
from attndiag.core.heads import (
    MassScore,
    current_token_score,
    duplicate_token_score,
    earlier_followers,
    entropy_score,
    mass_on,
    prefix_matching_score,
    previous_token_score,
    sink_rate,
)
from attndiag.errors import NotApplicableError
from attndiag.explanations.head_inputs import HeadInput
from attndiag.explanations.head_table import Measure
from attndiag.hooks.record import AttentionCall

Found = tuple[str, Tensor, dict[str, Tensor]]

PAIRS = ("layer", "head", "earlier_layer", "earlier_head")
MEASURES = {
    measure.name: measure
    for measure in (
        Measure("prefix_matching_score", "mass", "induction"),
        Measure("duplicate_token_score", "mass", "duplicate"),
        Measure("previous_token_score", "mass", "previous"),
        Measure("current_token_score", "mass", "current"),
        Measure("sink_mass", "mass", "sink"),
        Measure("sink_contribution_share", "share", "sink"),
        Measure("sink_norm_ratio", "ratio", "sink"),
        Measure("sink_rate", "share of heads", "sink", axes=("layer",)),
        Measure("entropy", "nats", "entropy"),
        Measure("effective_support", "keys", "entropy"),
        Measure("relative_output_norm", "ratio", "output"),
        Measure("redundancy", "cosine", "redundancy", signed=True, axes=("layer", "head", "other_head")),
        Measure("largest_similarity", "cosine", "redundancy", signed=True),
        Measure("copying_score", "share", "copying", signed=True),
        Measure("q_composition", "ratio", "composition", signed=True, axes=PAIRS),
        Measure("k_composition", "ratio", "composition", signed=True, axes=PAIRS),
        Measure("v_composition", "ratio", "composition", signed=True, axes=PAIRS),
        Measure("ablation_effect", "nats", "ablation", signed=True),
        Measure("mean_ablation_effect", "nats", "ablation", signed=True),
        Measure("ablation_effect_patterns_kept", "nats", "ablation", signed=True),
    )
}
SHORT_NAMES = {
    "prefix_matching": "prefix_matching_score",
    "duplicate_token": "duplicate_token_score",
    "previous_token": "previous_token_score",
    "current_token": "current_token_score",
    "sink": "sink_mass",
    "copying": "copying_score",
    "effect": "ablation_effect",
}
PROBES = tuple(dict.fromkeys(measure.probe for measure in MEASURES.values() if measure.probe != "ablation"))
ON_TOKENS = ("induction", "duplicate")
ON_WEIGHTS = ("copying", "composition")


def ranking_measure(name: str, probes: Sequence[str]) -> str:
    """The measure of single heads that a name, short or whole, stands for.

    Raises
    ------
    NotApplicableError : there is none of that name, or its probe is not among `probes`.
    """
    measure = MEASURES.get(SHORT_NAMES.get(name, name))
    if measure is None or measure.axes != ("layer", "head"):
        known = [*SHORT_NAMES, *(each.name for each in MEASURES.values() if each.axes == ("layer", "head"))]
        raise NotApplicableError(f"heads cannot be ranked by {name!r}; expected {', '.join(dict.fromkeys(known))}")
    if measure.probe not in ("ablation", *probes):
        raise NotApplicableError(
            f"heads are ranked by {measure.name}, which the probe {measure.probe!r} measures; add it to the probes"
        )
    return measure.name


class View:
    """One call with the masks of its batch: what the measures are made from."""

    def __init__(self, call: AttentionCall, batch: HeadInput) -> None:
        self.call, self.batch = call, batch
        self.pattern = call.pattern
        self.tokens = batch.tokens.to(self.pattern.device)
        self.valid = batch.valid.to(self.pattern.device)
        self.queries = batch.queries.to(self.pattern.device)
        self.sinks = batch.sinks.to(self.pattern.device)
        self.second_copy = None if batch.probe is None else batch.probe.second_copy.to(self.pattern.device)
        self.self_attention = call.kind == "self" and call.n_queries == call.n_keys == batch.tokens.shape[1]

    def require_positions(self) -> None:
        """Scores of token positions need queries and keys on one axis."""
        if not self.self_attention:
            raise NotApplicableError("its keys come from another sequence, so no key is an earlier token of the query")

    @property
    def allowed(self) -> Tensor:
        """[batch, query, key] bool: keys that some head may see, padding left out."""
        call, n_q, n_k = self.call, self.call.n_queries, self.call.n_keys
        seen = torch.ones(1, n_q, n_k, dtype=torch.bool, device=self.pattern.device)
        if call.is_causal:
            seen = seen.tril()
        elif call.mask is not None:
            mask = call.mask if call.mask.dtype == torch.bool else ~forbidden_entries(call.mask)
            while mask.ndim < 4:
                mask = mask[None]
            seen = mask.any(dim=1).expand(-1, n_q, n_k)
        if call.q is None:
            # a traced softmax may have been masked by other means: the weights themselves tell
            seen = seen & (self.pattern != 0).any(dim=1)
        seen = seen.expand(self.pattern.shape[0], -1, -1)
        return seen & self.valid[:, None, :] if self.self_attention else seen

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pattern, v and W_O, for measures of what heads write."""
        if self.call.output_gate is not None:
            raise NotApplicableError(
                "an elementwise gate stands between the heads and W_O, so what a key writes depends on the query"
            )
        return self.pattern, self.call.v.detach(), self.call.w_o


def measures(probe: str, view: View) -> Iterator[Found]:
    """(measure, [row, head, ...], what stands beside it) of one probe on one call."""
    if probe == "induction":
        yield _mass("prefix_matching_score", _prefix_matching(view))
    elif probe == "duplicate":
        view.require_positions()
        _require_causal(view)
        masses = duplicate_token_score(
            view.pattern, view.tokens, queries=view.second_copy, allowed=view.allowed, sinks=view.sinks
        )
        yield _mass("duplicate_token_score", masses)
    elif probe in ("previous", "current"):
        view.require_positions()
        score = previous_token_score if probe == "previous" else current_token_score
        masses = score(view.pattern, queries=view.queries, allowed=view.allowed, sinks=view.sinks)
        yield _mass(f"{probe}_token_score", masses)
    elif probe == "sink":
        view.require_positions()
        yield from _sink_measures(view)
    elif probe == "entropy":
        spread = entropy_score(view.pattern, queries=view.queries, allowed=view.allowed)
        yield "entropy", spread.entropy, {"baseline": spread.uniform_entropy}
        yield "effective_support", spread.effective_support, {}
    elif probe == "output":
        norms = head_output_norm(*view.written, queries=view.queries)
        yield "relative_output_norm", dormant_heads(norms)[1], {}
    elif probe == "redundancy":
        similarity = head_similarity(*view.written, queries=view.queries)
        yield "redundancy", similarity, {}
        if similarity.shape[-1] > 1:
            own = torch.eye(similarity.shape[-1], dtype=torch.bool, device=similarity.device)
            others = similarity.masked_fill(own, -torch.inf).nan_to_num(nan=-torch.inf).amax(dim=-1)
            yield "largest_similarity", others.masked_fill(others.isinf(), torch.nan), {}


def _mass(name: str, masses: MassScore) -> Found:
    beside = {"baseline": masses.baseline, "sink_mass": masses.sink_mass, "outside_mass": masses.outside_mass}
    return name, masses.score, beside


def _prefix_matching(view: View) -> MassScore:
    view.require_positions()
    _require_causal(view)
    followers = earlier_followers(view.tokens)
    reachable = (followers & view.allowed).any(dim=-1)
    if not bool(reachable[view.queries].all()):
        text = "" if view.call.window is None else f" (window of {view.call.window} keys)"
        raise NotApplicableError(f"the first copy is out of reach of the second{text}; ask for a smaller length")
    return prefix_matching_score(
        view.pattern, view.tokens, queries=view.queries, allowed=view.allowed, sinks=view.sinks
    )


def _require_causal(view: View) -> None:
    """Whether the future is hidden is read off the mask and the weights, not off the model's class."""
    future = torch.ones(view.pattern.shape[2:], dtype=torch.bool, device=view.pattern.device).triu(diagonal=1)
    if bool((view.allowed & future).any()) and bool((view.pattern * future).any()):
        raise NotApplicableError(
            "its attention is not causal: the first copy sees the second, so nothing has to be found again"
        )


def _sink_measures(view: View) -> Iterator[Found]:
    queries, sinks = view.queries, view.sinks
    keys = sinks[:, None, :].expand_as(view.allowed)
    on_sinks = mass_on(view.pattern, keys, queries=queries, allowed=view.allowed)
    yield "sink_mass", on_sinks.score, {"baseline": on_sinks.baseline, "outside_mass": on_sinks.outside_mass}
    yield "sink_rate", sink_rate(view.pattern, queries=queries)[0], {}
    drain = value_drain(*view.written, queries=queries, sinks=sinks, keys=view.valid)
    yield "sink_contribution_share", drain.contribution_share, {"sink_mass": drain.weight_share}
    yield "sink_norm_ratio", drain.norm_ratio, {}
