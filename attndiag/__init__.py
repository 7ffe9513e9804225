"""attndiag: what attention in a transformer really does, measured and checked.

The public names below are resolved on first use, so that `import attndiag` costs milliseconds and imports no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attndiag.catalog import explain
    from attndiag.comparison.edges import edge_verdicts
    from attndiag.comparison.own_scores import read_own_scores
    from attndiag.errors import AttnDiagError
    from attndiag.explanations.attention_card import card
    from attndiag.explanations.audit_run import audit
    from attndiag.explanations.contributions import contributions
    from attndiag.explanations.edge_truth import edge_effects
    from attndiag.explanations.head_history import heads_over_checkpoints
    from attndiag.explanations.head_scores import heads
    from attndiag.explanations.implied_maps import implied_maps
    from attndiag.explanations.model_contributions import model_contributions
    from attndiag.explanations.replacement import Replacement
    from attndiag.explanations.target import score
    from attndiag.explanations.top_contributions import top_contributions
    from attndiag.hooks.adapters import Adapter
    from attndiag.hooks.capture_context import capture
    from attndiag.hooks.edit_kinds import (
        AttentionOff,
        HeadAblation,
        Knockout,
        MeanValue,
        Patch,
        PatternReplacement,
        ValueZeroing,
    )
    from attndiag.hooks.edits import edit
    from attndiag.models.load import load
    from attndiag.prompts import Prompt, Target
    from attndiag.reports.compared import compare
    from attndiag.reports.page import report
    from attndiag.runs.compared_run import read_compared_run
    from attndiag.runs.comparing import run
    from attndiag.runs.prompt_files import read_prompts, shipped_prompts
    from attndiag.scores import Scores
    from attndiag.stats.verdicts import Thresholds

__version__ = "0.1.0"

# public name -> module that defines it under the same name
_HOME = {
    "Adapter": "attndiag.hooks.adapters",
    "AttentionOff": "attndiag.hooks.edit_kinds",
    "AttnDiagError": "attndiag.errors",
    "HeadAblation": "attndiag.hooks.edit_kinds",
    "Knockout": "attndiag.hooks.edit_kinds",
    "MeanValue": "attndiag.hooks.edit_kinds",
    "Patch": "attndiag.hooks.edit_kinds",
    "PatternReplacement": "attndiag.hooks.edit_kinds",
    "Prompt": "attndiag.prompts",
    "Replacement": "attndiag.explanations.replacement",
    "Scores": "attndiag.scores",
    "Target": "attndiag.prompts",
    "Thresholds": "attndiag.stats.verdicts",
    "ValueZeroing": "attndiag.hooks.edit_kinds",
    "audit": "attndiag.explanations.audit_run",
    "capture": "attndiag.hooks.capture_context",
    "compare": "attndiag.reports.compared",
    "card": "attndiag.explanations.attention_card",
    "contributions": "attndiag.explanations.contributions",
    "edge_effects": "attndiag.explanations.edge_truth",
    "edge_verdicts": "attndiag.comparison.edges",
    "edit": "attndiag.hooks.edits",
    "explain": "attndiag.catalog",
    "heads": "attndiag.explanations.head_scores",
    "heads_over_checkpoints": "attndiag.explanations.head_history",
    "implied_maps": "attndiag.explanations.implied_maps",
    "load": "attndiag.models.load",
    "model_contributions": "attndiag.explanations.model_contributions",
    "read_own_scores": "attndiag.comparison.own_scores",
    "read_prompts": "attndiag.runs.prompt_files",
    "read_compared_run": "attndiag.runs.compared_run",
    "report": "attndiag.reports.page",
    "run": "attndiag.runs.comparing",
    "score": "attndiag.explanations.target",
    "shipped_prompts": "attndiag.runs.prompt_files",
    "top_contributions": "attndiag.explanations.top_contributions",
}

__all__ = [
    "Adapter",
    "AttentionOff",
    "AttnDiagError",
    "HeadAblation",
    "Knockout",
    "MeanValue",
    "Patch",
    "PatternReplacement",
    "Prompt",
    "Replacement",
    "Scores",
    "Target",
    "Thresholds",
    "ValueZeroing",
    "__version__",
    "audit",
    "capture",
    "card",
    "compare",
    "contributions",
    "edge_effects",
    "edge_verdicts",
    "edit",
    "explain",
    "heads",
    "heads_over_checkpoints",
    "implied_maps",
    "load",
    "model_contributions",
    "read_compared_run",
    "read_own_scores",
    "read_prompts",
    "report",
    "run",
    "score",
    "shipped_prompts",
    "top_contributions",
]


def __getattr__(name: str) -> Any:
    """Import the module behind a public name and remember the object."""
    if name not in _HOME:
        raise AttributeError(f"module 'attndiag' has no attribute {name!r}; it offers {', '.join(sorted(_HOME))}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
