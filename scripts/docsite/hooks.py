"""MkDocs hooks: pages that are made from the code, so that they cannot be stale, and a check of the finished site.

Made at every build: the methods catalogue from `CATALOG`, the help texts of every command, the notebooks as executed,
benchmarks and changelog from the files at the root. The build fails where a method has no formula, a public name is on
no reference page, a notebook was never executed, or a page would load something from elsewhere.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from formulas import FORMULAS  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File  # noqa: E402
from notebook_pages import notebook_files  # noqa: E402


def on_config(config: Any) -> Any:
    """Every notebook stands in the navigation; those that mkdocs.yml does not place come last."""
    pages = next(part["Notebooks"] for part in config.nav if isinstance(part, dict) and "Notebooks" in part)
    found = [f"notebooks/{path.stem}.md" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    pages += [name for name in found if name not in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    _require_all_names(Path(config.docs_dir))
    made: dict[str, str | bytes] = {
        "methods.md": methods_page(),
        "cli.md": cli_page(),
        "benchmarks.md": _from_root("benchmarks.md"),
        "changelog.md": _from_root("CHANGELOG.md"),
    }
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        made.update(notebook_files(path))
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Headings of the reference say where a name is imported from: `attndiag`, or a module of it."""
    import attndiag

    def headed(match: re.Match[str]) -> str:
        path, name = match[1], match[1].rsplit(".", 1)[1]
        told = f"attndiag.{name}" if f"{attndiag._HOME.get(name)}.{name}" == path else path
        return f"{match[0]}\n    options: {{ heading: {told}, toc_label: {name} }}"

    return re.sub(r"^::: (\S+)$", headed, markdown, flags=re.MULTILINE)


def on_post_build(config: Any) -> None:
    """A reader's browser asks nobody but this site."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        found = _Loads()
        found.feed(page.read_text(encoding="utf-8"))
        if found.remote:
            raise PluginError(f"{page} would load {', '.join(found.remote)}; serve a copy from docs/ or leave it out")


class _Loads(HTMLParser):
    """Addresses that a browser fetches by itself: scripts, styles, pictures, frames, fonts."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loads = [given.get("src"), given.get("srcset"), given.get("poster"), given.get("data")]
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            loads.append(given.get("href"))
        self.remote += [url for url in loads if url and re.match(r"(https?:)?//", url)]


# ------------------------------------------------------------------------------------------------ methods
SCOPES = {
    "token": "A number for each token of the prompt",
    "edge": "A number for each layer, head, query and key",
    "head": "A number for each head",
    "row": "A number for each layer and query",
    "layer": "A number for each layer",
    "activation": "A number for each activation",
    "prompt": "A number for a prompt",
}


def methods_page() -> str:
    """The catalogue with formulas."""
    from attndiag.catalog import CATALOG

    if set(CATALOG) != set(FORMULAS):
        raise PluginError(f"scripts/docsite/formulas.py and CATALOG differ in {sorted(set(CATALOG) ^ set(FORMULAS))}")
    if strange := {entry.scope for entry in CATALOG.values()} - set(SCOPES):
        raise PluginError(f"SCOPES in {Path(__file__).name} says nothing of {sorted(strange)}")
    lines = [
        "# Methods",
        "",
        f"The {len(CATALOG)} entries of `attndiag.catalog.CATALOG`, made from it at every build. `attndiag methods`",
        'prints the same; `attndiag.explain(lm, prompt, method="NAME")` runs one. n is the number of tokens, m the',
        "target, e an embedding; the other letters are in [Words](words.md). Costs are for one prompt.",
        "",
        "A non-negative number says how large something is, never for or against what. A signed one is about the",
        "target and positive where the thing helped it. Formulas of the form m(..) - m(..) are differences between two",
        "runs of the model; the other numbers are read off one run, fitted to many, or estimated.",
        "",
    ]
    for scope, title in SCOPES.items():
        entries = [entry for entry in CATALOG.values() if entry.scope == scope]
        lines += [f"## {title}", ""]
        for entry in entries:
            given = ", ".join(f"`{name}`" for name in entry.parameters) or "none"
            unit = entry.unit.replace("target", "the target's unit", 1)
            needs = ", ".join(entry.needs) or "any model"
            about = "" if entry.targeted else " About no target."
            lines += [
                f"### `{entry.name}`",
                "",
                f"{entry.what[0].upper()}{entry.what[1:]}.{about}",
                "",
                f"    {FORMULAS[entry.name]}",
                "",
                f"{entry.sign.capitalize()}, in {unit}. Cost: {entry.cost}. Needs: {needs}. Source: {entry.source}.",
                f"Parameters: {given}.",
                "",
            ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- command line
def cli_page() -> str:
    """`--help` of every command."""
    import typer
    from click import Context

    from attndiag.cli import app

    group = typer.main.get_command(app)
    top = Context(group, info_name="attndiag", **group.context_settings)
    lines = [
        "# Command line",
        "",
        "`attndiag COMMAND --help`, as the program prints it. Data goes to standard output, progress and remarks to",
        "standard error.",
        "",
        "| exit status | meaning |",
        "|---|---|",
        "| 0 | fine |",
        "| 1 | some prompts failed, a self-check failed, or `audit` found a fault |",
        "| 2 | misuse: an option, a file or a model that cannot be used |",
        "| 130 | interrupted; what was measured is kept |",
        "",
        "```text",
        _help(group, top),
        "```",
        "",
    ]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        context = Context(command, info_name=name, parent=top, **command.context_settings)
        lines += [f"## {name}", "", "```text", _help(command, context), "```", ""]
    return "\n".join(lines)


def _help(command: Any, context: Any) -> str:
    formatter = context.make_formatter()
    formatter.width = 90
    command.format_help(context, formatter)
    return formatter.getvalue().rstrip()


# ---------------------------------------------------------------------------------------------- the rest
def _from_root(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


def _require_all_names(docs: Path) -> None:
    """Every public name stands on a reference page, under the module that defines it."""
    import attndiag

    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((docs / "reference").glob("*.md")))
    wanted = {f"::: {home}.{name}" for name, home in attndiag._HOME.items()}
    missing = sorted(name for name in wanted if not re.search(rf"^{re.escape(name)}$", pages, re.MULTILINE))
    if missing:
        raise PluginError(f"no page of docs/reference/ has {'; '.join(missing)}")
