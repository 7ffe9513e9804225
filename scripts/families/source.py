"""What the installed transformers source says about its model families.

A *family* is a folder under ``transformers/models`` that holds at least one ``modeling_*.py`` (the ``auto`` folder, which
holds no model, is left out). A family *routes* when its source looks attention functions up through
``ALL_ATTENTION_FUNCTIONS.get_interface``; a family has *attention of its own* when some class of it computes a softmax
or calls the fused kernel. Both facts are read from the text, so that nothing has to be imported or built.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROUTING_CALL = "ALL_ATTENTION_FUNCTIONS.get_interface"
# Heads also call softmax (classifiers, mixture weights, losses), hence "attention" in the class name as well.
_SOFTMAX = re.compile(r"softmax|scaled_dot_product_attention|MultiheadAttention", re.IGNORECASE)
_ATTENTION_NAME = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass(frozen=True)
class FamilySource:
    """One family as its source shows it.

    Parameters
    ----------
    name : str
        Folder name, for example ``"llama"``.
    modules : tuple of str
        Importable names of its modeling files.
    routed : bool
        Whether its source calls ``ALL_ATTENTION_FUNCTIONS.get_interface``.
    softmax : bool
        Whether its source mentions a softmax or the fused kernel at all (classifier heads included).
    attention_classes : tuple of str
        Classes that call the routing function, or whose name says attention and whose body computes a softmax.
    """

    name: str
    modules: tuple[str, ...]
    routed: bool
    softmax: bool
    attention_classes: tuple[str, ...]


def models_folder() -> Path:
    """Folder ``transformers/models`` of the installed transformers, found without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("transformers is not installed in this environment")
    return Path(spec.origin).parent / "models"


@cache
def family_sources() -> dict[str, FamilySource]:
    """Every family of the installed transformers, by name, in alphabetical order."""
    found = {}
    for folder in sorted(path for path in models_folder().iterdir() if path.is_dir() and path.name != "auto"):
        files = sorted(folder.glob("modeling_*.py"))
        if files:
            found[folder.name] = _read_family(folder.name, files)
    return found


def _read_family(name: str, files: list[Path]) -> FamilySource:
    texts = [file.read_text(encoding="utf-8") for file in files]
    attention = [cls for text in texts for cls in _attention_classes(text)]
    return FamilySource(
        name=name,
        modules=tuple(f"transformers.models.{name}.{file.stem}" for file in files),
        routed=any(ROUTING_CALL in text for text in texts),
        softmax=any(_SOFTMAX.search(text) for text in texts),
        attention_classes=tuple(attention),
    )


def _attention_classes(text: str) -> list[str]:
    names = []
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        body = ast.get_source_segment(text, node) or ""
        routed = ROUTING_CALL in body
        own = _ATTENTION_NAME.search(node.name) is not None and _SOFTMAX.search(body) is not None
        if routed or own:
            names.append(node.name)
    return names
