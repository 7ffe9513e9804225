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
    small: float = 0.5,
    even: float = 1.0,
    among: NDArray[np.integer] | None = None,
    level: float = 0.05,
    family: bool = True,
) -> States:
    """Present, absent or unsure for every item.

    Parameters
    ----------
    m : [row], the target on the unedited prompt.
    margin : share of |m| that an effect has to reach, whatever the others of its row are.
    small, even : shares of the row's mean effect size below which an effect is absent and from which it is present.
    among : [row] items over which that mean is taken, those without a measured effect counting as 0; the measured ones
        when None. For rows of which only the items with the largest expected effects were measured.
    level : the interval holds the effect with chance 1 - level; also the level of the correction.
    family : correct over all measured items (Benjamini & Hochberg, presence and absence apart). Without effect on
        knock-outs, whose p are 0 or 1.

    Raises
    ------
    ShapeError : not one m, or one number of items, for each row.
    ValueError : not 0 <= small <= even, margin below 0, or level not in (0, 1).
    """
    clean = np.asarray(m, dtype=np.float64)
    if clean.shape != evidence.floor.shape:
        raise ShapeError(f"m has shape {clean.shape}; expected one for each of {len(evidence.floor)} rows")
    if margin < 0 or not 0 <= small <= even or not 0 < level < 1:
        raise ValueError(
            f"margin is {margin}, small {small}, even {even} and level {level}; expected margin >= 0, 0 <= small <= "
            "even and a level between 0 and 1"
        )
    least = np.maximum(evidence.floor, margin * np.abs(clean))
    mean = _mean_size(evidence.effect, among)
    absent_below, present_from = np.maximum(least, small * mean), np.maximum(least, even * mean)
    half = evidence.half_width(level)
    low, high = evidence.effect - half, evidence.effect + half
    inner, outer = absent_below[:, None], present_from[:, None]
    measured = np.isfinite(evidence.effect)
    present = measured & ((low >= outer) | (high <= -outer))
    absent = measured & (low > -inner) & (high < inner)
    p_present, p_absent = _tests(evidence, inner, outer, half, level, present, absent)
    if family:
        p_present, p_absent = (benjamini_hochberg(p.ravel()).reshape(p.shape) for p in (p_present, p_absent))
        present, absent = present & (p_present <= level), absent & (p_absent <= level)
    state = np.where(present, PRESENT, np.where(absent, ABSENT, np.where(measured, UNSURE, "")))
    return States(state, low, high, p_present, p_absent, absent_below, present_from)


def _mean_size(effect: Array, among: NDArray[np.integer] | None) -> Array:
    """[row] mean |effect|; 0 for rows without any."""
    measured = np.isfinite(effect)
    count = measured.sum(axis=1) if among is None else np.asarray(among)
    if count.shape != (len(effect),):
        raise ShapeError(f"among has shape {count.shape}; expected one number for each of {len(effect)} rows")
    return np.where(measured, np.abs(effect), 0.0).sum(axis=1) / np.maximum(count, 1)


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
