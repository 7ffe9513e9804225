"""`Scores`: what every measurement comes back as.

One record for contributions, attributions, effects and head tables: an array, the names and labels of its
axes, its sign and unit, the target it is about, the method with its parameters, where it came from, and the
checks that decide whether it may be believed. No model inside, so it can be saved, merged and compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from attndiag.errors import ShapeError, UnverifiedCaptureError

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.prompts import Target

Sign = Literal["signed", "non-negative"]
# axes whose entries are tokens
_POSITIONS = ("position", "query_pos", "key_pos")


@dataclass(frozen=True, eq=False)
class Scores:
    """An array of scores with everything needed to read it.

    Parameters
    ----------
    values : tensor whose shape matches `axes`. `nan` means undefined, never zero.
    axes : axis names in order, out of `layer batch head query_pos key_pos position ...`.
    method : catalogue name, for example `"contribution"`.
    unit : `"mass"`, `"residual norm"`, `"nats"`, `"logits"`, ...
    sign : `"signed"` or `"non-negative"`.
    labels : for some axes, one label per index (token texts, layer numbers).
    target : what signed scores are about; None where the score has no target.
    params : parameters of the method.
    provenance : where the numbers come from (model, module, call index, kernel, backend, dtype, ...).
    checks : measured quantities that decide whether to believe the values (completeness error, certificate
        errors, standard errors as arrays, ...).
    failures : checks that failed, in words. Empty for a verified result.
    """

    values: Tensor
    axes: tuple[str, ...]
    method: str
    unit: str
    sign: Sign
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    target: Target | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    checks: Mapping[str, Any] = field(default_factory=dict)
    failures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.values.ndim != len(self.axes):
            raise ShapeError(f"values have shape {tuple(self.values.shape)} but axes are {self.axes}")
        for axis, names in self.labels.items():
            if axis not in self.axes:
                raise ShapeError(f"labels given for axis {axis!r}, which is not among {self.axes}")
            size = self.values.shape[self.axes.index(axis)]
            if len(names) != size:
                raise ShapeError(f"axis {axis!r} has {size} entries but {len(names)} labels were given")

    @property
    def verified(self) -> bool:
        """True when every check passed."""
        return not self.failures

    def require_verified(self) -> Scores:
        """Return self, or raise `UnverifiedCaptureError` naming the failed checks."""
        if self.failures:
            raise UnverifiedCaptureError(f"{self.method} is not verified: " + "; ".join(self.failures))
        return self

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array on the host (bf16 becomes float32)."""
        values = self.values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()

    def to_frame(self, *, tokens: Sequence[str] | Sequence[Sequence[str]] | None = None) -> pd.DataFrame:
        """Tidy table: one row per entry, one column per axis, `<axis>_label` where labelled, `value`, `unit`.

        Scores that were made from a prompt carry the texts of its tokens as labels of their positions. Those of a
        captured call do not: a call sees vectors, not texts.

        Parameters
        ----------
        tokens : texts of the tokens, of one prompt or of each prompt of the batch (`lm.encode(prompts).tokens`). They
            label the axes `position`, `query_pos` and `key_pos` that have no labels and as many entries.

        Returns
        -------
        Columns in the order of the axes, each with its labels beside it, then `value`, `method`, `unit`.

        Raises
        ------
        ShapeError : there is no such axis, or another number of prompts.
        """
        import pandas as pd

        array = self.numpy()
        grid = np.indices(array.shape).reshape(array.ndim, -1)
        columns: dict[str, Any] = {}
        texts, named = self._texts(tokens)
        # of which prompt each entry is
        rows = grid[self.axes.index("batch")] if "batch" in self.axes else np.zeros(grid.shape[1], dtype=np.int64)
        for axis, index in zip(self.axes, grid, strict=True):
            columns[axis] = index
            if axis in self.labels:
                columns[f"{axis}_label"] = np.asarray(list(self.labels[axis]), dtype=object)[index]
            elif axis in named:
                columns[f"{axis}_label"] = texts[rows, index]
        columns["value"] = array.reshape(-1)
        frame = pd.DataFrame(columns)
        return frame.assign(method=self.method, unit=self.unit)

    def _texts(self, tokens: Sequence[str] | Sequence[Sequence[str]] | None) -> tuple[np.ndarray, tuple[str, ...]]:
        """Texts [prompt, position], and the axes that they label."""
        if tokens is None:
            return np.empty((0, 0), dtype=object), ()
        given = [list(row) for row in ([tokens] if all(isinstance(one, str) for one in tokens) else tokens)]
        prompts = self.values.shape[self.axes.index("batch")] if "batch" in self.axes else 1
        lengths = sorted({len(row) for row in given})
        sizes = dict(zip(self.axes, self.values.shape, strict=True))
        free = {axis: sizes[axis] for axis in _POSITIONS if axis in sizes and axis not in self.labels}
        named = tuple(axis for axis, size in free.items() if lengths == [size])
        if len(given) != prompts or not named:
            raise ShapeError(
                f"tokens has rows: {len(given)}, texts in a row: {lengths}; expected rows: {prompts} (prompts), texts: "
                f"as many as an axis of positions without labels has entries ({free or 'there is none'})"
            )
        return np.array(given, dtype=object).reshape(len(given), -1), named

    def __repr__(self) -> str:
        shape = ", ".join(f"{a}={s}" for a, s in zip(self.axes, self.values.shape, strict=True))
        state = "verified" if self.verified else "NOT VERIFIED: " + "; ".join(self.failures)
        return f"Scores({self.method} [{shape}] {self.sign}, {self.unit}; {state})\n  {self._largest_in_words()}"

    def _largest_in_words(self, count: int = 3) -> str:
        """The entries that are largest in size, with their places by label where there is one; what is undefined."""
        array = self.numpy().astype(np.float64)
        size = np.abs(array).reshape(-1)
        defined = np.flatnonzero(~np.isnan(size))
        undefined = size.size - len(defined)
        left_out = f" ({undefined} undefined)" if undefined else ""
        if not len(defined):
            return f"no defined value{left_out}"
        order = defined[np.argsort(-size[defined], kind="stable")][:count]
        parts: list[str] = []
        for flat in order:
            index = np.unravel_index(flat, array.shape)
            # an axis with one entry tells nothing
            shown = [(a, int(i)) for a, i in zip(self.axes, index, strict=True) if array.shape[self.axes.index(a)] > 1]
            place = ", ".join(f"{axis} {self._label(axis, at)}" for axis, at in shown)
            parts.append(f"{array[index]:.4g}" + (f" at {place}" if place else ""))
        return f"largest: {'; '.join(parts)}{left_out}"

    def _label(self, axis: str, index: int) -> str:
        names = self.labels.get(axis)
        if names is None:
            return str(index)
        name = names[index]
        return f"{index} {name!r}" if isinstance(name, str) else str(name)
