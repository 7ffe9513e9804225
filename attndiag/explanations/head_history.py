"""`heads_over_checkpoints`: the same head scores at every checkpoint of a training run.

Works on the shipped series (`attndiag.models.series.load_series`), on folders (`checkpoint-500`), on revisions of a
hub model (`step1000`), and on (step, model) pairs. `HeadHistory.window` says when a score rose; read it beside that of
a control in which it cannot rise (Olsson 2022, arXiv 2209.11895).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attndiag.core.phases import PhaseWindow, icl_score, phase_window
from attndiag.errors import ModelLoadError, NotApplicableError
from attndiag.explanations.head_scores import Progress, heads
from attndiag.explanations.head_table import HeadTable
from attndiag.models.load import LoadedModel, load

if TYPE_CHECKING:
    import pandas as pd

Source = str | Path | nn.Module | LoadedModel
_STEP = re.compile(r"(?:^|[-_])(?:global_?)?(?:step|checkpoint|ckpt|iter)[-_]?(\d+)$", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class HeadHistory:
    """Head scores of one run, checkpoint by checkpoint.

    Parameters
    ----------
    steps : increasing training steps.
    tables : the `HeadTable` of each step.
    """

    steps: tuple[int, ...]
    tables: tuple[HeadTable, ...]

    def curve(self, name: str = "prefix_matching_score", head: tuple[Any, int] | None = None) -> list[float]:
        """One number a step: a measure of one head (layer label, head), or of the best head at that step.

        `name` may also be a number among the facts of the tables (`first_copy_loss`, `second_copy_loss`, `icl_score`).
        """
        if all(name in table.facts for table in self.tables):
            return [float(table.facts[name]) for table in self.tables]
        curve = []
        for table in self.tables:
            scores = table[name]
            if scores.axes != ("layer", "head"):
                raise NotApplicableError(f"{name} has axes {scores.axes}; a curve needs one number a head")
            if head is None:
                kept = scores.values[~scores.values.isnan()]
                curve.append(kept.max().item() if kept.numel() else torch.nan)
            else:
                labels = list(scores.labels["layer"])
                if head[0] not in labels or not 0 <= head[1] < scores.values.shape[1]:
                    raise NotApplicableError(f"there is no head {head}; layers are {labels}")
                curve.append(scores.values[labels.index(head[0]), head[1]].item())
        return curve

    def window(
        self,
        name: str = "prefix_matching_score",
        head: tuple[Any, int] | None = None,
        *,
        low: float = 0.2,
        high: float = 0.8,
    ) -> PhaseWindow:
        """When a score rose from `low` to `high` of its final value, in steps; see `core.phases.phase_window`."""
        return phase_window(self.steps, self.curve(name, head), low=low, high=high)

    def learning_window(
        self, control: HeadHistory | None = None, *, low: float = 0.2, high: float = 0.8
    ) -> PhaseWindow:
        """When the second copy became easier than the first: the window of first-copy minus second-copy loss.

        With a `control` of the same run form (one layer, say), of what goes beyond the control's, interpolated at
        these steps: a loss that falls along the context is no sign of induction by itself.
        """
        gain = self._copy_gain()
        if control is not None:
            if control.steps[0] > self.steps[0] or control.steps[-1] < self.steps[-1]:
                raise NotApplicableError(
                    f"the control covers steps {control.steps[0]}..{control.steps[-1]}, less than "
                    f"{self.steps[0]}..{self.steps[-1]}"
                )
            gain = [
                mine - _at(step, control.steps, control._copy_gain())
                for step, mine in zip(self.steps, gain, strict=True)
            ]
        return phase_window(self.steps, gain, low=low, high=high)

    def set_curve(self, way: str = "zero") -> list[float]:
        """Effect of ablating the heads above the threshold together, nats; nan at steps where no head is above it."""
        curve = []
        for table in self.tables:
            found = [item.effect for item in table.sets if item.name != "random" and item.way == way]
            curve.append(found[0] if found else torch.nan)
        return curve

    def to_frame(self) -> pd.DataFrame:
        """The tidy tables of all steps, one under the other, with a column `step` in front."""
        import pandas as pd

        parts = []
        for step, table in zip(self.steps, self.tables, strict=True):
            part = table.tidy()
            part.insert(0, "step", step)
            parts.append(part)
        return pd.concat(parts, ignore_index=True)

    def _copy_gain(self) -> list[float]:
        first, second = self.curve("first_copy_loss"), self.curve("second_copy_loss")
        return [a - b for a, b in zip(first, second, strict=True)]


def heads_over_checkpoints(
    sources: Iterable[Source | tuple[int, Source]],
    *,
    model: str | None = None,
    tokenizer: Any = None,
    load_options: Mapping[str, Any] | None = None,
    probes: Sequence[str] = ("induction", "previous"),
    ablate: int = 0,
    ablate_by: str = "prefix_matching",
    rows: int = 32,
    length: int = 50,
    seed: int = 0,
    bos: bool | None = None,
    texts: Sequence[str] | None = None,
    threshold: float = 0.4,
    ablation_rows: int = 4,
    losses_on: Tensor | None = None,
    early: int | tuple[int, int] = 50,
    late: int | tuple[int, int] = 500,
    progress: Progress | None = None,
) -> HeadHistory:
    """`heads` for every checkpoint of one run; each is loaded, measured and let go before the next.

    Parameters
    ----------
    sources : (step, source) pairs, a `CheckpointSeries`, or names that end in their step (`checkpoint-500`,
        `step1000`). A source is whatever `attndiag.load` takes.
    model : a hub id; the sources are then its revisions.
    tokenizer : for all checkpoints, where they bring none.
    load_options : more arguments for `attndiag.load` (device, dtype, offline, ...).
    probes, ablate, ablate_by, rows, length, seed, bos, texts, threshold, ablation_rows : as in `heads`, the same for
        all checkpoints.
    losses_on : [row, position] token ids on which the in-context-learning score is measured too, between the
        positions `early` and `late`; it appears as the fact `icl_score`.
    progress : called with (what is being done, checkpoints done, checkpoints in all).

    Raises
    ------
    ModelLoadError : a source without a step, a checkpoint that is missing, or one of another architecture.
    NotApplicableError : fewer than two checkpoints, or what `heads` raises.
    """
    given = _with_steps(sources)
    tables: list[HeadTable] = []
    form: tuple[str, tuple] | None = None
    for index, (step, source) in enumerate(given):
        lm = _open(source, model, {**(load_options or {}), "tokenizer": tokenizer})
        found = _form(lm)
        if form is not None and found != form:
            raise ModelLoadError(
                f"the checkpoint at step {step} is {_difference(found, form)}; a history needs checkpoints of one run"
            )
        form = found
        table = heads(
            lm,
            probes=probes,
            ablate=ablate,
            ablate_by=ablate_by,
            rows=rows,
            length=length,
            seed=seed,
            bos=bos,
            texts=texts,
            threshold=threshold,
            ablation_rows=ablation_rows,
        )
        if losses_on is not None:
            score = icl_score(_losses(lm, losses_on), early=early, late=late).mean().item()
            table = replace(table, facts={**table.facts, "icl_score": score})
        tables.append(table)
        if progress is not None:
            progress(f"heads at step {step}", index + 1, len(given))
    return HeadHistory(tuple(step for step, _ in given), tuple(tables))


class _Later:
    """A checkpoint of a series, opened when its turn comes."""

    def __init__(self, series: Any, step: int) -> None:
        self.series, self.step = series, step

    def open(self) -> nn.Module:
        return self.series.at(self.step)


def _with_steps(sources: Iterable[Source | tuple[int, Source]]) -> list[tuple[int, Any]]:
    """(step, source) pairs in the order of their steps."""
    pairs: list[tuple[int, Any]] = []
    for item in _items(sources):
        if isinstance(item, tuple):
            step, source = item
            pairs.append((int(step), source))
            continue
        match = _STEP.search(Path(item).name) if isinstance(item, str | Path) else None
        if match is None:
            raise ModelLoadError(
                f"the step of {item if isinstance(item, str | Path) else type(item).__name__} is unknown; give "
                "(step, source) pairs, or names that end in the step like checkpoint-500 or step1000"
            )
        pairs.append((int(match.group(1)), item))
    pairs.sort(key=lambda pair: pair[0])
    steps = [step for step, _ in pairs]
    if len(steps) < 2:
        raise NotApplicableError(f"a history needs at least two checkpoints, got {len(steps)}")
    if len(set(steps)) < len(steps):
        raise ModelLoadError(f"two checkpoints have the same step; steps are {steps}")
    return pairs


def _items(sources: Any) -> Iterator[Any]:
    if isinstance(sources, str | Path):
        raise ModelLoadError(f"{str(sources)!r} is one source; give a list of checkpoints")
    if hasattr(sources, "steps") and hasattr(sources, "at"):  # a series: no need to hold all models at once
        yield from ((step, _Later(sources, step)) for step in sources.steps)
    else:
        yield from sources


def _open(source: Any, model: str | None, options: Mapping[str, Any]) -> LoadedModel:
    if isinstance(source, _Later):
        source = source.open()
    if isinstance(source, LoadedModel):
        return source
    if model is not None:
        if not isinstance(source, str):
            raise ModelLoadError(f"with model={model!r} every source is a revision name, got {type(source).__name__}")
        return load(model, revision=source, **options)
    return load(source, **options)


def _form(lm: LoadedModel) -> tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    """What has to be equal for two models to be checkpoints of one run: class, and every weight's name and shape."""
    shapes = tuple((name, tuple(weight.shape)) for name, weight in lm.model.named_parameters())
    return lm.info.architecture, shapes


def _difference(found: tuple[str, tuple], first: tuple[str, tuple]) -> str:
    if found[0] != first[0]:
        return f"a {found[0]}, and the first is a {first[0]}"
    differing = sorted(set(found[1]) ^ set(first[1]))
    return f"of another size: {', '.join(f'{name} {list(shape)}' for name, shape in differing[:4])}"


def _losses(lm: LoadedModel, tokens: Tensor) -> Tensor:
    """[row, position], nats; nan at position 0, which nothing predicts."""
    tokens = tokens.to(lm.device)
    logits = lm.run({"input_ids": tokens}).logits.float()
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return torch.cat([torch.full_like(losses[:, :1], torch.nan), losses], dim=1).cpu()


def _at(step: int, steps: Sequence[int], values: Sequence[float]) -> float:
    """Linear interpolation between checkpoints."""
    after = next(i for i, known in enumerate(steps) if known >= step)
    if steps[after] == step:
        return values[after]
    share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])
