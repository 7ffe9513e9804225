"""Probe sequences: inputs on which a head that does one thing must show it.

The induction probe is `[BOS] s s`: one row of tokens drawn **without replacement**, repeated. With replacement a
token may have several earlier followers and a perfect induction head drops to about .7; without, its mass has
exactly one place to be. Which queries and which losses count is part of the probe, as explicit masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.errors import NotApplicableError, ShapeError

SHORTEST = 5


@dataclass(frozen=True, eq=False)
class InductionProbe:
    """Rows `[BOS] s s` and the masks that say what is measured on them.

    Parameters
    ----------
    tokens : [row, position] token ids.
    length : L, the number of tokens in s.
    bos : id of the token put first, or None.
    """

    tokens: Tensor
    length: int
    bos: int | None

    @property
    def start(self) -> int:
        """Position of the first token of s: 1 with BOS, 0 without."""
        return 0 if self.bos is None else 1

    @property
    def queries(self) -> Tensor:
        """[row, position]: second-copy queries without the first and the last (prefix matching is scored here)."""
        return self._between(self.start + self.length + 1, self.start + 2 * self.length - 1)

    @property
    def second_copy(self) -> Tensor:
        """[row, position]: every token of the second copy (duplicate-token heads are scored here)."""
        return self._between(self.start + self.length, self.start + 2 * self.length)

    @property
    def body(self) -> Tensor:
        """[row, position]: every token that has a token of s before it (previous-token heads are scored here)."""
        return self._between(self.start + 1, self.start + 2 * self.length)

    @property
    def first_copy(self) -> Tensor:
        """[row, position]: tokens of the first copy whose prediction cannot use induction; its first token left out."""
        return self._between(self.start + 1, self.start + self.length)

    @property
    def scored_losses(self) -> Tensor:
        """[row, position]: tokens of the second copy that the first copy predicts, that is, all but its first."""
        return self._between(self.start + self.length + 1, self.start + 2 * self.length)

    def _between(self, first: int, stop: int) -> Tensor:
        mask = torch.zeros(self.tokens.shape, dtype=torch.bool, device=self.tokens.device)
        mask[:, first:stop] = True
        return mask


def repeated_random_tokens(
    rows: int, length: int, *, admissible: Tensor, bos: int | None, seed: int, replacement: bool = False
) -> InductionProbe:
    """Rows `[BOS] s s` with s drawn from the admissible tokens, each row with its own s.

    Parameters
    ----------
    rows : number of sequences.
    length : L, tokens in s; at least 5, so that second-copy queries remain when the first and last are left out.
    admissible : 1-d token ids to draw from, each once; leave special tokens out.
    bos : id put before the first copy, or None to start with s.
    seed : the same seed gives the same rows on every machine.
    replacement : draw with replacement, only to show what that does to the score. Never for a measurement.

    Returns
    -------
    `InductionProbe` with tokens [row, 2 * length (+ 1)] on the CPU.

    Raises
    ------
    NotApplicableError : too few admissible tokens, or `length` below 5.
    ShapeError : `admissible` is not a list of distinct ids.
    """
    if admissible.ndim != 1 or admissible.unique().numel() != admissible.numel():
        raise ShapeError(f"admissible has shape {tuple(admissible.shape)}; expected a 1-d list of distinct token ids")
    if rows < 1:
        raise ShapeError(f"rows is {rows}; expected at least 1")
    fit_length(length, admissible=admissible.numel() if not replacement else length, cap=False)
    generator = torch.Generator().manual_seed(seed)
    count = admissible.numel()
    if replacement:
        picks = torch.randint(count, (rows, length), generator=generator)
    else:
        picks = torch.stack([torch.randperm(count, generator=generator)[:length] for _ in range(rows)])
    s = admissible.cpu()[picks]
    first = [] if bos is None else [torch.full((rows, 1), bos, dtype=s.dtype)]
    return InductionProbe(torch.cat([*first, s, s], dim=1), length, bos)


def fit_length(
    length: int,
    *,
    admissible: int,
    context: int | None = None,
    window: int | None = None,
    bos: bool = False,
    cap: bool = True,
) -> int:
    """Longest L up to `length` for which `[BOS] s s` can be measured.

    2 L (+ 1) must fit the trained context; L may not exceed the sliding window minus 1, so that a second-copy query
    still sees its own token and its follower in the first copy; L tokens without repetition must exist.

    Parameters
    ----------
    length : the L asked for.
    admissible : how many tokens there are to draw from.
    context : positions the model was trained on; None for no limit.
    window : keys that a query sees, itself included; None for no window.
    bos : whether a BOS token goes first.
    cap : shorten L to what fits the context and the window (never to the vocabulary: then the rows would be
        permutations of one set). False: raise instead.

    Raises
    ------
    NotApplicableError : fewer than 5 tokens would be left, or the vocabulary is too small; the text says which.
    """
    limits = {"the length asked for": length}
    if context is not None:
        limits[f"a trained context of {context} positions"] = (context - int(bos)) // 2
    if window is not None:
        limits[f"a sliding window of {window} keys"] = window - 1
    binding = min(limits, key=lambda name: limits[name])
    fitted = limits[binding]
    if fitted < SHORTEST:
        raise NotApplicableError(
            f"the induction probe needs at least {SHORTEST} tokens a copy, but {binding} allows {max(fitted, 0)}"
        )
    if fitted < length and not cap:
        raise NotApplicableError(f"the probe asks for {length} tokens a copy, but {binding} allows {fitted}")
    if admissible < fitted:
        raise NotApplicableError(
            f"a copy of {fitted} distinct tokens cannot be drawn from a vocabulary of {admissible} admissible tokens; "
            f"ask for length={admissible} or less"
        )
    return fitted
