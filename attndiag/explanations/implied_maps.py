"""The token-to-token map that a mixer without a softmax implies.

Linear attention, gated delta rules and state-space scans compute an output that is linear in their values once
everything else (queries, keys, decays, gates) is fixed: core_i = sum_j M_ij v_j, channel by channel. M is found by
running the mixer's own scan with one value at a time: the value 1 at position j, 0 elsewhere. What comes out is column
j of M. Nothing about the family's formula is assumed; that the map reproduces the core is measured (`core_error`), and
a mixer that is not linear, or mixes channels, is refused with the size of the error.

Behind the scan stand a norm and a gate. Frozen at what they were, they multiply every channel by a number, so that the
parts W_O (factor_i * M_ij v_j) sum to the module's own output (`output_error`). Without freezing they do not, and by
how much is told (`unfrozen_error`).

Such maps are not softmax-like: rows need not sum to 1 and entries may be negative. Where a short convolution comes
before the values, one token reaches several of them: the columns are then `post_convolution` positions, not tokens.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.errors import UnsupportedModelError
from attndiag.explanations.implied_map import ImpliedMap
from attndiag.explanations.probing import Probe, as_loaded, hooked, noise_level, probe_of, quiet_eval, run_probe
from attndiag.hooks.structure import MODEL_CACHE_NAMES, bound_arguments, first_tensor, layer_of, looks_like_mixer
from attndiag.models.load import LoadedModel

_SCAN = re.compile(r"chunk_gated_delta|gated_delta_rule|chunk_scan|selective_scan|chunk_kda|lightning")
_VALUE_NAMES = ("value", "values", "v", "x", "hidden_states", "u")


@dataclass(frozen=True, eq=False)
class _Scan:
    """One call of a scan function."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]

    def values(self) -> tuple[int | str, Tensor] | None:
        """Which argument holds the values, and what it was; None where none can be told."""
        names = list(inspect.signature(inspect.unwrap(self.function)).parameters)
        given: dict[str, tuple[int | str, Any]] = {
            n: (i, a) for i, (n, a) in enumerate(zip(names, self.args, strict=False))
        }
        given |= {name: (name, value) for name, value in self.kwargs.items()}
        for name in _VALUE_NAMES:
            place, value = given.get(name, (0, None))
            if isinstance(value, Tensor) and value.ndim == 4:
                return place, value.detach()
        return None

    def run(self, place: int | str, values: Tensor) -> Tensor:
        """The scan again with other values."""
        args, kwargs = self.args, self.kwargs
        if isinstance(place, int):
            args = (*args[:place], values, *args[place + 1 :])
        else:
            kwargs = {**kwargs, place: values}
        found = first_tensor(self.function(*args, **kwargs))
        if found is None:
            raise UnsupportedModelError("the scan returned no tensor when it ran again")
        return found


@dataclass(eq=False)
class _Run:
    """What one mixer did in one forward."""

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    scan: _Scan | None = None
    norm_input: Tensor | None = None
    projected: tuple[nn.Linear, Tensor, Tensor] | None = None
    output: Tensor | None = None
    linears: list[tuple[nn.Linear, Tensor, Tensor]] = field(default_factory=list)


def implied_maps(
    model: nn.Module | LoadedModel, *, inputs: Mapping[str, Any] | None = None, length: int = 12, seed: int = 0
) -> tuple[dict[str, ImpliedMap], dict[str, str]]:
    """The token-to-token map that every mixer without a softmax implies (linear attention, delta rules, state spaces).

    core_i = sum_j M_ij v_j, channel by channel, and with norm and gate frozen out_i = sum_j W_O (factor_i * M_ij v_j).

    Parameters
    ----------
    model : a PyTorch module or what `attndiag.load` returned.
    inputs : the batch, by argument name of the model's forward; random token ids by default.
    length, seed : of the random ids. One map costs `length` runs of the mixer's scan.

    Returns
    -------
    maps : `ImpliedMap` by module name. Entries of any sign, in units of the core per value: rows need not sum to 1
        (`row_sums`), and `negative_share` tells how many are below zero. `columns` says whether a column is a token or
        a position behind a short convolution. `core_error`, `output_error` (norm and gate frozen) and `unfrozen_error`
        (not frozen) are relative to the largest entry of what they are compared with.
    refused : reason by module name, for mixers that have no such map (no scan that can be run again, or not linear in
        its values). Both are empty for models without mixers.

    Raises
    ------
    UnsupportedModelError : the model does not run on the probe; the text says which arguments its forward takes.

    References
    ----------
    Katharopoulos 2020, arXiv 2006.16236 (linear attention); Dao and Gu 2024, arXiv 2405.21060, and Ali 2024, arXiv
    2403.01590 (state-space models as attention); Yang 2024, arXiv 2412.06464 (gated delta rule). Deviation: M is probed
    with one value at a time instead of written down for each family.
    """
    lm = as_loaded(model)
    probe = probe_of(lm, batch=1, length=length, seed=seed, inputs=inputs)
    runs = _watch(lm, probe)
    maps: dict[str, ImpliedMap] = {}
    refused: dict[str, str] = {}
    with quiet_eval(lm):
        for run in runs:
            try:
                maps[run.name] = _map_of(run, lm.model)
            except UnsupportedModelError as error:
                refused[run.name] = str(error)
    return maps, refused


def _watch(lm: LoadedModel, probe: Probe) -> list[_Run]:
    """One forward; every mixer with its scan, its norm and its output projection."""
    mixers = {name: module for name, module in lm.model.named_modules() if looks_like_mixer(module)}
    # whole models and blocks bear the family's name too: the innermost ones are the mixers
    mixers = {n: m for n, m in mixers.items() if not any(o != n and (n == "" or o.startswith(f"{n}.")) for o in mixers)}
    runs: list[_Run] = []
    stack: list[_Run] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            stack.append(_Run(name, module, bound_arguments(module, args, kwargs)))

        return hook

    def leave(_module: nn.Module, _args: tuple, _kwargs: dict, output: Any) -> None:
        run = stack.pop()
        run.output = first_tensor(output)
        run.projected = run.linears[-1] if run.linears else None
        runs.append(run)

    def linear(module: nn.Module, args: tuple, _kwargs: dict, output: Tensor) -> None:
        stack[-1].linears.append((module, args[0].detach(), output.detach()))  # type: ignore[arg-type]

    def norm(_module: nn.Module, args: tuple, _kwargs: dict) -> None:
        stack[-1].norm_input = args[0].detach()

    hooks: list[tuple[nn.Module, str, Any]] = []
    for name, module in mixers.items():
        hooks += [(module, "pre", enter(name)), (module, "post", leave)]
        for part in module.modules():
            if isinstance(part, nn.Linear):
                hooks.append((part, "post", linear))
            elif "norm" in type(part).__name__.lower():
                hooks.append((part, "pre", norm))

    def scanned(scan: _Scan) -> None:
        if stack:
            stack[-1].scan = scan

    with _watching_scans(mixers, scanned), hooked(*hooks):
        run_probe(lm, probe)
    return runs


@contextmanager
def _watching_scans(mixers: Mapping[str, nn.Module], tell: Callable[[_Scan], None]) -> Iterator[None]:
    """Within the block, calls of scan functions in the mixers' own Python modules are told."""
    patched: list[tuple[Any, str, Any]] = []
    try:
        for place in {sys.modules[type(module).__module__] for module in mixers.values()}:
            for name, function in list(vars(place).items()):
                if not _SCAN.search(name) or not inspect.isroutine(function):
                    continue

                def watched(*args: Any, _function: Any = function, **kwargs: Any) -> Any:
                    tell(_Scan(_function, args, kwargs))
                    return _function(*args, **kwargs)

                setattr(place, name, watched)
                patched.append((place, name, function))
        yield
    finally:
        for place, name, function in patched:
            setattr(place, name, function)


def _map_of(run: _Run, model: nn.Module) -> ImpliedMap:
    core_of, values = _core(run)
    core = core_of(values)
    columns = []
    for position in range(values.shape[1]):
        one = torch.zeros_like(values)
        one[:, position] = 1.0
        columns.append(core_of(one))
    found = torch.stack(columns, 2)  # [batch, query_pos, key_pos, head, d_value]
    rebuilt = (found * values[:, None]).sum(2)
    error = _relative(rebuilt, core)
    tolerance = max(1e-5, noise_level(core.dtype))
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"{run.name} ({type(run.module).__name__}) is not linear in its values channel by channel: the map misses "
            f"its output by {error:.1e} of scale (allowed {tolerance:.0e})"
        )
    spread = float((found.amax(-1) - found.amin(-1)).max()) / max(float(found.abs().max()), 1e-30)
    if spread <= noise_level(core.dtype):
        found = found[..., :1]
    factor, weight, output_error, unfrozen = _behind(run, found, values, core)
    return ImpliedMap(
        module_name=run.name,
        module_class=type(run.module).__name__,
        layer=layer_of(run.name, run.module, model),
        map=found,
        values=values,
        core=core,
        factor=factor,
        output_weight=weight,
        columns="post_convolution" if any(isinstance(m, nn.Conv1d) for m in run.module.modules()) else "token",
        core_error=error,
        output_error=output_error,
        unfrozen_error=unfrozen,
    )


def _core(run: _Run) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The scan as a function of its values [batch, position, head, d_value], and the values that it had."""
    found = None if run.scan is None else run.scan.values()
    if run.scan is not None and found is not None:
        return functools.partial(run.scan.run, found[0]), found[1]
    if hasattr(run.module, "qkv_proj") and hasattr(run.module, "act_fn") and run.norm_input is not None:
        return _through_projection(run)
    raise UnsupportedModelError(
        f"{run.name} ({type(run.module).__name__}): no scan with values [batch, position, head, d_value] was seen, so "
        "there is nothing to probe with one value at a time; token replacement and layer ablation work"
    )


def _through_projection(run: _Run) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Linear attention that splits one activated projection into q, k, v a head (MiniMax): the whole module runs."""
    module, heads = run.module, int(run.module.num_attention_heads)  # type: ignore[arg-type]
    width = int(module.head_dim)  # type: ignore[arg-type]
    kept: dict[str, Tensor] = {}
    arguments = {name: value for name, value in run.arguments.items() if name not in MODEL_CACHE_NAMES}

    def core_of(values: Tensor | None) -> Tensor:
        def replace(_module: nn.Module, _args: tuple, _kwargs: dict, output: Tensor) -> Tensor:
            split = output.unflatten(-1, (heads, 3 * width)).clone()
            kept["values"] = split[..., 2 * width :].detach()
            if values is not None:
                split[..., 2 * width :] = values
            return split.flatten(-2)

        def keep(_module: nn.Module, args: tuple, _kwargs: dict) -> None:
            kept["core"] = args[0].detach().unflatten(-1, (heads, width))

        with hooked((module.act_fn, "post", replace), (module.norm, "pre", keep)):  # type: ignore[arg-type]
            module(**arguments)
        return kept["core"]

    core_of(None)
    return core_of, kept["values"]


def _behind(
    run: _Run, found: Tensor, values: Tensor, core: Tensor
) -> tuple[Tensor | None, Tensor | None, float | None, float | None]:
    """Norm and gate as a factor for every channel, W_O, the error of the sum of parts, and the one without freezing."""
    if run.projected is None or run.output is None:
        return None, None, None, None
    linear, before, after = run.projected
    if before.numel() != core.numel() or not torch.equal(after.reshape(-1), run.output.detach().reshape(-1)):
        return None, None, None, None
    before = before.reshape(core.shape)
    factor = torch.where(core == 0, torch.zeros_like(core), before / core)
    bias = 0.0 if linear.bias is None else linear.bias.detach()
    weight = linear.weight.detach()
    parts = found * values[:, None] * factor[:, :, None]
    rebuilt = parts.sum(2).flatten(2) @ weight.T + bias
    output = run.output.detach().reshape(rebuilt.shape)
    return factor, weight, _relative(rebuilt, output), _unfrozen_error(run, found, values, factor, output, weight, bias)


def _unfrozen_error(
    run: _Run, found: Tensor, values: Tensor, factor: Tensor, output: Tensor, weight: Tensor, bias: Tensor | float
) -> float | None:
    """The error when each part is normed by its own size instead of the whole's."""
    if run.norm_input is None:
        return None
    parts = found * values[:, None]
    whole = parts.sum(2, keepdim=True).expand_as(parts)
    # an RMS norm divides by the size of what it is given; the gate and the gain are in the factor already
    group = -1 if run.norm_input.shape[-1] == values.shape[-1] else (-2, -1)
    gated = factor[:, :, None] * parts
    size = gated.square().mean(group, keepdim=True).sqrt()
    reference = (factor[:, :, None] * whole).square().mean(group, keepdim=True).sqrt()
    normed = torch.where(size > 0, gated * reference / size.clamp_min(1e-30), torch.zeros_like(gated))
    return _relative(normed.sum(2).flatten(2) @ weight.T + bias, output)


def _relative(found: Tensor, actual: Tensor) -> float:
    scale = float(actual.abs().max())
    difference = float((found - actual).abs().max())
    return difference / scale if scale > 0 else difference
