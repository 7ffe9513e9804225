"""Runs that go on: killed, interrupted, grown, reordered, damaged, in use, full, with the tables of a quiet run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import attndiag
from attndiag.comparison import methods, one_prompt
from attndiag.errors import InsufficientMemoryError, NotApplicableError, RunFolderError
from attndiag.models.known import sink_against_value
from attndiag.models.load import LoadedModel
from attndiag.runs import comparing, work
from attndiag.runs import folder as folder_module
from attndiag.runs.compared_run import ComparedRun, read_compared_run
from attndiag.runs.compared_tables import tidy_tables
from attndiag.runs.folder import kind_of, locked
from attndiag.runs.plan import RunPlan, make_plan
from attndiag.runs.result_files import RESTARTED, SAME_M, UNTOUCHED, write_result
from attndiag.runs.weights_run import measure_prompts
from attndiag.stats.verdicts import Thresholds

TEXTS = ("MARK a b c Q", "a MARK c Q", "a b c MARK b a Q", "c MARK Q", "b b MARK a Q")
PROMPTS = [
    attndiag.Prompt(f"<bos> {text}", id=f"p{i}", target="ANS", foil="FOIL", cluster=f"c{i % 3}")
    for i, text in enumerate(TEXTS)
]
# two runs of one plan may differ in these alone
TIMES = {"runs": ["created", "seconds", "seconds_by_method"]}


def small_plan(**more: Any) -> RunPlan:
    given = {"replacements": ["uniform:draws=3"], "metrics": ["effect_tau"], "heads": False}
    return make_plan(["weight", "input_x_gradient"], **{**given, **more})


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    built = sink_against_value()
    return attndiag.load(built.model, tokenizer=built.tokenizer())


@pytest.fixture(scope="module")
def quiet(lm: LoadedModel) -> ComparedRun:
    """The run without a folder and without a disturbance."""
    return attndiag.run(lm, PROMPTS, plan=small_plan())


def assert_equal_tables(one: ComparedRun, two: ComparedRun) -> None:
    first, second = tidy_tables(one), tidy_tables(two)
    for name, table in first.items():
        if name == "timings":
            continue
        left, right = (found.drop_columns(TIMES.get(name, [])) for found in (table, second[name]))
        assert left.equals(right), name
    assert one.comparison.verdicts.equals(two.comparison.verdicts)
    assert one.edges is not None and two.edges is not None
    np.testing.assert_array_equal(one.edges.effects, two.edges.effects)


# ------------------------------------------------------------------------------------------------------------- kills
DRIVER = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
import attndiag
from test_run_resume import PROMPTS, small_plan
from attndiag.models.known import sink_against_value
folder, kills = sys.argv[2], int(sys.argv[3])
built = sink_against_value()
lm = attndiag.load(built.model, tokenizer=built.tokenizer())
import attndiag.runs.comparing, attndiag.runs.compared_tables, pandas, pyarrow.parquet, scipy.stats, filelock

def start():
    child = os.fork()
    if child == 0:
        try:
            attndiag.run(lm, PROMPTS, plan=small_plan(), output=folder)
        except BaseException as error:
            print("died of", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return child

dice, hit = random.Random(int(sys.argv[4])), 0
began = time.perf_counter()
os.waitpid(start(), 0)
whole = time.perf_counter() - began
import shutil
shutil.rmtree(folder)
for _ in range(20 * kills):
    if hit == kills:
        break
    child = start()
    time.sleep(dice.uniform(0, whole))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        hit += 1
    elif os.WEXITSTATUS(status) != 0:
        sys.exit("a run failed")
    elif dice.random() < 0.7:
        # it was done before the kill: begin anew, so that most kills hit
        shutil.rmtree(folder)
_, status = os.waitpid(start(), 0)
print("hit", hit, "end", os.WEXITSTATUS(status), flush=True)
"""


def killed(tmp_path: Path, kills: int, seed: int) -> int:
    """Run, kill -9 at random moments, run again, ... until so many kills hit a running run; how many did."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(tmp_path / "out"), str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    assert words[-2:] == ["end", "0"], done.stdout + done.stderr
    return int(words[words.index("hit") + 1])


def test_a_run_killed_at_random_moments_has_the_tables_of_a_quiet_one(quiet: ComparedRun, tmp_path: Path) -> None:
    assert killed(tmp_path, kills=4, seed=0) == 4
    found = read_compared_run(tmp_path / "out")
    assert found.facts["status"] == "complete"
    assert_equal_tables(quiet, found)
    assert not list((tmp_path / "out").rglob("*.tmp"))


@pytest.mark.slow
def test_fifty_kills(quiet: ComparedRun, tmp_path: Path) -> None:
    assert killed(tmp_path, kills=50, seed=1) == 50
    assert_equal_tables(quiet, read_compared_run(tmp_path / "out"))


# -------------------------------------------------------------------------------------------------- what is measured
class Counting:
    """A callback that counts, and stops a run after so many prompts."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after, self.measured, self.started, self.ended = stop_after, [], [], []

    def on_start(self, facts: Mapping[str, Any], done: int, total: int) -> None:
        self.started.append((facts["run"], done, total))

    def on_prompt(self, work: work.PromptWork, done: int, total: int) -> None:
        self.measured.append(work.label)
        assert 0 < done <= total
        if len(self.measured) == self.stop_after:
            raise KeyboardInterrupt

    def on_end(self, run: ComparedRun) -> None:
        self.ended.append(run)


def test_an_interrupted_run_keeps_what_is_done_and_goes_on(lm: LoadedModel, quiet: ComparedRun, tmp_path: Path) -> None:
    first = Counting(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        attndiag.run(lm, PROMPTS, plan=small_plan(), output=tmp_path, callback=first)
    half = read_compared_run(tmp_path)
    assert half.facts["status"] == "unfinished" and not half.passed
    assert half.comparison.prompts.prompt.tolist() == ["p0", "p1"]
    second, said, steps = Counting(), [], []
    found = attndiag.run(
        lm,
        PROMPTS,
        plan=small_plan(),
        output=tmp_path,
        callback=second,
        remark=said.append,
        progress=lambda *step: steps.append(step),
    )
    assert second.measured == ["p2", "p3", "p4"]
    assert second.started == [(found.facts["run"], 2, 5)] and second.ended == [found]
    assert said == [f"2 of 5 prompts are in {tmp_path} already"]
    assert [step for step in steps if step[0] == "measuring"] == [("measuring", n, 5) for n in (2, 3, 4, 5)]
    assert_equal_tables(quiet, found)
    third = Counting()
    attndiag.run(lm, PROMPTS, plan=small_plan(), output=tmp_path, callback=third)
    assert third.measured == []


def test_a_set_may_grow_shrink_and_change_its_order(lm: LoadedModel, quiet: ComparedRun, tmp_path: Path) -> None:
    few, many = Counting(), Counting()
    attndiag.run(lm, PROMPTS, plan=small_plan(), output=tmp_path, limit=2, callback=few)
    assert few.measured == ["p0", "p1"]
    backwards = attndiag.run(lm, PROMPTS[::-1], plan=small_plan(), output=tmp_path, callback=many)
    assert many.measured == ["p4", "p3", "p2"]
    assert backwards.comparison.prompts.prompt.tolist() == ["p4", "p3", "p2", "p1", "p0"]
    assert backwards.facts["run"] != quiet.facts["run"]
    for name in ("scores", "agreement", "faithfulness"):
        one, two = (
            getattr(run.comparison, name).sort_values("prompt", kind="stable").reset_index(drop=True)
            for run in (quiet, backwards)
        )
        pd.testing.assert_frame_equal(one, two)
    said: list[str] = []
    forward = attndiag.run(lm, PROMPTS[:3], plan=small_plan(), output=tmp_path, remark=said.append)
    assert "2 results of other prompts or runs" in said[-1]
    assert forward.comparison.prompts.prompt.tolist() == ["p0", "p1", "p2"]


# --------------------------------------------------------------------------------------------------- broken, foreign
@pytest.fixture
def done(lm: LoadedModel, tmp_path: Path) -> Path:
    attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=tmp_path / "out")
    return tmp_path / "out"


def results(folder: Path) -> list[Path]:
    """Files of the prompts, in their order."""
    listed = json.loads((folder / "run.json").read_text())["prompts"]
    return [folder / "results" / f"{one['key']}.parquet" for one in listed]


def test_a_broken_result_is_named_and_measured_again(lm: LoadedModel, done: Path) -> None:
    path = results(done)[0]
    before = read_compared_run(done)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunFolderError, match=f"{path.name} is damaged.*measured anew"):
        read_compared_run(done)
    said, counting = [], Counting()
    again = attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=done, remark=said.append, callback=counting)
    assert counting.measured == ["p0"]
    assert said[0].startswith("measuring again: ") and path.name in said[0]
    assert_equal_tables(before, again)
    path.unlink()
    with pytest.raises(RunFolderError, match="the result of prompt 'p0' is gone"):
        read_compared_run(done)


def test_a_foreign_result_is_refused_and_never_touched(lm: LoadedModel, done: Path) -> None:
    one, two = results(done)
    shutil.copy(two, one)
    foreign = one.read_bytes()
    for overwrite in (False, True):
        with pytest.raises(RunFolderError, match=f"{one.name} holds the result of another piece of work"):
            attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=done, overwrite=overwrite)
        assert one.read_bytes() == foreign
    stranger = done / "results" / f"{'0' * 64}.parquet"
    write_result(stranger, "1" * 64, {"of": "somebody"})
    one.unlink()
    attndiag.run(lm, PROMPTS[:2], plan=small_plan(seed=3), output=done, overwrite=True)
    assert stranger.is_file()


def test_another_plan_is_refused_with_what_differs(lm: LoadedModel, done: Path) -> None:
    other = make_plan(["weight"], replacements=["uniform:draws=3"], metrics=[], heads=False, seed=4)
    with pytest.raises(RunFolderError, match="another plan") as error:
        attndiag.run(lm, PROMPTS[:2], plan=other, output=done)
    told = str(error.value)
    assert "methods: ['weight', 'input_x_gradient'] there, ['weight'] now" in told
    assert "seed: 0 there, 4 now" in told and "--overwrite" in told
    with pytest.raises(RunFolderError, match=r"thresholds\.margin: 0\.02 there, 0\.1 now"):
        attndiag.run(lm, PROMPTS[:2], plan=small_plan(thresholds=Thresholds(margin=0.1)), output=done)
    before = [path.read_bytes() for path in results(done)]
    assert len(before) == 2
    replaced = attndiag.run(lm, PROMPTS[:2], plan=other, output=done, overwrite=True)
    assert replaced.facts["methods"] == ["weight"]
    assert len(list((done / "results").iterdir())) == 3


def test_the_two_kinds_of_runs_do_not_take_each_other_for_their_own(
    lm: LoadedModel, done: Path, tmp_path: Path
) -> None:
    assert kind_of(done) == "comparison" and kind_of(tmp_path) is None
    with pytest.raises(RunFolderError, match="holds a comparison run"):
        folder_module.RunFolder.open(done)
    measure_prompts(lm, PROMPTS[:1], tmp_path / "weights")
    assert kind_of(tmp_path / "weights") == "weights"
    with pytest.raises(RunFolderError, match="holds a weights run"):
        attndiag.run(lm, PROMPTS[:1], plan=small_plan(), output=tmp_path / "weights")
    with pytest.raises(RunFolderError, match="holds a weights run"):
        read_compared_run(tmp_path / "weights")
    with pytest.raises(RunFolderError, match="holds no run"):
        read_compared_run(tmp_path / "nothing")


def test_a_page_never_stands_beside_tables_that_it_does_not_show(lm: LoadedModel, done: Path) -> None:
    def rendered() -> list[Path]:
        (done / "figures").mkdir(exist_ok=True)
        made = [done / "report.html", done / "figures" / "verdicts.png"]
        for path in made:
            path.write_text("old")
        return made

    same = rendered()
    attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=done)
    assert all(path.is_file() for path in same)
    for prompts in (PROMPTS[:3], PROMPTS[:1], PROMPTS[1::-1]):
        old = rendered()
        attndiag.run(lm, prompts, plan=small_plan(), output=done)
        assert not any(path.exists() for path in old)
    old = rendered()
    results(done)[0].unlink()
    attndiag.run(lm, PROMPTS[1::-1], plan=small_plan(), output=done)
    assert not any(path.exists() for path in old)


def test_what_killed_runs_left_half_written_is_removed(lm: LoadedModel, done: Path) -> None:
    places = ("", "tables", "results", "figures")
    left = [done / place / ".a.parquet.123.tmp" for place in places]
    kept = [done / place / name for place in places for name in (".mine.tmp", "a.tmp")]
    for path in (*left, *kept):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=done)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)


def test_one_kind_of_run_replaces_the_other_and_leaves_nothing_of_it(lm: LoadedModel, done: Path) -> None:
    (done / "notes.txt").write_text("mine")
    (done / "comparison.html").write_text("nobody here wrote it")
    (done / "report.html").write_text("page")
    measure_prompts(lm, PROMPTS[:2], done, overwrite=True)
    names = {path.name for path in done.iterdir() if path.name != folder_module.LOCK}
    assert names == {"run.json", "tables", "notes.txt", "comparison.html"}
    (done / "summary").mkdir()
    attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=done, overwrite=True)
    assert {path.name for path in done.iterdir()} - {folder_module.LOCK} == names | {"results"}
    assert kind_of(done) == "comparison" and not (done / "tables" / "checks.csv.gz").exists()
    foreign = done / "results" / f"{'0' * 64}.parquet"
    write_result(foreign, "1" * 64, {"of": "somebody"})
    measure_prompts(lm, PROMPTS[:2], done, overwrite=True)
    assert [path.name for path in (done / "results").iterdir()] == [foreign.name]


def test_with_a_comparison_goes_the_weights_run_below_it(lm: LoadedModel, done: Path) -> None:
    below = done / "weights"

    def overwritten(**plan: Any) -> None:
        attndiag.run(lm, PROMPTS[:2], plan=small_plan(**plan), output=done, overwrite=True)

    measure_prompts(lm, PROMPTS[:2], below)
    # not without being asked
    attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=done)
    assert kind_of(below) == "weights"
    # nor under the hands of whoever writes there, and then nothing else goes either
    before = {path: path.read_bytes() for path in done.rglob("*.parquet")}
    with folder_module.locked(below), pytest.raises(RunFolderError, match=r"another run is writing to .*weights"):
        overwritten(seed=7)
    assert {path: path.read_bytes() for path in done.rglob("*.parquet")} == before
    (below / "notes.txt").write_text("mine")
    overwritten(seed=7)
    assert [path.name for path in below.iterdir()] == ["notes.txt"]
    (below / "notes.txt").unlink()
    measure_prompts(lm, PROMPTS[:2], below)
    overwritten(seed=8)
    assert not below.exists()
    # a folder of that name that holds no weights run is nobody's business
    below.mkdir()
    (below / "model.safetensors").write_text("mine")
    overwritten(seed=9)
    assert (below / "model.safetensors").read_text() == "mine"


# -------------------------------------------------------------------------------------------------------- the folder
def test_two_runs_at_once_lose_nothing(lm: LoadedModel, done: Path) -> None:
    before = {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}
    with locked(done):
        code = (
            "import sys; from pathlib import Path; from attndiag.runs.folder import locked\n"
            "try:\n    with locked(Path(sys.argv[1])): print('in')\nexcept Exception as error: print(error)"
        )
        told = subprocess.run([sys.executable, "-c", code, str(done)], capture_output=True, text=True, check=True)
    assert f"another run is writing to {done}; wait" in told.stdout
    assert {path: path.read_bytes() for path in done.rglob("*") if path.is_file()} == before
    assert attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=done).passed


def test_a_full_disk_is_said_and_what_was_done_stays(
    lm: LoadedModel, quiet: ComparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, written = os.fsync, []

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RunFolderError, match="the disk is full; free some space"):
            attndiag.run(lm, PROMPTS, plan=small_plan(), output=tmp_path)
    assert 0 < len(read_compared_run(tmp_path).comparison.prompts) < 5
    assert_equal_tables(quiet, attndiag.run(lm, PROMPTS, plan=small_plan(), output=tmp_path))


def test_a_file_or_a_full_folder_is_no_place_for_a_run(lm: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="is a file"):
        attndiag.run(lm, PROMPTS[:1], plan=small_plan(), output=tmp_path / "file")
    with pytest.raises(RunFolderError, match="not empty and holds no run"):
        attndiag.run(lm, PROMPTS[:1], plan=small_plan(), output=tmp_path, overwrite=True)
    assert (tmp_path / "file").read_text() == "x"


# ------------------------------------------------------------------------------------------------------- odd prompts
def test_what_cannot_be_measured_is_a_row_with_its_reason(lm: LoadedModel, tmp_path: Path) -> None:
    odd = [
        attndiag.Prompt("<bos>", id="short"),
        attndiag.Prompt("<bos> Q", id="one token"),
        attndiag.Prompt("<bos> MARK a b c Q", id="same", target="ANS", foil="ANS "),
        attndiag.Prompt("<bos> MARK a b Q", id="flat", target="ANS", foil="FOIL"),
    ]
    own = {"mine": [np.ones(1), np.ones(2), np.ones(6), np.ones(5)]}
    found = attndiag.run(lm, odd, plan=small_plan(), own=own, output=tmp_path)
    assert found.facts["n_failed"] == 1 and not found.passed
    failed = found.comparison.problems.set_index("prompt").loc["same"]
    assert failed.method == "" and failed.reason.startswith("TargetError")
    row = pd.read_parquet(tmp_path / "tables" / "prompts.parquet").set_index("prompt").loc["same"]
    assert row[["status", "text", "target", "foil", "cluster"]].tolist() == [
        "failed",
        "<bos> MARK a b c Q",
        "ANS",
        "ANS ",
        "same",
    ]
    assert row.error == failed.reason
    verdicts = found.comparison.verdicts
    assert set(verdicts[verdicts.prompt.isin(["short", "one token"])].verdict) <= {"undefined"}
    flat = verdicts[(verdicts.prompt == "flat") & (verdicts.method == "mine")]
    assert set(flat.verdict) == {"undefined"} and set(flat.reason) == {"constant scores"}
    assert found.edges is not None
    rows = found.edges.head_rows("weight").set_index("prompt")
    assert set(rows.loc[["short", "one token"]].verdict) == {"undefined"}
    assert_equal_tables(found, read_compared_run(tmp_path))


def test_a_lack_of_memory_is_tried_again(lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise InsufficientMemoryError("needs more")

    with monkeypatch.context() as patched:
        patched.setattr(work, "noise_floor", too_much)
        first = attndiag.run(lm, PROMPTS[:1], plan=small_plan(), output=tmp_path)
    assert first.facts["n_failed"] == 1
    assert attndiag.run(lm, PROMPTS[:1], plan=small_plan(), output=tmp_path).passed


@pytest.mark.parametrize("lacking", ["edges", "method", "faithfulness"])
def test_a_lack_of_memory_of_a_part_is_tried_again(
    lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise InsufficientMemoryError("needs more")

    place = {"edges": (work, "measure_edges"), "faithfulness": (one_prompt, "_faithfulness")}
    with monkeypatch.context() as patched:
        patched.setattr(*place.get(lacking, (methods.PromptMethods, "_by_row")), too_much)
        first = attndiag.run(lm, PROMPTS[:1], plan=small_plan(), output=tmp_path)
    assert first.comparison.problems.reason.str.startswith("InsufficientMemoryError").any()
    assert first.passed == (lacking == "faithfulness")
    counting = Counting()
    again = attndiag.run(lm, PROMPTS[:1], plan=small_plan(), output=tmp_path, callback=counting)
    assert counting.measured == ["p0"] and again.passed and again.comparison.problems.empty
    assert attndiag.run(lm, PROMPTS[:1], plan=small_plan(), output=tmp_path, callback=counting).passed
    assert counting.measured == ["p0"]


def test_what_failed_on_every_prompt_is_no_success(
    lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise NotApplicableError("not here")

    plain = work.measure_edges
    with monkeypatch.context() as patched:
        patched.setattr(work, "measure_edges", none)
        found = attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=tmp_path)
        assert found.facts["failed_everywhere"] == ["edges"] and not found.passed and not found.blocked
        assert not read_compared_run(tmp_path).passed
        # that edges were not asked for is none of that
        assert attndiag.run(lm, PROMPTS[:2], plan=small_plan(edges=None)).passed
        some = iter((none, plain))
        patched.setattr(work, "measure_edges", lambda *given, **more: next(some)(*given, **more))
        assert attndiag.run(lm, PROMPTS[:2], plan=small_plan()).passed
    odd = make_plan(["weight", "weight@L9"], replacements=["uniform:draws=3"], metrics=[], heads=False, edges=None)
    found = attndiag.run(lm, PROMPTS[:2], plan=odd)
    assert found.facts["n_failed"] == 0 and found.facts["failed_everywhere"] == ["weight@L9"] and not found.passed


@pytest.mark.parametrize(
    ("failing", "tokens", "edges"),
    [
        ("capture leaves the output as it is", True, True),
        ("restarted runs reproduce the model", False, True),
        ("edges and tokens measure the same m", True, True),
        ("m above its noise floor", False, False),
    ],
)
def test_a_failed_self_check_blocks_the_verdicts_that_stand_on_it(
    lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, tokens: bool, edges: bool
) -> None:
    plain = work.measure_prompt

    def fails_on_the_first(lm: LoadedModel, prompt: attndiag.Prompt, *given: Any, **more: Any) -> work.PromptWork:
        found = plain(lm, prompt, *given, **more)
        assert failing in {check.name for check in found.checks}
        spoiled = [replace(check, passed=False) if check.name == failing else check for check in found.checks]
        return replace(found, checks=tuple(spoiled)) if prompt.id == "p0" else found

    monkeypatch.setattr(comparing, "measure_prompt", fails_on_the_first)
    attndiag.run(lm, PROMPTS[:2], plan=small_plan(), output=tmp_path)
    found = read_compared_run(tmp_path)
    verdicts, rows = found.comparison.verdicts, found.edges.edges("weight")  # type: ignore[union-attr]
    for table, blocked in ((verdicts, tokens), (rows, edges)):
        reason = f"blocked by failed self-checks: {failing}" if blocked else None
        first, second = (table[table.prompt == name] for name in ("p0", "p1"))
        assert set(first.blocked) == {blocked} and set(second.blocked) == {False}
        assert (set(first.reason) == {reason}) == blocked
        assert set(second.reason) == {""}
        assert (set(first.verdict) == {"undefined"}) == blocked
    assert found.blocked == (tokens or edges) and found.passed == (not found.blocked)
    if failing == UNTOUCHED:
        # nothing is judged, and still it is no success
        silent = attndiag.run(lm, PROMPTS[:1], plan=small_plan(replacements=[], metrics=[], edges=None))
        assert silent.comparison.verdicts.empty and silent.blocked and not silent.passed


def test_the_checks_themselves_can_fail(lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "RESTART_TOLERANCE", -1.0)
    monkeypatch.setattr(work.torch, "equal", lambda *_: False)
    checks = {check.name: check.passed for check in work.measure_prompt(lm, PROMPTS[0], small_plan()).checks}
    assert not checks[UNTOUCHED] and not checks[RESTARTED] and checks[SAME_M]


def test_facts_checks_heads_and_tables(lm: LoadedModel, tmp_path: Path) -> None:
    found = attndiag.run(lm, PROMPTS, plan=small_plan(heads=True), output=tmp_path, about={"prompt_file": "x.jsonl"})
    assert found.passed and not found.blocked
    assert {"weights", "dtype", "device", "kernel", "tokenizer_hash", "seed", "versions"} <= set(found.facts)
    assert set(found.facts["seconds_by_method"]) >= {"weight", "replacement[uniform(draws=3, seed=0)]", "edge effects"}
    assert found.checks.passed.all() and {"scores of weight", "edges of weight"} <= set(found.checks.check)
    assert found.card is not None and len(found.card["layers"]) == 1
    heads = found.heads
    assert heads is not None and heads["head"].tolist() == [0, 1]
    # weights mislead on head 0 of this model, and on no prompt on head 1
    assert heads["weight_misleads"].tolist() == [1.0, 0.0]
    assert (heads["mean_edge_effect"] > 0).all()
    # eight words are too few for a probe of random tokens, and none of English
    reasons = found.comparison.problems.set_index("method").reason
    assert "the tokenizer cannot read" in reasons["probe previous"] and "probe induction" in reasons
    ceiling = found.comparison.methods.set_index("method").role
    assert ceiling["replacement[uniform(draws=3, seed=0)]"] == "ceiling" and ceiling["weight"] == "method"
    columns = pd.read_csv(tmp_path / "tables" / "columns.csv")
    for name in ("runs", "prompts", "tokens", "scores", "heads", "edges", "agreement", "faithfulness", "verdicts"):
        table = pd.read_parquet(tmp_path / "tables" / f"{name}.parquet")
        assert len(table) and set(table.run) == {found.facts["run"]}
        assert set(table.columns) == set(columns[columns.table == name].name)
        assert len(pd.read_csv(tmp_path / "tables" / f"{name}.csv")) == len(table)
    edges = pd.read_parquet(tmp_path / "tables" / "edges.parquet")
    assert edges.complete.all() and edges.mass_kept.between(0, 1 + 1e-9).all()
    mild = read_compared_run(tmp_path, thresholds=Thresholds(margin=90.0))
    assert (mild.comparison.verdicts.present_from > found.comparison.verdicts.present_from).all()


# ----------------------------------------------------------------------------------------------------- weights runs
@pytest.fixture
def interrupted(lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A weights run that stopped after three prompts."""
    from attndiag.runs import weights_run

    plain, seen = weights_run._measure_prompt, []

    def stops(lm: LoadedModel, prompt: attndiag.Prompt, *rest: Any) -> Any:
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(prompt.id)
        return plain(lm, prompt, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(weights_run, "_measure_prompt", stops)
        with pytest.raises(KeyboardInterrupt):
            measure_prompts(lm, PROMPTS, tmp_path / "weights")
    yield tmp_path / "weights"


def assert_like_a_quiet_run(lm: LoadedModel, folder: Path, said: list[str]) -> None:
    quiet = measure_prompts(lm, PROMPTS, folder.parent / "quiet").folder
    outcome = measure_prompts(lm, PROMPTS, folder, remark=said.append)
    assert outcome.passed and outcome.n_prompts == 5 and outcome.logits_equal
    for name in ("prompts", "tokens", "scores", "heads", "checks", "disagreements", "refusals"):
        assert outcome.folder.arrow(name).equals(quiet.arrow(name)), name
    one, two = (found.read("runs").drop(columns=["created", "seconds"]) for found in (outcome.folder, quiet))
    pd.testing.assert_frame_equal(one, two)


def test_a_weights_run_goes_on(lm: LoadedModel, interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert_like_a_quiet_run(lm, interrupted, said)
    assert said == [f"3 of 5 prompts are in {interrupted} already"]
    # a finished one is not measured again
    monkeypatch.setattr("attndiag.runs.weights_run._measure_prompt", None)
    assert measure_prompts(lm, PROMPTS, interrupted).n_prompts == 5


def test_a_damaged_shard_of_a_weights_run_is_measured_again(lm: LoadedModel, interrupted: Path) -> None:
    (interrupted / "shards" / "heads" / "000001.parquet").write_bytes(b"PAR1")
    (interrupted / "shards" / "scores" / "000002.parquet").unlink()
    said: list[str] = []
    assert_like_a_quiet_run(lm, interrupted, said)
    assert "heads/000001.parquet is damaged" in said[0] and "scores/000002.parquet is gone" in said[1]
    assert said[2].startswith("1 of 5 prompts")


@pytest.mark.parametrize("table", ["timings", "tokens", "refusals"])
def test_every_shard_of_a_prompt_is_read_and_a_damaged_one_heals(
    lm: LoadedModel, interrupted: Path, table: str
) -> None:
    # no refusals were written: what lies in their place is of no prompt that was done
    damaged = interrupted / "shards" / table / "000001.parquet"
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(b"PAR1")
    stale = interrupted / "shards" / "refusals" / "000003.parquet"
    stale.parent.mkdir(exist_ok=True)
    stale.write_bytes(b"of a prompt that was never done")
    said: list[str] = []
    assert_like_a_quiet_run(lm, interrupted, said)
    assert [text.split(" ")[0] for text in said] == ["measuring", "measuring", "2"]
    assert f"{table}/000001.parquet is damaged" in said[0]


def test_a_foreign_shard_of_a_weights_run_is_refused(lm: LoadedModel, interrupted: Path) -> None:
    heads = interrupted / "shards" / "heads"
    shutil.copy(heads / "000000.parquet", heads / "000001.parquet")
    foreign = (heads / "000001.parquet").read_bytes()
    with pytest.raises(RunFolderError, match=r"000001\.parquet holds prompt \['p0'\] of run .* It was not touched"):
        measure_prompts(lm, PROMPTS, interrupted)
    assert (heads / "000001.parquet").read_bytes() == foreign
    with pytest.raises(RunFolderError, match=r"already holds a run.*It differs: the prompts"):
        measure_prompts(lm, PROMPTS[:2], interrupted)


def test_nothing_global_is_left_behind(lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit of work is a function: called apart and in another order, it gives what the run gives."""
    plan = small_plan()
    whole = attndiag.run(lm, PROMPTS[:3], plan=plan)
    apart = [work.measure_prompt(lm, prompt, plan) for prompt in PROMPTS[2::-1]]
    for one in apart:
        assert one.compared is not None
        scores = whole.comparison.scores
        mine = scores[(scores.prompt == one.label) & (scores.method == "input_x_gradient")].score
        np.testing.assert_array_equal(mine, one.compared.scores["input_x_gradient"].values)
    monkeypatch.setattr(comparing, "measure_prompt", lambda *_, **__: apart[0])
    assert attndiag.run(lm, PROMPTS[:1], plan=plan).comparison.prompts.prompt.tolist() == ["p2"]
