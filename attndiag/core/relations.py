"""Does a head look at the related token, or only where such tokens happen to stand?

One pair a prompt: a query position, and the block of keys (tokens of a span) that it is related to, as a person says.
A head that always looks k tokens back, or that looks at every position a little, has mass on the related tokens too. So
the mass is read against two rules that know nothing of the relation, on the same rows of the same pattern:

- **best fixed offset**: the distance, one for all pairs, with the most mass; the best is chosen afterwards on these
  very pairs, which favours the rule and not the relation;
- **shuffled pairs**: each query with the distances of the other pairs, which keeps how far related tokens stand and
  breaks which belongs to which.

Blocks that hold a sink (position 0, special tokens) count for neither: mass on a sink says nothing about a relation.

Glossary: *distance*, query position - position of the last token of the block; *width*, tokens of the block;
*pool*, the distances of all pairs that fit a given prompt (no sink, no hidden key, inside the prompt).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.errors import NotApplicableError, ShapeError


@dataclass(frozen=True)
class Pair:
    """One related pair in one prompt.

    Parameters
    ----------
    query : position.
    start, stop : the related keys, half-open.
    """

    query: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Tokens of the block."""
        return self.stop - self.start

    @property
    def distance(self) -> int:
        """From the query back to the last token of the block; negative where the block comes later."""
        return self.query - self.stop + 1

    def at(self, distance: int) -> Pair:
        """A block of the same width at another distance from the same query."""
        stop = self.query - distance + 1
        return Pair(self.query, stop - self.width, stop)


@dataclass(frozen=True, eq=False)
class RelationMass:
    """Mass on related keys, and what the two rules get.

    Parameters
    ----------
    mass : [pair, head], sum over the block.
    best_offset : [head], mean over pairs of the mass at the best fixed offset; pairs that it does not fit count as 0.
    offset : [head], that distance.
    shuffled : [head], mean mass at the other pairs' distances, over the pairs with another distance in their pool; nan
        where there is no such pair.
    p : [head], share of the draws in which shuffled pairs (the right one among the choices) have at least the mass of
        the right pairs.
    p_any : [head], the same against the largest standardised mass over all heads: the chance that *some* head looks
        this good.
    alternatives : number of pairs with at least one other distance in their pool.
    """

    mass: Tensor
    best_offset: Tensor
    offset: Tensor
    shuffled: Tensor
    p: Tensor
    p_any: Tensor
    alternatives: int


def pools(pairs: Sequence[Pair], usable: Sequence[Tensor]) -> list[list[int]]:
    """For each pair the distances of the other pairs that fit it and are not its own.

    Parameters
    ----------
    pairs : one a prompt.
    usable : for each, [key_pos] bool: keys that the query may see and that are no sinks.
    """
    distances = [pair.distance for pair in pairs]
    return [
        [d for d in distances if d != pair.distance and _fits(pair.at(d), keys)]
        for pair, keys in zip(pairs, usable, strict=True)
    ]


def relation_mass(
    rows: Sequence[Tensor], pairs: Sequence[Pair], usable: Sequence[Tensor], *, draws: int = 2000, seed: int = 0
) -> RelationMass:
    """Mass on the related keys against the best fixed offset and against shuffled pairs.

    mass_p = sum_{j in block(p)} A_{i_p j};  offset rule: max over d of mean_p mass at distance d

    Parameters
    ----------
    rows : for each pair the query's row, [head, key_pos]: a pattern's, or shares of what the head writes. A head whose
        row is nan anywhere comes back as nan.
    pairs : one a prompt.
    usable : as in `pools`. The related keys themselves must be usable.
    draws : shuffles behind p; p is at least 1 / (draws + 1).
    seed : of the shuffles.

    Returns
    -------
    `RelationMass`, float64, in the unit of `rows`. p is exact but for the draws under the hypothesis that any distance
    of a pair's pool could have been the right one.

    Raises
    ------
    ShapeError : lists of different lengths, or rows that do not fit their mask.
    NotApplicableError : no pairs, or related keys that are not usable.
    """
    if not pairs:
        raise NotApplicableError("there is no pair to measure")
    if not len(rows) == len(pairs) == len(usable):
        raise ShapeError(f"{len(rows)} rows, {len(pairs)} pairs and {len(usable)} masks were given; expected as many")
    for row, pair, keys in zip(rows, pairs, usable, strict=True):
        if row.ndim != 2 or row.shape[1] != len(keys):
            raise ShapeError(f"a row has shape {tuple(row.shape)} and its mask {len(keys)} keys; expected [head, key]")
        if not _fits(pair, keys):
            raise NotApplicableError(
                f"related keys {pair.start}..{pair.stop - 1} of query {pair.query} are hidden from it, or a sink"
            )
    given = [row.double() for row in rows]
    # a head without a number on one prompt has none on all of them, and no say in what other heads are held against
    defined = torch.stack([~row.isnan().any(dim=1) for row in given]).all(dim=0)
    doubles = [torch.where(defined[:, None], row, 0.0) for row in given]
    mass = torch.stack([_mass(row, pair) for row, pair in zip(doubles, pairs, strict=True)])
    offset_mass, offset = _best_offset(doubles, pairs, usable)
    others = pools(pairs, usable)
    shuffled, p, p_any = _against_shuffles(mass, doubles, pairs, others, draws, seed)
    mass, offset_mass, offset, shuffled, p, p_any = (
        values.masked_fill(~defined, torch.nan) for values in (mass, offset_mass, offset, shuffled, p, p_any)
    )
    return RelationMass(mass, offset_mass, offset, shuffled, p, p_any, sum(bool(pool) for pool in others))


def _best_offset(rows: Sequence[Tensor], pairs: Sequence[Pair], usable: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(len(keys) for keys in usable)
    found: dict[int, Tensor] = {}
    for distance in range(-longest + 1, longest):
        fitting = [
            _mass(row, pair.at(distance))
            for row, pair, keys in zip(rows, pairs, usable, strict=True)
            if _fits(pair.at(distance), keys)
        ]
        if fitting:
            found[distance] = torch.stack(fitting).sum(dim=0) / len(pairs)
    best, index = torch.stack(list(found.values())).max(dim=0)
    return best, torch.tensor(list(found), dtype=torch.float64, device=best.device)[index]


def _against_shuffles(
    mass: Tensor, rows: Sequence[Tensor], pairs: Sequence[Pair], others: list[list[int]], draws: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean mass at other pairs' distances, and the two p."""
    undefined = torch.full_like(mass[0], torch.nan)
    if not any(others):
        return undefined, undefined.clone(), undefined.clone()
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(draws, mass.shape[1], dtype=torch.float64, device=mass.device)
    means = []
    for own, row, pair, pool in zip(mass, rows, pairs, others, strict=True):
        if not pool:
            # a pair without an alternative stays as it is in every shuffle, which only weakens the claim
            total += own
            continue
        choices = torch.stack([own, *(_mass(row, pair.at(distance)) for distance in pool)])
        means.append(choices[1:].mean(dim=0))
        total += choices[torch.randint(len(choices), (draws,), generator=generator).to(choices.device)]
    drawn, observed = total / len(pairs), mass.mean(dim=0)
    # sums of the same numbers in another order differ in the last digit: that is no difference
    slack = 1e-12
    p = (1 + (drawn >= observed - slack).sum(dim=0)) / (1 + draws)
    spread = drawn.std(dim=0)
    scale = spread.masked_fill(spread <= slack, torch.inf)
    highest = ((drawn - drawn.mean(dim=0)) / scale).amax(dim=1)
    own_height = (observed - drawn.mean(dim=0)) / scale
    p_any = (1 + (highest[:, None] >= own_height - slack).sum(dim=0)) / (1 + draws)
    return torch.stack(means).mean(dim=0), p.double(), p_any.double()


def _fits(pair: Pair, usable: Tensor) -> bool:
    return 0 <= pair.start < pair.stop <= len(usable) and bool(usable[pair.start : pair.stop].all())


def _mass(row: Tensor, pair: Pair) -> Tensor:
    return row[:, pair.start : pair.stop].sum(dim=1)
