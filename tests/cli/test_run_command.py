"""`attndiag run` from the command line: what it says, what it writes, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attndiag.cli import app
from attndiag.runs import comparing
from attndiag.runs.compared_run import read_compared_run

TEXTS = ("When Mary and John went to the store", "John gave a drink to Mary", "to the store, John")
FEW = ["--methods", "weight,input_x_gradient", "--replacement", "uniform:draws=2", "--metrics", "none"]
QUICK = [*FEW, "--no-heads"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    lines = [json.dumps({"id": f"p{i}", "prompt": text, "cluster": f"c{i}"}) for i, text in enumerate(TEXTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["run", *(str(word) for word in words)])


def test_a_run_says_what_it_found_and_goes_on_with_more(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--prompts", prompts, "-m", tiny_folder, "-o", out, "--device", "cpu", *QUICK]
    result = run(*words, "--limit", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["weight", "input_x_gradient"]
    assert lines[2].startswith("replacement[uniform(draws=2, seed=0)]")
    assert lines[3].startswith("weight") and lines[4].startswith("head_contribution")
    assert lines[-1] == f"run: {out}"
    assert "memory: about" in result.stderr and "2 methods; edges: every edge" in result.stderr
    found = read_compared_run(out)
    assert found.facts["prompt_file"] == str(prompts) and found.facts["n_prompts"] == 2
    more = run(*words, "--json")
    assert more.exit_code == 0, more.output
    assert f"2 of 3 prompts are in {out} already" in more.stderr
    facts = json.loads(more.stdout)
    assert (facts["prompts"], facts["failed"], facts["passed"], facts["blocked"]) == (3, 0, True, False)
    assert set(facts["tokens"]) == {"weight", "input_x_gradient", "replacement[uniform(draws=2, seed=0)]"}
    assert facts["tokens"]["replacement[uniform(draws=2, seed=0)]"]["role"] == "ceiling"
    assert set(facts["edges"]) == {"weight", "head_contribution"}


def test_a_run_ends_with_what_comes_next_and_with_prompts_that_have_no_verdict(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    rows = [{"id": f"t{i}", "prompt": TEXTS[0], "target": target} for i, target in enumerate((" John", " to"))]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "an out"
    words = ["--prompts", prompts, "-m", tiny_folder, "-o", out, "--device", "cpu", *QUICK, "--edges", "none"]
    done = run(*words, "--primary", "weight,input_x_gradient")
    lines = done.stdout.splitlines()
    # at most one of two targets is the model's first choice
    failed = json.loads(run(*words, "--primary", "weight,input_x_gradient", "--json", "-q").stdout)["task_failed"]
    assert failed and set(failed) <= {"t0", "t1"}
    told = f"no verdict on {len(failed)} of 2 prompts, where the task check failed: {', '.join(failed)}"
    assert lines[-2:] == [told, f"run: {out}"]
    assert lines[-3].startswith("declared comparison, weight minus input_x_gradient: not measured")
    assert f"attndiag report '{out}' " in done.stderr and f"attndiag compare '{out}' " in done.stderr


def test_scores_made_elsewhere_join(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text("prompt,method,char_start,char_end,score\np0,mine,0,4,2.0\np0,mine,5,9,1.0\n")
    words = ["--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out", *QUICK, "--edges", "none", "--quiet"]
    assert run(*words, "--limit", 1, "--own", f"{own}:mine", "--primary", "mine,weight").exit_code == 0
    found = read_compared_run(tmp_path / "out")
    assert "mine" in found.comparison.judged
    assert found.facts["plan"]["primary"] == ["mine", "weight"]
    refused = run(*words, "--limit", 2, "--own", f"{own}:mine")
    assert refused.exit_code == 2 and "p1" in refused.stderr, refused.stderr


def test_heads_are_probed_once(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    words = ["--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out", *FEW, "--limit", 1, "--quiet"]
    assert run(*words).exit_code == 0
    found = read_compared_run(tmp_path / "out")
    assert found.heads is not None and len(found.heads) == 8
    assert found.heads["prefix_matching_score"].between(0, 1).all()
    # its context is too short for the texts of the other probes
    assert {"probe previous", "probe sink"} <= set(found.comparison.problems.method)
    model = next((tmp_path / "out" / "results").glob("model-*.parquet"))
    written = model.stat().st_mtime_ns
    assert run(*words, "--limit", 2).exit_code == 0
    assert model.stat().st_mtime_ns == written


def test_another_plan_is_refused_and_replaced_on_demand(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    words = ["--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out", "--limit", 1, "--quiet", *QUICK]
    assert run(*words, "--edges", "none").exit_code == 0
    refused = run(*words, "--edges", "none", "--seed", 2)
    assert refused.exit_code == 2
    assert "another plan: replacements" in refused.stderr and "seed: 0 there, 2 now" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert run(*words, "--edges", "none", "--seed", 2, "--overwrite").exit_code == 0
    assert read_compared_run(tmp_path / "out").facts["seed"] == 2


def test_a_file_configures_a_run_and_flags_win(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {tiny_folder}\nprompts: {prompts.name}\nmethods: [weight]\nreplacements: [mean_embedding]\n"
        "metrics: []\nedges: screen\nedge_most: 4\nheads: false\nlimit: 3\noutput: out\n"
    )
    result = run("--config", config, "--limit", 1, "--quiet", "--json")
    assert result.exit_code == 0, result.output
    found = read_compared_run(tmp_path / "out")
    assert found.facts["n_prompts"] == 1 and found.facts["replacements"] == ["mean_embedding"]
    assert found.edges is not None and 0 < found.facts["edges_measured"] < 1
    config.write_text("modle: x\n")
    wrong = run("--config", config)
    assert wrong.exit_code == 2 and "run.yaml:1: modle is no key of a run; did you mean 'model'?" in wrong.stderr


def test_run_and_compare_take_the_same_edges() -> None:
    for command in ("run", "compare"):
        shown = CliRunner().invoke(app, [command, "--help"]).stdout
        assert "--edges" in shown and "auto|all|screen|none" in "".join(shown.replace("\u2502", " ").split())
        assert "--no-edges" not in shown and "--edge-extent" not in shown
        for words in (["--edges", "al"], ["--no-edges"], ["--edge-extent", "all"]):
            refused = CliRunner().invoke(app, [command, *words, "-m", "no-such-model"])
            assert refused.exit_code == 2 and words[0] in refused.stderr


def test_an_unknown_method_keeps_its_type() -> None:
    from attndiag.catalog import UnknownMethodError
    from attndiag.commands.run import _plan
    from attndiag.runs.config import ConfigError, RunConfig

    with pytest.raises(UnknownMethodError, match="did you mean 'weight'"):
        _plan(RunConfig(methods=("wieght",)), ())
    with pytest.raises(ConfigError, match="metrics names"):
        _plan(RunConfig(metrics=("nothing",)), ())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--methods", "wieght"], "did you mean 'weight'"),
        (["--replacement", "nope"], "unknown replacement 'nope'"),
        (["--primary", "weight"], "--primary"),
        (["--metrics", "nothing"], "nothing"),
        (["--prompts", "no-such.jsonl"], "no-such.jsonl"),
    ],
)
def test_misuse_is_told_before_a_model_is_loaded(tmp_path: Path, words: list[str], text: str) -> None:
    result = run("-m", tmp_path / "no-model", "-o", tmp_path / "out", *words)
    assert result.exit_code == 2, result.output
    assert text in result.stderr and result.stderr.count("\n") == 1


def test_failed_prompts_and_blocked_verdicts_end_with_1(
    tiny_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "bad", "prompt": "Mary", "target": " a", "foil": " a "}) + "\n")
    words = ["--prompts", prompts, "-m", tiny_folder, *QUICK, "--edges", "none"]
    result = run(*words, "-o", tmp_path / "out")
    assert result.exit_code == 1, result.output
    assert "prompt bad: TargetError" in result.stderr

    from attndiag.comparison.methods import PromptMethods

    plain = PromptMethods.scores

    def broken(self: PromptMethods, method: str, **params: object) -> object:
        from dataclasses import replace

        return replace(plain(self, method, **params), failures=("completeness",))

    monkeypatch.setattr(PromptMethods, "scores", broken)
    blocked = run(*words, "-o", tmp_path / "blocked", "--limit", 3, "--json")
    assert blocked.exit_code == 1
    assert json.loads(blocked.stdout)["blocked"] is True
    (reason,) = [one for one in json.loads(blocked.stdout)["blocked_by"] if one["method"] == "input_x_gradient"]
    assert (reason["prompts"], reason["about"]) == (["p0", "p1", "p2"], ["tokens"])
    told = blocked.stderr.splitlines()
    assert (
        "self-check failed: scores of input_x_gradient, on 3 of 3 prompts (p0, p1, p2); on p0: completeness" in told
    ), told
    assert "  blocked: the verdicts on tokens of input_x_gradient on these prompts" in told
    assert any(line.startswith("  to do: ") and "(--methods weight)" in line for line in told)
    assert sum(line.startswith("everything else stands: ") for line in told) == 1


def test_an_interrupt_says_what_is_kept(
    tiny_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, seen = comparing.measure_prompt, []

    def stops(*given: object, **more: object) -> object:
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return plain(*given, **more)  # type: ignore[arg-type]

    words = ["--prompts", prompts, "-m", tiny_folder, "-o", tmp_path / "out", *QUICK, "--edges", "none"]
    with monkeypatch.context() as patched:
        patched.setattr(comparing, "measure_prompt", stops)
        result = run(*words)
    assert result.exit_code == 130
    assert f"interrupted: what is done is kept in {tmp_path / 'out'}; the same call goes on" in result.stderr
    again = run(*words)
    assert again.exit_code == 0 and "1 of 3 prompts are in" in again.stderr


def test_texts_may_go_through_a_chat_template(prompts: Path, tmp_path: Path) -> None:
    from attndiag.commands.run import _read
    from attndiag.runs.config import RunConfig

    (plain, *_), _ = _read(RunConfig(prompts=prompts), quiet=True)
    (chat, *_), _ = _read(RunConfig(prompts=prompts, chat_template=True), quiet=True)
    assert plain.text == TEXTS[0] and chat.text is None
    assert chat.messages == ({"role": "user", "content": TEXTS[0]},)
    assert (chat.id, chat.cluster) == (plain.id, plain.cluster)
    from attndiag.commands.run import _as_chat
    from attndiag.errors import PromptError
    from attndiag.prompts import Prompt

    whole = Prompt(
        "Hi", id="x", target=" a", foil=" b", decoder_text="d", cluster="c", meta={"k": 1}, continuation=" e"
    )
    turned = _as_chat(whole)
    assert vars(turned) == {**vars(whole), "text": None, "messages": ({"role": "user", "content": "Hi"},)}
    assert _as_chat(turned) is turned
    with pytest.raises(PromptError, match=r"prompt 'x' has pair and spans, which are about its plain text"):
        _as_chat(Prompt("Hi", id="x", pair="Ho", spans={"all": (0, 2)}))


def test_a_share_without_an_interval_says_so() -> None:
    from attndiag.commands.compared_text import rate

    assert rate(0.25, float("nan"), float("nan")) == "25% right (no interval)"
    assert rate(0.25, 0.1, 0.4) == "25% right (10% to 40%)"


def test_what_no_prompt_has_is_said_with_a_reason(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    plan = ["--methods", "weight,weight@L9", "--replacement", "uniform:draws=2", "--metrics", "none", "--edges", "none"]
    words = ["--prompts", prompts, "-m", tiny_folder, "--limit", 2, *plan]
    result = run(*words, "--no-heads", "-o", tmp_path / "out")
    assert result.exit_code == 1, result.output
    told = [line for line in result.stderr.splitlines() if "weight@L9" in line]
    assert len(told) == 1 and told[0].startswith("weight@L9 could be measured on no prompt: "), result.stderr
    assert "the layers with attention weights are [0, 1]" in told[0] and told[0].endswith("(prompt p0)")
    assert "everything else stands" not in result.stderr
    compared = CliRunner().invoke(app, ["compare", *map(str, words), "--json"])
    assert compared.exit_code == 1 and compared.stderr.count("could be measured on no prompt") == 1, compared.output
    assert "prompt p0, weight@L9" not in compared.stderr
    facts = json.loads(compared.stdout)
    assert list(facts["failed_everywhere"]) == ["weight@L9"] and facts["blocked_by"] == [] and not facts["passed"]


def test_parameters_of_methods_are_set_on_top_of_a_file(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {tiny_folder}\nprompts: {prompts.name}\nmethods: [integrated_gradients]\nmetrics: []\nedges: none\n"
        "replacements: [mean_embedding]\nheads: false\nlimit: 1\noutput: out\n"
        "params: {integrated_gradients: {steps: 4, baseline: zero}}\n"
    )
    done = run("--config", config, "--set", "integrated_gradients.steps=8", "-q")
    assert done.exit_code in (0, 1), done.output
    params = read_compared_run(tmp_path / "out").facts["plan"]["params"]
    assert params == {"integrated_gradients": {"baseline": "zero", "max_steps": 128, "steps": 8}}
    for wrong, text in (
        ("steps=8", "METHOD.NAME=VALUE"),
        ("saliency.aggregate=norm", "['saliency'], which are not among"),
        ("flow.steps=8", "flow has no parameter 'steps'; it takes none"),
        ("integrated_gradients.stpes=8", "did you mean 'steps'?"),
        ("integratd_gradients.steps=8", "did you mean 'integrated_gradients'"),
    ):
        refused = run("--config", config, "--set", wrong, "-m", tmp_path / "no-model")
        told = " ".join(refused.stderr.replace("\u2502", " ").split())
        assert refused.exit_code == 2 and text in told, told
