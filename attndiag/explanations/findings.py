"""A finding of an audit: what is wrong, where, and the measured numbers that say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FindingKind = Literal[
    "future_leak",
    "hidden_diagonal",
    "padding_leak",
    "inverted_mask",
    "window_mismatch",
    "batch_leak",
    "upstream_mix",
    "missing_scale",
    "double_scale",
    "wrong_scale",
    "padded_query_leak",
    "padding_variance",
    "nondeterministic",
]


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes
    ----------
    kind : name of the fault, out of `FindingKind`.
    modules : modules where it was located, outermost first; empty where it was seen in the output only.
    layers : their layers.
    text : one sentence with the measured numbers.
    evidence : the same numbers by name.
    """

    kind: FindingKind
    modules: tuple[str, ...]
    layers: tuple[int, ...]
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self) | {"evidence": dict(self.evidence)}

    def __str__(self) -> str:
        where = f" at layer {', '.join(map(str, self.layers))}" if self.layers else ""
        return f"{self.kind}{where}: {self.text}"


@dataclass(frozen=True)
class Check:
    """One question that an audit asked.

    Attributes
    ----------
    name : the question.
    state : `"passed"`, `"failed"`, `"limit"` (the model is sound but must not be used so; `detail` says how), or
        `"not checked"` with the reason in `detail`.
    detail : what was measured.
    """

    name: str
    state: Literal["passed", "failed", "limit", "not checked"]
    detail: str
