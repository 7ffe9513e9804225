"""From a run folder to a page: numbers, words, escaping, files, and what a page says when something went wrong."""

from __future__ import annotations

import html
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import attndiag
from attndiag.errors import RunFolderError
from attndiag.models.known import KNOWN_MODELS
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.reports import page as page_module
from attndiag.reports.figures import DRAWINGS
from attndiag.reports.html import BUDGET, environment, file_size, inline_svg, number, percent, script_data
from attndiag.reports.page import report
from attndiag.reports.prompt_view import view_prompt
from attndiag.reports.tables import summarise
from attndiag.reports.token_text import shortened, visible
from attndiag.reports.wording import headline
from attndiag.runs.folder import RunFolder
from attndiag.runs.schemas import CHECKS
from attndiag.runs.weights_run import measure_prompts

NASTY = '<script>alert(1)</script> & \u202eabc \u200f\u05d0 \x07 {{ 7*7 }} \u4e2d\n"quoted"'


@pytest.fixture(scope="module")
def tiny_lm(tiny_folder: Path) -> LoadedModel:
    return attndiag.load(tiny_folder, device="cpu")


@pytest.fixture(scope="module")
def rendered(tiny_lm: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> attndiag.reports.page.Report:
    prompts = [
        Prompt("When Mary and John went to the store, John gave a drink to", id="ioi", target=" Mary", cluster="ioi"),
        Prompt(NASTY, id="<b>nasty</b>", cluster="</td><script>x</script>"),
        Prompt("x" * 400, id="long <i>"),
    ]
    return report(tmp_path_factory.mktemp("report") / "out", lm=tiny_lm, prompts=prompts)


@pytest.fixture
def plain_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty drawings, for tests that are about something else: drawing is most of the time of a report."""
    empty = '<svg width="1pt" height="1pt" viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(page_module, "save_figures", lambda *_: {drawing.name: empty for drawing in DRAWINGS})


class Scan(HTMLParser):
    """Tags, ids and addresses of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "action", "xlink:href", "data"):
                self.addresses.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_loads_nothing_and_its_ids_differ(rendered: page_module.Report) -> None:
    page = rendered.to_html()
    scan = Scan(page)
    assert len(page.encode()) < BUDGET
    assert "default-src 'none'" in page
    for address in scan.addresses:
        assert address.startswith(("#", "data:")) or (rendered.folder / address).is_file(), address
    assert len(scan.ids) == len(set(scan.ids))
    # every reference inside the figures still finds its target
    used = set(re.findall(r"url\(#([^)]+)\)", page)) | {a[1:] for a in scan.addresses if a.startswith("#")}
    assert used <= set(scan.ids)
    assert page.count("<svg") == len(DRAWINGS)


def test_tokens_ids_and_clusters_are_text_never_markup(rendered: page_module.Report) -> None:
    page = rendered.to_html()
    scan = Scan(page)
    assert scan.tags.count("script") == 1
    assert "b" in scan.tags  # the page's own emphasis
    assert "<b>nasty" not in page and "<i>" not in page.replace("<i>", "", page.count("<i class"))
    assert html.escape("<b>nasty</b>", quote=False) in page
    assert "49" not in "".join(t for t in scan.text if "7*7" in t)
    for raw in ("\u202e", "\u200f", "\x07"):
        assert raw not in page
    assert "alert(1)</script>" not in page


def test_failed_prompts_and_their_reasons_are_on_the_page(rendered: page_module.Report) -> None:
    text = " ".join(Scan(rendered.to_html()).text)
    assert not rendered.passed
    assert "1 prompt could not be used in full" in text
    assert "has 400 tokens but the model has 128 positions; shorten it" in text
    assert "100 % certified (4 of 4 calls)" in text


def test_every_header_of_a_measured_column_has_unit_and_arrow(rendered: page_module.Report) -> None:
    page = rendered.to_html()
    (heads,) = re.findall(r'<section aria-labelledby="heads">.*?<thead>(.*?)</thead>', page, flags=re.DOTALL)
    headers = re.findall(r"<th .*?</th>", heads)
    assert len(headers) == 9
    assert all("↑" in header or "↓" in header for header in headers[1:])
    assert all("<small>" in header for header in headers)


def test_files_are_written_and_listed(rendered: page_module.Report) -> None:
    for drawing in DRAWINGS:
        for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
            path = rendered.folder / "figures" / f"{drawing.name}.{kind}"
            assert path.read_bytes().startswith(start)
            assert f'href="figures/{drawing.name}.{kind}"' in rendered.to_html()
    for name in ("heads", "layers", "clusters", "prompts"):
        table = pd.read_csv(rendered.folder / "summary" / f"{name}.csv")
        assert (table.run == rendered.summary.run["run"]).all()
    assert 'href="tables/heads.parquet"' in rendered.to_html()


def test_rendering_again_gives_the_same_bytes(rendered: page_module.Report) -> None:
    before = {path: path.read_bytes() for path in rendered.folder.rglob("*") if path.is_file()}
    again = report(rendered.folder)
    assert again.headline == rendered.headline
    changed = [str(path) for path, content in before.items() if path.read_bytes() != content]
    assert changed == []


def test_a_notebook_gets_a_frame_of_its_own(rendered: page_module.Report) -> None:
    frame = rendered._repr_html_()
    assert frame.startswith("<iframe ") and 'sandbox="allow-scripts allow-downloads"' in frame
    (srcdoc,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(srcdoc) == rendered.to_html()


@pytest.mark.usefixtures("plain_figures")
def test_the_headline_holds_the_known_numbers(tmp_path: Path) -> None:
    known = KNOWN_MODELS["sink_against_value"]()
    lm = attndiag.load(known.model, tokenizer=known.tokenizer())
    prompts = [Prompt("<bos> MARK a b c Q", id="a", target="ANS", foil="FOIL", cluster="one")]
    made = report(tmp_path / "out", lm=lm, prompts=prompts)
    by_head = (0.009 / 1.009 + 0.9) / 2
    sink, mark = np.hypot(0.009, 0.9), np.hypot(1.0, 0.1)
    assert made.headline.replace("\u00a0", " ") == (
        f"On one prompt, position 0 takes 90.0 % of the attention weight but only {100 * by_head:.1f} % of what single "
        f"heads write and {100 * sink / (sink + mark):.1f} % of what whole layers write."
    )
    assert made.passed
    page = made.to_html()
    assert "All self-checks passed." in page
    assert "Position 0 is a special token, &lt;bos&gt;." in page
    assert "gets the one checked prompt right" in page


@pytest.mark.usefixtures("plain_figures")
def test_averages_weigh_each_prompt_alike_and_leave_uncertified_calls_out(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    prompts = [Prompt("When Mary and John", id="a"), Prompt("to the store, John gave a drink to Mary and John", id="b")]
    folder = measure_prompts(tiny_lm, prompts, tmp_path / "out").folder
    heads = folder.read("heads")
    weights = heads[heads.measure == "sink_weight"].groupby("prompt").value.mean()
    assert summarise(folder).overall("sink_weight") == pytest.approx(weights.mean())

    # one call of prompt a loses its certificate
    bad = (heads.prompt == "a") & (heads.layer == 1)
    changed = folder.arrow("heads").to_pandas()
    changed.loc[bad, "certified"] = False
    changed.loc[bad, "value"] = 1e9
    rewrite(folder, "heads", changed)
    checks = folder.read("checks")
    hit = (checks.prompt == "a") & (checks.layer == 1)
    checks.loc[hit, ["certified", "value_error"]] = [False, 0.5]
    rewrite(folder, "checks", checks)
    made = report(folder.path)
    left = heads[(heads.measure == "sink_weight") & ~bad].groupby("prompt").value.mean()
    assert made.summary.overall("sink_weight") == pytest.approx(left.mean())
    assert str(made.summary.coverage) == "75 % certified (3 of 4 calls)"
    assert not made.passed
    assert "1 self-check failed." in made.to_html()
    assert '<td class="no">3 of 4</td>' in made.to_html()


def rewrite(folder: RunFolder, table: str, frame: pd.DataFrame) -> None:
    import pyarrow as pa

    schema = folder.arrow(table).schema
    whole = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
    folder.write_table(folder.path / "tables" / f"{table}.parquet", whole)


def test_a_nan_error_is_no_pass(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    folder = measure_prompts(tiny_lm, [Prompt("When Mary and John", id="a")], tmp_path / "out").folder
    # undefined is null in the tables
    assert CHECKS.table({"value_error": [float("nan")]}).column("value_error").to_pylist() == [None]
    checks = folder.read("checks")
    checks.loc[0, ["certified", "value_error", "failures"]] = [False, None, "|A v - z| is nan of scale"]
    rewrite(folder, "checks", checks)
    summary = summarise(folder)
    assert not summary.passed
    assert summary.checks.set_index("check").passed["pattern times values gives the head outputs"] == 1
    checks["certified"] = False
    rewrite(folder, "checks", checks)
    with pytest.raises(RunFolderError, match=r"not one of its 2 attention calls is certified.*is nan of scale"):
        summarise(folder)


@pytest.mark.usefixtures("plain_figures")
def test_an_unfinished_run_is_rendered_and_says_so(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    def stop(_what: str, done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    prompts = [Prompt(f"When Mary and John went {i}", id=str(i)) for i in range(4)]
    with pytest.raises(KeyboardInterrupt):
        measure_prompts(tiny_lm, prompts, tmp_path / "out", progress=stop)
    made = report(tmp_path / "out")
    assert not made.passed
    assert "Unfinished run: 2 of 4 prompts are here." in made.to_html()
    tables = tmp_path / "out" / "tables"
    assert pd.read_csv(tables / "prompts.csv").prompt.tolist() == [0, 1]
    # the row of the run too, which is in no shard
    (row,) = pd.read_parquet(tables / "runs.parquet").to_dict("records")
    facts = RunFolder.open(tmp_path / "out").about["runs"]
    assert (row["run"], row["status"], row["n_prompts"]) == (facts["run"], "unfinished", 4)
    assert row["model"] == facts["model"] and set(pd.read_csv(tables / "prompts.csv").run) == {row["run"]}
    # and below a comparison
    shutil.rmtree(tables)
    page_module.weights_part(RunFolder.open(tmp_path / "out"), "weights/")
    assert pd.read_parquet(tables / "runs.parquet").run.tolist() == [facts["run"]]


def test_a_run_without_a_measured_prompt_says_why(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    folder = measure_prompts(tiny_lm, [Prompt("x" * 400, id="long")], tmp_path / "out").folder
    with pytest.raises(RunFolderError, match=r"no measured prompt.*the first reason: prompt 'long' has 400 tokens"):
        report(folder.path)


@pytest.mark.usefixtures("plain_figures")
def test_a_page_over_budget_is_refused(rendered: page_module.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "BUDGET", 1000)
    with pytest.raises(RunFolderError, match="the page would have"):
        report(rendered.folder)


def test_arguments_that_contradict_each_other(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give lm= too"):
        report(tmp_path, prompts=[Prompt("x")])
    with pytest.raises(RunFolderError, match="holds no run"):
        report(tmp_path)


@pytest.mark.usefixtures("plain_figures")
def test_a_large_model_keeps_the_heads_that_differ_most(
    rendered: page_module.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "_HEADS_SHOWN", 3)
    page = report(rendered.folder).to_html()
    (body,) = re.findall(r'<section aria-labelledby="heads">.*?<tbody>(.*?)</tbody>', page, flags=re.DOTALL)
    shown = re.findall(r"L\d+H\d+", body)
    heads = rendered.summary.heads
    order = heads.reindex(heads.sink_gap.abs().sort_values(ascending=False).index)[:3]
    assert shown == [f"L{row.label}H{row.head}" for row in order.itertuples()]
    assert "5 more are in <code>summary/heads.csv</code>" in page


def test_encoder_decoders_get_labels_of_their_own(tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    lm = attndiag.load(T5ForConditionalGeneration(config).eval(), tokenizer=tokenizer)
    prompts = [Prompt("When Mary and John went to the store", id="a", decoder_text="John gave a drink")]
    made = report(tmp_path / "out", lm=lm, prompts=prompts)
    assert made.summary.places.label.tolist() == ["E0", "E1", "D0", "X0", "D1", "X1"]
    assert "E, D and X stand for" in made.to_html()
    assert headline(made.summary) == made.headline


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" Mary", "·Mary"),
        ("  x ", "··x·"),
        ("   ", "···"),
        ("a b", "a b"),
        ("\n\t\r", "⏎⇥␍"),
        ("", "∅"),
        ("\u202ertl", "\\u202ertl"),
        ("\u200b\u00a0", "\\u200b\\u00a0"),
        ("\x00\x1b", "\\x00\\x1b"),
        ("\ud800", "\\ud800"),
        ("שלום", "שלום"),
        ("🙂", "🙂"),
    ],
)
def test_nothing_in_a_token_stays_invisible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_no_number_but_zero_is_written_as_zero() -> None:
    assert [number(x, 2) for x in (0.001, 0.0034, -0.0034, 0.0096, 0.04, 0.5, 5e-4, 0)] == [
        "0.001", "0.003", "\u22120.003", "0.010", "0.04", "0.50", "0.0005", "0",
    ]  # fmt: skip
    for value in 10.0 ** np.linspace(-8, 8, 99):
        for digits in (1, 2, 3, 4):
            for signed in (value, -value):
                shown = float(number(signed, digits).replace("\u2212", "-").replace(",", ""))
                assert shown == pytest.approx(signed, rel=0.5) and shown != 0


def test_short_forms() -> None:
    assert shortened("abcdefghij", 5) == "ab…ij"
    assert len(shortened("abcdefghij", 6)) == 6
    assert shortened("abc", 5) == "abc"
    assert [number(x) for x in (0.12345, 12.345, 1234.5, 1234567, -0.5, 0, float("nan"), None, 1e-5)] == [
        "0.123",
        "12.3",
        "1,234",
        "1,234,567",
        "\u22120.500",
        "0",
        "\u2013",
        "\u2013",
        "1e\u221205",
    ]
    assert percent(0.5483) == "54.8\u00a0%"
    assert [file_size(n) for n in (12, 1500, 2_500_000)] == ["12\u00a0B", "1.5\u00a0kB", "2.5\u00a0MB"]


def test_templates_escape_and_refuse_misspelt_names() -> None:
    assert environment().from_string("{{ x }}").render(x="<b>&'\"") == "&lt;b&gt;&amp;&#39;&#34;"
    with pytest.raises(Exception, match="'y' is undefined"):
        environment().from_string("{{ y }}").render(x=1)
    assert str(script_data({"t": "</script><!--&"})) == '{"t":"\\u003c/script\\u003e\\u003c!--\\u0026"}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_data([float("nan")])


def test_figures_inside_a_page_do_not_share_ids() -> None:
    svg = (
        '<?xml?><svg width="3pt" height="2pt" viewBox="0 0 3 2"><metadata>m</metadata><path id="p"/>'
        '<use xlink:href="#p" clip-path="url(#p)" style="fill: #1b1b1f"/></svg>'
    )
    drawn = str(inline_svg(svg, "one", 'a "label"'))
    assert 'id="one-p"' in drawn and 'href="#one-p"' in drawn and "url(#one-p)" in drawn
    assert "metadata" not in drawn and "width=" not in drawn and 'style="max-width: 6px"' in drawn
    assert "fill: var(--ink)" in drawn
    assert 'aria-label="a &#34;label&#34;"' in drawn


def test_a_view_keeps_what_it_must(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    view = view_prompt(tiny_lm, Prompt(NASTY, id="<b>"))
    page = view.save(tmp_path / "view.html").read_text(encoding="utf-8")
    scan = Scan(page)
    assert scan.tags.count("script") == 2 and not [a for a in scan.addresses if not a.startswith(("#", "data:"))]
    assert "alert(1)</script>" not in page and "\u202e" not in page
    assert len(view.tokens) == len(view.key_tokens) == view.layers[0].weight.shape[1]
    for kind in ("png", "svg", "pdf"):
        assert view.save(tmp_path / f"view.{kind}").stat().st_size > 5000
    with pytest.raises(attndiag.errors.AttnDiagError, match=r"suffix '\.gif'; expected \.html, \.png"):
        view.save(tmp_path / "view.gif")
    with pytest.raises(attndiag.errors.AttnDiagError, match="layer 9 is not among the 2"):
        view.save(tmp_path / "view.png", layer=9)
    with pytest.raises(RunFolderError, match="part of that path is a file"):
        view.save(tmp_path / "view.html" / "x.html")
