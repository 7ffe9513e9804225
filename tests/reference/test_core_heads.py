"""Head scores on patterns whose answer is known, and against slow replicas written from the definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attndiag.core import circuits, head_outputs, heads, phases, probes
from attndiag.errors import NotApplicableError, ShapeError, UndefinedScoreWarning

VOCABULARY = torch.arange(1, 64)


def random_pattern(seed: int, *, batch: int = 2, n_heads: int = 4, n: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(batch, n_heads, n, n, generator=generator, dtype=torch.float64)
    return scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf).softmax(dim=-1)


def random_head(seed: int, *, batch: int = 2, n: int = 9, n_heads: int = 4, kv: int = 2, d_head: int = 3, d: int = 7):
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(batch, kv, n, d_head, generator=generator, dtype=torch.float64)
    w_o = torch.randn(n_heads, d_head, d, generator=generator, dtype=torch.float64)
    return v, w_o


def written(pattern: torch.Tensor, v: torch.Tensor, w_o: torch.Tensor) -> np.ndarray:
    """T[b, h, i, j, :], the slow way: every vector that every key writes into every query."""
    batch, n_heads, n_q, n_k = pattern.shape
    group = n_heads // v.shape[1]
    t = np.zeros((batch, n_heads, n_q, n_k, w_o.shape[2]))
    for b in range(batch):
        for h in range(n_heads):
            for i in range(n_q):
                for j in range(n_k):
                    t[b, h, i, j] = pattern[b, h, i, j].item() * (v[b, h // group, j] @ w_o[h]).numpy()
    return t


def one_hot_rows(key_of_query: torch.Tensor) -> torch.Tensor:
    """[row, query] keys -> pattern [row, 1, query, key] with all mass on that key."""
    n = key_of_query.shape[1]
    return torch.nn.functional.one_hot(key_of_query, n).double()[:, None]


def perfect_induction(probe: probes.InductionProbe) -> torch.Tensor:
    """Second copy: the follower of the own token in the first copy. Before that: position 0."""
    rows, n = probe.tokens.shape
    keys = torch.zeros(rows, n, dtype=torch.long)
    second = probe.start + probe.length
    keys[:, second:] = torch.arange(second, n) - probe.length + 1
    return one_hot_rows(keys)


def token_matching(tokens: torch.Tensor) -> torch.Tensor:
    """Even over every key whose predecessor equals the query's token; position 0 where there is none."""
    rows, n = tokens.shape
    pattern = torch.zeros(rows, 1, n, n, dtype=torch.float64)
    for b in range(rows):
        for i in range(n):
            keys = [j for j in range(1, i) if tokens[b, j - 1] == tokens[b, i]] or [0]
            pattern[b, 0, i, keys] = 1 / len(keys)
    return pattern


@pytest.mark.parametrize("bos", [0, None])
@pytest.mark.parametrize("length", [5, 6, 17, 31, 50, 60])
def test_a_perfect_induction_head_scores_one(length, bos):
    probe = probes.repeated_random_tokens(3, length, admissible=VOCABULARY, bos=bos, seed=length)
    found = heads.prefix_matching_score(perfect_induction(probe), probe.tokens, queries=probe.queries)
    assert found.score.tolist() == [[1.0]] * 3
    assert found.n_queries.tolist() == [length - 2] * 3
    assert found.sink_mass.max() == 0.0 and found.outside_mass.abs().max() == 0.0
    # one follower a query, spread evenly over i + 1 keys
    positions = np.arange(probe.start + length + 1, probe.start + 2 * length - 1)
    assert found.baseline.numpy() == pytest.approx(np.mean(1 / (positions + 1)), abs=1e-15)


@pytest.mark.parametrize("bos", [0, None])
def test_a_head_on_bos_scores_no_more_than_the_rest_of_its_mass(bos):
    probe = probes.repeated_random_tokens(2, 20, admissible=VOCABULARY, bos=bos, seed=0)
    sink = torch.zeros_like(perfect_induction(probe))
    sink[..., 0] = 1.0
    found = heads.prefix_matching_score(
        0.999 * sink + 0.001 * perfect_induction(probe), probe.tokens, queries=probe.queries
    )
    assert found.score.numpy() == pytest.approx(0.001, abs=1e-12)
    assert found.sink_mass.numpy() == pytest.approx(0.999, abs=1e-12)


def test_a_uniform_head_scores_its_baseline_everywhere():
    probe = probes.repeated_random_tokens(2, 20, admissible=VOCABULARY, bos=0, seed=0)
    n = probe.tokens.shape[1]
    even = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
    even = even.expand(2, 1, n, n)
    for found in (
        heads.prefix_matching_score(even, probe.tokens, queries=probe.queries),
        heads.duplicate_token_score(even, probe.tokens, queries=probe.second_copy),
        heads.previous_token_score(even, queries=probe.body),
        heads.current_token_score(even, queries=probe.body),
    ):
        assert torch.allclose(found.score[:, 0], found.baseline, atol=1e-15, rtol=0)
        assert found.baseline.min() > 0


def test_repeated_draws_break_the_fixed_offset_and_not_the_definition():
    with_repeats = probes.repeated_random_tokens(8, 50, admissible=VOCABULARY, bos=0, seed=0, replacement=True)
    pattern = token_matching(with_repeats.tokens)
    found = heads.prefix_matching_score(pattern, with_repeats.tokens, queries=with_repeats.queries)
    n = with_repeats.tokens.shape[1]
    offset = heads.mass_on(pattern, heads.offset_targets(n, 49), queries=with_repeats.queries)
    assert found.score.mean() > 0.99
    assert 0.6 < offset.score.mean() < 0.8
    without = probes.repeated_random_tokens(8, 50, admissible=VOCABULARY, bos=0, seed=0)
    pattern = token_matching(without.tokens)
    offset = heads.mass_on(pattern, heads.offset_targets(n, 49), queries=without.queries)
    assert offset.score.tolist() == [[1.0]] * 8


def test_previous_current_and_duplicate_heads_score_one():
    probe = probes.repeated_random_tokens(2, 12, admissible=VOCABULARY, bos=0, seed=3)
    n = probe.tokens.shape[1]
    at = torch.arange(n).expand(2, n)
    previous, current = one_hot_rows((at - 1).clamp(min=0)), one_hot_rows(at)
    duplicate = one_hot_rows((at - 12).clamp(min=0))
    assert heads.previous_token_score(previous, queries=probe.body).score.tolist() == [[1.0], [1.0]]
    assert heads.current_token_score(current, queries=probe.body).score.tolist() == [[1.0], [1.0]]
    found = heads.duplicate_token_score(duplicate, probe.tokens, queries=probe.second_copy)
    assert found.score.tolist() == [[1.0], [1.0]]
    assert heads.previous_token_score(current, queries=probe.body).score.max() == 0.0
    assert heads.prefix_matching_score(duplicate, probe.tokens, queries=probe.queries).score.max() == 0.0


def test_pattern_scores_equal_their_slow_replicas():
    tokens = torch.tensor([[0, 1, 2, 1, 1, 3, 2, 1, 0], [0, 2, 2, 2, 3, 1, 3, 2, 1]])
    pattern = random_pattern(0)
    pattern[:, 1] *= 0.7  # a head with a learned sink: rows sum to .7
    queries = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) > 0.2
    allowed = torch.ones(9, 9, dtype=torch.bool).tril().triu(diagonal=-5)  # a window of six keys
    sinks = torch.zeros(2, 9, dtype=torch.bool)
    sinks[0, 0] = sinks[1, 2] = True

    targets = {
        "prefix": lambda x, i: [j for j in range(1, i) if x[j - 1] == x[i]],
        "duplicate": lambda x, i: [j for j in range(i) if x[j] == x[i]],
        "previous": lambda _, i: [i - 1] if i else [],
        "current": lambda _, i: [i],
    }
    found = {
        "prefix": heads.prefix_matching_score(pattern, tokens, queries=queries, allowed=allowed, sinks=sinks),
        "duplicate": heads.duplicate_token_score(pattern, tokens, queries=queries, allowed=allowed, sinks=sinks),
        "previous": heads.previous_token_score(pattern, queries=queries, allowed=allowed, sinks=sinks),
        "current": heads.current_token_score(pattern, queries=queries, allowed=allowed, sinks=sinks),
    }
    for name, rule in targets.items():
        for b in range(2):
            rows = []
            for i in range(9):
                keys = [j for j in rule(tokens[b].tolist(), i) if allowed[i, j]]
                if queries[b, i] and keys:
                    rows.append((i, keys))
            assert found[name].n_queries[b] == len(rows) > 0
            assert found[name].baseline[b].item() == pytest.approx(
                np.mean([len(keys) / allowed[i].sum().item() for i, keys in rows]), abs=1e-14
            )
            for h in range(4):
                a = pattern[b, h].numpy()
                expected = np.mean([sum(a[i, j] for j in keys) for i, keys in rows])
                assert found[name].score[b, h].item() == pytest.approx(expected, abs=1e-14)
                expected = np.mean([a[i, sinks[b].numpy()].sum() for i, _ in rows])
                assert found[name].sink_mass[b, h].item() == pytest.approx(expected, abs=1e-14)
                expected = np.mean([1 - a[i].sum() for i, _ in rows])
                assert found[name].outside_mass[b, h].item() == pytest.approx(expected, abs=1e-14)
    assert found["current"].outside_mass[:, 1].numpy() == pytest.approx(0.3, abs=1e-14)


def test_rows_without_queries_are_nan_and_warn():
    queries = torch.ones(2, 9, dtype=torch.bool)
    queries[1] = False
    with pytest.warns(UndefinedScoreWarning, match=r"the score is undefined in batch rows \[1\]"):
        found = heads.previous_token_score(random_pattern(0), queries=queries)
    assert found.score[0].isfinite().all() and found.score[1].isnan().all()
    assert found.n_queries.tolist() == [8, 0]  # query 0 has no previous token


def test_sink_rate_and_entropy_equal_their_slow_replicas():
    pattern = random_pattern(4)
    pattern[:, 0] = 0.0
    pattern[:, 0, :, 2] = 1.0
    pattern[:, 0, :3] = torch.eye(9, dtype=torch.float64)[:3]
    rate, alpha = heads.sink_rate(pattern, key=2)
    expected = pattern[:, :, 3:, 2].numpy().mean(axis=-1)
    assert alpha.numpy() == pytest.approx(expected, abs=1e-14)
    assert rate.numpy() == pytest.approx((expected > 0.3).mean(axis=1))
    assert alpha[:, 0].tolist() == [1.0, 1.0]

    queries = torch.ones(2, 9, dtype=torch.bool)
    queries[:, :2] = False
    found = heads.entropy_score(pattern, queries=queries)
    for b in range(2):
        for h in range(4):
            rows = [-sum(p * math.log(p) for p in row if p > 0) for row in pattern[b, h, 2:].tolist()]
            assert found.entropy[b, h].item() == pytest.approx(np.mean(rows), abs=1e-13)
            assert found.effective_support[b, h].item() == pytest.approx(np.mean(np.exp(rows)), abs=1e-12)
    assert found.uniform_entropy.numpy() == pytest.approx(np.mean(np.log(np.arange(3, 10))), abs=1e-14)
    assert found.effective_support[:, 0].tolist() == [1.0, 1.0]


def test_entropy_of_a_uniform_head_and_of_an_empty_row():
    n = 6
    even = (torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]).expand(1, 1, n, n).clone()
    assert heads.row_entropy(even)[0, 0].numpy() == pytest.approx(np.log(np.arange(1, n + 1)), abs=1e-14)
    assert torch.allclose(heads.row_entropy(0.25 * even), heads.row_entropy(even))  # a learned sink took the rest
    even[0, 0, 3] = 0.0
    assert heads.row_entropy(even)[0, 0].isnan().tolist() == [False, False, False, True, False, False]


def test_copying_score_equals_the_eigenvalues_of_the_whole_circuit():
    generator = torch.Generator().manual_seed(5)
    w_e = torch.randn(20, 7, generator=generator, dtype=torch.float64)
    w_u = torch.randn(7, 20, generator=generator, dtype=torch.float64)
    w_v = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64)
    w_o = torch.randn(4, 3, 7, generator=generator, dtype=torch.float64)
    gain, final = (torch.rand(7, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
    for centre in (True, False):
        projection = np.eye(7) - (1 / 7 if centre else 0.0)
        folded = circuits.fold_norm(w_v, gain, centre=centre)
        w_ue = circuits.embedding_circuit(circuits.fold_norm(w_u, final, centre=centre), w_e)
        found = circuits.copying_score(folded, w_o, w_ue)
        for h in range(4):
            reads = w_e.numpy() @ projection @ np.diag(gain.numpy()) @ w_v[h // 2].numpy() @ w_o[h].numpy()
            whole = reads @ projection @ np.diag(final.numpy()) @ w_u.numpy()
            eigenvalues = np.linalg.eigvals(whole)
            expected = eigenvalues.real.sum() / np.abs(eigenvalues).sum()
            assert found[h].item() == pytest.approx(expected, abs=1e-6)  # the 17 zeros of the V x V matrix are noisy


def test_copying_score_of_circuits_with_a_known_answer():
    d, d_head = 8, 4
    w_e = torch.eye(d, dtype=torch.float64)
    reads = torch.eye(d, d_head, dtype=torch.float64)[None]
    copies = reads.transpose(1, 2)
    shifts = copies.roll(1, dims=2)  # token t raises t + 1 only: a chain, whose eigenvalues are all 0
    w_o = torch.cat([copies, -copies, 0 * copies, shifts])
    with pytest.warns(UndefinedScoreWarning, match=r"copying score is undefined for 2, 3"):
        score = circuits.copying_score(reads, w_o, circuits.embedding_circuit(w_e.T, w_e))
    assert score[:2].tolist() == [1.0, -1.0]
    assert score[2:].isnan().all()
    with pytest.warns(UndefinedScoreWarning, match="copying logit score is undefined for 2"):
        logit = circuits.copying_logit_score(w_e[:d_head], reads, w_o, w_e.T[:, :d_head])
    assert logit[0].item() == 1.0 and logit[1].item() == -1.0


def test_copying_logit_score_equals_its_slow_replica():
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    w_u = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    w_v = torch.randn(1, 7, 3, generator=generator, dtype=torch.float64)
    w_o = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    found = circuits.copying_logit_score(x, w_v, w_o, w_u)
    for h in range(2):
        logits = (x @ w_v[0] @ w_o[h] @ w_u).numpy()
        ratios = []
        for a in range(5):
            raised = [max(0.0, logits[a, b] - logits[a].mean()) for b in range(5)]
            ratios.append(raised[a] / sum(raised))
        assert found[h].item() == pytest.approx(2 * np.mean(ratios) - 1, abs=1e-12)


def test_composition_equals_its_slow_replica_and_is_zero_on_average_for_random_heads():
    generator = torch.Generator().manual_seed(7)
    d, d_head = 32, 4
    w_v = torch.randn(2, d, d_head, generator=generator, dtype=torch.float64)
    w_o = torch.randn(4, d_head, d, generator=generator, dtype=torch.float64)
    w_k = torch.randn(3, d, d_head, generator=generator, dtype=torch.float64)
    w_q = torch.randn(3, d, d_head, generator=generator, dtype=torch.float64)
    w_k[0] = w_o[1].T  # reads exactly what head 1 writes
    found = circuits.composition_score(w_k, w_v, w_o, reads_other_side=w_q.transpose(1, 2), draws=200)
    for later in range(3):
        for earlier in range(4):
            ov = (w_v[earlier // 2] @ w_o[earlier]).numpy()
            qk = (w_k[later] @ w_q[later].T).numpy()
            ratio = np.linalg.norm(ov @ qk) / (np.linalg.norm(ov) * np.linalg.norm(qk))
            assert found.score[later, earlier].item() + found.baseline == pytest.approx(ratio, abs=1e-12)
    assert found.score[0].argmax() == 1
    assert found.score[0, 1] > 8 * found.spread
    assert found.score[1:].abs().max() < 5 * found.spread
    w_o[2] = 0.0
    with pytest.warns(UndefinedScoreWarning, match="one of the two circuits is zero"):
        dead = circuits.composition_score(w_k, w_v, w_o, reads_other_side=w_q.transpose(1, 2), draws=5)
    assert dead.score[:, 2].isnan().all() and dead.score[:, [0, 1, 3]].isfinite().all()


def test_head_similarity_equals_the_cosine_of_everything_written():
    first, second = random_pattern(8), random_pattern(9, n_heads=6)
    v, w_o = random_head(10)
    v2, w_o2 = random_head(11, n_heads=6, kv=3)
    queries = torch.ones(2, 9, dtype=torch.bool)
    queries[0, :4] = False
    mine, theirs = written(first, v, w_o), written(second, v2, w_o2)
    within = head_outputs.head_similarity(first, v, w_o, queries=queries)
    across = head_outputs.head_similarity(first, v, w_o, queries=queries, other=(second, v2, w_o2))
    for b in range(2):
        kept = queries[b].numpy()
        for h in range(4):
            a = mine[b, h, kept].ravel()
            for other, found in ((mine, within), (theirs, across)):
                for g in range(other.shape[1]):
                    c = other[b, g, kept].ravel()
                    expected = a @ c / np.linalg.norm(a) / np.linalg.norm(c)
                    assert found[b, h, g].item() == pytest.approx(expected, abs=1e-12)


def test_duplicated_opposite_and_dead_heads():
    pattern = random_pattern(12)[:, [0, 0, 0, 1]]
    v, w_o = random_head(13, kv=1)
    w_o[1], w_o[2], w_o[3] = w_o[0], -w_o[0], 0.0
    with pytest.warns(UndefinedScoreWarning, match="a head writes nothing"):
        found = head_outputs.head_similarity(pattern, v, w_o)
    assert found[:, 0, :3].numpy() == pytest.approx(np.array([[1, 1, -1]] * 2), abs=1e-12)
    assert found[:, 3].isnan().all()
    dormant, relative = head_outputs.dormant_heads(head_outputs.head_output_norm(pattern, v, w_o))
    assert dormant.tolist() == [[False, False, False, True]] * 2
    assert relative.mean(dim=-1).numpy() == pytest.approx(1.0)


def test_output_norm_and_value_drain_equal_their_slow_replicas():
    pattern = random_pattern(14)
    v, w_o = random_head(15)
    queries = torch.ones(2, 9, dtype=torch.bool)
    queries[:, :3] = False
    sinks = torch.zeros(2, 9, dtype=torch.bool)
    sinks[:, :2] = True
    t = written(pattern, v, w_o)
    norm = head_outputs.head_output_norm(pattern, v, w_o, queries=queries)
    found = head_outputs.value_drain(pattern, v, w_o, queries=queries, sinks=sinks)
    for b in range(2):
        kept = t[b][:, 3:]
        assert norm[b].numpy() == pytest.approx(np.linalg.norm(kept.sum(axis=2), axis=-1).mean(axis=1), abs=1e-12)
        sizes = np.linalg.norm(kept, axis=-1)
        shares = (sizes[..., :2].sum(axis=-1) / sizes.sum(axis=-1)).mean(axis=1)
        assert found.contribution_share[b].numpy() == pytest.approx(shares, abs=1e-12)
        weights = pattern[b, :, 3:, :2].numpy().sum(axis=-1).mean(axis=1)
        assert found.weight_share[b].numpy() == pytest.approx(weights, abs=1e-12)
        assert found.layer_weight_share[b].item() == pytest.approx(weights.mean(), abs=1e-12)
        joint = np.linalg.norm(kept.sum(axis=0), axis=-1)
        layer = (joint[:, :2].sum(axis=-1) / joint.sum(axis=-1)).mean()
        assert found.layer_contribution_share[b].item() == pytest.approx(layer, abs=1e-10)
        for h in range(4):
            f = np.linalg.norm((v[b, h // 2] @ w_o[h]).numpy(), axis=-1)
            assert found.norm_ratio[b, h].item() == pytest.approx(f[:2].mean() / f[2:].mean(), abs=1e-12)


def test_a_sink_without_values_takes_weight_and_contributes_nothing():
    pattern = torch.full((1, 1, 4, 4), 0.1, dtype=torch.float64)
    pattern[..., 0] = 0.9
    v, w_o = torch.ones(1, 1, 4, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[None]
    v[:, :, 0] = 0.0
    found = head_outputs.value_drain(pattern, v, w_o)
    assert found.weight_share.item() == pytest.approx(0.75)
    assert found.contribution_share.item() == 0.0 and found.layer_contribution_share.item() == 0.0
    assert found.norm_ratio.item() == 0.0


def test_in_context_learning_score_and_its_limits():
    losses = torch.linspace(5, 1, 501)[None]
    assert phases.icl_score(losses).item() == pytest.approx((1 - 5) * 450 / 500, abs=1e-5)
    assert phases.icl_score(losses, early=(0, 3), late=(10, 13)).item() == pytest.approx(-4 * 10 / 500, abs=1e-5)
    with pytest.raises(NotApplicableError, match=r"positions 500\.\.500, but there are losses for 64 positions"):
        phases.icl_score(losses[:, :64])


def test_phase_window_interpolates_and_survives_noise_before_the_rise():
    found = phases.phase_window([0, 100, 200, 300, 400], [0.0, 0.0, 1.0, 1.0, 1.0])
    assert (found.start, found.end, found.found) == (pytest.approx(120), pytest.approx(180), True)
    found = phases.phase_window([0, 100, 200, 300, 400], [0.0, 0.3, 0.1, 0.9, 1.0])
    assert (found.start, found.end) == (pytest.approx(212.5), pytest.approx(287.5))


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([0.02, 0.03, 0.05], "does not exceed 0.1"),
        ([0.6, 0.7, 0.8], "already 0.600 at the first checkpoint, step 0"),
        ([0.0, math.nan, 0.8], "undefined at some checkpoints"),
        ([math.nan, 0.5, 0.8], "undefined at some checkpoints"),
    ],
)
def test_no_phase_window_without_a_rise(scores, reason):
    found = phases.phase_window([0, 10, 20], scores)
    assert not found.found and math.isnan(found.start) and math.isnan(found.end)
    assert reason in found.reason


def test_probe_rows_are_distinct_repeated_and_reproducible():
    probe = probes.repeated_random_tokens(4, 10, admissible=torch.arange(5, 15), bos=2, seed=0)
    again = probes.repeated_random_tokens(4, 10, admissible=torch.arange(5, 15), bos=2, seed=0)
    assert torch.equal(probe.tokens, again.tokens)
    assert (probe.tokens[:, 0] == 2).all()
    assert torch.equal(probe.tokens[:, 1:11], probe.tokens[:, 11:])
    assert all(sorted(row) == list(range(5, 15)) for row in probe.tokens[:, 1:11].tolist())
    assert not torch.equal(probe.tokens[0], probe.tokens[1])
    names = ("first_copy", "second_copy", "queries", "scored_losses", "body")
    spans = [(m.nonzero().min().item(), m.nonzero().max().item()) for m in (getattr(probe, n)[0] for n in names)]
    assert spans == [(2, 10), (11, 20), (12, 19), (12, 20), (2, 20)]


def test_probe_length_is_capped_and_refused_with_the_reason():
    assert probes.fit_length(50, admissible=1000) == 50
    assert probes.fit_length(50, admissible=1000, context=64, bos=True) == 31
    assert probes.fit_length(50, admissible=1000, context=64) == 32
    assert probes.fit_length(50, admissible=1000, window=16) == 15
    with pytest.raises(NotApplicableError, match="a sliding window of 5 keys allows 4"):
        probes.fit_length(50, admissible=1000, window=5)
    with pytest.raises(NotApplicableError, match="a trained context of 10 positions allows 4"):
        probes.fit_length(50, admissible=1000, context=10, bos=True)
    with pytest.raises(NotApplicableError, match="50 distinct tokens cannot be drawn from a vocabulary of 20"):
        probes.fit_length(50, admissible=20)
    with pytest.raises(NotApplicableError, match="the length asked for allows 3"):
        probes.repeated_random_tokens(1, 3, admissible=VOCABULARY, bos=None, seed=0)
    with pytest.raises(ShapeError, match="distinct token ids"):
        probes.repeated_random_tokens(1, 5, admissible=torch.zeros(9, dtype=torch.long), bos=None, seed=0)


def test_misfits_are_refused():
    pattern = random_pattern(0)
    with pytest.raises(ShapeError, match="over one whole sequence"):
        heads.previous_token_score(pattern[:, :, -1:])
    with pytest.raises(ShapeError, match=r"queries is torch.bool \(2, 8\); expected bool \[batch, query_pos\]"):
        heads.current_token_score(pattern, queries=torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"targets is torch.bool \(2, 4, 4\)"):
        heads.prefix_matching_score(
            pattern, torch.zeros(2, 4, dtype=torch.long), queries=torch.ones(2, 9, dtype=torch.bool)
        )
    with pytest.raises(ShapeError, match="key is 9"):
        heads.sink_rate(pattern, key=9)
    v, w_o = random_head(0)
    with pytest.raises(ShapeError, match="heads of the pattern is 3 but heads of w_o is 4"):
        head_outputs.head_similarity(pattern[:, :3], v, w_o)
    with pytest.raises(ShapeError, match="must agree in batch, key_pos and d_head"):
        head_outputs.head_output_norm(pattern, v[:, :, :5], w_o)
    with pytest.raises(ShapeError, match="does not fit w_o"):
        circuits.copying_score(torch.zeros(2, 7, 4), w_o, torch.eye(7))
    with pytest.raises(ShapeError, match="strictly increasing"):
        phases.phase_window([0, 0, 1], [0.0, 0.5, 1.0])


def test_inputs_are_left_as_they_were_and_half_precision_is_reduced_in_double():
    pattern = random_pattern(0).bfloat16()
    kept = pattern.clone()
    found = heads.current_token_score(pattern)
    assert found.score.dtype == torch.float64
    assert torch.equal(pattern, kept)
    assert torch.equal(found.score, heads.current_token_score(pattern.double()).score)
