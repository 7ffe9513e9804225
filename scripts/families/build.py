"""Builds a small random model of a family together with inputs that it accepts.

Weights are drawn wide (not with the families' own 0.02), because attention that is uniform to three decimals agrees
with almost any wrong formula.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from families.classes import model_classes
from families.inputs import TEXT_LENGTH, Inputs, Proposal, proposals, text_ids
from families.shrink import LEVELS, shrunk_config
from families.source import FamilySource, family_source
from families.special import SPECIAL, Special

MAX_PARAMETERS = 400_000_000
GAINS = (1.4, 1.0, 0.5)
MAX_PROPOSALS = 40


class CouldNotBuildError(Exception):
    """No class of the family could be built and run; the text gives the reason of the first attempt."""

    def __init__(self, reason: str, attempts: list[str] | None = None) -> None:
        super().__init__(reason)
        self.attempts = attempts or []


@dataclass
class BuiltFamily:
    """A model in evaluation mode and inputs that it has accepted once."""

    family: str
    model: PreTrainedModel
    inputs: Inputs
    kind: str
    level: str
    gain: float
    parameters: int
    build_seconds: float
    forward_seconds: float
    uncovered: tuple[str, ...]
    attempts: list[str] = field(default_factory=list)


def build_family(name: str, *, seed: int = 0, only_class: str | None = None) -> BuiltFamily:
    """Build the first class of the family that runs.

    Parameters
    ----------
    name : str
        Folder name in ``transformers/models``.
    seed : int
        Fixes weights and inputs.
    only_class : str, optional
        Name of the one class to try.

    Raises
    ------
    CouldNotBuildError
        With the reason of the first attempt; its `attempts` hold the others.
    """
    source = family_source(name)
    special = SPECIAL.get(name, Special())
    if special.skip:
        raise CouldNotBuildError(special.skip)
    try:
        classes = model_classes(source)
    except ImportError as error:
        raise CouldNotBuildError(f"import: {error}") from error
    wanted = [only_class] if only_class else list(special.classes)
    if wanted:
        classes = [cls for cls in classes if cls.__name__ in wanted]
        classes.sort(key=lambda cls: wanted.index(cls.__name__))
    if not classes:
        raise CouldNotBuildError("no model class with a forward and a configuration")
    attempts: list[str] = []
    levels = (special.level,) if special.level else LEVELS
    whole = [cls for cls in classes if cls.config_class is classes[0].config_class]
    # all of a model at any size before a part of it at a small one
    for some in (whole, [cls for cls in classes if cls not in whole]):
        for level in levels:
            for cls in some[:4]:
                built = _try(source, cls, level, special, seed, attempts)
                if built is not None:
                    return built
    raise CouldNotBuildError(attempts[0] if attempts else "nothing was tried", attempts)


def more_models(built: BuiltFamily, *, seed: int = 0, limit: int = 5) -> Iterator[BuiltFamily]:
    """Further small models of the family, each with attention classes that the ones before it do not hold.

    Parameters
    ----------
    built : BuiltFamily
        What `build_family` gave.
    seed : int
        As there.
    limit : int
        How many classes are tried.
    """
    source = family_source(built.family)
    special = SPECIAL.get(built.family, Special())
    missing = set(built.uncovered)
    if any("Cross" in name for name in missing):
        decoder = _decoder(source, special, seed)
        if decoder is not None:
            missing &= set(decoder.uncovered)
            yield decoder
    tried = 0
    for cls in model_classes(source):
        if not missing or tried >= limit:
            return
        if cls is type(built.model) or (special.classes and cls.__name__ not in special.classes):
            continue
        tried += 1
        other = _try(source, cls, "small", replace(special, config=None, inputs=None), seed, [])
        if other is not None and missing - set(other.uncovered):
            missing &= set(other.uncovered)
            yield other


def _decoder(source: FamilySource, special: Special, seed: int) -> BuiltFamily | None:
    """The family as a decoder that also attends to another sequence, where its configuration offers that."""
    fields = special.fields | {"is_decoder": True, "add_cross_attention": True}
    for cls in model_classes(source):
        known = {field.name for field in dataclasses.fields(cls.config_class)}
        if "add_cross_attention" in known and cls.__name__.endswith(("ForCausalLM", "LMHeadModel", "Decoder")):
            return _try(source, cls, "small", replace(special, fields=fields, inputs=_crossing), seed, [])
    return None


def _crossing(model: PreTrainedModel, generator: torch.Generator) -> Inputs:
    return {
        "input_ids": text_ids(model, TEXT_LENGTH, 2, generator),
        "encoder_hidden_states": torch.randn(2, TEXT_LENGTH - 3, model.config.hidden_size, generator=generator),
    }


def _try(
    source: FamilySource, cls: type[PreTrainedModel], level: str, special: Special, seed: int, attempts: list[str]
) -> BuiltFamily | None:
    started = time.perf_counter()
    label = f"{cls.__name__}/{level}"
    try:
        model = _build(cls, level, special, seed)
    except Exception as error:
        attempts.append(f"{label} build: {brief(error)}")
        return None
    build_seconds = time.perf_counter() - started
    failures: list[str] = []
    for proposal in islice(_proposals(model, special, seed), MAX_PROPOSALS):
        started = time.perf_counter()
        try:
            outputs = run(model, proposal.inputs)
        except Exception as error:
            failures.append(f"{label} forward({proposal.kind}): {brief(error)}")
            continue
        seconds = time.perf_counter() - started
        gain = _calm(model, proposal.inputs, outputs, seed)
        if gain is None:
            failures.append(f"{label} forward({proposal.kind}): outputs are not finite at any gain")
            continue
        return BuiltFamily(
            family=source.name,
            model=model,
            inputs=proposal.inputs,
            kind=proposal.kind,
            level=level,
            gain=gain,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            build_seconds=build_seconds,
            forward_seconds=seconds,
            uncovered=_uncovered(source, model),
            attempts=[*attempts, *failures],
        )
    attempts.extend(failures or [f"{label}: no inputs known for its forward"])
    return None


def _build(cls: type[PreTrainedModel], level: str, special: Special, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = special.config(cls, level) if special.config else shrunk_config(cls.config_class, level, **special.fields)
    size = _size(cls, config)
    if size > (MAX_PARAMETERS if level in ("small", special.level) else MAX_PARAMETERS // 4):
        raise CouldNotBuildError(f"{size / 1e6:.0f}M parameters even when shrunk")
    torch.manual_seed(seed)
    model = cls(config).eval().float()
    widen(model, GAINS[0], seed)
    return model


def _size(cls: type[PreTrainedModel], config: PreTrainedConfig) -> int:
    """Number of parameters without allocating them; 0 for models whose constructor needs real numbers."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return 0


def _proposals(model: PreTrainedModel, special: Special, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    if special.inputs is not None:
        try:
            yield Proposal("special", special.inputs(model, generator))
        except (AttributeError, TypeError, ValueError):
            return  # written for another class of the family
        return
    yield from proposals(model, generator)


def run(model: PreTrainedModel, inputs: Inputs) -> Any:
    """One forward without gradients, from a fixed seed (some models draw noise)."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs)


def widen(model: nn.Module, gain: float, seed: int) -> None:
    """Draw every weight matrix from N(0, gain² / fan_in) and disturb every vector by N(0, 0.1²), in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0 or parameter.is_meta:
                continue
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
                continue
            parameter.copy_(_fan_in_std(parameter, gain) * torch.randn(parameter.shape, generator=generator))


def _fan_in_std(parameter: Tensor, gain: float) -> float:
    if parameter.dim() == 2:
        return gain / math.sqrt(min(parameter.shape))
    if parameter.shape[0] == 1:  # learned positions and class tokens
        return 0.5 * gain
    return gain / math.sqrt(math.prod(parameter.shape[1:]))


def _calm(model: PreTrainedModel, inputs: Inputs, outputs: Any, seed: int) -> float | None:
    """The widest gain at which every output is finite, or None."""
    if finite(outputs):
        return GAINS[0]
    for gain in GAINS[1:]:
        widen(model, gain, seed)
        if finite(run(model, inputs)):
            return gain
    return None


def tensors_of(outputs: Any) -> list[Tensor]:
    """Every floating-point tensor inside a model output, in a fixed order."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() else []
    if isinstance(outputs, dict):
        return [tensor for value in outputs.values() for tensor in tensors_of(value)]
    if isinstance(outputs, list | tuple):
        return [tensor for value in outputs for tensor in tensors_of(value)]
    return []


def finite(outputs: Any) -> bool:
    """Whether there is an output and none of it is nan; -inf is a mask that some heads return on purpose."""
    tensors = tensors_of(outputs)
    return bool(tensors) and not any(tensor.isnan().any() or (tensor == math.inf).any() for tensor in tensors)


def _uncovered(source: FamilySource, model: nn.Module) -> tuple[str, ...]:
    present = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return tuple(name for name in source.attention_classes if name not in present)


def brief(error: BaseException) -> str:
    """Kind and first line of an error, short enough for a table cell."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[0:2])[:180] if lines else ''}"
