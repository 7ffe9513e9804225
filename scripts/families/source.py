"""What the installed transformers source says about its model families.

A *family* is a folder under ``transformers/models`` that holds at least one ``modeling_*.py`` (the ``auto`` folder,
which holds no model, is left out). A family *routes* when its source looks attention functions up through
``ALL_ATTENTION_FUNCTIONS.get_interface``; a family has *attention of its own* when some class of it computes a softmax
or calls the fused kernel. Both facts are read from the text, so that nothing has to be imported or built.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROUTING_CALL = "ALL_ATTENTION_FUNCTIONS.get_interface"
# Heads also call softmax (classifiers, mixture weights, losses), hence "attention" in the class name as well.
_SOFTMAX = re.compile(r"softmax|scaled_dot_product_attention|MultiheadAttention", re.IGNORECASE)
_CLASS = re.compile(r"^class (?P<name>\w+)[^\n]*\n", re.MULTILINE)
_MARGIN = re.compile(r"^[A-Za-z_@]", re.MULTILINE)
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
def family_names() -> tuple[str, ...]:
    """Every family of the installed transformers, in alphabetical order."""
    folders = (path for path in models_folder().iterdir() if path.is_dir() and path.name != "auto")
    return tuple(sorted(folder.name for folder in folders if any(folder.glob("modeling_*.py"))))


@cache
def family_source(name: str) -> FamilySource:
    """One family of the installed transformers; raises `KeyError` for a name that is none."""
    if name not in family_names():
        raise KeyError(f"no family {name!r} in {models_folder()}")
    return _read_family(name, sorted((models_folder() / name).glob("modeling_*.py")))


def family_sources() -> dict[str, FamilySource]:
    """Every family of the installed transformers, by name."""
    return {name: family_source(name) for name in family_names()}


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
    # A class ends where the next line starts at the left margin; parsing 531 files properly takes a minute.
    names = []
    for match in _CLASS.finditer(text):
        end = _MARGIN.search(text, match.end())
        body = text[match.start() : end.start() if end else len(text)]
        routed = ROUTING_CALL in body
        own = _ATTENTION_NAME.search(match["name"]) is not None and _SOFTMAX.search(body) is not None
        if routed or own:
            names.append(match["name"])
    return names
