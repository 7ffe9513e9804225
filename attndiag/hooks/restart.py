"""Run the rest of a causal model again, from one layer on and from one position on.

An edit of query i at layer l can change nothing before it: not the layers below l, not the positions before i. So the
model's own forward is called on the tokens from i on, with a cache that holds the keys and values of the unedited run
before i; the blocks below are replaced, for the duration, by stubs that hand on the stored residual stream. Masks,
positions, norms, the blocks from l on and the unembedding are the model's own code. Whether that reproduces the
unedited run is measured before it is used (`Restart.error`), and where it does not, it is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from attndiag.errors import UnsupportedModelError
from attndiag.hooks.sites import BlockSites, sites_of
from attndiag.hooks.structure import MODEL_CACHE_NAMES, first_tensor, stubbed
from attndiag.hooks.variants import NONE, Variants, losing_edges
from attndiag.models.access import accepts
from attndiag.models.load import LoadedModel


class _Enough(Exception):  # noqa: N818 - no error: the forward has given what was wanted
    """Ends a forward early."""


class _RecordingCache(DynamicCache):
    """A cache that also keeps every layer's keys and values whole, windows or not."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keep, then do what every cache does."""
        if layer_idx in self.kept:
            raise UnsupportedModelError(f"layer {layer_idx} fills its cache twice in one forward")
        self.kept[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Restart:
    """The stored unedited run of one prompt, and restarts from it.

    Parameters
    ----------
    lm : a decoder with an output embedding and a key/value cache.
    input_ids : [1, position].
    positions : where logits are wanted, ascending.

    Raises
    ------
    UnsupportedModelError : the model has no such parts; the text says which. Use whole forwards instead.
    """

    def __init__(self, lm: LoadedModel, input_ids: Tensor, positions: list[int]) -> None:
        self._lm, self.ids, self.positions = lm, input_ids, positions
        self.model, self.config = lm.model, lm.config
        model = lm.model
        if getattr(lm.config, "is_encoder_decoder", False):
            raise UnsupportedModelError("an encoder-decoder reads its source anew for each variant")
        self.cache_argument = next((name for name in MODEL_CACHE_NAMES if accepts(model, name)), "")
        if not self.cache_argument:
            raise UnsupportedModelError(f"{lm.info.architecture} takes no key/value cache")
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is None:
            raise UnsupportedModelError(f"{lm.info.architecture} has no output embedding")
        self.head: nn.Module = head
        sites = sites_of(model)
        if any(site.stream != "self" or site.calls != 1 or site.block is None for site in sites):
            raise UnsupportedModelError("its blocks are shared, or hold more than one self-attention")
        self.sites: dict[int, BlockSites] = {int(site.layer): site for site in sites if site.layer is not None}
        holder = next(iter(self.sites.values())).block
        parent = model.get_submodule(str(holder).rsplit(".", 1)[0])
        self.blocks = list(parent.children())
        if len(self.sites) != len(sites) or sorted(self.sites) != list(range(len(self.blocks))):
            raise UnsupportedModelError("some of its blocks have no softmax attention, so they carry hidden state")
        self._outputs: list[Tensor] = []
        self._shapes: list[Callable[[Tensor], Any]] = []
        self.clean_rows = self._store()

    @property
    def length(self) -> int:
        """Positions of the prompt."""
        return self.ids.shape[1]

    @property
    def n_layers(self) -> int:
        """Blocks of the model."""
        return len(self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream."""
        return self._outputs[0].dtype

    def entering(self, layer: int) -> Tensor:
        """The unedited residual stream that enters a block, [1, position, d_model]."""
        return self._entering if layer == 0 else self._outputs[layer - 1]

    def shaped(self, layer: int, hidden: Tensor) -> Any:
        """A residual stream in the form in which the block returns it."""
        return self._shapes[layer](hidden)

    def run(self, given: dict[str, Any]) -> Any:
        """A forward of the model, in eval mode and without gradients."""
        return self._lm.run(given)

    def error(self) -> float:
        """Largest difference of a restarted unedited run from the stored one, relative to the logits' own spread."""
        scale = float(self.clean_rows.std())
        worst = 0.0
        layers = sorted({0, self.n_layers // 2, self.n_layers - 1})
        starts = sorted({0, self.length // 2, self.positions[-1]})
        nothing = torch.full((2,), NONE, device=self.ids.device)
        for layer, start in zip(layers, starts, strict=False):
            for once in (True, False):
                got = self.logits(layer, start, Variants(nothing, nothing, nothing, first_query=start), one_query=once)
                worst = max(worst, float((got - self.clean_rows).abs().max()))
        return worst / max(scale, 1e-30)

    def logits(self, layer: int, start: int, variants: Variants, *, one_query: bool) -> Tensor:
        """[row, step, vocabulary] at the wanted positions, each row with its own edges gone at `layer`.

        With `one_query` only query `start` is edited, so the layer itself is run for that position alone.
        """
        rows = len(variants)
        later = [position for position in self.positions if position >= start]
        known = self.clean_rows[:, : len(self.positions) - len(later)].expand(rows, -1, -1)
        if not later:
            return known
        stop = start + 1 if one_query else later[-1] + 1
        changed = self._through_layer(layer, start, stop, variants)
        if one_query:
            rest = self._outputs[layer][:, stop : later[-1] + 1]
            changed = torch.cat([changed, rest.expand(rows, -1, -1)], dim=1)
        wanted = torch.tensor([position - start for position in later], device=self.ids.device)
        return torch.cat([known, self._after_layer(layer, start, changed, wanted)], dim=1)

    # ------------------------------------------------------------------------------------------------------ storing
    def _store(self) -> Tensor:
        """The unedited run: outputs of blocks, keys and values, logits at the wanted positions."""
        cache = _RecordingCache(self._lm.config)
        handles = [block.register_forward_hook(self._keep) for block in self.blocks]
        handles.append(self.blocks[0].register_forward_pre_hook(self._keep_entering, with_kwargs=True))
        try:
            output = self._lm.run({"input_ids": self.ids}, use_cache=True, **{self.cache_argument: cache})
        finally:
            for handle in handles:
                handle.remove()
        if len(self._outputs) != len(self.blocks) or sorted(cache.kept) != list(range(len(self.blocks))):
            raise UnsupportedModelError(f"{self._lm.info.architecture} does not keep one key/value pair a block")
        self.kept = [cache.kept[layer] for layer in range(len(self.blocks))]
        return output.logits[:, self.positions].detach()

    def _keep_entering(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        floats = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point())
        self._entering = next(floats).detach()

    def _keep(self, _module: nn.Module, _args: tuple, output: Any) -> None:
        hidden = first_tensor(output)
        if hidden is None or hidden.ndim != 3:
            raise UnsupportedModelError("its blocks return no residual stream [batch, position, d_model]")
        self._outputs.append(hidden.detach())
        if isinstance(output, Tensor):
            self._shapes.append(lambda tensor: tensor)
        elif isinstance(output, tuple) and output[0] is hidden:
            self._shapes.append(lambda tensor, rest=output[1:]: (tensor, *rest))
        else:
            raise UnsupportedModelError(f"its blocks return {type(output).__name__}")

    # ---------------------------------------------------------------------------------------------------- restarting
    def _through_layer(self, layer: int, start: int, stop: int, variants: Variants) -> Tensor:
        """Output of the edited block, [row, stop - start, d_model]."""
        kept: list[Tensor] = []

        def finish(_module: nn.Module, _args: tuple, output: Any) -> None:
            kept.append(first_tensor(output))  # type: ignore[arg-type]
            raise _Enough

        below = {index: self._outputs[index][:, start:stop] for index in range(layer)}
        site = self.sites[layer]
        with ExitStack() as stack:
            stack.enter_context(self._stubs(below, len(variants)))
            handle = self.blocks[layer].register_forward_hook(finish)
            stack.callback(handle.remove)
            listener = stack.enter_context(losing_edges(self._lm.model, site.attention, site.stream))
            listener.variants = variants
            with suppress(_Enough):
                self._run(start, stop, len(variants))
            if listener.seen != 1:
                raise UnsupportedModelError(f"{site.attention} did not run in the restarted forward")
        return kept[0]

    def _after_layer(self, layer: int, start: int, changed: Tensor, wanted: Tensor) -> Tensor:
        """Logits at the wanted positions when block `layer` has returned `changed`."""
        below = dict.fromkeys(range(layer), changed[:1]) | {layer: changed}

        def pick(_module: nn.Module, args: tuple) -> tuple:
            return (args[0].index_select(1, wanted), *args[1:])

        with self._stubs(below, changed.shape[0]):
            handle = self.head.register_forward_pre_hook(pick)
            try:
                output = self._run(start, start + changed.shape[1], changed.shape[0])
            finally:
                handle.remove()
        return output.logits

    def _run(self, start: int, stop: int, rows: int) -> Any:
        cache = DynamicCache(config=self._lm.config)
        if start:
            for index, (k, v) in enumerate(self.kept):
                cache.update(k[:, :, :start].expand(rows, -1, -1, -1), v[:, :, :start].expand(rows, -1, -1, -1), index)
        return self._lm.run(
            {"input_ids": self.ids[:, start:stop].expand(rows, -1)},
            use_cache=True,
            **{self.cache_argument: cache},
        )

    @contextmanager
    def _stubs(self, outputs: dict[int, Tensor], rows: int) -> Iterator[None]:
        """Blocks that return what is given instead of running."""

        def stub(index: int) -> Callable[..., Any]:
            return lambda *_args, **_kwargs: self._shapes[index](outputs[index].expand(rows, -1, -1))

        with stubbed((self.blocks[index], stub(index)) for index in outputs):
            yield
