"""Scores that another tool made, from a file: one row a token or a span of characters.

Columns `prompt` (its id), `method` (what to call them), `score`, and either `position` (of the token) or `start` and
`end` (characters of the text). A .jsonl line may also hold a whole prompt: `{"prompt", "method", "scores": [...]}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndiag.errors import PromptError

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.prompts import Prompt

EXPECTED = "columns prompt, method, score and either position, or start and end; or, in .jsonl, prompt, method, scores"


def read_own_scores(path: Path, prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Method -> for each prompt a list of scores by position, or of spans (start, end, score).

    Raises
    ------
    PromptError : the file cannot be read, lacks a column, has gaps, or has no scores for one of the prompts.
    """
    frame = _frame(path)
    if "scores" in frame:
        _require(frame, path, ("prompt", "method", "scores"))
        found = {(str(r["method"]), str(r["prompt"])): list(r["scores"]) for r in frame.to_dict("records")}
    else:
        spans = {"start", "end"} <= set(frame.columns)
        _require(frame, path, ("prompt", "method", "score", *(("start", "end") if spans else ("position",))))
        found = {
            (str(method), str(prompt)): _spans(rows) if spans else _positions(rows, path, str(method), str(prompt))
            for (method, prompt), rows in frame.groupby(["method", "prompt"], sort=False)  # type: ignore[misc]
        }
    methods = list(dict.fromkeys(method for method, _ in found))
    for method in methods:
        missing = [str(one.id) for one in prompts if (method, str(one.id)) not in found]
        if missing:
            raise PromptError(
                f"{path} has no scores of {method!r} for prompt {missing[0]!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + "; give them for every prompt, or take --limit or --id"
            )
    return {method: [found[method, str(one.id)] for one in prompts] for method in methods}


def _frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    readers = {
        ".csv": pd.read_csv,
        ".parquet": pd.read_parquet,
        ".jsonl": lambda file: pd.read_json(file, lines=True),
    }
    if path.suffix not in readers:
        raise PromptError(f"{path} ends in {path.suffix!r}; expected .jsonl, .csv or .parquet with {EXPECTED}")
    try:
        return readers[path.suffix](path)
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} cannot be read: {str(error).splitlines()[0]}; expected {EXPECTED}") from error


def _require(frame: pd.DataFrame, path: Path, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in frame]
    if missing or frame.empty:
        what = f"lacks {', '.join(missing)}" if missing else "holds no row"
        raise PromptError(f"{path} {what}; expected {EXPECTED}")


def _spans(rows: pd.DataFrame) -> list[tuple[int, int, float]]:
    return [(int(r["start"]), int(r["end"]), float(r["score"])) for r in rows.to_dict("records")]


def _positions(rows: pd.DataFrame, path: Path, method: str, prompt: str) -> list[float]:
    ordered = rows.sort_values("position")
    if ordered["position"].tolist() != list(range(len(ordered))):
        raise PromptError(
            f"{path}: the positions of {method!r} on prompt {prompt!r} are {ordered['position'].tolist()[:8]}; "
            f"expected 0 to {len(ordered) - 1}, each once (an empty score is undefined)"
        )
    return [float(score) for score in ordered["score"]]
