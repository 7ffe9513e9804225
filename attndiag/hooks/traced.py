"""Route C: watch the softmax of models that compute their attention themselves.

A softmax output is followed through dropout, casts and reshapes to the matrix product that consumes it; that product
is A v = z. Calls of `scaled_dot_product_attention` are read from their arguments. Only runs inside modules that do not
fetch their attention function from transformers (Falcon, BLOOM, MPT, GPT-Neo, DeBERTa, XLNet, XLM, ...).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attndiag.core.masks import causal_mask
from attndiag.errors import UnsupportedModelError
from attndiag.hooks.routed import DROPOUT_IS_ACTIVE

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_PASSES_ON = {
    F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16,
    Tensor.contiguous, Tensor.view, Tensor.reshape, torch.reshape, Tensor.masked_fill, torch.masked_fill,
    torch.nan_to_num, Tensor.nan_to_num, Tensor.clone,
}  # fmt: skip
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}


@dataclass(frozen=True, eq=False)
class TracedSoftmax:
    """One attention call in canonical shapes.

    pattern [batch, head, query_pos, key_pos] (None for fused calls, where q, k, scale and mask are known instead),
    v [batch, kv_head, key_pos, d_value], z [batch, query_pos, head, d_value]. Where the output projection is part of
    the same function (`multi_head_attention_forward`), its weight and its output come along. `restore` turns edited
    head outputs into what the watched function would have returned. `windows` counts the windows of an image or a text
    that were made rows of the batch.
    """

    v: Tensor
    z: Tensor
    kernel: str
    pattern: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    scale: float | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    replay: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None
    output_weight: Tensor | None = None
    attn_out: Tensor | None = None
    restore: Callable[[Tensor], Any] | None = None
    windows: int = 1


OnSoftmax = Callable[[TracedSoftmax], Tensor | None]


@contextmanager
def watching_softmax(on_softmax: OnSoftmax, n_heads: int | None):
    """Report every softmax-times-values product until the context is left.

    Parameters
    ----------
    on_softmax : called with each; where it returns a tensor, the model goes on with these head outputs instead.
    n_heads : head count, to split patterns that come as [batch * head, query_pos, key_pos]; None leaves those alone.
    """
    with _SoftmaxWatch(on_softmax, n_heads):
        yield


class _SoftmaxWatch(TorchFunctionMode):
    def __init__(self, on_softmax: OnSoftmax, n_heads: int | None) -> None:
        super().__init__()
        self._on_softmax = on_softmax
        self._n_heads = n_heads
        self._tagged: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            seen = _from_fused(args, kwargs, output)
        elif func is F.multi_head_attention_forward:
            seen = _from_multi_head(args, kwargs, output)
        elif (func in _SOFTMAX and isinstance(output, Tensor) and output.ndim >= 3) or (
            func in _PASSES_ON and args and id(args[0]) in self._tagged and isinstance(output, Tensor)
        ):
            if func in (F.dropout, torch.dropout) and not torch.equal(output, args[0]):
                raise UnsupportedModelError(DROPOUT_IS_ACTIVE)
            self._tagged[id(output)] = output
            seen = None
        elif func in _PRODUCTS and len(args) == 2 and id(args[0]) in self._tagged:
            seen = _from_product(self._tagged.pop(id(args[0])), args[1], output, self._n_heads)
        elif func is torch.einsum and len(operands := _operands(args)) == 2 and id(operands[0]) in self._tagged:
            seen = _from_einsum(args[0], self._tagged.pop(id(operands[0])), operands[1], output)
        else:
            seen = None
        edited = None if seen is None else self._on_softmax(seen)
        if seen is None or edited is None:
            return output
        if seen.restore is None:
            raise UnsupportedModelError(f"head outputs of a {seen.kernel} call cannot be edited")
        return seen.restore(edited)


def _operands(args: tuple) -> Sequence[Tensor]:
    """The tensors of an einsum, which may come as one list."""
    return args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]


def _from_product(pattern: Tensor, v: Tensor, z: Tensor, n_heads: int | None) -> TracedSoftmax | None:
    shape = z.shape
    if pattern.ndim == v.ndim == 5 and pattern.shape[1] == n_heads and pattern.shape[:3] == v.shape[:3]:
        return _from_windows(pattern, v, z)
    if pattern.ndim == 3 and v.ndim == 3 and n_heads and pattern.shape[0] % n_heads == 0:
        # by the head count, never by the first axis of the input: sequence-first modules have the length there
        pattern, v, z = (tensor.unflatten(0, (-1, n_heads)) for tensor in (pattern, v, z))
    if pattern.ndim != 4 or v.ndim != 4 or pattern.shape[-1] != v.shape[-2]:
        return None
    v = v.expand(pattern.shape[0], -1, -1, -1)
    return TracedSoftmax(
        v=v, z=z.transpose(1, 2), kernel="softmax", pattern=pattern,
        restore=lambda edited: edited.transpose(1, 2).reshape(shape),
    )  # fmt: skip


def _from_windows(pattern: Tensor, v: Tensor, z: Tensor) -> TracedSoftmax | None:
    """[batch, head, window, query_pos, key_pos]: every window is a row of the batch of its own (Hiera)."""
    if pattern.shape[-1] != v.shape[-2]:
        return None
    batch, _, windows = pattern.shape[:3]

    def folded(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).flatten(0, 1)

    return TracedSoftmax(
        v=folded(v), z=folded(z).transpose(1, 2), kernel="softmax", pattern=folded(pattern), windows=windows,
        restore=lambda edited: edited.transpose(1, 2).unflatten(0, (batch, windows)).transpose(1, 2),
    )  # fmt: skip


def _from_einsum(equation: str, pattern: Tensor, v: Tensor, z: Tensor) -> TracedSoftmax | None:
    """Axes by their letters: in all three = batch, head (in the pattern's order); pattern and z = query; and so on."""
    left, _, out = equation.replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    shared = [axis for axis in first if axis in second and axis in out]
    query = [axis for axis in first if axis not in second]
    key = [axis for axis in first if axis in second and axis not in out]
    width = [axis for axis in second if axis not in first]
    if (len(shared), len(query), len(key), len(width)) != (2, 1, 1, 1):
        return None
    batch, head = shared

    def arranged(tensor: Tensor, have: str, want: tuple[str, ...]) -> Tensor:
        return tensor.permute([have.index(axis) for axis in want])

    canonical = (batch, query[0], head, width[0])
    return TracedSoftmax(
        v=arranged(v, second, (batch, head, key[0], width[0])),
        z=arranged(z, out, canonical),
        kernel="softmax",
        pattern=arranged(pattern, first, (batch, head, query[0], key[0])),
        restore=lambda edited: edited.permute([canonical.index(axis) for axis in out]),
    )


def _from_fused(args: tuple, kwargs: dict, z: Tensor) -> TracedSoftmax | None:
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    q, k, v = given["query"], given["key"], given["value"]
    if q.ndim != 4:
        return None
    mask, is_causal = given.get("attn_mask"), bool(given.get("is_causal", False))
    if is_causal and q.shape[2] != k.shape[2]:
        mask, is_causal = causal_mask(q.shape[2], k.shape[2], offset=0, device=q.device), False
    scale = given.get("scale")

    def replay(values: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            again = F.scaled_dot_product_attention(**(given | {"value": values, "dropout_p": 0.0}))
        return again.transpose(1, 2), None

    return TracedSoftmax(
        v=v, z=z.transpose(1, 2), kernel="sdpa", q=q, k=k, mask=mask, is_causal=is_causal, replay=replay,
        scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
        restore=lambda edited: edited.transpose(1, 2),
    )  # fmt: skip


def _from_multi_head(args: tuple, kwargs: dict, output: tuple[Tensor, Tensor | None]) -> TracedSoftmax | None:
    """PyTorch's own function: asked again for the weights of each head; its output then certifies them."""
    names = inspect.signature(F.multi_head_attention_forward).parameters
    given = dict(zip(names, args, strict=False)) | kwargs
    value, heads = given["value"], given["num_heads"]
    if value.ndim != 3 or given["bias_k"] is not None or given["add_zero_attn"]:
        return None
    width = given["embed_dim_to_check"]
    separate = given.get("use_separate_proj_weight")
    weight = given["v_proj_weight"] if separate else given["in_proj_weight"][2 * width :]
    bias = given["in_proj_bias"]
    with torch.no_grad():
        v = F.linear(value, weight, None if bias is None else bias[2 * width :])
        again = F.multi_head_attention_forward(**(given | {"need_weights": True, "average_attn_weights": False}))
    pattern = cast(Tensor, again[1])  # asked for: need_weights=True
    v = v.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    z = (pattern @ v).transpose(1, 2)

    def restore(edited: Tensor) -> tuple[Tensor, Tensor | None]:
        change = F.linear((edited - z).flatten(2), given["out_proj_weight"])
        return output[0] + change.transpose(0, 1), output[1]

    return TracedSoftmax(
        v=v, z=z, kernel="multi_head_attention", pattern=pattern,
        output_weight=given["out_proj_weight"], attn_out=output[0].transpose(0, 1), restore=restore,
    )  # fmt: skip
