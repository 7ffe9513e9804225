"""What a head attends to: pattern scores that stand beside their baseline and the sink mass of the same queries.

Every score is the mean over an explicit set of queries of the mass on some keys. It is read against two numbers
from the same queries: `baseline`, what a row that spreads evenly over its allowed keys would get, and `sink_mass`,
what the sink keys took. A head with 99.9 % of its mass on BOS scores at most .001 here whatever else it does:
patterns are never renormalised without the sink.

All reductions run in float64 whatever the dtype of the pattern; inputs are never changed. Values come back per batch
row, [batch, head], so that intervals can be taken over probes.

Glossary: `queries` [batch, query_pos] bool, the rows that count (padding, BOS and special tokens are left out here);
`allowed` [query_pos, key_pos] or [batch, query_pos, key_pos] bool, the keys a row may see (default: causal);
`sinks` [batch, key_pos] bool, the sink keys (default: position 0).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.errors import ShapeError, UndefinedScoreWarning
from attndiag.shapes import Pattern, check_rank


@dataclass(frozen=True, eq=False)
class MassScore:
    """Mean mass on chosen keys, and what it is read against.

    Parameters
    ----------
    score : [batch, head], mass in [0, 1].
    baseline : [batch], the score of a row that is uniform over its allowed keys.
    sink_mass : [batch, head], mean mass on the sink keys of the same queries.
    outside_mass : [batch, head], 1 - row sum: mass that a learned sink (no token) took; 0 for plain softmax.
    n_queries : [batch], how many queries counted.
    """

    score: Tensor
    baseline: Tensor
    sink_mass: Tensor
    outside_mass: Tensor
    n_queries: Tensor


def mass_on(
    pattern: Pattern,
    targets: Tensor,
    *,
    queries: Tensor | None = None,
    allowed: Tensor | None = None,
    sinks: Tensor | None = None,
) -> MassScore:
    """Mean mass that each head puts on the target keys of each query.

    score = mean over queries i with a target of sum_{j in targets(i)} A_ij

    Parameters
    ----------
    pattern : [batch, head, query_pos, key_pos].
    targets : [query_pos, key_pos] or [batch, query_pos, key_pos] bool. Keys that are not allowed are no targets.
    queries, allowed, sinks : see the module docstring. A query without any target is left out: it cannot score.

    Returns
    -------
    `MassScore`. Rows of the batch without a query that counts are nan, with an `UndefinedScoreWarning`.

    Raises
    ------
    ShapeError : masks that do not fit the pattern.
    """
    check_rank("pattern", pattern, "batch head query_pos key_pos")
    seen = _pair_mask("allowed", allowed if allowed is not None else _causal(pattern), pattern)
    aim = _pair_mask("targets", targets, pattern) & seen
    counted = query_mask(queries, pattern) & aim.any(dim=-1)
    on_sinks = sink_mask(sinks, pattern)
    mass = (pattern * aim[:, None]).sum(dim=-1, dtype=torch.float64)
    even = aim.sum(dim=-1).double() / seen.sum(dim=-1).clamp(min=1)
    return MassScore(
        score=mean_over(mass, counted, "the score"),
        baseline=mean_over(even[:, None], counted, None)[:, 0],
        sink_mass=mean_over((pattern * on_sinks[:, None, None]).sum(dim=-1, dtype=torch.float64), counted, None),
        outside_mass=mean_over(1.0 - pattern.sum(dim=-1, dtype=torch.float64), counted, None),
        n_queries=counted.sum(dim=-1),
    )


def prefix_matching_score(
    pattern: Pattern,
    token_ids: Tensor,
    *,
    queries: Tensor,
    allowed: Tensor | None = None,
    sinks: Tensor | None = None,
) -> MassScore:
    """Mass on every earlier follower of the query's own token: what an induction head does.

    targets(i) = {j < i : x_{j-1} = x_i}

    Parameters
    ----------
    pattern : [batch, head, query_pos, key_pos], square.
    token_ids : [batch, position].
    queries : for the induction probe `InductionProbe.queries`, the second copy without its first and last query.
        First-copy queries have no follower to attend to, so a score that averages over them is halved.
    allowed, sinks : see the module docstring.

    Returns
    -------
    `MassScore`; a perfect induction head has 1.000, a uniform head the baseline, about 1 / (1.5 L).

    References
    ----------
    Olsson 2022, arXiv 2209.11895, appendix. Deviations: the text there says tokens that *preceded* the same token in
    earlier repeats; the tokens that **followed** it are meant (erratum). Two copies instead of four.
    """
    return mass_on(pattern, earlier_followers(token_ids), queries=queries, allowed=allowed, sinks=sinks)


def previous_token_score(
    pattern: Pattern, *, queries: Tensor | None = None, allowed: Tensor | None = None, sinks: Tensor | None = None
) -> MassScore:
    """Mass on the token before the query: targets(i) = {i - 1}. Parameters and returns as in `mass_on`.

    Where position 0 is a sink, leave query 1 out: its previous token is the sink. Olsson 2022, arXiv 2209.11895.
    """
    return mass_on(pattern, offset_targets(_square(pattern), 1), queries=queries, allowed=allowed, sinks=sinks)


def current_token_score(
    pattern: Pattern, *, queries: Tensor | None = None, allowed: Tensor | None = None, sinks: Tensor | None = None
) -> MassScore:
    """Mass on the query's own position: targets(i) = {i}. Parameters and returns as in `mass_on`."""
    return mass_on(pattern, offset_targets(_square(pattern), 0), queries=queries, allowed=allowed, sinks=sinks)


def duplicate_token_score(
    pattern: Pattern,
    token_ids: Tensor,
    *,
    queries: Tensor | None = None,
    allowed: Tensor | None = None,
    sinks: Tensor | None = None,
) -> MassScore:
    """Mass on earlier copies of the query's own token: targets(i) = {j < i : x_j = x_i}.

    Parameters and returns as in `prefix_matching_score`. Wang 2022, arXiv 2211.00593 (duplicate-token heads).
    """
    return mass_on(pattern, earlier_equal(token_ids), queries=queries, allowed=allowed, sinks=sinks)


def earlier_equal(token_ids: Tensor) -> Tensor:
    """[batch, query_pos, key_pos] bool: key j < i holds the same token as query i."""
    check_rank("token_ids", token_ids, "batch position")
    same = token_ids[:, :, None] == token_ids[:, None, :]
    return same.tril(diagonal=-1)


def earlier_followers(token_ids: Tensor) -> Tensor:
    """[batch, query_pos, key_pos] bool: key j < i comes right after an earlier copy of query i's token."""
    check_rank("token_ids", token_ids, "batch position")
    follows = torch.zeros_like(earlier_equal(token_ids))
    follows[:, :, 1:] = token_ids[:, :, None] == token_ids[:, None, :-1]
    return follows.tril(diagonal=-1)


def offset_targets(n: int, offset: int) -> Tensor:
    """[query_pos, key_pos] bool: key i - offset for query i, where it exists."""
    position = torch.arange(n)
    return position[None, :] == position[:, None] - offset


def sink_rate(
    pattern: Pattern, *, key: int = 0, threshold: float = 0.3, queries: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Share of heads whose mean mass on one key exceeds a threshold.

    alpha^h = mean over queries i > key of A^h_{i,key};  sink_rate = share of heads with alpha^h > threshold

    Parameters
    ----------
    pattern : [batch, head, query_pos, key_pos].
    key : the key position, usually 0.
    threshold : .3 in the source.
    queries : [batch, query_pos] bool; queries at or before `key` are left out in any case.

    Returns
    -------
    rate : [batch], share in [0, 1].
    alpha : [batch, head], mass in [0, 1].

    References
    ----------
    Gu 2024, arXiv 2410.10781. Deviation: the query at `key` itself is left out; for key 0 its mass is 1 by necessity.
    """
    check_rank("pattern", pattern, "batch head query_pos key_pos")
    if not 0 <= key < pattern.shape[3]:
        raise ShapeError(f"key is {key}; expected a key position in 0..{pattern.shape[3] - 1}")
    later = torch.arange(pattern.shape[2], device=pattern.device) > key
    alpha = mean_over(pattern[..., key].double(), query_mask(queries, pattern) & later, "the sink mass")
    rate = (alpha > threshold).double().mean(dim=-1)
    return torch.where(alpha.isnan().any(dim=-1), torch.nan, rate), alpha


@dataclass(frozen=True, eq=False)
class EntropyScore:
    """How spread out a head's rows are. Peaked is not good and flat is not bad: read it beside an effect.

    Parameters
    ----------
    entropy : [batch, head], mean over queries of the row entropy, nats.
    effective_support : [batch, head], mean over queries of exp(row entropy), keys.
    uniform_entropy : [batch], mean over queries of ln(number of allowed keys), the largest possible entropy.
    """

    entropy: Tensor
    effective_support: Tensor
    uniform_entropy: Tensor


def row_entropy(pattern: Pattern) -> Tensor:
    """Entropy of each row over its keys: -sum_j p_j ln p_j with p = A_ij / r_i.

    Where a learned sink took part of the mass (row sum r_i < 1), the entropy is that of the rest; `outside_mass`
    says how much is missing. Rows without any mass are nan.

    Returns
    -------
    [batch, head, query_pos], nats in [0, ln key_pos], float64.
    """
    check_rank("pattern", pattern, "batch head query_pos key_pos")
    weights = pattern.double()
    shares = weights / weights.sum(dim=-1, keepdim=True)  # 0 / 0 is nan: a row without mass has no entropy
    return torch.special.entr(shares).sum(dim=-1)


def entropy_score(pattern: Pattern, *, queries: Tensor | None = None, allowed: Tensor | None = None) -> EntropyScore:
    """Mean row entropy and effective support over the queries that count; see `EntropyScore` and `row_entropy`."""
    entropy = row_entropy(pattern)
    counted = query_mask(queries, pattern)
    seen = _pair_mask("allowed", allowed if allowed is not None else _causal(pattern), pattern)
    ceiling = seen.sum(dim=-1).double().log()
    return EntropyScore(
        entropy=mean_over(entropy, counted, "the entropy"),
        effective_support=mean_over(entropy.exp(), counted, None),
        uniform_entropy=mean_over(ceiling[:, None], counted, None)[:, 0],
    )


def query_mask(queries: Tensor | None, pattern: Pattern) -> Tensor:
    """[batch, query_pos] bool from an optional mask of that shape; all True without one."""
    batch, _, n_q, _ = pattern.shape
    if queries is None:
        return torch.ones(batch, n_q, dtype=torch.bool, device=pattern.device)
    if queries.dtype != torch.bool or tuple(queries.shape) != (batch, n_q):
        raise ShapeError(
            f"queries is {queries.dtype} {tuple(queries.shape)}; expected bool [batch, query_pos] = {(batch, n_q)}"
        )
    return queries.to(pattern.device)


def sink_mask(sinks: Tensor | None, pattern: Pattern) -> Tensor:
    """[batch, key_pos] bool from an optional mask of that shape; position 0 without one."""
    batch, _, _, n_k = pattern.shape
    if sinks is None:
        first = torch.zeros(batch, n_k, dtype=torch.bool, device=pattern.device)
        first[:, 0] = True
        return first
    if sinks.dtype != torch.bool or tuple(sinks.shape) != (batch, n_k):
        raise ShapeError(
            f"sinks is {sinks.dtype} {tuple(sinks.shape)}; expected bool [batch, key_pos] = {(batch, n_k)}"
        )
    return sinks.to(pattern.device)


def mean_over(values: Tensor, queries: Tensor, what: str | None) -> Tensor:
    """Mean of [batch, head, query_pos] over the queries that count: [batch, head].

    A batch row without any such query is nan; with `what`, an `UndefinedScoreWarning` names it.
    """
    count = queries.sum(dim=-1)
    if what is not None and bool((count == 0).any()):
        rows = torch.nonzero(count == 0).flatten().tolist()
        warnings.warn(
            f"{what} is undefined in batch rows {rows}: no query counts there, so it is nan",
            UndefinedScoreWarning,
            stacklevel=3,
        )
    kept = torch.where(queries[:, None], values, 0.0)  # where, not times: an excluded row may hold nan
    return kept.sum(dim=-1) / count[:, None]


def _causal(pattern: Tensor) -> Tensor:
    n = _square(pattern)
    return torch.ones(n, n, dtype=torch.bool, device=pattern.device).tril()


def _square(pattern: Tensor) -> int:
    check_rank("pattern", pattern, "batch head query_pos key_pos")
    if pattern.shape[2] != pattern.shape[3]:
        raise ShapeError(
            f"pattern has {pattern.shape[2]} queries and {pattern.shape[3]} keys; scores of token positions need "
            "self-attention over one whole sequence (run without a key/value cache)"
        )
    return pattern.shape[2]


def _pair_mask(name: str, mask: Tensor, pattern: Tensor) -> Tensor:
    batch, _, n_q, n_k = pattern.shape
    if mask.dtype != torch.bool or tuple(mask.shape) not in {(n_q, n_k), (batch, n_q, n_k)}:
        raise ShapeError(
            f"{name} is {mask.dtype} {tuple(mask.shape)}; expected bool [query_pos, key_pos] or "
            f"[batch, query_pos, key_pos] for a pattern of {tuple(pattern.shape)}"
        )
    return mask.to(pattern.device).expand(batch, n_q, n_k)
