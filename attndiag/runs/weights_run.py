"""The first report's run: a prompt set through a model, weights against contributions, into a run folder.

One prompt after the other, and within a prompt one attention call after the other (`on_call`), so that a single layer
is in memory. What one prompt gave is written before the next one starts; a prompt that cannot be measured becomes a
row with its reason. Nothing is drawn at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attndiag.errors import InsufficientMemoryError, PromptError, TargetError, UnverifiedCaptureError
from attndiag.hooks.capture_context import capture
from attndiag.hooks.captured import Refusal
from attndiag.hooks.record import AttentionCall
from attndiag.models.access import accepts
from attndiag.models.encoding import Encoded
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.runs.call_measures import measure_call
from attndiag.runs.call_record import CallMeasures
from attndiag.runs.folder import RunFolder, locked, read_parquet, remove_leftovers
from attndiag.runs.keys import with_ids
from attndiag.runs.memory import MemoryEstimate, estimate_memory
from attndiag.runs.resuming import find_run, whole_prompts
from attndiag.runs.rows import check_rows, disagreement_rows, head_rows, refusal_rows, score_rows, token_rows
from attndiag.runs.schemas import PROMPTS, RUNS, TIMINGS
from attndiag.runs.task_check import Answers, check_task, predicts_next_token, resolve_answers
from attndiag.runs.weights_facts import METHODS, RunSettings, run_facts, run_identity

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["METHODS", "RunOutcome", "RunSettings", "estimate_run", "longest_prompt", "measure_prompts", "run_identity"]

Progress = Callable[[str, int, int], None]
# what can be wrong with one prompt while the others are fine; everything else stops the run
PROMPT_FAULTS = (PromptError, TargetError, InsufficientMemoryError, UnverifiedCaptureError)


@dataclass(frozen=True)
class RunOutcome:
    """What a finished run comes to."""

    folder: RunFolder
    n_prompts: int
    n_failed: int
    n_without_target: int
    n_calls: int
    n_certified: int
    logits_equal: bool | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Every prompt measured, every target usable, every self-check passed."""
        return (
            self.n_failed + self.n_without_target == 0
            and self.n_calls == self.n_certified
            # None: nobody asked, so it did not pass
            and self.logits_equal is True
        )


def longest_prompt(lm: LoadedModel, prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt that the model can read; 1 when it can read none."""
    lengths = [1]
    for prompt in prompts:
        try:
            encoded = lm.encode(prompt)
        except PromptError:
            continue  # becomes a row with its reason when its turn comes
        lengths.append(max(encoded.input_ids.shape[1], encoded.decoder.input_ids.shape[1] if encoded.decoder else 0))
    return max(lengths)


def estimate_run(lm: LoadedModel, prompts: Sequence[Prompt], *, backend: str = "auto") -> MemoryEstimate:
    """Memory that a run over these prompts needs, from the longest one."""
    return estimate_memory(lm, longest_prompt(lm, prompts), backend=backend)


def measure_prompts(
    lm: LoadedModel,
    prompts: Sequence[Prompt],
    output: str | Path,
    *,
    settings: RunSettings | None = None,
    prompt_file: str | Path | None = None,
    n_skipped: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
    remark: Callable[[str], None] | None = None,
) -> RunOutcome:
    """Measure weights and contributions of every attention call on every prompt, and keep them in a run folder.

    A run that was stopped goes on where it was: prompts that are there and whole are not measured again.

    Parameters
    ----------
    lm : from `attndiag.load`.
    prompts : in the order in which they will stand in the tables; ids must differ.
    output : the run folder; new, empty, this very run, or another one that `overwrite` allows to replace.
    settings : what to measure.
    prompt_file, n_skipped : where the prompts came from and how many entries were left out; written down.
    progress : called with (what is being done, prompts done, prompts in all).
    remark : called with what a person should know: prompts that were found, or found damaged.

    Raises
    ------
    PromptError : no prompts, or two with the same id.
    RunFolderError : the folder cannot be written, is in use or holds another run, or the disk is full. Finished prompts
        stay.
    UnsupportedModelError : the model has no attention that could be captured.
    """
    settings = settings or RunSettings()
    named = with_ids(prompts)
    facts = run_facts(lm, named, settings, prompt_file, n_skipped)
    RunFolder.require_place(output)
    with locked(Path(output)):
        remove_leftovers(Path(output))
        found = None if overwrite else find_run(output, facts)
        if found is not None and found.finished:
            return _outcome(found)
        if found is None:
            about = {"model": lm.info.name, "n_prompts": len(named), "runs": facts}
            found = RunFolder.create(output, facts["run"], about=about, overwrite=overwrite)
        _measure_missing(lm, named, found, settings, progress, remark or (lambda _text: None), facts)
        return _outcome(found)


def _measure_missing(
    lm: LoadedModel,
    prompts: Sequence[Prompt],
    folder: RunFolder,
    settings: RunSettings,
    progress: Progress | None,
    say: Callable[[str], None],
    facts: dict[str, Any],
) -> None:
    started = time.perf_counter()
    done = whole_prompts(folder, prompts, say)
    earlier = sum(read_parquet(folder.shard("timings", key)).to_pandas()["seconds"].sum() for key in done)
    equal = _Once(folder.about["runs"].get("logits_equal"))
    told = equal.answer
    for index, prompt in enumerate(prompts):
        key = f"{index:06d}"
        if key in done:
            continue
        if progress is not None:
            progress("measuring", len(done), len(prompts))
        measured = _measure_prompt(lm, prompt, index, settings, equal)
        if equal.answer is not told:
            # before the shard: a prompt that is there is not measured again, so nobody would ask again
            told = equal.answer
            folder.note({"logits_equal": told})
        folder.write_shard(key, _tables(folder.run_id, prompt, measured, settings))
        done[key] = measured.row
    if progress is not None:
        progress("measuring", len(prompts), len(prompts))
    seconds = time.perf_counter() - started
    checks = folder.arrow("checks").to_pydict()
    kernels, backends = (sorted({name for name in checks[column] if name}) for column in ("kernel", "backend"))
    facts |= {
        "created": folder.about["runs"]["created"],
        "status": "complete",
        "kernel": ", ".join(kernels) or None,
        "backend": ", ".join(backends) or None,
        "logits_equal": equal.answer,
        "seconds": float(earlier) + seconds,
    }
    if any(row.get("transient") for row in done.values()):
        # open, with its shards: the next run into this folder tries again what lacked memory
        facts["status"] = "unfinished"
        folder.note(facts)
        folder.merge_shards({"runs": RUNS.table(facts)})
        return
    folder.finish({"runs": RUNS.table(facts)})


def _outcome(folder: RunFolder) -> RunOutcome:
    """What a finished run says of itself."""
    rows = folder.read("prompts")
    run = folder.read("runs").iloc[0] if folder.finished else folder.about["runs"]
    return RunOutcome(
        folder,
        n_prompts=len(rows),
        n_failed=int((rows["status"] == "failed").sum()),
        n_without_target=int((rows["status"] == "no_target").sum()),
        n_calls=int(rows["n_calls"].sum()),
        n_certified=int(rows["n_certified"].sum()),
        logits_equal=None if run["logits_equal"] is None else bool(run["logits_equal"]),
        seconds=float(run["seconds"]),
    )


class _Once:
    """Whether outputs with and without capture were bit-equal; asked on the first prompt that runs."""

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer


@dataclass(frozen=True, eq=False)
class _Measured:
    """What one prompt gave; `calls` is empty where it failed."""

    row: dict[str, Any]
    encoded: Encoded | None
    calls: list[CallMeasures]
    refusals: list[Refusal]
    seconds: dict[str, float]


def _measure_prompt(lm: LoadedModel, prompt: Prompt, index: int, settings: RunSettings, equal: _Once) -> _Measured:
    row: dict[str, Any] = {
        "prompt": prompt.id,
        "index": index,
        "cluster": prompt.cluster,
        "text": prompt.text,
        "target": prompt.target,
        "foil": prompt.foil,
        "status": "ok",
        "n_calls": 0,
        "n_certified": 0,
        "transient": False,
    }
    encoded = None
    try:
        encoded = lm.encode(prompt)
        row |= {"text": encoded.texts[0], "n_tokens": int(encoded.lengths[0])}
        estimate_memory(
            lm, int(encoded.lengths[0]), backend=settings.calls.backend, rows=settings.calls.most_ranked_rows
        ).require_fit(f"prompt {prompt.id!r}")
        calls, refusals, logits, seconds = _captured(lm, encoded, settings, equal)
    except PROMPT_FAULTS as error:
        row |= {"status": "failed", "error": str(error), "transient": isinstance(error, InsufficientMemoryError)}
        return _Measured(row, encoded, [], [], {})
    row |= {"n_calls": len(calls), "n_certified": sum(call.certified for call in calls)}
    if logits is not None and predicts_next_token(lm):
        answers = Answers()
        try:
            answers = resolve_answers(lm, prompt)
        except TargetError as error:
            row |= {"status": "no_target", "error": str(error)}
        row |= check_task(lm, logits, answers)
    return _Measured(row, encoded, calls, refusals, seconds)


def _captured(
    lm: LoadedModel, encoded: Encoded, settings: RunSettings, equal: _Once
) -> tuple[list[CallMeasures], list[Refusal], torch.Tensor | None, dict[str, float]]:
    """One forward under capture, each call measured as it comes."""
    calls: list[CallMeasures] = []
    in_measures = 0.0

    def measure(call: AttentionCall) -> None:
        nonlocal in_measures
        begun = time.perf_counter()
        calls.append(measure_call(call, _special_keys(encoded, call), settings.calls))
        in_measures += time.perf_counter() - begun

    # the language-model head at every position is most of the memory of a long prompt
    keep = {"logits_to_keep": 1} if accepts(lm.model, "logits_to_keep") else {}
    begun = time.perf_counter()
    with capture(lm, on_call=measure) as captured:
        output = lm.run(encoded.inputs, **keep)
    seconds = {"forward under capture": time.perf_counter() - begun - in_measures}
    for call in calls:
        for work, spent in call.seconds.items():
            seconds[work] = seconds.get(work, 0.0) + spent
    if equal.answer is None:
        begun = time.perf_counter()
        equal.answer = _same_output(lm.run(encoded.inputs, **keep), output)
        seconds["forward without capture (check)"] = time.perf_counter() - begun
    logits = getattr(output, "logits", None)
    found = logits[0, -1] if isinstance(logits, torch.Tensor) and logits.ndim == 3 else None
    return calls, captured.refusals, found, seconds


def _same_output(plain: Any, captured: Any) -> bool:
    """Bit-equal logits; where there are none, bit-equal hidden states."""
    for name in ("logits", "last_hidden_state"):
        left, right = getattr(plain, name, None), getattr(captured, name, None)
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            return torch.equal(left, right)
    left, right = plain[0], captured[0]
    return torch.equal(left, right)


def _special_keys(encoded: Encoded, call: AttentionCall) -> np.ndarray:
    """Which keys of a call are special tokens; none where its keys are not this prompt's tokens."""
    side = encoded
    if encoded.decoder is not None and call.kind == "self" and "decoder" in call.module_name.split("."):
        side = encoded.decoder
    special = side.special[0].cpu().numpy()
    return special if len(special) == call.n_keys else np.zeros(call.n_keys, dtype=bool)


def _tables(run_id: str, prompt: Prompt, measured: _Measured, settings: RunSettings) -> dict[str, pa.Table]:
    name = str(prompt.id)
    tables = {
        "prompts": PROMPTS.table({"run": run_id, **{key: [value] for key, value in measured.row.items()}}),
        "timings": TIMINGS.table(
            {
                "run": run_id,
                "prompt": name,
                "work": list(measured.seconds),
                "seconds": list(measured.seconds.values()),
            }
        ),
    }
    if measured.encoded is not None:
        tables["tokens"] = token_rows(run_id, name, measured.encoded)
    if measured.calls and measured.encoded is not None:
        tables |= {
            "heads": head_rows(run_id, name, measured.calls),
            "scores": score_rows(run_id, name, measured.calls, strongest=settings.strongest),
            "checks": check_rows(run_id, name, measured.calls),
            "disagreements": disagreement_rows(
                run_id, name, measured.calls, measured.encoded, strongest=settings.strongest
            ),
        }
    if measured.refusals:
        tables["refusals"] = refusal_rows(run_id, name, measured.refusals)
    return tables
