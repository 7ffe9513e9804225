"""What the edits of one context did: the proof that they acted, and where."""

from __future__ import annotations

from dataclasses import dataclass, field

from attndiag.hooks.edit_kinds import Edit


@dataclass(frozen=True)
class Applied:
    """One application of one edit.

    Attributes
    ----------
    edit : which; module_name : where.
    entries : how many rows (batch, position, and head where there are heads) it had a say in.
    largest_change : largest absolute difference that all edits made together there; 0 for an edit that changes nothing.
    """

    edit: Edit
    module_name: str
    entries: int
    largest_change: float


@dataclass
class EditLog:
    """What the edits of one context did, in order."""

    applied: list[Applied] = field(default_factory=list)

    def of(self, edit: Edit) -> list[Applied]:
        """The applications of one edit."""
        return [each for each in self.applied if each.edit is edit]
