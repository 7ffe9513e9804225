"""What a capture hands back: calls, and the layers that mix tokens without weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from attndiag.hooks.record import AttentionCall


@dataclass(frozen=True)
class Refusal:
    """A layer that mixes tokens but has no softmax weights that could be captured."""

    module_name: str
    module_class: str
    reason: str


@dataclass
class Captured:
    """What a capture collected: filled while the context runs, complete once it is left."""

    calls: list[AttentionCall] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    n_calls: int = 0

    def layer(self, index: int) -> list[AttentionCall]:
        """The calls of one layer, in order."""
        return [call for call in self.calls if call.layer == index]
