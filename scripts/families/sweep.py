"""Runs one function per family, each in a forked process with a time and a memory limit, and keeps what came back.

Every family leaves one JSON file in the output folder, so that a sweep that was stopped goes on where it was, and a
family that hangs, crashes or eats the memory costs only itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Work = Callable[[str], Record]


def sweep(
    names: Iterable[str],
    work: Work,
    folder: Path,
    *,
    processes: int = 1,
    seconds: float = 120.0,
    gigabytes: float = 10.0,
    progress: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Records of all families, the ones already in the folder included.

    Parameters
    ----------
    names : iterable of str
        Families, in the order in which to run them.
    work : callable
        Maps a family name to a JSON-able record. Runs in a child process.
    folder : Path
        One ``<family>.json`` each; existing ones are not run again.
    processes : int
        How many families run at once.
    seconds, gigabytes : float
        Limits of one family.
    progress : callable, optional
        Is given each new record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    waiting = [name for name in names if not (folder / f"{name}.json").exists()]
    running: dict[str, tuple[Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop(0)
            process = context.Process(target=_child, args=(name, work, folder, gigabytes))
            process.start()
            running[name] = (process, time.monotonic())
        for name, (process, started) in list(running.items()):
            process.join(timeout=0.02)
            late = time.monotonic() - started > seconds
            if process.is_alive() and not late:
                continue
            if process.is_alive():
                process.kill()
                process.join()
            del running[name]
            if not (folder / f"{name}.json").exists():
                why = f"took longer than {seconds:.0f} s" if late else f"process ended with code {process.exitcode}"
                write_record(folder, {"family": name, "outcome": "not built", "reason": why})
            if progress is not None:
                progress(read_record(folder, name))
    return [read_record(folder, name) for name in names if (folder / f"{name}.json").exists()]


def _child(name: str, work: Work, folder: Path, gigabytes: float) -> None:
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    started = time.monotonic()
    try:
        record = work(name)
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        record = {"family": name, "outcome": "error", "reason": f"{type(error).__name__}: {error}"[:300]}
        record["traceback"] = lines[-12:]
    record["seconds"] = round(time.monotonic() - started, 2)
    write_record(folder, record)


def write_record(folder: Path, record: Record) -> None:
    """Write one family's record in one step, so that a reader never sees half of it."""
    target = folder / f"{record['family']}.json"
    temporary = target.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
    temporary.replace(target)


def read_record(folder: Path, name: str) -> Record:
    """The record of one family."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
