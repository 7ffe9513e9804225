"""The report on the trained default model: the known figures come out of the report's own tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from attndiag.reports.html import BUDGET
from attndiag.reports.page import Report, report
from attndiag.reports.prompt_view import view_prompt
from attndiag.runs.folder import RunFolder
from attndiag.runs.prompt_files import shipped_prompts

if TYPE_CHECKING:
    from attndiag.models.load import LoadedModel

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def made(default_lm: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The first prompt of each of four clusters, and one more of the first."""
    prompts = {str(prompt.id): prompt for prompt in shipped_prompts()}
    chosen = [prompts[name] for name in ("ioi-1", "ioi-2", "facts-1", "code-1", "induction-1")]
    return report(tmp_path_factory.mktemp("real") / "out", lm=default_lm, prompts=chosen)


@pytest.fixture(scope="module")
def heads(made: Report) -> pd.DataFrame:
    table = pd.read_parquet(made.folder / "tables" / "heads.parquet")
    return table[table.prompt == "ioi-1"]


def mean(heads: pd.DataFrame, measure: str, layer: int | None = None) -> float:
    rows = heads[heads.measure == measure]
    if layer is not None:
        rows = rows[rows.layer == layer]
    assert len(rows) == (1 if layer is not None else 30) * (9 if rows["head"].notna().all() else 1)
    return float(rows.value.mean())


def test_the_known_figures_of_the_named_prompt(heads: pd.DataFrame) -> None:
    assert mean(heads, "sink_weight") == pytest.approx(0.548, abs=5e-4)
    assert mean(heads, "sink_head_contribution_share") == pytest.approx(0.392, abs=5e-4)
    assert mean(heads, "sink_contribution_share") == pytest.approx(0.29, abs=5e-3)
    assert mean(heads, "sink_weight", layer=20) == pytest.approx(0.86, abs=5e-3)
    assert mean(heads, "sink_contribution_share", layer=20) == pytest.approx(0.36, abs=5e-3)
    assert mean(heads, "top_key_differs") == pytest.approx(0.28, abs=5e-3)


def test_the_known_task_of_the_named_prompt(made: Report) -> None:
    row = made.summary.prompts.set_index("prompt").loc["ioi-1"]
    assert (row.top1, row.n_tokens, row.task_ok) == (" Mary", 14, True)
    # the float32 weights that are shipped; rounded to bfloat16 first they give .924 and 6.137
    assert row.target_prob == pytest.approx(0.9229, abs=2e-4)
    assert row.logit_diff == pytest.approx(6.120, abs=2e-3)


def test_everything_is_certified_and_the_page_says_what_the_tables_hold(made: Report) -> None:
    assert made.passed
    assert str(made.summary.coverage) == "100 % certified (150 of 150 calls)"
    page = made.to_html()
    assert len(page.encode()) < BUDGET
    weight = made.summary.overall("sink_weight")
    table = pd.read_parquet(made.folder / "tables" / "heads.parquet")
    rows = table[table.measure == "sink_weight"]
    assert weight == pytest.approx(rows.groupby("prompt").value.mean().mean())
    assert f"position 0 takes {100 * weight:.1f}\u00a0% of the attention weight but only" in page
    assert "all 5 checked prompts right" in page


def test_the_csv_tables_hold_the_same_numbers(made: Report) -> None:
    folder = RunFolder.open(made.folder)
    for name in ("prompts", "heads", "checks", "disagreements"):
        plain = made.folder / "tables" / f"{name}.csv"
        from_csv = pd.read_csv(plain if plain.is_file() else plain.with_suffix(".csv.gz"))
        expected = folder.read(name)
        assert len(from_csv) == len(expected)
        numbers = expected.select_dtypes("number").columns
        pd.testing.assert_frame_equal(from_csv[numbers], expected[numbers], check_dtype=False, rtol=1e-12)


def test_the_view_of_the_named_prompt(default_lm: LoadedModel, tmp_path: Path) -> None:
    view = view_prompt(default_lm, shipped_prompts()[0])
    assert len(view.layers) == 30 and all(layer.certified for layer in view.layers)
    layer = view.layers[20]
    assert layer.weight[:, 1:, 0].mean() == pytest.approx(0.86, abs=5e-3)
    assert layer.together[1:, 0].mean() == pytest.approx(0.36, abs=5e-3)
    assert view.save(tmp_path / "view.html").stat().st_size < 1_000_000
