"""Workers: the same tables as one process, and no loss and no leftovers when something ends before its time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attndiag
from attndiag.errors import NotApplicableError, RunFolderError, WorkerError
from attndiag.models.known import sink_against_value
from attndiag.models.load import LoadedModel
from attndiag.runs import workers
from attndiag.runs.compared_tables import tidy_tables
from attndiag.runs.memory import MemoryEstimate
from attndiag.runs.plan import RunPlan, make_plan

TEXTS = ("MARK a b c Q", "a MARK c Q", "a b c MARK b a Q", "c MARK Q", "b b MARK a Q")
PROMPTS = [
    attndiag.Prompt(f"<bos> {text}", id=f"p{i}", target="ANS", foil="FOIL", cluster=f"c{i % 3}")
    for i, text in enumerate(TEXTS)
]


def small_plan() -> RunPlan:
    return make_plan(
        ["weight", "input_x_gradient"], replacements=["uniform:draws=3"], metrics=["effect_tau"], heads=False
    )


@pytest.fixture
def lm() -> LoadedModel:
    built = sink_against_value()
    return attndiag.load(built.model, tokenizer=built.tokenizer())


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_plan() -> RunPlan:
    return make_plan(["weight"], replacements=[], metrics=[], heads=False, edges=None)


class Told:
    """A callback that keeps what it is told, and does something after so many prompts."""

    def __init__(self, then: Any = None, after: int = 1) -> None:
        self.done: list[str] = []
        self.then = then
        self.after = after

    def on_start(self, facts: Any, done: int, total: int) -> None:
        self.found = done

    def on_prompt(self, work: Any, done: int, total: int) -> None:
        self.done.append(work.label)
        if self.then is not None and len(self.done) == self.after:
            self.then()

    def on_end(self, run: Any) -> None:
        pass


def test_two_workers_give_the_tables_of_one_process(lm: LoadedModel, tmp_path: Path, one_thread: None) -> None:
    alone = attndiag.run(lm, PROMPTS, plan=small_plan())
    told = Told()
    beside = attndiag.run(lm, PROMPTS, plan=small_plan(), workers=2, output=tmp_path, callback=told)
    assert beside.facts["workers"] == 2 and beside.facts["threads"] == 1
    assert sorted(told.done) == sorted(prompt.id for prompt in PROMPTS)
    first, second = tidy_tables(alone), tidy_tables(beside)
    for name in set(first) - {"runs", "timings"}:
        assert first[name].num_rows == second[name].num_rows
        assert first[name].equals(second[name]), name
    assert "5 of 5 prompts, 2 methods, edges: yes" in repr(beside) and len(repr(beside)) < 300
    assert first["edges"].num_rows and first["faithfulness"].num_rows
    assert not multiprocessing.active_children()
    assert not list(tmp_path.glob(".*.tmp"))


def test_workers_need_no_folder(lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.tempfile, "tempdir", str(tmp_path))
    left: list[Path] = []
    told = Told(lambda: left.extend(tmp_path.rglob(".model*")), after=len(PROMPTS))
    found = attndiag.run(lm, PROMPTS, plan=small_plan(), workers=2, callback=told)
    assert found.facts["status"] == "complete" and found.folder is None
    # when the last prompt was done, every worker had had the weights for long: they had no name any more
    assert len(told.done) == len(PROMPTS) and left == []
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_loses_nothing_that_was_done(lm: LoadedModel, tmp_path: Path) -> None:
    many = [replace(PROMPTS[i % 5], id=f"p{i}") for i in range(200)]

    def kill() -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)

    told = Told(kill)
    with pytest.raises(WorkerError, match="same call with fewer workers goes on"):
        attndiag.run(lm, many, plan=tiny_plan(), workers=2, output=tmp_path, callback=told)
    assert not list(tmp_path.glob(".*.tmp"))
    again = Told()
    found = attndiag.run(lm, many, plan=tiny_plan(), output=tmp_path, callback=again)
    assert again.found >= len(told.done) and again.found + len(again.done) == len(many)
    assert found.facts["status"] == "complete"


def test_a_callback_that_raises_ends_the_workers(lm: LoadedModel, tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        attndiag.run(lm, PROMPTS, plan=small_plan(), workers=2, output=tmp_path, callback=Told(stop))
    assert not multiprocessing.active_children()
    assert not list(tmp_path.glob(".*.tmp"))
    assert time.perf_counter() - began < 60


DRIVER = """
import signal, sys, time
# a shell that starts a test run in the background has its interrupts ignored, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
import attndiag
from attndiag.models.known import sink_against_value
from test_run_workers import PROMPTS, small_plan

class Pids:
    def on_start(self, facts, done, total): pass
    def on_prompt(self, work, done, total):
        import multiprocessing
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        # not one long wait: a signal just before it would be seen only after it
        while True:
            time.sleep(0.05)
    def on_end(self, run): pass

if __name__ == "__main__":
    built = sink_against_value()
    lm = attndiag.load(built.model, tokenizer=built.tokenizer())
    attndiag.run(lm, PROMPTS, plan=small_plan(), workers=2, output=sys.argv[2], callback=Pids())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent_and_leave_nothing(lm: LoadedModel, tmp_path: Path, how: signal.Signals) -> None:
    driver, folder = tmp_path / "driver.py", tmp_path / "run"
    driver.write_text(DRIVER)
    parent = subprocess.Popen(
        [sys.executable, str(driver), str(Path(__file__).parent), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with parent, contextlib.ExitStack() as stack:
        # a parent that did not end must not keep the test waiting for it
        stack.callback(parent.kill)
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        # Ctrl-C reaches the workers as well
        os.killpg(parent.pid, how) if how == signal.SIGINT else parent.send_signal(how)
        _, said = parent.communicate(timeout=60)
    # of all processes only the parent has something to say of an interrupt
    assert said.count("KeyboardInterrupt") == (how == signal.SIGINT), said
    limit = time.monotonic() + 30
    while any(_runs(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)
    told = Told()
    attndiag.run(lm, PROMPTS, plan=small_plan(), output=folder, callback=told)
    assert told.found >= 1
    assert not list(folder.glob(".*.tmp"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_model_that_cannot_be_sent_is_refused_by_name(lm: LoadedModel, tmp_path: Path) -> None:
    lm.model.register_forward_hook(lambda *_: None)
    with pytest.raises(NotApplicableError, match="cannot be sent to other processes"):
        attndiag.run(lm, PROMPTS, plan=small_plan(), workers=2, output=tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_weights_that_find_no_room_are_told(lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(RunFolderError, match="the disk is full"):
        attndiag.run(lm, PROMPTS, plan=small_plan(), workers=2, output=tmp_path)


def test_numbers_and_devices_that_cannot_be_are_refused(lm: LoadedModel) -> None:
    with pytest.raises(ValueError, match="workers is 0"):
        attndiag.run(lm, PROMPTS, plan=small_plan(), workers=0)
    with pytest.raises(NotApplicableError, match="on cuda:0, where one process keeps the device busy"):
        workers.require_workers(SimpleNamespace(device=torch.device("cuda:0")), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "cores", "prompts", "gigabytes", "expected"),
    [
        ("cpu", 8, 90, 100, 8),
        ("cpu", 8, 11, 100, 2),
        ("cpu", 8, 3, 100, 1),
        ("cpu", 8, 90, 4, 3),
        ("cpu", 8, 90, 1, 1),
        ("cpu", 8, 90, None, 8),
        ("cpu", 1, 90, 100, 1),
        ("cuda", 8, 90, 100, 1),
    ],
)
def test_workers_fit_cores_prompts_and_memory(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, prompts: int, gigabytes: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    lm = SimpleNamespace(device=torch.device(device))
    memory = MemoryEstimate(500_000_000, 50_000_000, 50_000_000, gigabytes and gigabytes * 10**9, 20)
    assert workers.fitting_workers(lm, prompts, memory) == expected  # type: ignore[arg-type]
