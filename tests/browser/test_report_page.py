"""The pages in a real browser with the network cut: nothing is requested, nothing fails, everything can be used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import attndiag
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.reports.page import Report, report

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
NASTY = "<script>document.title='owned'</script> <img src=x onerror=alert(1)> & \u202eabc \u05d0\u05d1 \x07\n\"quoted\""


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> LoadedModel:
    return attndiag.load(tiny_folder, device="cpu")


@pytest.fixture(scope="module")
def made(lm: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Report:
    prompts = [
        Prompt("When Mary and John went to the store, John gave a drink to", id="ioi", target=" Mary", foil=" John"),
        Prompt(NASTY, id="<img src=x onerror=alert(2)>", cluster="<script>alert(3)</script>"),
    ]
    return report(tmp_path_factory.mktemp("pages") / "out", lm=lm, prompts=prompts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1200])
def test_the_report_works_offline_in_every_dress(
    made: Report, open_page: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    page = open_page(made.page, color_scheme=scheme, viewport={"width": width, "height": 800})
    assert page.title().startswith("Attention weight against contribution")
    # nothing sticks out to the side
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # every drawing has a size, and a name for those who cannot see it
    for drawing in page.locator("figure svg").all():
        box = drawing.bounding_box()
        assert box and box["width"] > 200 and box["height"] > 100
        assert drawing.get_attribute("aria-label")
    assert contrast(page, "h1") > 7
    assert contrast(page, "figcaption") > 4.5
    assert contrast(page, ".tiles dt") > 4.5
    picture = page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert len(picture) > 20_000


def contrast(page: Page, selector: str) -> float:
    """WCAG contrast of an element's text against the page."""
    colours = page.evaluate(
        "(s) => [getComputedStyle(document.querySelector(s)).color, getComputedStyle(document.body).backgroundColor]",
        selector,
    )

    def luminance(colour: str) -> float:
        parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(colour) for colour in colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_prompts_are_shown_as_text(made: Report, open_page: Any) -> None:
    page = open_page(made.page)
    assert page.locator("img").count() == 0
    assert "<img src=x onerror=alert(2)>" in page.locator("main").inner_text()
    assert "\\u202e" in page.locator("main").inner_text() or page.locator(".strip").count() > 0


def test_tables_are_sorted_by_keyboard(made: Report, open_page: Any) -> None:
    page = open_page(made.page)
    table = page.locator("section[aria-labelledby=heads] table")
    button = table.locator("th button", has_text="weight on position 0")
    button.focus()
    page.keyboard.press("Enter")
    values = [float(cell.replace("\u2212", "-")) for cell in table.locator("tbody td:nth-child(2)").all_inner_texts()]
    assert values == sorted(values, reverse=True) and len(set(values)) > 3
    assert table.locator("th[aria-sort=descending]").inner_text().startswith("weight on position 0")
    page.keyboard.press("Enter")
    values = [float(cell.replace("\u2212", "-")) for cell in table.locator("tbody td:nth-child(2)").all_inner_texts()]
    assert values == sorted(values)
    # negative numbers carry a minus sign that a plain Number() would not read
    table.locator("th button", has_text="difference").press("Enter")
    gaps = [float(cell.replace("\u2212", "-")) for cell in table.locator("tbody td:nth-child(4)").all_inner_texts()]
    assert gaps == sorted(gaps, reverse=True) and min(gaps) < 0


def test_the_colours_can_be_switched_and_every_link_leads_somewhere(made: Report, open_page: Any) -> None:
    page = open_page(made.page, color_scheme="light")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.locator("#theme").inner_text() == "light"
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1


def test_the_report_prints(made: Report, open_page: Any, tmp_path: Path) -> None:
    page = open_page(made.page, color_scheme="dark")
    printed = page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert printed.startswith(b"%PDF") and len(printed) > 30_000
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper')").strip() == "#fff"
    assert not page.locator("#theme").is_visible()
