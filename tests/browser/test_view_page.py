"""The view in a real browser: numbers, keyboard, sinks, search, files, long texts; nothing requested, nothing said."""

from __future__ import annotations

import csv
import io
import os
import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from playwright.sync_api import expect

import attndiag
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.reports.html import BUDGET
from attndiag.reports.prompt_view import PromptView, view_prompt

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
NASTY = "<script>document.title='owned'</script> <img src=x onerror=alert(1)> & \u202eabc \u05d0\u05d1 \x07\n\"quoted\""
TEXT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> LoadedModel:
    return attndiag.load(tiny_folder, device="cpu")


@pytest.fixture(scope="module")
def view(lm: LoadedModel) -> PromptView:
    return view_prompt(lm, Prompt(TEXT, id="ioi"), exact_effects=True)


@pytest.fixture
def opened(view: PromptView, open_page: Any, tmp_path: Path) -> Page:
    page = open_page(view.save(tmp_path / "view.html"), viewport={"width": 1200, "height": 900})
    page.wait_for_selector("html[data-ready=yes]")
    return page


def numbers(said: str) -> list[float]:
    """Weight, share and effect out of a sentence of the page."""
    found = re.search(r"weight (\S+?), (\S+) of what.*?, effect (\S+) ", said)
    assert found is not None, said
    return [float(part.replace("\u2212", "-")) for part in found.groups()]


def choose(page: Page, layer: int, head: int) -> None:
    page.locator("#layer").select_option(str(layer))
    page.locator("#head").select_option(str(head))
    # the page forbids evaluating strings, so nothing can be polled that way
    expect(page.locator("#where")).to_contain_text(f"L{layer}H{head},")


def test_hover_values_equal_the_measured_numbers_to_three_places(opened: Page, view: PromptView) -> None:
    n = len(view.tokens)
    for layer, head in ((0, 1), (1, 2)):
        choose(opened, layer, head)
        maps, effects = view.layers[layer], view.effects_of(layer)
        assert maps.written is not None and effects is not None
        box = opened.locator("#map-weight")
        box.scroll_into_view_if_needed()
        place = box.bounding_box()
        assert place is not None
        for query, key in ((n - 1, 0), (n - 1, 3), (7, 2), (5, 5)):
            opened.mouse.move(
                place["x"] + (key + 0.5) * place["width"] / n, place["y"] + (query + 0.5) * place["height"] / n
            )
            said = opened.locator("#where").inner_text()
            assert f"({query}) reads" in said and f"({key}): weight" in said
            weight, written, effect = numbers(said)
            assert weight == round(float(maps.weight[head, query, key]), 3)
            assert written == round(float(maps.written[head, query, key]), 3)
            assert effect == pytest.approx(effects[head, query, key], abs=1e-3)
            assert said.endswith("(exact)" if query == n - 1 else "(first order)")


def test_maps_are_drawn_cell_by_cell_and_the_future_is_blank(opened: Page, view: PromptView) -> None:
    n = len(view.tokens)
    assert opened.locator("#row li").count() == n
    for name in ("weight", "written", "gap", "effect"):
        size = opened.evaluate(f"(({{width, height}}) => [width, height])(document.getElementById('map-{name}'))")
        assert size == [n, n]
    read = f"[...document.getElementById('map-weight').getContext('2d').getImageData(0, 0, {n}, {n}).data]"
    alpha = opened.evaluate(read)[3::4]
    assert alpha == [255 if key <= query else 0 for query in range(n) for key in range(n)]


def test_the_keyboard_reaches_methods_grid_and_maps(opened: Page, view: PromptView) -> None:
    opened.locator("#switch input").first.focus()
    opened.keyboard.press("ArrowRight")
    assert opened.locator("#switch input").nth(1).is_checked()
    first = view.rows[0]
    opened.locator("#row button").nth(2).focus()
    assert f"{first.name} {first.values[2]:.3f} {first.unit}" in opened.locator("#where").inner_text()
    opened.locator("#switch input").first.focus()
    opened.keyboard.press("Space")
    opened.locator("#grid").focus()
    for press in ("ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowLeft"):
        opened.keyboard.press(press)
    opened.keyboard.press("ArrowRight")
    said = opened.locator("#grid-where").inner_text()
    stat = view.layers[0].differences[1]
    assert said.startswith(f"L0H1: weight against contribution {stat:.3f}")
    opened.keyboard.press("Enter")
    expect(opened.locator("#head")).to_have_value("1")
    assert opened.locator("#layer").input_value() == "0"
    opened.locator("#map-weight").focus()
    for _ in range(3):
        opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowUp")
    n = len(view.tokens)
    assert f"({n - 2}) reads" in opened.locator("#where").inner_text()
    opened.keyboard.press("Enter")
    assert opened.locator("#query").input_value() == str(n - 2)
    opened.locator("body").press(".")
    expect(opened.locator("#layer")).to_have_value("1")


def test_methods_side_by_side_hold_their_numbers(opened: Page, view: PromptView) -> None:
    choose(opened, 1, 0)
    rows = opened.locator("#side tbody tr")
    assert rows.count() == len(view.rows) + 3
    assert rows.nth(0).locator("th").inner_text() == "weight"
    titles = rows.nth(0).locator("td").evaluate_all("cells => cells.map(c => c.title)")
    numbers_shown = [float(title.rsplit(": ", 1)[1].split()[0]) for title in titles]
    assert numbers_shown == [round(float(value), 3) for value in view.rows[0].values]
    assert all(title.endswith(" share") for title in titles)
    assert len(rows.nth(len(view.rows)).locator("td").all_inner_texts()) == len(view.tokens)


def test_sinks_are_set_aside_and_the_scale_says_so(opened: Page, view: PromptView) -> None:
    choose(opened, 1, 1)
    assert opened.locator("#end-weight").inner_text() == "1 (mass)"
    opened.locator("#aside").check()
    maps = view.layers[1]
    assert maps.written is not None
    rest = max(float(maps.weight[1, :, 1:].max()), float(maps.written[1, :, 1:].max()))
    shown = float(opened.locator("#end-weight").inner_text().split()[0])
    assert shown == pytest.approx(rest, abs=2e-3) and shown < 1
    pixel = "[...document.getElementById('map-weight').getContext('2d').getImageData(0, 3, 1, 1).data]"
    assert opened.evaluate(pixel) == [150, 150, 158, 255]
    assert opened.locator("#row li").first.locator(".bars i").count() == 0


def test_tokens_are_found(opened: Page, view: PromptView) -> None:
    opened.locator("#find").fill("john")
    want = sum("john" in token.lower() for token in view.tokens)
    assert opened.locator("#found").inner_text() == f"{want} found" and want == 2
    assert opened.locator("#row button.found").count() == want
    opened.keyboard.press("Enter")
    first = next(place for place, token in enumerate(view.tokens) if "John" in token)
    assert f"({first}): weight" in opened.locator("#where").inner_text()


def test_what_is_shown_can_be_kept(opened: Page, view: PromptView, tmp_path: Path) -> None:
    choose(opened, 0, 2)
    with opened.expect_download() as waiting:
        opened.locator("#csv").press("Enter")
    assert waiting.value.suggested_filename == "attndiag-L0H2.csv"
    waiting.value.save_as(tmp_path / "head.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "head.csv").read_text())))
    n = len(view.tokens)
    assert len(rows) == n * (n + 1) // 2
    weight = np.zeros((n, n))
    for row in rows:
        weight[int(row["query"]), int(row["key"])] = float(row["weight"])
    np.testing.assert_allclose(weight, view.layers[0].weight[2], atol=2e-5)
    assert {row["effect_is"] for row in rows} == {"exact", "first order"}
    with opened.expect_download() as waiting:
        opened.locator("[data-png=weight]").click()
    assert waiting.value.suggested_filename == "attndiag-L0H2-weight.png"
    waiting.value.save_as(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_scrolls_sideways_in_any_dress(
    view: PromptView, open_page: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    page = open_page(view.save(tmp_path / "v.html"), color_scheme=scheme, viewport={"width": width, "height": 800})
    page.wait_for_selector("html[data-ready=yes]")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("[role=img]:not([aria-label])").count() == 0
    assert page.locator("canvas:not([tabindex='0'])").count() == 0


def test_two_views_on_one_page_do_not_clash(view: PromptView, open_page: Any, tmp_path: Path) -> None:
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><link rel=icon href='data:,'>{view._repr_html_()}{view._repr_html_()}")
    page = open_page(notebook)
    for frame in page.frames[1:]:
        frame.wait_for_selector("html[data-ready=yes]")
    first, second = page.frames[1:]
    first.locator("#layer").select_option("0")
    second.locator("#layer").select_option("1")
    assert (first.locator("#layer").input_value(), second.locator("#layer").input_value()) == ("0", "1")


def test_a_nasty_prompt_is_text(lm: LoadedModel, open_page: Any, tmp_path: Path) -> None:
    nasty = view_prompt(lm, Prompt(NASTY, id="<script>alert(4)</script>"))
    page = open_page(nasty.save(tmp_path / "nasty.html"))
    page.wait_for_selector("html[data-ready=yes]")
    assert page.title().startswith("<script>document.title='owned'</script>")
    assert page.locator("img").count() == 0
    shown = "".join(page.locator("#row bdi").all_inner_texts())
    assert "script" in shown.replace("\u00b7", "") and "\u202e" not in shown


def long_text(tmp_path_factory: pytest.TempPathFactory, n: int, layers: int) -> PromptView:
    """A text of n words on a small random model."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<unk>", *(f"w{index}" for index in range(63))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim == 2 else 1)
    lm = attndiag.load(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"))
    draw = random.Random(0)
    return view_prompt(lm, " ".join(f"w{draw.randrange(63)}" for _ in range(n)))


def test_a_page_of_1024_tokens_loads_within_three_seconds(
    open_page: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shown = long_text(tmp_path_factory, 1024, 2)
    assert len(shown.tokens) == 1024
    path = shown.save(tmp_path / "long.html")
    assert path.stat().st_size < BUDGET
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        page = open_page(path, viewport={"width": 1200, "height": 900})
        page.wait_for_selector("html[data-ready=yes]")
        seconds.append(time.perf_counter() - began)
    # three seconds of a machine with nothing else to do: others that want its cores take their share of the clock
    waiting = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert min(seconds) < 3 * waiting
    assert "The text has 1024 tokens." in page.locator("header").inner_text()
    size = page.evaluate("document.getElementById('map-pooledWeight').width")
    assert size == 128
    assert page.locator("#strongest tbody tr").count() > 3
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


@pytest.mark.slow
def test_a_page_of_4096_tokens_stays_within_the_budget(
    open_page: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shown = long_text(tmp_path_factory, 4096, 2)
    path = shown.save(tmp_path / "long.html")
    assert path.stat().st_size < BUDGET
    page = open_page(path)
    page.wait_for_selector("html[data-ready=yes]")
    header = page.locator("header").inner_text()
    assert "The text has 4096 tokens. Exact are its last 256 queries" in header
    assert page.locator("#block").inner_text() == "32"
