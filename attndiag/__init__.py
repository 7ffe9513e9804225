"""attndiag: what attention in a transformer really does, measured and checked.

The public names below are resolved on first use, so that `import attndiag` costs milliseconds and imports no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attndiag.explain.contributions import contributions
    from attndiag.explain.target import score
    from attndiag.hooks.capture_context import capture
    from attndiag.models.load import load
    from attndiag.prompts import Prompt, Target
    from attndiag.scores import Scores

__version__ = "0.1.0"

# public name -> module that defines it under the same name
_HOME = {
    "Prompt": "attndiag.prompts",
    "Scores": "attndiag.scores",
    "Target": "attndiag.prompts",
    "capture": "attndiag.hooks.capture_context",
    "contributions": "attndiag.explain.contributions",
    "load": "attndiag.models.load",
    "score": "attndiag.explain.target",
}

__all__ = [
    "Prompt",
    "Scores",
    "Target",
    "__version__",
    "capture",
    "contributions",
    "load",
    "score",
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
