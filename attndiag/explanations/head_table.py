"""`HeadTable`: what `attndiag.heads` returns, one `Scores` for each measure and the reasons for what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attndiag.errors import NotApplicableError
from attndiag.scores import Scores

if TYPE_CHECKING:
    import pandas as pd

BESIDE = ("low", "high", "baseline", "sink_mass", "outside_mass", "first_copy_effect")


@dataclass(frozen=True)
class NotMeasurable:
    """A probe that could not be run, in words.

    Parameters
    ----------
    probe : which one.
    layer : label of the layer, or None where it holds for the whole model.
    reason : why, and what would help where something would.
    """

    probe: str
    layer: Any
    reason: str


@dataclass(frozen=True)
class SetEffect:
    """Effect of heads that were taken away together.

    Parameters
    ----------
    name : what the set is.
    heads : (layer, head) pairs.
    way : how, see `explain.head_ablation`.
    effect, low, high : rise of the second-copy loss in nats, mean over rows and its 95 % interval.
    first_copy_effect : the same on the first copy.
    """

    name: str
    heads: tuple[tuple[int, int], ...]
    way: str
    effect: float
    low: float
    high: float
    first_copy_effect: float

    @classmethod
    def of(cls, found: Any) -> SetEffect:
        """From an `Ablation`, which holds the effects of single rows."""
        mean, half = found.effect.mean().item(), half_width(found.effect).item()
        control = found.first_copy_effect.mean().item()
        return cls(found.name, found.heads, found.way, mean, mean - half, mean + half, control)


@dataclass(frozen=True, eq=False)
class HeadTable:
    """Measures of every head of a model.

    Parameters
    ----------
    scores : name -> `Scores` with axes (layer, head), (layer,) or (layer, head, other_head). nan where a head was
        not measured. `checks` holds the arrays that stand beside the values: `low` and `high`, the 95 % interval over
        probe rows; `baseline`, `sink_mass` and `outside_mass` of the same queries where the measure has them.
    not_measurable : what is missing and why.
    facts : about the whole run: probe length, rows, BOS policy, losses of the first and second copy (nats), ...
    sets : effects of sets of heads that were ablated together; random sets of the same size are named `random`.
    """

    scores: Mapping[str, Scores]
    not_measurable: tuple[NotMeasurable, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[SetEffect, ...] = ()

    def __getitem__(self, name: str) -> Scores:
        if name in self.scores:
            return self.scores[name]
        reasons = "; ".join(f"{item.probe}: {item.reason}" for item in self.not_measurable)
        raise NotApplicableError(
            f"there is no {name!r}; measured are {', '.join(self.scores) or 'none'}"
            + (f". Not measurable: {reasons}" if reasons else "")
        )

    def to_frame(self) -> pd.DataFrame:
        """One row a head: layer, head, each measure with axes (layer, head), and `<measure>_low`, `_baseline`, ..."""
        import pandas as pd

        per_head = {name: scores for name, scores in self.scores.items() if scores.axes == ("layer", "head")}
        if not per_head:
            raise NotApplicableError("no measure of single heads was made; see not_measurable")
        first = next(iter(per_head.values()))
        layers, n_heads = first.labels["layer"], first.values.shape[1]
        columns: dict[str, Any] = {
            "layer": [layer for layer in layers for _ in range(n_heads)],
            "head": list(range(n_heads)) * len(layers),
        }
        for name, scores in per_head.items():
            columns[name] = scores.numpy().reshape(-1)
            for beside in BESIDE:
                if beside in scores.checks:
                    columns[f"{name}_{beside}"] = _per_head(scores.checks[beside], n_heads)
        frame = pd.DataFrame(columns)
        measures = [column for column in frame.columns if column not in ("layer", "head")]
        return frame.dropna(how="all", subset=measures).reset_index(drop=True)

    def tidy(self) -> pd.DataFrame:
        """Long form: one row for each measure and head: layer, head, measure, value, low, high, unit."""
        import pandas as pd

        parts = []
        for name, scores in self.scores.items():
            if scores.axes != ("layer", "head"):
                continue
            n_heads = scores.values.shape[1]
            layers = scores.labels["layer"]
            parts.append(
                pd.DataFrame(
                    {
                        "layer": [layer for layer in layers for _ in range(n_heads)],
                        "head": list(range(n_heads)) * len(layers),
                        "measure": name,
                        "value": scores.numpy().reshape(-1),
                        "low": _per_head(scores.checks.get("low", math.nan), n_heads),
                        "high": _per_head(scores.checks.get("high", math.nan), n_heads),
                        "unit": scores.unit,
                    }
                )
            )
        columns = ["layer", "head", "measure", "value", "low", "high", "unit"]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)

    def top(self, name: str, count: int = 10) -> pd.DataFrame:
        """The heads with the largest values of one measure, largest first."""
        self[name]
        return self.to_frame().dropna(subset=[name]).nlargest(count, name).reset_index(drop=True)

    def sets_frame(self) -> pd.DataFrame:
        """One row for each set of heads that was ablated together."""
        import pandas as pd

        columns = ["name", "heads", "way", "effect", "low", "high", "first_copy_effect"]
        return pd.DataFrame([vars(item) for item in self.sets], columns=columns)

    def __repr__(self) -> str:
        missing = f"; {len(self.not_measurable)} not measurable" if self.not_measurable else ""
        return f"HeadTable({', '.join(self.scores)}{missing})"


@dataclass(frozen=True)
class Measure:
    """What a measure is called and how its numbers are to be read."""

    name: str
    unit: str
    probe: str
    signed: bool = False
    axes: tuple[str, ...] = ("layer", "head")


class Rows:
    """Collects one measure batch by batch: [row, ...] values for each layer, and what stands beside them."""

    def __init__(self) -> None:
        self.values: dict[Any, list[Tensor]] = {}
        self.beside: dict[str, dict[Any, list[Tensor]]] = {}

    def add(self, layer: Any, values: Tensor, **beside: Tensor) -> None:
        """Add a batch of rows for a layer; everything is copied to the CPU in float64."""
        self.values.setdefault(layer, []).append(values.detach().double().cpu())
        for name, more in beside.items():
            self.beside.setdefault(name, {}).setdefault(layer, []).append(more.detach().double().cpu())

    def table(self, measure: Measure, layers: Mapping[Any, Any], **provenance: Any) -> Scores:
        """Means and 95 % intervals over rows, as `Scores` with one entry for each layer in `layers` (key -> label).

        The interval is mean ± t s.e. over rows, which are independent draws; nan for a single row.
        """
        means, spread = {}, {}
        for layer, batches in self.values.items():
            rows = torch.cat(batches)
            means[layer] = rows.mean(dim=0)
            spread[layer] = half_width(rows)
        values = _stacked(means, layers)
        half = _stacked(spread, layers)
        checks: dict[str, Any] = {"low": values - half, "high": values + half}
        for name, per_layer in self.beside.items():
            checks[name] = _stacked({k: torch.cat(b).mean(dim=0) for k, b in per_layer.items()}, layers)
        checks["rows"] = max((sum(len(b) for b in batches) for batches in self.values.values()), default=0)
        return Scores(
            values=values,
            axes=measure.axes,
            method=measure.name,
            unit=measure.unit,
            sign="signed" if measure.signed else "non-negative",
            labels={"layer": list(layers.values())},
            params=provenance.pop("params", {}),
            provenance=provenance,
            checks=checks,
        )


def labels_of(keys: Sequence[tuple[str, int, int | None]]) -> dict[tuple[str, int, int | None], Any]:
    """Label for each (module, call, layer): the layer's number where that is unique, else module (and call)."""
    numbers = [layer for _, _, layer in keys]
    modules = [module for module, _, _ in keys]
    if None not in numbers and len(set(numbers)) == len(numbers):
        return {key: key[2] for key in keys}
    repeated = {module for module in modules if modules.count(module) > 1}
    return {key: f"{key[0]}#{key[1]}" if key[0] in repeated else key[0] for key in keys}


def half_width(rows: Tensor) -> Tensor:
    """Half the 95 % interval of a mean over rows, t s.e.; nan for a single row."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    count = rows.shape[0]
    if count < 2:
        return torch.full_like(rows[0], torch.nan)
    return float(stdtrit(count - 1, 0.975)) * rows.std(dim=0) / count**0.5


def _stacked(per_layer: Mapping[Any, Tensor], layers: Mapping[Any, Any]) -> Tensor:
    """[layer, ...], nan for layers without a value and for heads that a layer does not have."""
    some = list(per_layer.values())
    shape = tuple(max(sizes) for sizes in zip(*(tensor.shape for tensor in some), strict=True))
    out = torch.full((len(layers), *shape), torch.nan, dtype=torch.float64)
    for index, layer in enumerate(layers):
        if layer in per_layer:
            tensor = per_layer[layer]
            out[(index, *(slice(size) for size in tensor.shape))] = tensor
    return out


def _per_head(values: Any, n_heads: int) -> Any:
    """[layer, head] or [layer] to one number for each row of the frame; one number stands for all of them."""
    if not isinstance(values, Tensor):
        return values
    if values.ndim == 1:
        values = values[:, None].expand(-1, n_heads)
    return values.reshape(-1).tolist()
