"""The page of worked examples in a real browser, offline: its numbers are Python's, in both languages."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attndiag.core.worked import MASKS, WIDTHS, dot_product_spread, scorings, shared_heads, three_positions, two_items
from attndiag.reports.worked_examples import TITLES, worked_examples

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium"),
]
SETTINGS = [
    {},
    {"q1": 0.0},
    {"q1": 0.0, "q2": 1.0},
    {"q1": -2.3, "q2": 1.7, "temperature": 0.4, "v11": -1.5, "v12": 3.2, "v21": 0.7},
    {"q1": 2.0, "q2": 1.0, "copies": 5, "temperature": 2.5, "v22": -3.0},
    {"q1": 3.0, "see1": False},
    {"see1": False, "see2": False},
]
START = {"q1": 1.0, "q2": 0.0, "temperature": 1.0, "copies": 1, "v11": 2.0, "v12": 0.0, "v21": 0.0, "v22": 4.0}
TICKS = {"see1": True, "see2": True}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worked_examples().save(tmp_path_factory.mktemp("learn") / "page.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield instance
        instance.close()


@pytest.fixture
def open_page(browser: Browser, file: Path) -> Iterator[Any]:
    """Opens the page and, at the end, asserts that it asked for nothing and complained about nothing."""
    contexts, asked, complaints = [], [], []

    def opened(**options: Any) -> Page:
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [url for url in asked if url != file.as_uri() and not url.startswith("data:")] == []
    assert complaints == []


def value(page: Page, name: str) -> Any:
    """The number or vector behind a cell, at full precision; `-inf` as None."""
    found = json.loads(page.locator(f"#{name}").get_attribute("data-value"))
    return None if found == "-inf" else found


def shown(page: Page, name: str) -> list[float]:
    """The numbers that a reader sees in a cell."""
    text = page.locator(f"#{name}").inner_text().replace("\u2212", "-")
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_two_items_are_what_python_says(open_page: Any, language: str) -> None:
    page = open_page()
    if language == "zh":
        page.click("#language")
    for changed in SETTINGS:
        numbers, ticks = {**START, **changed}, {**TICKS, **changed}
        for name in START:
            page.fill(f"#{name}", str(numbers[name]))
        for name in TICKS:
            page.set_checked(f"#{name}", bool(ticks[name]))
        expected = two_items(
            (numbers["q1"], numbers["q2"]),
            ((numbers["v11"], numbers["v12"]), (numbers["v21"], numbers["v22"])),
            temperature=numbers["temperature"],
            copies=int(numbers["copies"]),
            visible=(bool(ticks["see1"]), bool(ticks["see2"])),
        )
        for item in (1, 2):
            for cell, numbers_of in (
                ("dot", expected.dots),
                ("weight", expected.weights),
                ("part", expected.parts),
                ("contribution", expected.contributions),
            ):
                assert value(page, f"{cell}{item}") == pytest.approx(numbers_of[item - 1], abs=1e-9)
                seen = shown(page, f"{cell}{item}")
                assert (seen if cell == "part" else seen[0]) == pytest.approx(numbers_of[item - 1], abs=5e-4)
            score = expected.scores[item - 1]
            assert value(page, f"score{item}") == (None if score == -float("inf") else pytest.approx(score, abs=1e-9))
        assert value(page, "output") == pytest.approx(expected.output, abs=1e-9)
        assert shown(page, "output") == pytest.approx(expected.output, abs=5e-5 + 1e-9)
        said = page.locator("#two-said").inner_text()
        assert bool(re.search(r"[\u4e00-\u9fff]", said)) == (language == "zh")


def test_worked_numbers_to_four_decimals(open_page: Any) -> None:
    page = open_page()
    for preset, weights, output in (
        ("first", (0.6698, 0.3302), [1.3395, 1.3210]),
        ("zero", (0.5, 0.5), [1.0, 2.0]),
        ("second", (0.3302, 0.6698), [0.6605, 2.6790]),
    ):
        page.click(f"[data-preset={preset}]")
        assert page.locator(f"[data-preset={preset}]").get_attribute("aria-pressed") == "true"
        assert (shown(page, "weight1")[0], shown(page, "weight2")[0]) == weights
        assert shown(page, "output") == output
    page.click("[data-preset=sink]")
    assert "yet item 2 writes more" in page.locator("#two-said").inner_text()
    assert float(page.locator("#check").get_attribute("data-worst")) < 1e-12


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_other_examples_are_what_python_says(open_page: Any, language: str) -> None:
    page = open_page()
    if language == "zh":
        page.click("#language")
    for mask in MASKS:
        for own in (0.0, 1.5, -2.0):
            page.check(f"input[name=mask][value={mask}]")
            page.fill("#own", str(own))
            for i, row in enumerate(three_positions(mask, own), 1):
                for j, weight in enumerate(row, 1):
                    assert value(page, f"a{i}{j}") == pytest.approx(weight, abs=1e-9)
                    assert shown(page, f"a{i}{j}")[0] == pytest.approx(weight, abs=5e-4 + 1e-9)
    for index, width in enumerate(WIDTHS):
        page.check(f"input[name=width][value='{index}']")
        spread = dot_product_spread(width)
        assert value(page, "scale-said") == pytest.approx(spread.variance)
        assert f"{spread.scaled_variance:.3f}" in page.locator("#scale-said").inner_text()
        assert page.locator("#histogram rect").count() > 10
    for kv_heads in (8, 4, 2, 1):
        page.check(f"input[name=kv][value='{kv_heads}']")
        heads, size = shared_heads(8, kv_heads)
        assert value(page, "shared-said") == {"map": list(heads), "bytes": size}
        assert f"{size:,}" in page.locator("#shared-said").inner_text()
    for length in (0.0, 1.0, 3.7, 8.0):
        page.fill("#length", str(length))
        for name, (scores, weights) in scorings(length).items():
            found = [value(page, f"{name}-{what}") for what in ("s1", "s2", "a1", "a2")]
            assert found == pytest.approx([*scores, *weights], abs=1e-9)
            assert shown(page, f"{name}-a1")[0] == pytest.approx(weights[0], abs=5e-5 + 1e-9)


def test_the_switch_changes_every_visible_text(open_page: Any) -> None:
    page = open_page(locale="en-GB")
    assert page.locator("html").get_attribute("lang") == "en"
    labels = page.locator("svg[role=img]").evaluate_all("all => all.map((svg) => svg.getAttribute('aria-label'))")
    assert not re.findall(r"[\u4e00-\u9fff]", page.locator("body").inner_text().replace("中文", ""))
    assert not any(re.search(r"[\u4e00-\u9fff]", label) for label in labels)
    page.click("#language")
    assert page.locator("html").get_attribute("lang") == "zh-CN"
    assert page.title() == TITLES["zh"]
    # names of people, functions and formulas stay; no other English word may
    text = page.locator("body").inner_text()
    for kept in (
        "attndiag", "English", "softmax", "transformer", "Bahdanau", "Vaswani", "Luong", "Kobayashi", "Ainslie", "exp",
        "eager", "tanh", "scaled_dot_product_attention", "flex_attention", "nn.MultiheadAttention", "key_padding_mask",
        "nan", "Var", "MiB", "JavaScript", "sii", "Hkv",
    ):  # fmt: skip
        text = text.replace(kept, "")
    assert re.findall(r"[A-Za-z]{3,}", text) == []
    named = page.locator("[data-zh]").evaluate_all("all => all.map((node) => node.getAttribute('aria-label'))")
    drawn = page.locator("svg[role=img]").evaluate_all("all => all.map((svg) => svg.getAttribute('aria-label'))")
    assert all(re.search(r"[\u4e00-\u9fff]", label) for label in [*named, *drawn])
    page.click("#language")
    assert page.title() == TITLES["en"]


def test_the_keyboard_is_enough(open_page: Any) -> None:
    page = open_page()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.dataset.preset"))
    assert {"language", "theme", "q1", "v22", "see2", "sink"} <= set(reached)
    page.focus("#q1")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#q1") == "1.1"
    assert value(page, "weight1") == pytest.approx(two_items((1.1, 0.0)).weights[0])
    assert page.locator("#q1").get_attribute("aria-valuetext") == "1.1"
    page.focus("#see1")
    page.keyboard.press("Space")
    assert value(page, "weight1") == 0
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, button, svg, [role=region]')].filter((node) => "
        "!(node.getAttribute('aria-label') || node.labels?.length || node.textContent.trim())).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_nothing_sticks_out(open_page: Any, scheme: str, width: int, language: str) -> None:
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    if language == "zh":
        page.click("#language")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    clipped = page.evaluate(
        "[...document.querySelectorAll('.scroll, .panel, .formula, .lab')]"
        ".filter((node) => node.scrollWidth > node.clientWidth + 1).length"
    )
    assert clipped == 0
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) > 600) == (scheme == "light")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != paper


def test_print(open_page: Any) -> None:
    page = open_page(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#language").is_visible()
    assert len(page.pdf()) > 20_000


def test_contrast_of_coloured_words(open_page: Any) -> None:
    """WCAG AA: 4.5 for text, in both dresses."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        for selector in ("b.one", "b.two", "#bar-w1-shown", "#bar-c1-shown", ".note", "#check", "nav a"):
            text, paper = page.evaluate(
                "s => [document.querySelector(s), document.body].map((node) => getComputedStyle(node))"
                ".map((style, n) => n ? style.backgroundColor : style.color)",
                selector,
            )
            bright, dim = sorted((luminance(text), luminance(paper)), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (scheme, selector, text)
