"""Mass on related keys against its two rules: known answers, and a slow replica."""

from __future__ import annotations

import itertools

import pytest
import torch

from attndiag.core.relations import Pair, pools, relation_mass
from attndiag.errors import NotApplicableError, ShapeError

PAIRS = [Pair(10, 3, 4), Pair(9, 5, 6), Pair(11, 2, 4), Pair(8, 6, 7), Pair(12, 4, 5)]
LENGTH = 14


def usable(pair):
    keys = torch.arange(LENGTH) <= pair.query
    keys[0] = False
    return keys


def rows_of(*rules):
    """Rows for each pair: one head a rule; what a rule leaves over goes to the sink."""
    rows = []
    for pair in PAIRS:
        row = torch.zeros(len(rules), LENGTH, dtype=torch.float64)
        for head, rule in enumerate(rules):
            for key, mass in rule(pair).items():
                row[head, key] += mass
            row[head, 0] += 1 - row[head].sum()
        rows.append(row)
    return rows


def related(pair):
    return dict.fromkeys(range(pair.start, pair.stop), 1 / pair.width)


def previous(pair):
    return {pair.query - 1: 1.0}


def uniform(pair):
    return dict.fromkeys(range(1, pair.query + 1), 1 / pair.query)


def sink(pair):
    return {0: 1.0}


def test_a_head_for_the_relation_stands_out_and_the_others_do_not():
    found = relation_mass(rows_of(related, previous, uniform, sink), PAIRS, [usable(p) for p in PAIRS])
    assert found.mass.mean(dim=0).tolist() == pytest.approx([1.0, 0.0, found.mass[:, 2].mean().item(), 0.0])
    assert found.best_offset[1].item() == pytest.approx(1.0) and found.offset[1].item() == 1
    # no offset hits more than a part of pairs that stand at different distances
    assert found.best_offset[0] < 0.5
    assert found.shuffled[0] < 0.2 and found.p[0] < 0.01 and found.p_any[0] < 0.01
    # a head that looks everywhere a little has what shuffled pairs have
    assert found.shuffled[2] == pytest.approx(found.mass[:, 2].mean().item(), rel=0.2)
    assert found.p[2] > 0.2 and found.p[3] == 1 and found.best_offset[3] == 0
    assert found.alternatives == len(PAIRS)


def test_equal_distances_cannot_be_told_from_an_offset():
    pairs = [Pair(q, q - 4, q - 3) for q in (6, 8, 11)]
    rows = [torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = relation_mass(rows, pairs, [usable(p) for p in pairs])
    assert found.alternatives == 0 and found.shuffled.isnan().all() and found.p_any.isnan().all()
    assert bool((found.best_offset >= found.mass.mean(dim=0) - 1e-12).all())


def test_values_equal_their_slow_replica():
    rows = [torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(5)]
    masks = [usable(p) for p in PAIRS]
    found = relation_mass(rows, PAIRS, masks, draws=20_000, seed=1)
    for head in range(3):

        def mass(pair, distance, row, keys, head=head):
            """None where the block does not fit."""
            total = 0.0
            for back in range(pair.width):
                key = pair.query - distance - back
                if not 0 < key < LENGTH or not keys[key]:
                    return None
                total += row[head, key].item()
            return total

        own = [mass(p, p.query - p.stop + 1, r, k) for p, r, k in zip(PAIRS, rows, masks, strict=True)]
        assert found.mass[:, head].tolist() == pytest.approx(own)
        by_offset = {
            d: sum(mass(p, d, r, k) or 0.0 for p, r, k in zip(PAIRS, rows, masks, strict=True)) / 5
            for d in range(-LENGTH, LENGTH)
        }
        assert found.best_offset[head].item() == pytest.approx(max(by_offset.values()))
        assert by_offset[int(found.offset[head])] == pytest.approx(max(by_offset.values()))
        choices = []
        for p, r, k, first in zip(PAIRS, rows, masks, own, strict=True):
            others = [q.query - q.stop + 1 for q in PAIRS if q.query - q.stop != p.query - p.stop]
            fitting = [m for m in (mass(p, d, r, k) for d in others) if m is not None]
            choices.append((first, fitting))
        expected = sum(sum(m) / len(m) for _, m in choices) / 5
        assert found.shuffled[head].item() == pytest.approx(expected)
        sums = [sum(pick) / 5 for pick in itertools.product(*([first, *m] for first, m in choices))]
        exact = sum(s >= sum(own) / 5 - 1e-12 for s in sums) / len(sums)
        assert found.p[head].item() == pytest.approx(exact, abs=0.015)
    assert bool((found.p_any >= found.p - 0.015).all())


def test_a_sink_is_in_no_pool_and_no_offset():
    pairs = [Pair(5, 2, 3), Pair(9, 4, 5)]  # distance 5 would reach position 0 of the first
    assert pools(pairs, [usable(p) for p in pairs]) == [[], [3]]


def test_a_head_without_a_number_changes_nothing_for_the_others():
    rows = rows_of(related, uniform)
    whole = relation_mass(rows, PAIRS, [usable(p) for p in PAIRS])
    rows = [torch.cat([row, torch.full_like(row[:1], torch.nan)]) for row in rows]
    found = relation_mass(rows, PAIRS, [usable(p) for p in PAIRS])
    for name in ("mass", "best_offset", "offset", "shuffled", "p", "p_any"):
        values = getattr(found, name)
        assert torch.equal(values[..., :2], getattr(whole, name)) and values[..., 2].isnan().all()


def test_misfits_are_refused():
    rows, masks = rows_of(related), [usable(p) for p in PAIRS]
    with pytest.raises(NotApplicableError, match="no pair"):
        relation_mass([], [], [])
    with pytest.raises(ShapeError, match="4 rows, 5 pairs"):
        relation_mass(rows[:4], PAIRS, masks)
    with pytest.raises(ShapeError, match=r"expected \[head, key\]"):
        relation_mass([row[0] for row in rows], PAIRS, masks)
    with pytest.raises(NotApplicableError, match=r"related keys 0\.\.0 of query 10 are hidden from it, or a sink"):
        relation_mass(rows, [Pair(10, 0, 1), *PAIRS[1:]], masks)
