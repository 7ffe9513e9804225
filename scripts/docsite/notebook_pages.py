"""An executed notebook as pages of the site: Markdown, and its pictures beside it."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError


def notebook_files(path: Path) -> dict[str, str | bytes]:
    """`notebooks/NAME.md` and its pictures by name."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    if not any(cell["outputs"] for cell in code):
        raise PluginError(f"{path.name} was committed without its outputs; execute it (see tests/real)")
    made: dict[str, str | bytes] = {}
    parts: list[str] = []
    for cell in cells:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        shown = "\n".join(line for line in source.splitlines() if not line.startswith("%"))
        parts.append(f"```python\n{shown}\n```")
        for output in cell["outputs"]:
            parts += _shown(output, path.stem, made)
    parts.append(f"*This page is `notebooks/{path.name}`, as it was run.*")
    made[f"notebooks/{path.stem}.md"] = "\n\n".join(parts) + "\n"
    return made


def _shown(output: dict[str, Any], stem: str, made: dict[str, str | bytes]) -> list[str]:
    if output["output_type"] == "stream":
        return ["```text\n" + "".join(output["text"]).rstrip() + "\n```"]
    data = output.get("data", {})
    if "image/png" in data:
        name = f"{stem}_{len(made)}.png"
        made[f"notebooks/{name}"] = base64.b64decode("".join(data["image/png"]))
        return [f"![figure]({name})"]
    if "text/html" in data:
        table = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
        table = re.sub(r' (class="dataframe"|border="\d+"|style="[^"]*")', "", table)  # the site's own look
        return [re.sub(r"\s*\n\s*", "", table)]
    text = "".join(data.get("text/plain", ""))
    return ["```text\n" + text.rstrip() + "\n```"] if text else []
