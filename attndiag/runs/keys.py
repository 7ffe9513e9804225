"""What makes two pieces of work the same: keys of prompts under a plan, and the identity of a model.

key = SHA-256 of (prompt, model with revision and weights, methods with parameters, dtype, version of attndiag). Nothing
about batches, the order of prompts, the number of workers, the device or the place of a file goes in, so a result is
found again wherever and whenever it was made.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn

from attndiag.errors import PromptError
from attndiag.explanations.replacement import Replacement
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target

# entries of a weight that go into its fingerprint one by one, beside its sum
_SAMPLED = 1024
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# of the configuration: where it came from and how it runs, not what is computed
_NO_PART = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures")


def digest(value: Any) -> str:
    """SHA-256 of a JSON-like value, 64 hex digits.

    Raises
    ------
    TypeError : something that JSON does not have; `plain` makes it so, or refuses it.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def plain(value: Any, what: str = "value") -> Any:
    """A parameter as JSON gives it back: tuples as lists, arrays by shape, dtype and SHA-256 of their bytes.

    Parameters
    ----------
    what : how an error calls it.

    Raises
    ------
    ValueError : something that has no such form, so that nobody could tell two of its kind apart.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return plain(value.item(), what)
    if isinstance(value, Replacement):
        return plain_replacement(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part, f"{what}.{name}") for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, f"{what}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        whole = value.detach().cpu().contiguous()
        return _array(whole.reshape(-1).view(torch.uint8).numpy().tobytes(), whole.shape, whole.dtype)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _array(np.ascontiguousarray(value).tobytes(), value.shape, value.dtype)
    raise ValueError(
        f"{what} is a {type(value).__qualname__}; expected numbers, texts, lists, dictionaries, arrays or tensors"
    )


def _array(data: bytes, shape: Sequence[int], dtype: Any) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "shape": list(shape), "dtype": str(dtype)}


def plain_replacement(one: Replacement) -> dict[str, Any]:
    """A replacement as JSON-like values; a masked model by its weights."""
    return {
        "label": one.label,
        "name": one.name,
        "draws": one.draws,
        "seed": one.seed,
        "token": one.token,
        "width": one.width,
        "counts": None if one.counts is None else digest([float(count) for count in one.counts]),
        "variants": plain(one.variants, "variants"),
        "masked": None if one.masked is None else model_identity(one.masked),
    }


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    found = {"python": platform.python_version()}
    for name in ("attndiag", "torch", "transformers", "numpy", "scipy", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            # run from a source tree that is not installed
            found[name] = "source tree" if name == "attndiag" else getattr(import_module(name), "__version__", "?")
    return found


def plain_prompt(prompt: Prompt) -> dict[str, Any]:
    """A prompt as JSON-like values, without what is carried along unread."""
    return {name: plain(value, name) for name, value in vars(prompt).items() if name != "meta"}


def with_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts whose ids are there and differ.

    Raises
    ------
    PromptError : no prompts, or two with the same id.
    """
    if not prompts:
        raise PromptError("there are no prompts; give at least one")
    named = [p if p.id is not None else replace(p, id=f"prompt-{i}") for i, p in enumerate(prompts, 1)]
    seen: set[str | None] = set()
    for prompt in named:
        if prompt.id in seen:
            raise PromptError(f"two prompts have the id {prompt.id!r}; ids must differ within a run")
        seen.add(prompt.id)
    return named


def model_identity(lm: LoadedModel) -> dict[str, Any]:
    """Revision, weights, configuration, dtype, attention function and tokenizer of a model."""
    info = lm.info
    return {
        "name": info.name,
        "architecture": info.architecture,
        "revision": info.revision,
        "weights": weights_fingerprint(lm.model),
        "config": _config_hash(lm),
        "dtype": info.dtype,
        "attention": info.attn_implementation,
        "tokenizer": info.tokenizer_hash,
        "chat_template": None if info.chat_template is None else digest(info.chat_template)[:16],
        "adds_bos": info.adds_bos,
    }


def weights_fingerprint(model: nn.Module) -> str:
    """First 16 hex digits of the SHA-256 of names, shapes, exact sums and samples of all weights.

    The sums are those of the bit patterns as integers: the same on every device and with any number of threads. Weights
    that are not in memory (offloaded ones) go in by name and shape only.
    """
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if weight.device.type == "meta" or not weight.numel():
            continue
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLED)
        found.update(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        whole = _WHOLE.get(flat.element_size())
        if whole is not None and not flat.is_complex():
            found.update(str(int(flat.view(whole).sum(dtype=torch.int64))).encode())
    return found.hexdigest()[:16]


def _config_hash(lm: LoadedModel) -> str:
    as_dict = getattr(getattr(lm.model, "config", None), "to_dict", None)
    told: Any = as_dict() if callable(as_dict) else {}
    return digest({str(name): _told(value) for name, value in told.items() if name not in _NO_PART})[:16]


def _told(value: Any) -> Any:
    """An entry of a configuration as JSON-like values; of objects, which name no number, the kind."""
    if isinstance(value, Mapping):
        return {str(name): _told(part) for name, part in value.items() if name not in _NO_PART}
    if isinstance(value, list | tuple):
        return [_told(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(str(part) for part in value)
    if isinstance(value, torch.dtype | Enum):
        return str(value)
    try:
        return plain(value)
    except ValueError:
        return type(value).__qualname__


# thresholds that decide which edges are removed together
_TOGETHER = ("high", "margin", "absent_below", "present_from")


def prompt_key(
    prompt: Prompt,
    target: Target | None,
    own: Mapping[str, Any],
    model: Mapping[str, Any],
    plan: Mapping[str, Any],
    *,
    signed: Mapping[str, bool] | None = None,
) -> str:
    """The key of one prompt's result.

    Parameters
    ----------
    target : of this prompt; None where it is the prompt's own.
    own : name -> scores made elsewhere.
    model : of `model_identity`; its name has no part in the key.
    plan : as plain values. Thresholds, the primary pair and the probes of heads judge or stand beside what was
        measured, so they have no part either; the high claim and the margins have, where they decide which edges are
        removed together.
    signed : name -> whether the scores made elsewhere have signs.
    """
    measured = {name: value for name, value in plan.items() if name not in ("thresholds", "primary", "heads")}
    if plan["edges"] is not None and plan["edges"]["stand_ins"] >= 2:
        measured["together"] = {name: plan["thresholds"][name] for name in _TOGETHER}
    return digest(
        {
            "prompt": plain_prompt(prompt),
            "target": None if target is None else vars(target),
            "own": {name: np.asarray(scores, dtype=np.float64).tolist() for name, scores in sorted(own.items())},
            "signed": {name: bool(value) for name, value in sorted((signed or {}).items())},
            "model": {name: value for name, value in model.items() if name != "name"},
            "plan": measured,
            "version": package_versions()["attndiag"],
        }
    )
