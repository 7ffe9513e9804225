"""The page of worked examples: attention small enough to check by hand, with sliders, in English and Chinese.

The page computes its numbers itself, by the formulas of `core.worked`, and holds a few of them against that module's
when it opens. It loads nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attndiag.core.worked import MASKS, WIDTHS, dot_product_spread, scorings, three_positions, two_items
from attndiag.errors import RunFolderError
from attndiag.explanations.masked_rows import fully_masked_rows
from attndiag.reports.html import asset, number, render, script_data

LANGUAGES = ("en", "zh")
_WORDS: dict[str, Any] = json.loads(asset("worked_examples.json"))
TITLES: dict[str, str] = _WORDS["titles"]
QUERIES, KEYS = 500, 16
REACH = 40  # of the histogram, in scores


@dataclass(frozen=True, eq=False)
class WorkedExamples:
    """The page as text; `save` writes it."""

    html: str
    lang: str

    def save(self, path: Path | str) -> Path:
        """Write the page.

        Raises
        ------
        RunFolderError : the file cannot be written.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise RunFolderError(
                f"{target} cannot be written: {error.strerror}; give another file with --output"
            ) from error
        return target

    def _repr_html_(self) -> str:
        from attndiag.reports.html import notebook_frame

        return notebook_frame(self.html, TITLES[self.lang])


def worked_examples(lang: str = "en") -> WorkedExamples:
    """The page of worked examples.

    Parameters
    ----------
    lang : `"en"` or `"zh"`, the language in which it opens; the page has a switch.

    Raises
    ------
    ValueError : another language.
    """
    if lang not in LANGUAGES:
        raise ValueError(f"lang is {lang!r}; expected one of {', '.join(LANGUAGES)}")
    spreads = [dot_product_spread(width, queries=QUERIES, keys=KEYS) for width in WIDTHS]
    known = [{"q": q, **asdict(two_items(q))} for q in ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0))]
    data = {
        "titles": TITLES,
        "spreads": [_drawn(asdict(spread)) for spread in spreads],
        "known": [{name: each[name] for name in ("q", "weights", "output")} for each in known],
        "three": {mask: three_positions(mask) for mask in MASKS},
        "scorings": scorings(1.0),
    }
    page = render(
        "worked_examples.html.j2",
        lang=lang,
        titles=TITLES,
        base_css=asset("base.css"),
        own_css=asset("worked_examples.css"),
        own_js=asset("worked_examples.js"),
        spreads=spreads,
        queries=QUERIES,
        keys=KEYS,
        masked_rows=_masked_rows(),
        data=script_data(data),
    )
    return WorkedExamples(page, lang)


def _drawn(spread: dict[str, Any]) -> dict[str, Any]:
    """What the histogram draws: bins of width 1 between -REACH and REACH, the rest in the outermost two."""
    edges = spread.pop("edges")
    for name in ("counts", "scaled_counts"):
        bins = [0] * (2 * REACH)
        for left, count in zip(edges, spread[name], strict=False):
            bins[min(max(round(left) + REACH, 0), 2 * REACH - 1)] += count
        spread[name] = bins
    return spread


def _masked_rows() -> list[dict[str, str]]:
    """The rows in both languages; names of functions are the same in both."""
    chinese: dict[str, str] = _WORDS["chinese"]
    return [
        {
            "en": row.implementation,
            "zh": chinese.get(row.implementation, row.implementation),
            "output": "nan" if row.output != row.output else number(row.output, 4),
            "answer_en": row.answer,
            "answer_zh": chinese[row.answer],
        }
        for row in fully_masked_rows()
    ]
