"""The numbers of the worked examples, to 4 decimals, and the page that is written with them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attndiag.cli import app
from attndiag.core.worked import (
    MASKS,
    WIDTHS,
    dot_product_spread,
    scorings,
    shared_heads,
    three_positions,
    two_items,
)
from attndiag.errors import RunFolderError
from attndiag.reports.worked_examples import TITLES, worked_examples


@pytest.mark.parametrize(
    ("q", "weights", "output"),
    [
        ((1.0, 0.0), (0.6698, 0.3302), (1.3395, 1.3210)),
        ((0.0, 0.0), (0.5, 0.5), (1.0, 2.0)),
        ((0.0, 1.0), (0.3302, 0.6698), (0.6605, 2.6790)),
    ],
)
def test_worked_numbers(q, weights, output):
    found = two_items(q)
    assert found.weights == pytest.approx(weights, abs=5e-5)
    assert found.output == pytest.approx(output, abs=5e-5)
    assert found.scores == pytest.approx([x / math.sqrt(2) for x in q])
    assert found.contributions == pytest.approx([found.weights[0] * 2, found.weights[1] * 4])


def test_three_positions():
    assert three_positions() == (
        (1.0, 0.0, 0.0),
        (0.5, 0.5, 0.0),
        pytest.approx((1 / 3, 1 / 3, 1 / 3)),
    )
    assert three_positions("hidden_diagonal")[0] == (0.0, 0.0, 0.0)
    assert three_positions("one_step_leak")[0] == (0.5, 0.5, 0.0)
    assert three_positions("window_2")[2] == (0.0, 0.5, 0.5)
    e = math.e
    assert three_positions("causal", 1.0)[1] == pytest.approx((1 / (1 + e), e / (1 + e), 0.0))
    with pytest.raises(ValueError, match="mask is 'casual'; expected one of causal"):
        three_positions("casual")


def test_temperature_copies_and_masks():
    even = two_items((3.0, 0.0), temperature=1e9)
    assert even.weights == pytest.approx((0.5, 0.5))
    # copies of one key share the weight that exp(score) times their number earns
    p = math.exp(1 / math.sqrt(2))
    assert two_items((1.0, 0.0), copies=4).weights == pytest.approx((4 * p / (4 * p + 1), 1 / (4 * p + 1)))
    assert two_items((1.0, 0.0), visible=(False, True)).weights == (0.0, 1.0)
    empty = two_items((1.0, 0.0), visible=(False, False))
    assert (empty.weights, empty.output) == ((0.0, 0.0), (0.0, 0.0))
    assert empty.scores == (-math.inf, -math.inf)
    sink = two_items((3.0, 0.0), ((0.1, 0.1), (0.0, 4.0)))
    assert sink.weights[0] > 0.89
    assert sink.contributions[0] < sink.contributions[1]
    with pytest.raises(ValueError, match="temperature is 0"):
        two_items((1.0, 0.0), temperature=0)
    with pytest.raises(ValueError, match="copies is 0"):
        two_items((1.0, 0.0), copies=0)


@pytest.mark.parametrize("d_k", WIDTHS)
def test_the_variance_of_a_dot_product_is_its_width(d_k):
    found = dot_product_spread(d_k)
    assert found.variance == pytest.approx(d_k, rel=0.06)
    assert found.scaled_variance == pytest.approx(1.0, rel=0.06)
    assert found.scaled_variance == pytest.approx(found.variance / d_k)
    assert sum(found.counts) == sum(found.scaled_counts) == found.draws == 8000
    assert found.largest > found.scaled_largest
    assert found == dot_product_spread(d_k)
    assert found.root == pytest.approx(found.sd, rel=0.03)


def test_wider_heads_freeze_without_the_division():
    largest = [dot_product_spread(width).largest for width in WIDTHS]
    assert largest == sorted(largest)
    assert dot_product_spread(512).frozen > 0.6
    assert dot_product_spread(512).scaled_frozen == 0
    with pytest.raises(ValueError, match="d_k is 0"):
        dot_product_spread(0)


def test_scores_side_by_side():
    one = scorings(1.0)
    assert one["scaled_dot"][1] == pytest.approx((0.6698, 0.3302), abs=5e-5)
    assert one["additive"][0] == pytest.approx((-2 * math.tanh(2), -4 * math.tanh(1)))
    far = scorings(100.0)
    assert far["dot"][1][0] == pytest.approx(1.0)
    # bounded by the sum of |v| = 4: it never decides completely
    assert far["additive"][1][0] == pytest.approx(1 / (1 + math.exp(-2 * math.tanh(1))))
    assert far["general"][1] == pytest.approx((0.0, 1.0))


def test_shared_heads():
    assert shared_heads(8, 2) == ((0, 0, 0, 0, 1, 1, 1, 1), 512)
    assert shared_heads(8, 8)[0] == tuple(range(8))
    assert shared_heads(9, 3)[0] == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    with pytest.raises(ValueError, match="8 heads cannot share 3"):
        shared_heads(8, 3)


@pytest.fixture(scope="module")
def page() -> str:
    return worked_examples().html


def test_the_page_loads_nothing(page):
    assert "default-src 'none'" in page
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)", page)
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert len(page) < 120_000


def test_the_page_carries_the_reference_numbers(page):
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))
    assert [each["q"] for each in data["known"]] == [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert data["known"][0]["weights"] == pytest.approx([0.6698, 0.3302], abs=5e-5)
    assert set(data["three"]) == set(MASKS)
    for spread, width in zip(data["spreads"], WIDTHS, strict=True):
        assert spread["d_k"] == width
        assert sum(spread["counts"]) == sum(spread["scaled_counts"]) == spread["draws"]
        assert len(spread["counts"]) == 80


def test_every_english_text_has_a_chinese_one(page):
    english = re.findall(r'<span class="en" lang="en">', page)
    chinese = re.findall(r'<span class="zh" lang="zh-CN">(.*?)</span>', page, re.DOTALL)
    assert len(english) == len(chinese) > 60
    assert len(re.findall("data-en=", page)) == len(re.findall("data-zh=", page)) > 20


def test_languages():
    chinese = worked_examples("zh")
    assert '<html lang="zh-CN">' in chinese.html
    assert f"<title>{TITLES['zh']}</title>" in chinese.html
    assert "srcdoc" in chinese._repr_html_()
    with pytest.raises(ValueError, match="lang is 'de'; expected one of en, zh"):
        worked_examples("de")


def test_the_command(tmp_path: Path, monkeypatch):
    run = CliRunner()
    target = tmp_path / "deep" / "page.html"
    done = run.invoke(app, ["learn", "-o", str(target), "--lang", "zh"])
    assert (done.exit_code, done.stdout.strip()) == (0, str(target))
    assert 'lang="zh-CN"' in target.read_text(encoding="utf-8")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or False)
    done = run.invoke(app, ["learn", "-o", str(target), "--open", "--json"])
    assert done.exit_code == 0
    assert opened == [target.resolve().as_uri()]
    assert "no browser could be started" in done.stderr
    assert json.loads(done.stdout)["lang"] == "en"


def test_misuse_of_the_command(tmp_path: Path):
    run = CliRunner()
    assert "expected a file ending in .html" in run.invoke(app, ["learn", "-o", str(tmp_path / "x.pdf")]).output
    assert run.invoke(app, ["learn", "--lang", "de", "-o", str(tmp_path / "x.html")]).exit_code == 2
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run.invoke(app, ["learn", "-o", str(blocked / "x.html")])
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
    with pytest.raises(RunFolderError, match="--output"):
        worked_examples().save(blocked / "x.html")
