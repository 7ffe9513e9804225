"""The rules of the house: who may import whom, who may print, what the package root costs."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import attndiag

PACKAGE = Path(attndiag.__file__).parent

# a lower number may be imported by a higher one; rooms on one level do not know each other
LEVEL = {
    "errors": 0,
    "shapes": 0,
    "scores": 0,
    "prompts": 0,
    "data": 0,
    "core": 1,
    "stats": 1,
    "models": 2,
    "hooks": 3,
    "explanations": 4,
    "catalog": 5,
    "comparison": 6,
    "runs": 7,
    "reports": 8,
    "commands": 9,
    "cli": 10,
    "__main__": 11,
}
# level 0 is one room: its files build on each other
ROOMS_OF_ONE = {"errors", "shapes", "scores", "prompts"}


def modules() -> list[Path]:
    """Every file of the package, its root first."""
    return sorted(PACKAGE.rglob("*.py"), key=lambda path: (path != PACKAGE / "__init__.py", path))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, those inside functions and `import_module("...")` too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            module = node.module or ""
            # `from attndiag import models` imports a room as `import attndiag.models` does
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "attndiag" else [module]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.append((node.lineno, argument.value))
    return found


def breaches(path: Path, tree: ast.AST) -> list[str]:
    """What a file imports against the rule, as `file:line imports name`."""
    here = room(path)
    wrong: list[str] = []
    for line, name in imports(tree):
        where = f"{path.relative_to(PACKAGE.parent)}:{line} imports {name}"
        top = name.split(".")[0]
        if top == "attndiag":
            parts = name.split(".")
            other = parts[1] if len(parts) > 1 else "__init__"
            same_room = other == here or {other, here} <= ROOMS_OF_ONE
            if other == "__init__" or (not same_room and (other not in LEVEL or LEVEL[other] >= LEVEL[here])):
                wrong.append(where)
        elif LEVEL[here] <= 1 and top in {"transformers", "transformer_lens", "matplotlib"}:
            wrong.append(where)
    return wrong


# the root is left out: it re-exports every room, lazily, and its cost is tested apart
@pytest.mark.parametrize("path", modules()[1:], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_levels(path: Path) -> None:
    assert room(path) in LEVEL, f"{path} stands on no level; give its room one in LEVEL"
    assert not breaches(path, ast.parse(path.read_text()))


@pytest.mark.parametrize(
    ("source", "in_room"),
    [
        ("from attndiag.hooks import record", "models"),
        ("import transformers", "core"),
        ("def f():\n    from attndiag.cli import main", "reports"),
        ("from attndiag import load", "explanations"),
        ("from attndiag.stats import agreement", "core"),
        ("importlib.import_module('attndiag.reports')", "runs"),
        ("from attndiag.shelf import thing", "cli"),
    ],
)
def test_the_import_rule_bites(source: str, in_room: str) -> None:
    assert breaches(PACKAGE / in_room / "made_up.py", ast.parse(source))


@pytest.mark.parametrize(
    ("source", "in_room"),
    [
        ("from attndiag.errors import AttnDiagError", "shapes.py"),
        ("from attndiag.core.attention import softmax_rows", "hooks"),
        ("import transformers", "models"),
        ("from attndiag.explanations import target", "explanations"),
    ],
)
def test_the_import_rule_allows(source: str, in_room: str) -> None:
    assert not breaches(PACKAGE / in_room / "made_up.py", ast.parse(source))


def printing(tree: ast.AST) -> list[int]:
    """Lines that write to the standard streams."""
    lines = []
    for node in ast.walk(tree):
        is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        is_stream = isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"}
        if is_print or is_stream:
            lines.append(node.lineno)
    return lines


def test_only_the_command_line_prints() -> None:
    assert printing(ast.parse("import sys\nprint(1)\nsys.stderr.write('')")) == [2, 3]
    talkers = {
        str(path.relative_to(PACKAGE)): lines
        for path in modules()
        if room(path) not in {"cli", "commands", "__main__"} and (lines := printing(ast.parse(path.read_text())))
    }
    assert talkers == {}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_root_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'pandas', 'matplotlib', 'numpy', 'scipy', 'captum', 'transformer_lens'}"
    assert run_python(f"import sys, attndiag; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_every_public_name_still_means_the_same_after_all_submodules_are_imported() -> None:
    before = {name: getattr(attndiag, name) for name in attndiag.__all__}
    for info in pkgutil.walk_packages([str(PACKAGE)], "attndiag."):
        if info.name != "attndiag.__main__":
            importlib.import_module(info.name)
    for name, first in before.items():
        again = getattr(attndiag, name)
        assert again is first, f"attndiag.{name} turned from {first!r} into {again!r}"
        assert name == "__version__" or callable(again), f"attndiag.{name} is a {type(again).__name__}"


def test_the_root_lists_what_it_offers() -> None:
    assert set(attndiag.__all__) == {*attndiag._HOME, "__version__"}
    assert set(attndiag.__all__) <= set(dir(attndiag))
    rooms = {path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir()}
    assert not rooms & set(attndiag.__all__), "a module or package bears the name of a public function"
    with pytest.raises(AttributeError, match=r"no attribute 'lode'; it offers .*\bload\b"):
        _ = attndiag.lode


if (PACKAGE / "cli.py").exists():

    def test_help_answers_within_a_second_and_without_torch() -> None:
        code = "import sys; sys.argv = ['attndiag', '--help']\nfrom attndiag.cli import main\ntry:\n    main()\n"
        code += "except SystemExit as stop:\n    assert not stop.code\nassert 'torch' not in sys.modules"
        run_python(code)  # the first one fills the byte code cache
        seconds = []
        for _ in range(3):
            # time of the processor: what else the machine does is no part of it
            before = os.times()
            assert "report" in run_python(code)
            after = os.times()
            seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert 0 < min(seconds) < 1.0
