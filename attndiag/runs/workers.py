"""Prompts measured by several processes: the same functions, the same numbers, and one process that writes.

A prompt is a small job: threads within it gain little, prompts beside each other nearly all. Every worker is a fresh
interpreter in which torch has one thread. The weights lie in one file that all of them map into memory, so they are
there once; when all have it, it loses its name, so that nothing is left of it whatever happens.

Workers live as long as a pipe to the parent: they end with it, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import torch

from attndiag.comparison.one_prompt import Own
from attndiag.errors import NotApplicableError, WorkerError
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target
from attndiag.runs.folder import explained
from attndiag.runs.memory import USABLE, MemoryEstimate
from attndiag.runs.plan import RunPlan
from attndiag.runs.result_files import PromptWork
from attndiag.runs.work import measure_prompt

# a worker has to start and to load: below this many prompts each, that costs more than it gains
LEAST_PROMPTS = 4
# interpreter, torch and transformers, without the weights
_WORKER_BYTES = 900_000_000
# "quota period", or "max period"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Job:
    """One prompt with what is particular to it, see `work.measure_prompt`."""

    prompt: Prompt
    target: Target | None
    own: Mapping[str, Own]
    signed: Mapping[str, bool]


def fitting_workers(lm: LoadedModel, n_prompts: int, memory: MemoryEstimate) -> int:
    """How many workers suit this machine: at most one a core, none for an accelerator, as many as there is memory for.

    Parameters
    ----------
    memory : estimate of the longest prompt.

    Returns
    -------
    At least 1, which stands for measuring in the calling process.
    """
    if lm.device.type != "cpu":
        return 1
    found = min(_cores(), n_prompts // LEAST_PROMPTS)
    if memory.available is not None:
        found = min(found, int(USABLE * memory.available - memory.weights) // (_WORKER_BYTES + memory.needed))
    return max(1, found)


def _cores() -> int:
    """Cores that this process may use, a container's quota included."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if _QUOTA.exists() and (told := _QUOTA.read_text().split())[0] != "max":
        cores = min(cores, max(1, int(told[0]) // int(told[1])))
    return cores


def require_workers(lm: LoadedModel, workers: int) -> None:
    """Refuse numbers and devices that cannot be.

    Raises
    ------
    ValueError : fewer than 1.
    NotApplicableError : more than 1 for a model on an accelerator.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1")
    if workers > 1 and lm.device.type != "cpu":
        raise NotApplicableError(
            f"the model is on {lm.device}, where one process keeps the device busy; measure in this one (1 worker), "
            "or load the model on the CPU"
        )


def measured(
    lm: LoadedModel, plan: RunPlan, jobs: Mapping[str, Job], *, workers: int, folder: Path | None
) -> Iterator[tuple[str, PromptWork]]:
    """Results of `work.measure_prompt` by key, in the order in which they are done.

    Parameters
    ----------
    jobs : key -> job.
    folder : where the weights lie meanwhile; a temporary folder when None.

    Raises
    ------
    NotApplicableError : the model cannot be sent to another process (a hook that is a lambda, ...).
    RunFolderError : no room for the weights.
    WorkerError : a worker ended by itself.
    """
    context = multiprocessing.get_context("spawn")
    n = min(workers, len(jobs))
    with _stored(lm, plan, folder) as file:
        theirs, ours = context.Pipe(duplex=False)
        loaded = context.Semaphore(0)
        pool = ProcessPoolExecutor(n, mp_context=context, initializer=_begin, initargs=(file, theirs, loaded))
        results = pool._result_queue
        try:
            waiting: dict[Future[PromptWork], str] = {pool.submit(_measure, job): key for key, job in jobs.items()}
            to_load = n
            while waiting:
                # never for long: an interrupt just before a wait is seen after it
                done = wait(waiting, timeout=0.2 if to_load else 1.0, return_when=FIRST_COMPLETED).done
                while to_load and loaded.acquire(block=False):
                    to_load -= 1
                    if not to_load:
                        _unname(file)
                # what was done is kept before anything that went wrong is told
                for one in sorted(done, key=lambda one: one.exception() is not None):
                    yield waiting.pop(one), one.result()
            pool.shutdown()
        except BrokenProcessPool as error:
            raise WorkerError(
                f"one of {n} workers ended by itself ({error}): it lacked memory, or could not load the model (its own "
                "message stands above). Prompts that were done are kept; the same call with fewer workers goes on from "
                "there"
            ) from error
        finally:
            # nobody waits for jobs that nobody wants any more
            ours.close()
            # nor for the rest of a result whose sender has ended: without our own end the pipe has an end, too
            results._writer.close()
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _stored(lm: LoadedModel, plan: RunPlan, folder: Path | None) -> Iterator[Path]:
    """A file with model and plan, gone afterwards."""
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attndiag-")))
        # a name that the folder knows for a leftover, should this process be killed
        file = place / f".model.{os.getpid()}.tmp"
        stack.callback(file.unlink, missing_ok=True)
        with explained(file):
            # of a full disk torch.save says nothing that a person could read
            if shutil.disk_usage(place).free < _stored_bytes(lm):
                raise OSError(errno.ENOSPC, "no room for the weights")
            try:
                torch.save((lm, plan), file)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise NotApplicableError(
                    f"the model cannot be sent to other processes: {error}; measure in this one (1 worker)"
                ) from error
        yield file


def _unname(file: Path) -> None:
    # Windows keeps the names of mapped files until nobody maps them
    with contextlib.suppress(PermissionError):
        file.unlink()


def _stored_bytes(lm: LoadedModel) -> int:
    """Bytes of weights and buffers, and something for the rest."""
    tensors = [*lm.model.parameters(), *lm.model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 10_000_000


# what a worker works with: put here when it starts, by the only function that runs before its jobs
_works_with: list[tuple[LoadedModel, RunPlan]] = []


def _begin(file: Path, alive: Connection, loaded: Semaphore) -> None:
    # Ctrl-C reaches the whole group: the parent decides what becomes of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    torch.set_num_threads(1)
    _works_with.append(torch.load(file, map_location="cpu", mmap=True, weights_only=False))
    loaded.release()


def _end_with(alive: Connection) -> None:
    """End this process when the other end of the pipe is gone: nothing is ever sent."""
    with contextlib.suppress(EOFError, OSError):
        alive.recv()
    os._exit(1)


def _measure(job: Job) -> PromptWork:
    ((lm, plan),) = _works_with
    return measure_prompt(lm, job.prompt, plan, target=job.target, own=job.own, signed=job.signed)
