"""Over training: how much a model learns from its context, and when a score rose.

`icl_score` is one number a checkpoint; `phase_window` reads a curve of such numbers against the step. A loss that
falls along the context is no sign of induction by itself: a one-layer model, in which induction heads cannot form,
has it too, from the first hundred steps on. So read the window of a score beside that of a control.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.errors import NotApplicableError, ShapeError
from attndiag.shapes import check_rank, check_same_size


def icl_score(losses: Tensor, *, early: int | tuple[int, int] = 50, late: int | tuple[int, int] = 500) -> Tensor:
    """In-context-learning score: loss late in the context minus loss early in it.

    icl = loss[late] - loss[early]; more negative means that more is learned from the context.

    Parameters
    ----------
    losses : [batch, position], nats; `losses[:, p]` is the loss of predicting the token at position p.
    early, late : a position, or a half-open range of positions whose losses are averaged. 50 and 500 in the source;
        state others wherever the number is shown.

    Returns
    -------
    [batch], nats, signed, float64.

    Raises
    ------
    NotApplicableError : the context is too short for the positions asked for.

    References
    ----------
    Olsson 2022, arXiv 2209.11895.
    """
    check_rank("losses", losses, "batch position")
    return _mean_at(losses, late) - _mean_at(losses, early)


@dataclass(frozen=True)
class PhaseWindow:
    """The steps between which a score rose from a low to a high share of its final value.

    Parameters
    ----------
    start, end : steps, interpolated between checkpoints; nan where there is no window.
    final : the score at the last checkpoint.
    reason : why there is no window; empty where there is one.
    """

    start: float
    end: float
    final: float
    reason: str = ""

    @property
    def found(self) -> bool:
        """True when there is a window."""
        return not self.reason


def phase_window(
    steps: Sequence[int],
    scores: Sequence[float],
    *,
    low: float = 0.2,
    high: float = 0.8,
    smallest: float = 0.1,
) -> PhaseWindow:
    """When a score rose from `low` to `high` times its final value, linear in the step between checkpoints.

    end = where the score first reaches high * final;  start = where it last passed low * final before that.

    Parameters
    ----------
    steps : strictly increasing training steps.
    scores : one number for each step, rising (turn the sign of an in-context-learning score).
    low, high : shares of the final score.
    smallest : a final score at or below this has no window: there is nothing that rose.

    Returns
    -------
    `PhaseWindow`; without a window its `reason` says why.

    Raises
    ------
    ShapeError : steps and scores that do not fit, or steps that do not increase.
    """
    check_same_size("the number of steps", len(steps), "the number of scores", len(scores))
    if len(steps) < 2 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ShapeError(f"steps are {list(steps)}; expected at least two, strictly increasing")
    if not 0 < low < high < 1:
        raise ShapeError(f"low={low} and high={high}; expected 0 < low < high < 1")
    final = float(scores[-1])
    if any(score != score for score in scores):
        return PhaseWindow(torch.nan, torch.nan, final, "the score is undefined at some checkpoints")
    if not final > smallest:
        return PhaseWindow(torch.nan, torch.nan, final, f"the final score {final:.3f} does not exceed {smallest}")
    if not scores[0] < low * final:
        text = f"the score is already {scores[0]:.3f} at the first checkpoint, step {steps[0]}; add earlier checkpoints"
        return PhaseWindow(torch.nan, torch.nan, final, text)
    reached = next(i for i, score in enumerate(scores) if score >= high * final)
    passed = max(i for i in range(1, reached + 1) if scores[i - 1] < low * final <= scores[i])
    return PhaseWindow(
        _crossing(steps, scores, passed, low * final), _crossing(steps, scores, reached, high * final), final
    )


def _mean_at(losses: Tensor, where: int | tuple[int, int]) -> Tensor:
    first, stop = (where, where + 1) if isinstance(where, int) else where
    if not 0 <= first < stop <= losses.shape[1]:
        raise NotApplicableError(
            f"the in-context-learning score asks for positions {first}..{stop - 1}, but there are losses for "
            f"{losses.shape[1]} positions; give `early` and `late` inside the context"
        )
    return losses[:, first:stop].double().mean(dim=-1)


def _crossing(steps: Sequence[int], scores: Sequence[float], index: int, level: float) -> float:
    """Step at which the line from checkpoint index - 1 to index reaches `level`."""
    share = (level - scores[index - 1]) / (scores[index] - scores[index - 1])
    return steps[index - 1] + share * (steps[index] - steps[index - 1])
