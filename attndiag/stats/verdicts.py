"""Does what a method claims of an item agree with what removing the item does?

What the method claims: the item's share of the method's mass over the admissible items, sinks included, is `high` from
2 / n, `low` up to 1 / (2 n), else it claims nothing. What the intervention shows: `stats.evidence`.

| | effect present | effect absent | unsure, redundant |
|---|---|---|---|
| high | agree | disagree: a weight without effect | inconclusive |
| low | disagree: an effect without weight | agree | inconclusive |
| neither | inconclusive | inconclusive | inconclusive |

Items that stand in for each other (heads that write the same) show nothing when one is removed and much when all are:
`redundant`, which is not absent.

No verdict at all (`undefined`) for rows with constant scores, fewer than 3 admissible items, |m| at most the noise
floor, a failed task check (the model does not do what the prompt asks, so nothing can be said about how) or a failed
self-check (the numbers may be wrong); `replacement_dependent` where two replacements order the items differently.

A row is whatever shares one mass: the keys of one head's query, the tokens of a prompt, the heads of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.stats.agreement import LEAST_ITEMS, tau_b
from attndiag.stats.evidence import ABSENT, PRESENT, REDUNDANT, Array, Evidence, States, states

if TYPE_CHECKING:
    import pandas as pd

HIGH, LOW, NONE = "high", "low", "none"
AGREE, DISAGREE, INCONCLUSIVE = "agree", "disagree", "inconclusive"
REPLACEMENT_DEPENDENT, UNDEFINED = "replacement_dependent", "undefined"
VERDICTS = (AGREE, DISAGREE, INCONCLUSIVE, REPLACEMENT_DEPENDENT, UNDEFINED)


@dataclass(frozen=True)
class Thresholds:
    """What a verdict depends on; printed with it.

    Parameters
    ----------
    high, low : a share of at least high / n is a high claim, one of at most low / n a low claim.
    absent_below, present_from : shares of the row's mean effect size: what a claim of 1 / n is to claims. With
        absent_below = low, an effect that is absent is one of which a low claim would be true.
    margin : share of |m| that an effect has to reach to be present, and below which it is absent, whatever the others
        of its row are.
    level : of the intervals and of the correction over items.
    least_items : admissible items that a row needs.
    replacement_tau : two replacements whose effects have a smaller tau-b make a prompt `replacement_dependent`.
    majority : part of a row's mass, or of its effects, that decides the verdict on the row.
    """

    high: float = 2.0
    low: float = 0.5
    absent_below: float = 0.5
    present_from: float = 1.0
    margin: float = 0.02
    level: float = 0.05
    least_items: int = LEAST_ITEMS
    replacement_tau: float = 0.5
    majority: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; expected 0 <= low < high")
        if not 0 <= self.absent_below <= self.present_from:
            raise ValueError(
                f"absent_below is {self.absent_below} and present_from {self.present_from}; expected 0 <= absent_below "
                "<= present_from"
            )
        if self.margin < 0 or not 0 < self.level < 1 or self.least_items < 2:
            raise ValueError(
                f"margin is {self.margin}, level {self.level}, least_items {self.least_items}; expected margin >= 0, "
                "a level between 0 and 1 and at least 2 items"
            )


@dataclass(frozen=True, eq=False)
class Verdicts:
    """Verdicts with everything they rest on, arrays [row, item].

    Parameters
    ----------
    verdict : one of `VERDICTS`; empty text for items that are not admissible.
    claim : `"high"`, `"low"`, `"none"`; empty where not admissible.
    share : of the method's mass over the admissible items; nan where not admissible or undefined.
    effect : measured.
    shown : states, intervals, p and margins.
    reason : [row] why a row has no verdict; empty where it has.
    blocked : [row] True where a failed self-check is that reason: such a report must not end with success.
    thresholds : used.
    """

    verdict: NDArray[np.str_]
    claim: NDArray[np.str_]
    share: Array
    effect: Array
    shown: States
    reason: tuple[str, ...]
    blocked: NDArray[np.bool_]
    thresholds: Thresholds

    @property
    def counts(self) -> dict[str, int]:
        """How many admissible items got each verdict."""
        found = Counter(self.verdict[self.verdict != ""].tolist())
        return {name: found.get(name, 0) for name in VERDICTS}

    def where(self, claim: str, state: str) -> NDArray[np.bool_]:
        """[row, item] True for items that got a verdict, with this claim and this state."""
        judged = np.isin(self.verdict, (AGREE, DISAGREE, INCONCLUSIVE))
        return judged & (self.claim == claim) & (self.shown.state == state)

    def to_frame(self) -> pd.DataFrame:
        """Tidy table, one row for each admissible item; the thresholds stand in columns of their own."""
        import pandas as pd

        row, item = np.nonzero(self.verdict != "")
        shown = self.shown
        frame = pd.DataFrame(
            {
                "row": row,
                "item": item,
                "verdict": self.verdict[row, item],
                "claim": self.claim[row, item],
                "share": self.share[row, item],
                "state": shown.state[row, item],
                "effect": self.effect[row, item],
                "effect_low": shown.low[row, item],
                "effect_high": shown.high[row, item],
                "absent_below": shown.absent_below[row],
                "present_from": shown.present_from[row],
                "p_present": shown.p_present[row, item],
                "p_absent": shown.p_absent[row, item],
                "reason": np.array(self.reason, dtype=object)[row],
                "blocked": self.blocked[row],
            }
        )
        return frame.assign(**{f"threshold_{name}": value for name, value in asdict(self.thresholds).items()})


def claims(
    scores: NDArray[np.floating],
    admissible: NDArray[np.bool_] | None = None,
    thresholds: Thresholds | None = None,
) -> tuple[NDArray[np.str_], Array]:
    """What a method claims of each item, and the item's share of its mass.

    Parameters
    ----------
    scores : [row, item]; signed ones count by their size.
    admissible : [row, item]; all when None. Sinks are admissible here.

    Returns
    -------
    claim : [row, item], empty text where not admissible or the row's scores are constant.
    share : [row, item] in [0, 1], sums to 1 over a row's admissible items; nan where not admissible or all are 0.

    Raises
    ------
    ShapeError : not [row, item], or a mask of another shape.
    ValueError : an admissible score is nan.
    """
    limits = thresholds or Thresholds()
    size, keep = _table(scores, admissible)
    total = size.sum(axis=1, keepdims=True)
    share = np.divide(size, total, out=np.full(size.shape, np.nan), where=(total > 0) & keep)
    n = keep.sum(axis=1, keepdims=True)
    # a share of exactly 2 / n must not depend on the rounding of the division
    slack = 1e-9
    claim = np.full(size.shape, NONE, dtype="<U4")
    claim[share * n >= limits.high - slack] = HIGH
    claim[share * n <= limits.low + slack] = LOW
    claim[np.isnan(share) | ~keep | _constant(size, keep)[:, None]] = ""
    return claim, share


def judge(
    scores: NDArray[np.floating],
    evidence: Evidence,
    m: NDArray[np.floating],
    *,
    admissible: NDArray[np.bool_] | None = None,
    task: Sequence[str] | None = None,
    failed_checks: Sequence[Sequence[str]] | None = None,
    replacement_tau: NDArray[np.floating] | None = None,
    redundant: NDArray[np.bool_] | None = None,
    expected: Array | None = None,
    thresholds: Thresholds | None = None,
    family: bool = True,
) -> Verdicts:
    """A verdict on every item.

    Parameters
    ----------
    scores : [row, item] of one method.
    evidence : effects of the same items.
    m : [row], the target on the unedited prompt.
    admissible : [row, item], sinks included; all when None. Items without a measured effect are inconclusive.
    task : [row] what `task_check` said; no row failed when None.
    failed_checks : [row] names of self-checks that failed (a capture that does not reproduce the model, ...).
    replacement_tau : [row] what `replacement_agreement` said, nan included; None where only one replacement was used.
    redundant : [row, item] of `redundancy.stand_ins`: where the effect is absent, the state is `redundant` instead.
    expected : see `evidence.margins`.
    family : see `evidence.states`.

    Raises
    ------
    ShapeError : arrays that do not fit each other.
    ValueError : an admissible score is nan.
    """
    limits = thresholds or Thresholds()
    size, keep = _table(scores, admissible)
    n_rows = len(size)
    if evidence.effect.shape != size.shape:
        raise ShapeError(f"scores have shape {size.shape} and effects {evidence.effect.shape}; expected the same items")
    for name, given in (("task", task), ("failed_checks", failed_checks), ("replacement_tau", replacement_tau)):
        if given is not None and len(given) != n_rows:
            raise ShapeError(f"{name} has {len(given)} entries for {n_rows} rows; expected one for each")
    inside = Evidence(
        np.where(keep, evidence.effect, np.nan), evidence.error, evidence.freedom, evidence.floor, evidence.source
    )
    clean = np.asarray(m, dtype=np.float64)
    shown = states(
        inside,
        clean,
        margin=limits.margin,
        absent_below=limits.absent_below,
        present_from=limits.present_from,
        expected=expected,
        level=limits.level,
        family=family,
    )
    if redundant is not None:
        stands_in = np.asarray(redundant, dtype=bool)
        if stands_in.shape != size.shape:
            raise ShapeError(f"redundant has shape {stands_in.shape} and scores {size.shape}; expected the same items")
        shown = replace(shown, state=np.where(stands_in & (shown.state == ABSENT), REDUNDANT, shown.state))
    claim, share = claims(scores, admissible, limits)
    verdict = np.full(size.shape, INCONCLUSIVE, dtype="<U21")
    high, low = claim == HIGH, claim == LOW
    present, absent = shown.state == PRESENT, shown.state == ABSENT
    verdict[(high & present) | (low & absent)] = AGREE
    verdict[(high & absent) | (low & present)] = DISAGREE
    constant = _constant(size, keep)
    reasons: list[str] = []
    for row in range(n_rows):
        failed = list(failed_checks[row]) if failed_checks is not None else []
        reason = _why_undefined(
            failed, int(keep[row].sum()), bool(constant[row]), clean[row], evidence.floor[row], limits.least_items
        )
        reason = reason or (task[row] if task is not None else "")
        tau = 1.0 if replacement_tau is None else float(replacement_tau[row])
        if not reason and np.isnan(tau):
            reason = "the replacements cannot be compared: constant effects, or fewer than 3 items"
        if reason:
            verdict[row] = UNDEFINED
        elif tau < limits.replacement_tau:
            reason = f"two replacements order the items with tau {tau:.2f}, below {limits.replacement_tau:g}"
            verdict[row] = REPLACEMENT_DEPENDENT
        reasons.append(reason)
    verdict[~keep] = ""
    blocked = np.array([bool(failed_checks[row]) if failed_checks is not None else False for row in range(n_rows)])
    return Verdicts(verdict, claim, share, inside.effect, shown, tuple(reasons), blocked, limits)


def _why_undefined(failed: Sequence[str], n: int, constant: bool, m: float, floor: float, least: int) -> str:
    if failed:
        return "blocked by failed self-checks: " + ", ".join(failed)
    if n < least:
        return f"{n} admissible items, at least {least} are needed"
    if constant:
        return "constant scores"
    if np.isnan(m) or abs(m) <= floor:
        return f"|m| is {abs(m):.3g}, not above the noise floor {floor:.3g}"
    return ""


def task_check(*, target_is_top1: bool, margin: float | None) -> str:
    """Why the model does not do what the prompt asks; empty where it does.

    Parameters
    ----------
    target_is_top1 : whether the target is the model's first choice.
    margin : target minus foil; None without a foil.
    """
    problems: list[str] = []
    if not target_is_top1:
        problems.append("the target is not the model's first choice")
    if margin is not None and not margin > 0:
        problems.append(f"the margin over the foil is {margin:.3g}, not positive")
    return "task check failed: " + " and ".join(problems) if problems else ""


def replacement_agreement(effects: Mapping[str, NDArray[np.floating]]) -> float:
    """Smallest tau-b between the effects of the same items under different replacements.

    Range -1 to 1; nan when some pair has no tau-b (constant effects, fewer than 3 items).

    Raises
    ------
    ValueError : fewer than 2 replacements.
    ShapeError : different items.
    """
    if len(effects) < 2:
        raise ValueError(f"replacements are {list(effects)}; expected at least 2 to compare")
    taus: list[float] = []
    for one, two in combinations(effects, 2):
        a, b = (np.asarray(effects[name], dtype=np.float64) for name in (one, two))
        if a.shape != b.shape:
            raise ShapeError(f"{one} has {a.shape} effects and {two} {b.shape}; expected the same items")
        both = np.isfinite(a) & np.isfinite(b)
        taus.append(tau_b(a[both], b[both]))
    return float(np.min(taus))


def _table(scores: NDArray[np.floating], admissible: NDArray[np.bool_] | None) -> tuple[Array, NDArray[np.bool_]]:
    """Sizes of the scores with 0 where not admissible, and the mask."""
    values = np.asarray(scores, dtype=np.float64)
    keep = np.ones(values.shape, dtype=bool) if admissible is None else np.asarray(admissible, dtype=bool)
    if values.ndim != 2 or keep.shape != values.shape:
        raise ShapeError(f"scores have shape {values.shape} and admissible {keep.shape}; expected both [row, item]")
    if np.isnan(values[keep]).any():
        raise ValueError("an admissible score is nan; make the item inadmissible or give it a score")
    return np.where(keep, np.abs(values), 0.0), keep


def _constant(size: Array, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[row] True where all admissible sizes are equal."""
    largest = np.where(keep, size, -np.inf).max(axis=1, initial=-np.inf)
    smallest = np.where(keep, size, np.inf).min(axis=1, initial=np.inf)
    return largest <= smallest


def row_verdicts(verdicts: Verdicts) -> list[dict[str, Any]]:
    """One verdict for each row (a head on a prompt, a prompt's tokens), and the counts behind it.

    `disagree` when most of the row's mass is on items without effect, or most of its effects (by size) are on items
    with a low claim; `agree` when neither is so and the items that are both high and present hold most of the mass and
    most of the effects; else `inconclusive`. Single disagreeing items do not decide: among many keys there nearly
    always is one. `undefined` and `replacement_dependent` rows stay what they are. Descriptive: a method that points
    at one of n items is right by chance once in n; whether it does better is `method_verdict`'s question.

    Returns
    -------
    For each row `row`, `verdict`, `reason`, the counts of its items, and `idle_mass`, `missed_effect`, `hit_mass`,
    `hit_effect`: the parts that decided, 0 to 1.
    """
    size = np.where(np.isfinite(verdicts.effect), np.abs(verdicts.effect), 0.0)
    total = size.sum(axis=1, keepdims=True)
    effect = np.divide(size, total, out=np.zeros(size.shape), where=total > 0)
    mass = np.where(np.isfinite(verdicts.share), verdicts.share, 0.0)
    hit = verdicts.where(HIGH, PRESENT)
    parts = {
        "idle_mass": (mass * verdicts.where(HIGH, ABSENT)).sum(axis=1),
        "missed_effect": (effect * verdicts.where(LOW, PRESENT)).sum(axis=1),
        "hit_mass": (mass * hit).sum(axis=1),
        "hit_effect": (effect * hit).sum(axis=1),
    }
    most = verdicts.thresholds.majority
    wrong = (parts["idle_mass"] > most) | (parts["missed_effect"] > most)
    right = (parts["hit_mass"] > most) & (parts["hit_effect"] > most)
    rows: list[dict[str, Any]] = []
    for row, items in enumerate(verdicts.verdict):
        found = Counter(items[items != ""].tolist())
        if verdicts.reason[row]:
            verdict = REPLACEMENT_DEPENDENT if found.get(REPLACEMENT_DEPENDENT) else UNDEFINED
        elif wrong[row]:
            verdict = DISAGREE
        else:
            verdict = AGREE if right[row] else INCONCLUSIVE
        counts = {name: found.get(name, 0) for name in VERDICTS}
        held = {name: float(part[row]) for name, part in parts.items()}
        rows.append({"row": row, "verdict": verdict, "reason": verdicts.reason[row], **counts, **held})
    return rows
