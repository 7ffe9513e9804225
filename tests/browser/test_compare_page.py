"""The page of a comparison in a real browser: silent, offline, readable in every dress, usable by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import attndiag
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.reports.compared import Compared, compare

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> LoadedModel:
    return attndiag.load(tiny_folder, device="cpu")


@pytest.fixture(scope="module")
def compared(lm: LoadedModel) -> Compared:
    prompts = [
        Prompt("When Mary and John went to the store, John gave a drink to", id="ioi"),
        Prompt("<script>document.title='owned'</script> & \u202eabc", id="<img src=x onerror=alert(2)>"),
    ]
    return compare(
        lm, prompts, ["weight", "input_x_gradient"], replacements=["uniform:draws=2", "delete"], metrics=["effect_tau"]
    )


@pytest.fixture(scope="module")
def file(compared: Compared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared.save(tmp_path_factory.mktemp("compared") / "compare.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_works_offline_in_every_dress(file: Path, open_page: Any, scheme: str, width: int) -> None:
    page = open_page(file, color_scheme=scheme, viewport={"width": width, "height": 800})
    assert page.title().startswith("Methods compared: ")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("img").count() == 0
    for drawing in page.locator("figure svg").all():
        box = drawing.bounding_box()
        assert box and box["width"] > 200 and box["height"] > 60
        assert drawing.get_attribute("aria-label")
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1


def test_heads_are_sorted_and_cases_unfolded_by_keyboard(file: Path, open_page: Any) -> None:
    page = open_page(file)
    table = page.locator("section[aria-labelledby=c-heads] table")
    table.locator("th button", has_text="largest of them").press("Enter")
    column = table.locator("thead th", has_text="largest of them")
    place = column.evaluate("head => head.cellIndex")
    shown = [
        float(text.replace("\u2212", "-"))
        for text in table.locator(f"tbody tr td:nth-child({place + 1})").all_inner_texts()
    ]
    assert shown == sorted(shown, reverse=True) and len(shown) == 8
    every = page.locator("section[aria-labelledby=c-cases] details")
    was = every.evaluate_all("all => all.map(one => one.open)")
    place = was.index(False)
    every.nth(place).locator("summary").press("Enter")
    assert every.evaluate_all("all => all.map(one => one.open)") == [*was[:place], True, *was[place + 1 :]]


def test_captions_stay_where_a_wide_table_is_scrolled(file: Path, open_page: Any) -> None:
    page = open_page(file, viewport={"width": 400, "height": 800})
    found = page.locator(".scroll:has(caption), .tall:has(caption)").evaluate_all(
        """boxes => boxes.filter(box => box.offsetParent && box.scrollWidth > box.clientWidth + 40).map(box => {
            const caption = box.querySelector("caption"), cell = box.querySelector("tbody td");
            const where = thing => thing.getBoundingClientRect().left;
            const before = [where(caption), where(cell)];
            box.scrollLeft = 40;
            return [where(caption) - before[0], where(cell) - before[1], caption.getBoundingClientRect().width,
                box.clientWidth];
        })"""
    )
    assert len(found) >= 3
    for caption_moved, cell_moved, width, seen in found:
        # no more than the padding of the box around it
        assert abs(caption_moved) <= 8 and cell_moved == pytest.approx(-40, abs=1) and width <= seen + 1


def test_it_prints_with_everything_unfolded(file: Path, open_page: Any, tmp_path: Path) -> None:
    page = open_page(file, color_scheme="dark")
    assert page.pdf(path=tmp_path / "page.pdf", format="A4").startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper')").strip() == "#fff"


def test_two_comparisons_in_one_notebook_do_not_clash(compared: Compared, open_page: Any, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><link rel=icon href='data:,'>{compared._repr_html_()}{compared._repr_html_()}")
    page = open_page(notebook)
    first, second = page.frames[1:]
    first.locator("#theme").click()
    dark = "document.documentElement.dataset.theme ?? ''"
    assert (first.evaluate(dark), second.evaluate(dark)) == ("dark", "")
