"""Skip the blocks below an edit: they return what they returned in the unedited run of the same rows.

An edit at layer l changes nothing below it. So while the edited forward runs, the blocks below l are replaced by stubs
that hand on what was stored; embeddings, masks, positions, the blocks from l on and the unembedding are the model's own
code. Whether that reproduces an unedited run is measured by whoever uses it (`StoredBlocks.error`). For whole rows
without a cache; `hooks.restart` also leaves out earlier positions, for one prompt at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from attndiag.errors import UnsupportedModelError
from attndiag.hooks.sites import sites_of
from attndiag.models.load import LoadedModel


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

        def again(item: Any) -> Any:
            # copies: a later block may add to the stream in place
            if isinstance(item, Tensor) and item.ndim and item.shape[0] == self._rows:
                return item.repeat(copies, *[1] * (item.ndim - 1))
            return _copy(item)

        def stub(place: int) -> Callable[..., Any]:
            return lambda *_args, **_kwargs: tree_map(again, self._returned[place])

        replaced: list[nn.Module] = []
        try:
            for place in range(self._place[layer]):
                self._blocks[place].forward = stub(place)
                replaced.append(self._blocks[place])
            yield
        finally:
            for block in replaced:
                del block.forward

    def error(self, inputs: dict[str, Tensor]) -> float:
        """Largest difference of unedited logits when blocks are skipped, relative to the spread of the logits.

        Tried from a middle and from the last layer, one copy and two. Overwrites what was recorded.
        """
        rows = len(inputs["input_ids"])
        layers = sorted(self._place, key=lambda layer: self._place[layer])
        worst = 0.0
        with torch.no_grad():
            with self.recording(rows):
                whole = self._lm.run(inputs).logits
            for layer, copies in ((layers[len(layers) // 2], 1), (layers[-1], 2)):
                given = {name: tensor.repeat(copies, 1) for name, tensor in inputs.items()}
                with self.below(layer, copies):
                    found = self._lm.run(given).logits
                difference = (found.unflatten(0, (copies, rows)) - whole).abs().max()
                worst = max(worst, float(difference))
        return worst / max(float(whole.float().std()), 1e-30)


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item
