"""Skip the blocks below an edit: they return what they returned in the unedited run of the same rows.

An edit at layer l changes nothing below it. So while the edited forward runs, the blocks below l are replaced by stubs
that hand on what was stored; embeddings, masks, positions, the blocks from l on and the unembedding are the model's own
code. Whether that reproduces an unedited run is measured by whoever uses it (`StoredBlocks.error`). For whole rows
without a cache; `hooks.restart` also leaves out earlier positions, for one prompt at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from attndiag.errors import UnsupportedModelError
from attndiag.hooks.sites import sites_of
from attndiag.hooks.structure import stubbed
from attndiag.models.load import LoadedModel


@dataclass(frozen=True)
class SkipError:
    """Largest difference of unedited logits when blocks are skipped, relative to the spread of the logits.

    Attributes
    ----------
    same_batch : with the recorded rows as they are. The same kernels read the same numbers: anything but 0 means that
        the blocks hand on more than what they return.
    two_copies : with the rows twice; another batch size may round otherwise.
    """

    same_batch: float
    two_copies: float


class StoredBlocks:
    """What each block of a model returned in one forward.

    Parameters
    ----------
    lm : a model whose self-attention layers each sit in their own block of one list.

    Raises
    ------
    UnsupportedModelError : the blocks are shared, nested, or hold more than one attention; the text says which.
    """

    def __init__(self, lm: LoadedModel) -> None:
        self._lm = lm
        sites = sites_of(lm.model)
        if any(site.stream != "self" or site.calls != 1 or site.block is None for site in sites):
            raise UnsupportedModelError("its blocks are shared, or hold more than one self-attention")
        parents = {str(site.block).rpartition(".")[0] for site in sites}
        holder = lm.model.get_submodule(parents.pop())
        if parents or not isinstance(holder, nn.ModuleList):
            raise UnsupportedModelError("its blocks do not sit in one list, so their order is unknown")
        self._blocks: list[nn.Module] = list(holder)
        places = {id(block): place for place, block in enumerate(self._blocks)}
        self._place: dict[int, int] = {
            site.layer: places[id(lm.model.get_submodule(str(site.block)))] for site in sites if site.layer is not None
        }
        if len(places) != len(self._blocks) or len(self._place) != len(sites):
            raise UnsupportedModelError("its blocks are shared, or its layers have no numbers of their own")
        self._returned: dict[int, Any] = {}
        self._rows = 0

    @contextmanager
    def recording(self, rows: int) -> Iterator[None]:
        """Store what the blocks return in the forward of `rows` rows that runs inside."""
        self._returned.clear()
        self._rows = rows

        def keep(place: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
                self._returned[place] = tree_map(_copy, output)

            return hook

        with ExitStack() as stack:
            for place, block in enumerate(self._blocks):
                stack.callback(block.register_forward_hook(keep(place)).remove)
            yield

    @contextmanager
    def below(self, layer: int, copies: int = 1) -> Iterator[None]:
        """The blocks below layer `layer` return what was stored; run the same rows inside, `copies` times over."""
        if len(self._returned) != len(self._blocks):
            raise UnsupportedModelError("not every block ran in the recorded forward")
        self._require_places([layer])

        def again(item: Any) -> Any:
            # copies: a later block may add to the stream in place
            if isinstance(item, Tensor) and item.ndim and item.shape[0] == self._rows:
                return item.repeat(copies, *[1] * (item.ndim - 1))
            return _copy(item)

        def stub(place: int) -> Callable[..., Any]:
            return lambda *_args, **_kwargs: tree_map(again, self._returned[place])

        with stubbed((self._blocks[place], stub(place)) for place in range(self._place[layer])):
            yield

    def error(self, inputs: dict[str, Tensor], layers: Iterable[int] | None = None) -> SkipError:
        """What skipping blocks changes in unedited logits. Overwrites what was recorded.

        Parameters
        ----------
        inputs : at least two rows, so that what mixes rows shows itself.
        layers : the blocks below each of these are skipped in turn, those below the last with two copies of the rows
            as well; every layer when None.

        Raises
        ------
        UnsupportedModelError : the model cannot run without the skipped blocks: later ones read more than the stream
            (keys and values that layers share, say).
        """
        rows, chosen = len(inputs["input_ids"]), set(self._place if layers is None else layers)
        self._require_places(chosen)
        wanted = sorted(chosen, key=lambda layer: self._place[layer])
        trials = [(layer, 1) for layer in wanted] + [(layer, 2) for layer in wanted[-1:]]
        worst = {1: 0.0, 2: 0.0}
        with torch.no_grad():
            with self.recording(rows):
                whole = self._lm.run(inputs).logits
            spread = max(float(whole.float().std()), 1e-30)
            for layer, copies in trials:
                given = {name: tensor.repeat(copies, 1) for name, tensor in inputs.items()}
                try:
                    with self.below(layer, copies):
                        found = self._lm.run(given).logits
                except Exception as failure:
                    raise UnsupportedModelError(
                        f"later blocks read more than the stream: without the blocks below layer {layer} the model "
                        f"ended in {type(failure).__name__}: {failure}"
                    ) from failure
                difference = float((found.unflatten(0, (copies, rows)) - whole).abs().max()) / spread
                # nan is the largest error of all, and `max` would drop it
                worst[copies] = max(worst[copies], float("inf") if math.isnan(difference) else difference)
        return SkipError(worst[1], worst[2])

    def _require_places(self, layers: Iterable[int]) -> None:
        unknown = sorted(set(layers) - set(self._place))
        if unknown:
            there = sorted(self._place)
            raise UnsupportedModelError(f"no block holds attention of layers {unknown}; there are {there}")


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item
