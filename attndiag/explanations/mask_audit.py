"""Masks audited by intervention: does changing a token change what it must not reach?

Three kinds of intervention, from the outside to the inside:

- **tokens**: token t is exchanged and the outputs at every position are compared. Finds any leak, whatever its cause.
- **blocks**: the state that enters a block is exchanged at position t and what leaves the block is compared; each
  block's output is then put back, so that one forward judges all blocks apart from each other.
- **kernels**: q, k and the values of every position but one are held fixed (`explain.visible`). A leak that is seen in
  a block and not in its kernels vanishes when q, k and v are frozen: the mask is sound and something else in the block
  mixed the tokens.

All variants stand in one batch beside unedited rows, so that the batch size is the same for all; differences within
`probing.noise_level` of the largest output are rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import attndiag.explanations.probing as probing
from attndiag.errors import UnsupportedModelError
from attndiag.explanations.probing import Probe, hooked, moved, noise_level, run_probe
from attndiag.hooks.structure import block_names, first_tensor, layer_of, looks_like_mixer
from attndiag.models.access import accepts, input_embedding
from attndiag.models.load import LoadedModel


@dataclass(frozen=True, eq=False)
class BlockReach:
    """Who reaches whom through one block.

    reach : [changed, observed] boolean: exchanging the state at `changed` moves the block's output at `observed`.
    """

    name: str
    layer: int | None
    reach: Tensor


@dataclass(eq=False)
class _Blocks:
    """Blocks of a model that hold attention or another mixer, and no smaller block, under their names."""

    modules: dict[str, nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> _Blocks:
        modules = dict(model.named_modules())
        names = block_names(modules) | {name for name, module in modules.items() if _holds_mixer(name, module, modules)}
        inner = {n for n in names if not any(other != n and other.startswith(f"{n}.") for other in names)}
        return cls({name: module for name, module in modules.items() if name in inner})


def token_reach(lm: LoadedModel, probe: Probe, *, seed: int) -> tuple[Tensor | None, str]:
    """Exchange one token at a time and compare the outputs.

    Returns
    -------
    [changed, observed] boolean, or None with the reason where the model has no output at positions or no tokens.
    """
    if probe.tokens is None:
        return None, "the inputs hold no token ids"
    ids = probe.ids[:1]
    length = ids.shape[1]
    rows = ids.repeat(length + 2, 1)  # the first and the last row stay as they are
    rows.diagonal(offset=-1)[:length] = _other_ids(lm, ids[0], seed)
    variants = _repeated(probe, length + 2).with_(**{probe.tokens: rows})
    output = probing.per_position(run_probe(lm, variants), length + 2, length)
    if output is None:
        return None, "the model's output has no axis of positions"
    change = torch.stack([moved(output[row], output[0]) for row in range(1, length + 2)])
    return change[:length].cpu() > _floor(output.dtype, change[length]), ""


def block_reach(lm: LoadedModel, probe: Probe) -> list[BlockReach]:
    """Exchange the state that enters each block, one position at a time.

    Blocks that read anything but [row, position, width], or whose number of positions changes, are left out.
    """
    blocks = _Blocks.of(lm.model).modules
    length = probe.first.shape[1]
    n_rows = length + 2
    found: list[BlockReach] = []
    inputs: dict[str, int] = {}

    def before(name: str) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            place = _first_float(args, kwargs)
            if place is None:
                return None
            state = args[place] if isinstance(place, int) else kwargs[place]
            if state.ndim != 3 or state.shape[0] != n_rows or state.shape[1] < 3:
                return None
            inputs[name] = state.shape[1]
            edited = state.clone()
            for position in range(min(state.shape[1], length)):
                # the state of another position: of the right size and in the distribution
                edited[position + 1, position] = state[0, (position + 1) % state.shape[1]]
            if isinstance(place, int):
                return (*args[:place], edited, *args[place + 1 :]), kwargs
            return args, {**kwargs, place: edited}

        return hook

    def after(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, _args: tuple, _kwargs: dict, output: Any) -> Any:
            size = inputs.pop(name, None)
            state = first_tensor(output)
            if size is None or state is None:
                return None
            if state.ndim == 3 and state.shape[0] == n_rows and state.shape[1] == size:
                change = torch.stack([moved(state[row], state[0]) for row in range(1, n_rows)])
                known = min(size, length)
                reach = change[:known, :known] > _floor(state.dtype, change[-1])
                found.append(BlockReach(name, layer_of(name, module, lm.model), reach.cpu()))
            return probing.replace_first_tensor(output, lambda tensor: tensor[:1].expand_as(tensor).clone())

        return hook

    hooks = [(m, "pre", before(name)) for name, m in blocks.items()]
    hooks += [(m, "post", after(name)) for name, m in blocks.items()]
    with hooked(*hooks):
        run_probe(lm, _repeated(probe, n_rows))
    return found


@dataclass(frozen=True)
class BatchReach:
    """Whether other rows of a batch reach a row: largest relative change of its output, and where it began."""

    output_change: float
    noise: float
    first_block: str | None
    layer: int | None


def batch_reach(lm: LoadedModel, probe: Probe, *, seed: int) -> BatchReach | None:
    """Exchange every token of the other rows and watch row 0; None where the probe holds no token ids."""
    if probe.tokens is None:
        return None
    states: list[dict[str, Tensor]] = []
    outputs: list[Tensor] = []
    blocks = _Blocks.of(lm.model).modules
    rows = probe.ids[:1].repeat(3, 1)
    for round_ in range(2):
        ids = rows.clone()
        ids[1] = _other_ids(lm, rows[0], seed + 10 * round_ + 1)
        ids[2] = _other_ids(lm, rows[0], seed + 10 * round_ + 2)
        seen: dict[str, Tensor] = {}
        hooks = [(m, "post", _keep_row(name, seen)) for name, m in blocks.items()]
        with hooked(*hooks):
            output = run_probe(lm, _repeated(probe, 3).with_(**{probe.tokens: ids}))
        outputs.append(everything(output, 3)[0])
        states.append(seen)
    noise = noise_level(outputs[0].dtype)
    change = float(moved(outputs[1].flatten(), outputs[0].flatten()))
    first = next(
        (name for name in states[0] if float(moved(states[1][name].flatten(), states[0][name].flatten())) > noise), None
    )
    layer = None if first is None else layer_of(first, blocks[first], lm.model)
    return BatchReach(change, noise, first, layer)


@dataclass(frozen=True)
class PaddingReach:
    """What padding does to outputs at real positions (largest relative changes).

    Attributes
    ----------
    side : `"right"` or `"left"`.
    embedding_change : padded positions got other embeddings; None where the model has no embedding to edit, or no
        output at positions.
    unpadded_change : the same rows without any padding.
    query_change : padded positions of the last block's output got noise.
    pooled_moved : names of the outputs for whole rows (pooled vectors, class logits, losses) that either moved.
    noise : below this it is rounding.
    """

    side: str
    embedding_change: float | None
    unpadded_change: float | None
    query_change: float | None
    pooled_moved: tuple[str, ...]
    noise: float


def padded(lm: LoadedModel, probe: Probe, side: str, *, take: tuple[int, ...]) -> tuple[Probe, Tensor]:
    """The first rows of a probe with `take` places of padding each, and [row, position] True where tokens are."""
    if "input_ids" not in probe.inputs or not accepts(lm.model, "attention_mask"):
        raise UnsupportedModelError("no token ids with an attention_mask to pad")
    ids = probe.inputs["input_ids"][:1].repeat(len(take), 1)
    n = ids.shape[1]
    mask = torch.ones_like(ids)
    filler = getattr(lm.config, "pad_token_id", None)
    filler = 0 if filler is None or not 0 <= filler < lm.vocabulary else filler
    for row, places in enumerate(take):
        if places == 0:
            continue
        here = slice(n - places, n) if side == "right" else slice(0, places)
        words = ids[row, : n - places].clone()
        mask[row, here] = 0
        ids[row, mask[row] == 1] = words
        ids[row, here] = filler
    made = _repeated(probe, len(take)).with_(input_ids=ids, attention_mask=mask)
    if made.tokens == "decoder_input_ids" and made.ids.shape[1] == n:
        made = made.with_(decoder_input_ids=made.ids[:, 1:])  # so that shapes tell encoder and decoder apart
    if side == "left" and accepts(lm.model, "position_ids"):
        made = made.with_(position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    return made, mask.bool()


def padding_reach(lm: LoadedModel, probe: Probe, side: str, *, take: tuple[int, ...] = (0, 2, 4)) -> PaddingReach:
    """Change what stands in padded places, and what padded queries return, and watch the real positions.

    Raises
    ------
    UnsupportedModelError : the model takes no `attention_mask`, or does not run with padding on that side.
    """
    made, real = padded(lm, probe, side, take=take)
    decoder = "decoder_input_ids" in made.inputs
    n_rows = len(take)
    labels = {}
    if not decoder and accepts(lm.model, "labels") and type(lm.model).__name__.endswith(("LM", "LMHeadModel")):
        # padding has no label, and neither has a row's first token: under left padding a padded query predicts it
        scored = real & (real.cumsum(-1) > 1)
        labels = {"labels": made.inputs["input_ids"].masked_fill(~scored, -100)}
    made = made.with_(**labels)
    clean = run_probe(lm, made)
    changes: dict[str, float | None] = {"embedding": None, "query": None}
    pooled_moved: list[str] = []
    blocks = _Blocks.of(lm.model).modules
    encoder_blocks = [m for name, m in blocks.items() if not decoder or "encoder" in name.split(".")]
    places = {"embedding": input_embedding(lm.model), "query": encoder_blocks[-1] if encoder_blocks else None}
    noise = noise_level(_tensors(clean)[0].dtype)
    for name, module in places.items():
        if module is None:
            continue
        with hooked((module, "post", _noise_at(~real))):
            output = run_probe(lm, made)
        changes[name] = _at_tokens(output, clean, real)
        before = probing.pooled(clean, n_rows, real.shape[1])
        for field_name, value in probing.pooled(output, n_rows, real.shape[1]).items():
            if float(moved(value.flatten(), before[field_name].flatten())) > noise and field_name not in pooled_moved:
                pooled_moved.append(field_name)
    unpadded_change = _against_unpadded(lm, made, real, clean, decoder)
    return PaddingReach(side, changes["embedding"], unpadded_change, changes["query"], tuple(pooled_moved), noise)


def _against_unpadded(lm: LoadedModel, made: Probe, real: Tensor, clean: Any, decoder: bool) -> float | None:
    """Largest relative difference between a padded row and the same row alone."""
    row = int(real.sum(-1).argmin())
    alone = {"input_ids": made.inputs["input_ids"][row : row + 1, real[row]]}
    extra = {k: v for k, v in made.inputs.items() if k not in ("input_ids", "attention_mask", "position_ids", "labels")}
    extra = {k: v[row : row + 1] if isinstance(v, Tensor) and v.ndim else v for k, v in extra.items()}
    try:
        output = run_probe(lm, Probe({**extra, **alone}, made.tokens))
    except UnsupportedModelError:
        return None  # a model with inputs tied to the length of the text
    n = int(real[row].sum())
    if decoder:
        length = made.inputs["decoder_input_ids"].shape[1]
        left = probing.per_position(clean, real.shape[0], length)
        right = probing.per_position(output, 1, length)
        left = None if left is None else left[row]
    else:
        left = probing.per_position(clean, real.shape[0], real.shape[1])
        right = probing.per_position(output, 1, n)
        left = None if left is None else left[row, real[row]]
    if left is None or right is None:
        return None
    return float(moved(right[0].flatten(), left.flatten()))


def _at_tokens(output: Any, clean: Any, real: Tensor) -> float | None:
    """Largest relative change at positions that are tokens; None where the model returns nothing by position."""
    largest: float | None = None
    for now, then in zip(_tensors(output), _tensors(clean), strict=True):
        if then.ndim < 2 or then.shape[0] != real.shape[0]:
            continue
        if tuple(then.shape[:2]) == tuple(real.shape):
            now, then = now[real], then[real]
        elif then.ndim < 3:
            continue  # one vector for a whole row
        change = float(moved(now.flatten(), then.flatten()))
        largest = change if largest is None else max(largest, change)
    return largest


def everything(output: Any, batch: int) -> Tensor:
    """[row, width], all floats of an output that have a row axis."""
    parts = [t.reshape(batch, -1) for t in _tensors(output) if t.ndim > 1 and t.shape[0] == batch]
    if not parts:
        raise UnsupportedModelError("the model returns nothing by row that could be compared")
    return torch.cat(parts, dim=1)


def _tensors(output: Any) -> list[Tensor]:
    """Float tensors of a model output, its state dictionaries and caches left out."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    values = values if isinstance(values, tuple | list) else (values,)
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _repeated(probe: Probe, n_rows: int) -> Probe:
    """Row 0 of every input, `n_rows` times."""
    inputs = {
        name: value[:1].expand(n_rows, *value.shape[1:]).clone() if isinstance(value, Tensor) and value.ndim else value
        for name, value in probe.inputs.items()
    }
    return Probe(inputs, probe.tokens)


def _other_ids(lm: LoadedModel, ids: Tensor, seed: int) -> Tensor:
    """For each id another ordinary one."""
    ordinary = probing.ordinary_ids(lm, ids)
    generator = torch.Generator().manual_seed(seed)
    drawn = ordinary[torch.randint(len(ordinary) - 1, (len(ids),), generator=generator)]
    return torch.where(drawn.to(ids.device) == ids, ordinary[-1].to(ids.device), drawn.to(ids.device)).to(ids.dtype)


def _floor(dtype: torch.dtype, between_equal_rows: Tensor) -> float:
    """What counts as moved: above rounding, and well above what two equal rows of the batch differ by."""
    return max(noise_level(dtype), 20 * float(between_equal_rows.max()))


def _holds_mixer(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> bool:
    """True for an entry of a module list with a token mixer inside."""
    parent, _, index = name.rpartition(".")
    if not index.isdigit() or not isinstance(modules.get(parent), nn.ModuleList | nn.Sequential):
        return False
    return any(looks_like_mixer(part) for part in module.modules())


def _first_float(args: tuple, kwargs: dict) -> int | str | None:
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            return index
    return next((n for n, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()), None)


def _keep_row(name: str, seen: dict[str, Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: tuple, _kwargs: dict, output: Any) -> None:
        state = first_tensor(output)
        if state is not None:
            seen.setdefault(name, state[0].detach().clone())

    return hook


def _noise_at(places: Tensor) -> Callable[..., Any]:
    """Hook that replaces a module's output at [row, position] `places` by noise of the size of the rest."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim != 3 or tuple(tensor.shape[:2]) != tuple(places.shape):
            return tensor
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(tensor.shape, generator=generator).to(tensor) * tensor[~places].float().std().to(tensor)
        return torch.where(places[..., None], noise, tensor)

    def hook(_module: nn.Module, _args: tuple, _kwargs: dict, output: Any) -> Any:
        return probing.replace_first_tensor(output, change)

    return hook
