"""What a view keeps and packs: exact numbers, windows of long texts, the budget, titles, methods and effects."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from typing import Any

import numpy as np
import pytest

import attndiag
from attndiag.models import known
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.reports import prompt_view, view_maps
from attndiag.reports.html import BUDGET
from attndiag.reports.prompt_view import PromptView, view_prompt
from attndiag.reports.view_maps import LayerMaps, window_of
from attndiag.reports.view_pack import MAP_CHARACTERS, pack_layers, pack_shares, pack_signed


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    model = known.induction_gpt2()
    return attndiag.load(model.model, tokenizer=model.tokenizer())


@pytest.fixture(scope="module")
def text() -> str:
    return str(known.induction_gpt2().text(0))


@pytest.fixture(scope="module")
def view(lm: LoadedModel, text: str) -> PromptView:
    return view_prompt(lm, text, exact_effects=True, replacements=["uniform:draws=2"])


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def opened(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)


def test_maps_on_the_page_are_those_of_the_capture(view: PromptView, lm: LoadedModel, text: str) -> None:
    with attndiag.capture(lm) as captured:
        lm.forward(Prompt(text))
    data = data_of(view.to_html())
    for call, layer, packed in zip(captured.calls, view.layers, data["layers"], strict=True):
        np.testing.assert_allclose(layer.weight, call.pattern[0], atol=1e-6)
        assert packed["fine"]
        high, low = (opened(plane).astype(int) for plane in packed["maps"]["weight"])
        shown = ((256 * high + low) / 65535) ** 2
        np.testing.assert_allclose(shown, layer.weight.reshape(-1), atol=2e-5)
        seen = np.unpackbits(opened(packed["seen"]))[: layer.weight[0].size].astype(bool)
        np.testing.assert_array_equal(seen, (layer.weight > 0).any(axis=0).reshape(-1))


def test_effects_are_first_order_with_exact_ones_on_the_target_row(
    view: PromptView, lm: LoadedModel, text: str
) -> None:
    assert view.edges is not None and view.edges.exact is not None and view.edges.first_order is not None
    exact = attndiag.edge_effects(lm, Prompt(text), queries=[view.edges.query]).numpy()
    first = attndiag.explain(lm, Prompt(text), method="pattern_attribution").numpy()
    for index in range(len(view.layers)):
        found = view.effects_of(index)
        assert found is not None
        query = view.edges.query
        np.testing.assert_allclose(found[:, query], exact[index][:, query], atol=1e-6)
        np.testing.assert_allclose(found[:, :query], first[index][:, :query], atol=1e-5)
    data = data_of(view.to_html())
    assert data["exact"] and data["firstOrder"] and data["target"] == view.edges.query
    top = next(stat for stat in data["grid"] if stat["name"].startswith("largest effect"))
    want = np.nanmax(np.abs(exact[:, :, view.edges.query]), axis=-1)
    np.testing.assert_allclose(top["values"], want, atol=1e-4)


def test_token_methods_are_those_of_a_comparison(view: PromptView, lm: LoadedModel, text: str) -> None:
    names = [row.name for row in view.rows]
    assert names == [*prompt_view.METHODS, "replacement[uniform(draws=2, seed=0)]"]
    swaps = ["uniform:draws=2"]
    table = attndiag.run(
        lm, text, list(prompt_view.METHODS), replacements=swaps, metrics=[], edges=None, heads=False
    ).comparison.scores
    for row in view.rows:
        want = table[table.method == row.name].sort_values("position").score
        np.testing.assert_allclose(row.values, want, atol=1e-9)


def test_a_method_that_does_not_fit_is_a_note_and_an_unknown_one_an_error(lm: LoadedModel, text: str) -> None:
    shown = view_prompt(lm, text, methods=["weight@L9", "weight"])
    assert [row.name for row in shown.rows] == ["weight"]
    (note,) = shown.notes
    assert note.startswith("weight@L9: ") and "the layers with attention weights are [0, 1]" in note
    assert "the layers with attention weights are [0, 1]" in shown.to_html()
    with pytest.raises(attndiag.errors.AttnDiagError, match="there is no method 'wieght'"):
        view_prompt(lm, text, methods=["wieght"])


def test_the_title_is_the_text_and_never_an_id(lm: LoadedModel, text: str) -> None:
    for name in (None, "prompt", "prompt-1"):
        shown = view_prompt(lm, Prompt(text, id=name), methods=())
        assert shown.title.startswith(text[:20]) and len(shown.title) <= 90
        page = shown.to_html()
        assert f"<title>{html.escape(shown.title[:20])}" in page and "<title>prompt" not in page


def test_bytes_hold_shares_and_signed_numbers() -> None:
    values = np.array([0.0, 1.0, 0.5, 1e-4, 1 / 3])
    planes = pack_shares(values)
    code = 256 * opened(planes.high).astype(int) + opened(planes.low)
    np.testing.assert_allclose((code / 65535) ** 2, values, atol=1.6e-5)
    signed = np.array([0.0, -2.0, 1.0, np.nan, 1e-3])
    planes = pack_signed(signed)
    code = 256 * opened(planes.high).astype(int) + opened(planes.low) - 32768
    np.testing.assert_allclose(np.sign(code) * (code / 32767) ** 2 * planes.scale, np.nan_to_num(signed), atol=1.3e-4)
    assert pack_signed(np.zeros(3)).scale == 0


def noise(label: str, heads: int, n: int, shift: float) -> LayerMaps:
    """Maps that hardly compress, the contribution `shift` away from the weight."""
    rng = np.random.default_rng(int(label))
    weight = rng.random((heads, n, n), dtype=np.float32)
    return LayerMaps(label, "self", weight, np.clip(weight + shift, 0, 1).astype(np.float32), None, None, None, True)


def test_layers_beyond_the_budget_are_left_out_smallest_difference_first_and_said() -> None:
    layers = [noise(str(i), 9, 256, 0.05 * (i + 1)) for i in range(6)]
    packed, kept, coarse = pack_layers(layers, [None] * 6)
    assert sum(len(plane) for layer in packed for map_ in layer["maps"].values() for plane in map_) <= MAP_CHARACTERS
    # 0.6 MB a map: all pictures do not fit, and hardly any low bytes
    assert kept == list(range(6 - len(kept), 6)) and 2 <= len(kept) < 6
    assert set(coarse) <= {layers[i].label for i in kept}
    tokens = ("a",) * 256
    about = {"model": "m", "certified": "6 of 6 layers"}
    shown = PromptView(Prompt("x"), tokens, tokens, tuple(layers), window_of(256, 256), about)
    page = shown.to_html()
    assert len(page.encode()) < BUDGET
    assert "Left out to keep the page below 8 MB: layers 0" in page


def test_a_long_text_keeps_a_window_an_overview_and_the_strongest_pairs(
    lm: LoadedModel, text: str, view: PromptView, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = len(view.tokens)
    for module in (view_maps, prompt_view):
        monkeypatch.setattr(module, "MOST_TOKENS", 6)
    monkeypatch.setattr(view_maps, "MOST_BLOCKS", 4)
    monkeypatch.setattr(view_maps, "_ROWS", 5)
    monkeypatch.setattr(view_maps, "STRONGEST", 3)
    short = view_prompt(lm, text)
    window = short.window
    assert window.cut and window.queries.tolist() == list(range(n - 6, n))
    assert window.keys.tolist() == [0, *range(n - 5, n)]
    for whole, cut in zip(view.layers, short.layers, strict=True):
        assert whole.written is not None and whole.together is not None and cut.written is not None
        rows = np.ix_(range(len(whole.weight)), window.queries, window.keys)
        np.testing.assert_allclose(cut.weight, whole.weight[rows], atol=1e-6)
        np.testing.assert_allclose(cut.written, whole.written[rows], atol=1e-5)
        assert cut.together is not None and cut.row_written is not None and whole.row_written is not None
        np.testing.assert_allclose(cut.together, whole.together[np.ix_(window.queries, window.keys)], atol=1e-4)
        np.testing.assert_allclose(cut.row_written, whole.row_written[:, window.queries], rtol=1e-4)
        assert cut.certified and cut.overview is not None
        block = cut.overview.block
        assert block == -(-n // 4)
        first = whole.weight[:, :block]
        np.testing.assert_allclose(cut.overview.weight[:, 0, 0], first[:, :, :block].sum(-1).mean(-1), atol=1e-6)
        np.testing.assert_allclose(cut.overview.weight.sum(-1), 1.0, atol=1e-5)
        best = np.unravel_index(whole.weight[0, :, 1:].argmax(), whole.weight[0, :, 1:].shape)
        mine = {(pair.query, pair.key): pair for pair in cut.overview.strongest if pair.head == 0}
        top = mine[int(best[0]), int(best[1]) + 1]
        assert top.weight == pytest.approx(whole.weight[0, top.query, top.key], abs=1e-6)
    assert short.rows == () and "are left out above 6" in short.notes[0]
    page = short.to_html()
    assert f"The text has {n} tokens. Exact are its last 6 queries" in page
    assert "The whole text" in page and data_of(page)["names"]


def test_a_run_gives_its_methods_verdicts_and_exact_effects(lm: LoadedModel, text: str) -> None:
    from attndiag.reports.view_tokens import exact_of_run, rows_of_run
    from attndiag.runs.comparing import run

    done = run(lm, Prompt(text, id="p"), ["weight"], replacements=["uniform:draws=2"], metrics=[], heads=False)
    rows = {row.name: row for row in rows_of_run(done.comparison, "p")}
    assert set(rows) == {"weight", "replacement[uniform(draws=2, seed=0)]"}
    verdicts = done.comparison.verdicts.query("method == 'weight'").set_index("position").verdict
    assert rows["weight"].verdicts is not None
    assert {place: rows["weight"].verdicts[place] for place in verdicts.index} == verdicts.to_dict()
    found = exact_of_run(done.edges, "p")
    assert found is not None and done.edges is not None
    layers, exact = found
    edges = done.edges.edges("weight").set_index(["layer", "head", "key"]).effect
    for (layer, head, key), effect in edges.items():
        assert exact[layers.index(layer), head, key] == effect
    assert exact_of_run(done.edges, "nobody") is None and exact_of_run(None, "p") is None


def test_saved_views_and_their_words(view: PromptView, tmp_path: Any) -> None:
    assert view.save(tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert view.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert repr(view).startswith("PromptView('") and "2 layers" in repr(view)
    assert prompt_view.facts_of(view)["methods"][0] == "weight"
