"""What a run is told, as one checked record: from a YAML file, from flags, or both (flags win).

    model: default
    prompts: my.jsonl
    methods: [weight, contribution, input_x_gradient]
    params: {input_x_gradient: {aggregate: norm}}
    replacements: ["sampled:draws=16"]
    edges: auto            # auto, all, screen or none
    thresholds: {margin: 0.05}
    output: out

Every key is optional. A key that does not exist, or a value of the wrong kind, is named with its file and line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from attndiag.errors import AttnDiagError


class ConfigError(AttnDiagError, ValueError):
    """A configuration file cannot be read or holds what nobody understands; the text names file, line and key."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class ThresholdsConfig(_Strict):
    """Of the verdicts, see `attndiag.stats.verdicts.Thresholds`."""

    high: float = 2.0
    low: float = 0.5
    absent_below: float = 0.5
    present_from: float = 1.0
    margin: float = 0.02
    level: float = 0.05
    least_items: int = 3
    replacement_tau: float = 0.5
    majority: float = 0.5


class RunConfig(_Strict):
    """Everything that `attndiag run` can be told, with its defaults.

    Parameters
    ----------
    model, revision, device, dtype, attn_implementation, offline : see `attndiag.load`.
    prompts : file; the shipped set when None. `limit` takes the first ones, `skip_bad` leaves bad entries out.
    own : files of scores made elsewhere, `FILE` or `FILE:METHOD`, compared with the methods.
    chat_template : put plain texts through the model's chat template as one user turn.
    methods, params, replacements, metrics, primary, thresholds, deep, heads, seed : see `attndiag.run`.
    edges : `auto`, `all`, `screen` or `none`; `edge_methods` whose claims are judged, `edge_most` of a screen.
    workers : processes that measure prompts; as many as suit the machine when None.
    output, overwrite : the folder.
    """

    model: str = "default"
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attn_implementation: str | None = None
    offline: bool = False
    prompts: Path | None = None
    limit: PositiveInt | None = None
    skip_bad: bool = False
    chat_template: bool = False
    own: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    params: dict[str, dict[str, Any]] = Field(default_factory=dict)
    replacements: tuple[str, ...] | None = None
    metrics: tuple[str, ...] | None = None
    primary: tuple[str, str] | None = None
    thresholds: ThresholdsConfig = Field(default_factory=ThresholdsConfig)
    edges: Literal["auto", "all", "screen", "none"] = "auto"
    edge_methods: tuple[str, ...] | None = None
    edge_most: PositiveInt = 64
    heads: bool = True
    deep: bool = False
    seed: int = 0
    workers: PositiveInt | None = None
    output: Path = Path("attndiag-run")
    overwrite: bool = False


def read_config(path: str | Path | None, flags: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration of a file, with flags that win over it.

    Parameters
    ----------
    path : a YAML file; None for flags alone.
    flags : name -> value; None stands for a flag that was not given.

    Raises
    ------
    ConfigError : the file cannot be read or is no YAML, a key does not exist, or a value is of the wrong kind.
    """
    told, lines = ({}, {}) if path is None else _loaded(Path(path))
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if path is not None:
        # paths in a file are meant from where the file lies
        for name in ("prompts", "output"):
            if isinstance(told.get(name), str):
                told[name] = Path(path).parent / Path(told[name]).expanduser()
        if isinstance(told.get("own"), str):
            told["own"] = [told["own"]]
        if isinstance(told.get("own"), list):
            told["own"] = [str(Path(path).parent / Path(str(one)).expanduser()) for one in told["own"]]
    try:
        return RunConfig.model_validate({**told, **given})
    except ValidationError as error:
        raise ConfigError("; ".join(_in_words(error, path, lines, given))) from error


def _loaded(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Keys with their values, and the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{where} is not YAML: {getattr(error, 'problem', None) or error}") from error
    if value is None:
        return {}, {}
    if not isinstance(value, dict) or not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{path} holds a {type(value).__name__}; expected keys with values, as in `model: default`")
    lines: dict[str, int] = {}
    for name, line in _key_lines(tree):
        if name in lines:
            raise ConfigError(f"{path}:{line}: the key {name!r} stands twice; the first is in line {lines[name]}")
        lines[name] = line
    return value, lines


def _key_lines(tree: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in tree.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            yield from _key_lines(value, f"{name}.")


def _in_words(
    error: ValidationError, path: str | Path | None, lines: Mapping[str, int], flags: Mapping[str, Any]
) -> Iterator[str]:
    for one in error.errors():
        parts = [str(part) for part in one["loc"]]
        name = ".".join(parts)
        if parts[0] in flags:
            where = f"--{parts[0].replace('_', '-')}"
        else:
            line = next((lines[key] for key in (name, parts[0]) if key in lines), None)
            where = f"{path}:{line}: {name}" if line is not None else f"{path}: {name}"
        if one["type"] == "extra_forbidden":
            known = (ThresholdsConfig if parts[0] == "thresholds" and len(parts) > 1 else RunConfig).model_fields
            near = difflib.get_close_matches(parts[-1], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            yield f"{where} is no key of a run; {hint}"
        else:
            yield f"{where} is {one['input']!r}: {one['msg'][0].lower()}{one['msg'][1:]}"
