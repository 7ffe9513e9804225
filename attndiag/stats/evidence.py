"""What an intervention shows of an item: its effect is there, it is not there, or one cannot say.

"Not significant" is not "absent". An effect is `absent` only if its whole interval lies inside a margin of equivalence,
`present` only if its whole interval lies outside another, and `unsure` otherwise:

    absent:  |effect| < max(noise floor, .02 |m|, .5 mean |effect|)
    present: |effect| >= max(noise floor, .02 |m|, mean |effect|)

with the means over the row. The last terms measure effects as claims are measured, against an even share of their row:
an effect of less than half an even share is no more than a low claim says, and one of a whole even share is twice that.
By .02 |m| alone, the items of a row of many small effects would be low claims and present at once, and effects taken as
a method would be found to disagree with themselves.

Where the interval comes from: draws of a replacement (tokens), prompts of a template (heads, layers, edges of a
template), or one deterministic knock-out, whose only uncertainty is the noise floor. Intervals of draws and prompts are
Student's t. Over a family of many items the two claims are corrected apart by Benjamini & Hochberg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.stats.inference import benjamini_hochberg

Array = NDArray[np.float64]
Source = Literal["draws", "prompts", "knockout"]

PRESENT, ABSENT, UNSURE = "present", "absent", "unsure"
# no effect alone, one together with others: neither there nor absent
REDUNDANT = "redundant"


@dataclass(frozen=True, eq=False)
class Evidence:
    """Effects with their uncertainty, all arrays [row, item] (a row is a prompt, a head's query, a template, ...).

    Parameters
    ----------
    effect : m(clean) - m(edited); nan for items that were not measured.
    error : standard error; 0 for a knock-out.
    freedom : degrees of freedom; infinite for a knock-out.
    floor : noise floor [row]: no interval is narrower than effect +- floor.
    source : where the spread comes from.
    """

    effect: Array
    error: Array
    freedom: Array
    floor: Array
    source: Source

    def half_width(self, level: float) -> Array:
        """Half the length of the interval that misses the true effect with chance `level`."""
        from scipy.stats import t

        return np.maximum(t.ppf(1 - level / 2, self.freedom) * self.error, self.floor[:, None])


def from_knockout(effects: NDArray[np.floating], floor: NDArray[np.floating] | float = 0.0) -> Evidence:
    """Evidence of one deterministic intervention an item, effect +- noise floor.

    Parameters
    ----------
    effects : [row, item], nan where not measured.
    floor : [row] or one for all.

    Raises
    ------
    ShapeError : not [row, item], or a floor for another number of rows.
    """
    effect = np.asarray(effects, dtype=np.float64)
    if effect.ndim != 2:
        raise ShapeError(f"effects have shape {effect.shape}; expected [row, item]")
    return Evidence(effect, np.zeros(effect.shape), np.full(effect.shape, np.inf), _rows(floor, effect), "knockout")


def from_draws(
    draws: NDArray[np.floating],
    floor: NDArray[np.floating] | float = 0.0,
    *,
    clusters: Sequence[Any] | None = None,
    source: Source = "draws",
) -> Evidence:
    """Evidence of several draws of a replacement, or of several prompts of a template.

    Parameters
    ----------
    draws : [draw, row, item] effects; nan draws are left out.
    clusters : [draw]: draws of one label are averaged first and count as one (prompts of one template).
    source : `"draws"` or `"prompts"`.

    Returns
    -------
    Evidence; nan for items with fewer than 2 draws: one draw has no spread, it is not a spread of 0.

    Raises
    ------
    ShapeError : not [draw, row, item], fewer than 2 draws, or clusters for another number of draws.
    """
    values = np.asarray(draws, dtype=np.float64)
    if values.ndim != 3 or len(values) < 2:
        raise ShapeError(
            f"draws have shape {values.shape}; expected [draw, row, item] with at least 2 draws (for one deterministic "
            "intervention use from_knockout)"
        )
    if clusters is not None:
        if len(clusters) != len(values):
            raise ShapeError(f"{len(clusters)} clusters for {len(values)} draws; expected one for each")
        groups: dict[Any, list[int]] = {}
        for index, cluster in enumerate(clusters):
            groups.setdefault(cluster, []).append(index)
        values = np.stack([_mean(values[chosen])[0] for chosen in groups.values()])
    mean, count = _mean(values)
    spread = np.where(np.isnan(values), 0.0, (values - mean) ** 2).sum(axis=0)
    enough = count >= 2
    freedom = np.where(enough, count - 1, 1).astype(np.float64)
    error = np.sqrt(spread / freedom / np.maximum(count, 1))
    return Evidence(np.where(enough, mean, np.nan), error, freedom, _rows(floor, mean), source)


def _mean(values: Array) -> tuple[Array, NDArray[np.int64]]:
    """Mean over the first axis without nan, and how many there were; nan where there were none."""
    count = (~np.isnan(values)).sum(axis=0)
    total = np.where(np.isnan(values), 0.0, values).sum(axis=0)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0), count


def _rows(floor: NDArray[np.floating] | float, effects: Array) -> Array:
    rows = np.asarray(floor, dtype=np.float64)
    if rows.ndim > 1 or (rows.ndim == 1 and len(rows) != len(effects)):
        raise ShapeError(f"floor has shape {rows.shape}; expected one number or one for each of {len(effects)} rows")
    if not (rows >= 0).all():
        raise ValueError(f"floor is {floor}; expected numbers that are not negative")
    return np.broadcast_to(rows, (len(effects),)).copy()


@dataclass(frozen=True, eq=False)
class States:
    """What the evidence shows, arrays [row, item].

    Parameters
    ----------
    state : `"present"`, `"absent"`, `"unsure"`; empty text for items that were not measured.
    low, high : ends of the interval.
    p_present, p_absent : of "the effect lies outside its margin" and "inside"; corrected over the family where asked.
    absent_below, present_from : margins [row].
    """

    state: NDArray[np.str_]
    low: Array
    high: Array
    p_present: Array
    p_absent: Array
    absent_below: Array
    present_from: Array


def states(
    evidence: Evidence,
    m: NDArray[np.floating],
    *,
    margin: float = 0.02,
    absent_below: float = 0.5,
    present_from: float = 1.0,
    expected: Array | None = None,
    level: float = 0.05,
    family: bool = True,
) -> States:
    """Present, absent or unsure for every item.

    Parameters
    ----------
    m : [row], the target on the unedited prompt.
    margin, absent_below, present_from, expected : see `margins`.
    level : the interval holds the effect with chance 1 - level; also the level of the correction.
    family : correct over all measured items (Benjamini & Hochberg, presence and absence apart). Without effect on
        knock-outs, whose p are 0 or 1.

    Raises
    ------
    ShapeError, ValueError : see `margins`; a level not in (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected a number between 0 and 1")
    below, upwards = margins(
        evidence.effect,
        evidence.floor,
        m,
        margin=margin,
        absent_below=absent_below,
        present_from=present_from,
        expected=expected,
    )
    half = evidence.half_width(level)
    low, high = evidence.effect - half, evidence.effect + half
    # effects that equal a margin, as those of a row of equal effects do, must not depend on the rounding of a mean
    inner, outer = below[:, None] * (1 + 1e-9), upwards[:, None] * (1 - 1e-9)
    measured = np.isfinite(evidence.effect)
    present = measured & ((low >= outer) | (high <= -outer))
    absent = measured & (low > -inner) & (high < inner)
    p_present, p_absent = _tests(evidence, inner, outer, half, level, present, absent)
    if family:
        p_present, p_absent = (benjamini_hochberg(p.ravel()).reshape(p.shape) for p in (p_present, p_absent))
        present, absent = present & (p_present <= level), absent & (p_absent <= level)
    state = np.where(present, PRESENT, np.where(absent, ABSENT, np.where(measured, UNSURE, "")))
    return States(state, low, high, p_present, p_absent, below, upwards)


def margins(
    effect: Array,
    floor: Array,
    m: NDArray[np.floating],
    *,
    margin: float = 0.02,
    absent_below: float = 0.5,
    present_from: float = 1.0,
    expected: Array | None = None,
) -> tuple[Array, Array]:
    """Below which size an effect of a row is absent, and from which it is present.

    max(floor, margin |m|, share mean |effect|), with the share `absent_below` and `present_from`.

    Parameters
    ----------
    effect : [row, item], nan where not measured.
    floor, m : [row] noise floor, and target on the unedited prompt.
    margin : share of |m| that an effect has to reach, whatever the others of its row are.
    absent_below, present_from : shares of the row's mean effect size.
    expected : [row, item] estimates that stand in the mean for effects that were not measured, or nan: where a screen
        measured only those that promised most, their mean alone would be too large. None without a screen.

    Raises
    ------
    ShapeError : not one m for each row, or expected effects of other items.
    ValueError : not 0 <= absent_below <= present_from, or margin below 0.
    """
    clean = np.asarray(m, dtype=np.float64)
    if clean.shape != floor.shape:
        raise ShapeError(f"m has shape {clean.shape}; expected one for each of {len(floor)} rows")
    if margin < 0 or not 0 <= absent_below <= present_from:
        raise ValueError(
            f"margin is {margin}, absent_below {absent_below} and present_from {present_from}; expected margin >= 0 "
            "and 0 <= absent_below <= present_from"
        )
    size = np.abs(effect)
    if expected is not None:
        if expected.shape != effect.shape:
            raise ShapeError(f"expected has shape {expected.shape} and effect {effect.shape}; expected the same items")
        size = np.where(np.isfinite(size), size, np.abs(expected))
    known = np.isfinite(size)
    mean = np.where(known, size, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    least = np.maximum(floor, margin * np.abs(clean))
    return np.maximum(least, absent_below * mean), np.maximum(least, present_from * mean)


def _tests(
    evidence: Evidence,
    inner: Array,
    outer: Array,
    half: Array,
    level: float,
    present: NDArray[np.bool_],
    absent: NDArray[np.bool_],
) -> tuple[Array, Array]:
    """p of presence and absence, doubled one-sided ones, so that p <= level says what the interval says."""
    from scipy.stats import t

    # the standard error that belongs to the interval, noise floor included
    error = half / t.ppf(1 - level / 2, evidence.freedom)
    effect = evidence.effect
    measured = np.isfinite(effect)
    sure = (error == 0) | (evidence.error == 0)
    safe = np.where(sure, 1.0, error)
    # nan where nothing was measured: not a member of the family
    beyond = np.maximum(effect - outer, -effect - outer) / safe
    within = np.minimum(inner - effect, inner + effect) / safe
    p_present, p_absent = (np.minimum(1.0, 2 * t.sf(x, evidence.freedom)) for x in (beyond, within))
    p_present = np.where(sure, 1.0 - present, p_present)
    p_absent = np.where(sure, 1.0 - absent, p_absent)
    return np.where(measured, p_present, np.nan), np.where(measured, p_absent, np.nan)
