"""What one call of an attention function leaves behind: one frozen record, no string keys.

A record keeps what entered the attention function (q, k, v after position encoding, norms and cache; scale, mask,
soft-cap, sinks, window, position bias) and what left it (z, and the module's output). Anything of size
[head, query_pos, key_pos] is computed when asked for, never kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from attndiag.core.attention import attention_scores, forbidden_entries, softmax_rows
from attndiag.errors import UnsupportedModelError
from attndiag.hooks.certify import Certificate, certify
from attndiag.hooks.residual import BlockTrace, ResidualSite, locate_residual
from attndiag.models.projections import OutputProjection

Replay = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False, repr=False)
class AttentionCall:
    """One call of one attention module.

    Attributes
    ----------
    module_name, module_class : where the call came from.
    layer : index of the block in its stack; None where the module sits in no numbered stack.
    call_index : 0 for the module's first call inside the capture, 1 for the next, ...
    kind : `"self"`, or `"cross"` when keys and values come from another sequence.
    route : `"routed"` (the model's own attention function was wrapped), `"traced"` (its softmax was watched),
        `"adapter"` (a person's statements about a module of their own, checked) or `"bridge"` (TransformerLens).
    kernel : the function that computed the attention (`eager`, `sdpa`, `flex_attention`, ...).
    q : [batch, head, query_pos, d_head] or None for traced softmax calls.
    k : [batch, kv_head, key_pos, d_head] or None likewise.
    v : [batch, kv_head, key_pos, d_value], value bias included.
    z : [batch, query_pos, head, d_value], what the attention function returned.
    scale : factor on q.k. None for traced softmax calls.
    mask : boolean (True = allowed) or additive, broadcastable to [batch, head, query_pos, key_pos]; None = all allowed.
    is_causal : True when the kernel hid the future itself (query i sees keys up to i); `mask` is then None.
    softcap, sinks, window, position_bias : None where the call has none. A window is already part of `mask`.
    output : the output projection, or None with the reason in `output_reason`.
    output_gate : [batch, query_pos, head, d_value], the factor between z and W_O where the module has one.
    attn_out : [batch, query_pos, d_model], output of W_O. None where W_O was not found.
    query_valid : [batch, query_pos] boolean, False for padding; None when nothing is padded.
    past : keys that a cache held before query 0, told by the cache itself; None where the module was given none.
    attends : `"tokens"`, or what the keys are instead: `"channels"` (the positions stand on the feature axis of q and
        k) or `"states"` (they stand on the head axis: every position attends over vectors of its own, such as earlier
        blocks). Told from the shapes of the module's input and of q.
    """

    module_name: str
    module_class: str
    layer: int | None
    call_index: int
    kind: Literal["self", "cross"]
    route: Literal["routed", "traced", "adapter", "bridge"]
    kernel: str
    q: Tensor | None
    k: Tensor | None
    v: Tensor
    z: Tensor
    scale: float | None
    mask: Tensor | None = None
    is_causal: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None
    position_bias: Tensor | None = None
    output: OutputProjection | None = None
    output_reason: str = ""
    output_gate: Tensor | None = None
    attn_out: Tensor | None = None
    query_valid: Tensor | None = None
    replay: Replay | None = None
    traced_pattern: Tensor | None = None
    trace: BlockTrace | None = None
    past: int | None = None
    attends: Literal["tokens", "channels", "states"] = "tokens"

    # ------------------------------------------------------------------ sizes
    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return self.z.shape[2]

    @property
    def n_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.v.shape[1]

    @property
    def n_queries(self) -> int:
        """Length of the query axis."""
        return self.z.shape[1]

    @property
    def n_keys(self) -> int:
        """Length of the key axis (cache included)."""
        return self.v.shape[2]

    @property
    def diagonal_offset(self) -> int:
        """Key index of query 0's own token in a self-attention call: keys that came from a cache precede it.

        Keys that a sliding cache has dropped do not count; room that a static cache keeps free stands behind.
        """
        newest = self.n_keys - self.n_queries
        return newest if self.past is None else min(self.past, newest)

    # ------------------------------------------------------- quantities on demand
    def formula_pattern(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pattern and sink mass recomputed from q, k and the recorded scale, soft-cap, bias, mask and sinks.

        Computed in float32, or float64 where the call is float64. Rows without any allowed key are all zero.

        Parameters
        ----------
        rows : query indices; all when None.

        Returns
        -------
        pattern : [batch, head, query_pos, key_pos]; sink mass : [batch, head, query_pos]; both in [0, 1].

        Raises
        ------
        UnsupportedModelError : the call was traced from a softmax, so q and k are unknown.
        """
        if self.q is None or self.k is None or self.scale is None:
            raise UnsupportedModelError(
                f"{self.module_name}: q and k were not seen (the model computes its softmax itself); "
                "use `call.pattern`, which holds the weights that it used"
            )
        dtype = torch.float64 if self.z.dtype == torch.float64 else torch.float32
        mask = _cast(_take_rows(self.mask, rows, self.n_queries), dtype)
        if self.is_causal:
            queries = torch.arange(self.n_queries, device=self.q.device) if rows is None else rows
            mask = (torch.arange(self.n_keys, device=self.q.device) <= queries[:, None])[None, None]
        scores = attention_scores(
            (self.q if rows is None else self.q.index_select(2, rows)).detach().to(dtype),
            self.k.detach().to(dtype),
            scale=self.scale,
            softcap=self.softcap,
            position_bias=_cast(_take_rows(self.position_bias, rows, self.n_queries), dtype),
            mask=mask,
        )
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.detach().to(dtype)
            if sinks.ndim == 3:
                sinks = sinks if rows is None else sinks[..., rows]
        return softmax_rows(scores, sinks=sinks)

    @property
    def native_pattern(self) -> Tensor | None:
        """The weights that the kernel itself reports, by running it once more; None for kernels that report none.

        Preferred over the recomputed ones: a kernel that works in bf16 rounds differently from float32.
        """
        if self.traced_pattern is not None:
            return self.traced_pattern
        if self.replay is None:
            return None
        weights = self.replay(self.v)[1]
        expected = (self.z.shape[0], self.n_heads, self.n_queries, self.n_keys)
        if weights is None or tuple(weights.shape) != expected:
            return None
        if self.sinks is not None and float(weights.sum(-1).min()) > 1 - 1e-3 and float(self.sink_mass.max()) > 1e-2:
            return None  # reported before the sink took its part (Granite): not what multiplied the values
        return weights.detach()

    @property
    def pattern(self) -> Tensor:
        """A, [batch, head, query_pos, key_pos], in [0, 1]; computed anew at each access, so keep what you reuse.

        The kernel's own weights where it reports them, else recomputed from q and k. Rows without an allowed key are
        all zero whatever the kernel does with them.
        """
        native = self.native_pattern
        if native is None:
            return self.formula_pattern()[0]
        dead = self.fully_masked
        return native if dead is None else native.masked_fill(dead[..., None], 0.0)

    @property
    def sink_mass(self) -> Tensor:
        """[batch, head, query_pos], the share of each row that goes to a learned sink and writes nothing."""
        if self.sinks is None:
            return torch.zeros(self.z.shape[0], self.n_heads, self.n_queries, device=self.z.device)
        return self.formula_pattern()[1]

    @cached_property
    def fully_masked(self) -> Tensor | None:
        """[batch, head or 1, query_pos] boolean, True where no key is allowed; None when every row has one."""
        if self.mask is None:
            return None
        mask = self.mask
        forbidden = ~mask if mask.dtype == torch.bool else forbidden_entries(mask)
        dead = forbidden.all(-1)
        if not bool(dead.any()):
            return None
        while dead.ndim < 3:
            dead = dead[None]
        return dead.expand(dead.shape[0], dead.shape[1], self.n_queries)

    @cached_property
    def certificate(self) -> Certificate:
        """Measured proof, over all query rows, that this record reproduces what the model computed."""
        return certify(self)

    @cached_property
    def sampled_certificate(self) -> Certificate:
        """The same over eight query rows: enough to catch a wrong formula, at a small part of the cost."""
        return certify(self, rows=8)

    @cached_property
    def site(self) -> ResidualSite:
        """Where the output enters the residual stream, found by fitting the block's own tensors."""
        return locate_residual(self.trace, self.attn_out)

    @property
    def w_o(self) -> Tensor:
        """[head, d_value, d_model]; raises `UnsupportedModelError` with the reason where there is none."""
        return self.require_output().w_o

    @property
    def b_o(self) -> Tensor:
        """[d_model]; raises like `w_o`."""
        return self.require_output().b_o

    def require_output(self) -> OutputProjection:
        """The output projection, or `UnsupportedModelError` saying why there is none."""
        if self.output is None:
            raise UnsupportedModelError(
                f"{self.module_name} ({self.module_class}): {self.output_reason or 'no output projection was found'}. "
                "`weight` and `value_norm` are defined here; contributions are not"
            )
        return self.output

    def __repr__(self) -> str:
        shape = f"batch={self.z.shape[0]}, heads={self.n_heads}, kv_heads={self.n_kv_heads}"
        return (
            f"AttentionCall({self.module_name}, layer={self.layer}, call={self.call_index}, {self.kind}, {self.route}, "
            f"{self.kernel}, {shape}, queries={self.n_queries}, keys={self.n_keys}, {self.z.dtype})"
        )


def _take_rows(tensor: Tensor | None, rows: Tensor | None, n_queries: int) -> Tensor | None:
    """Select query rows of a tensor whose second-last axis is the query axis, unless that axis is broadcast."""
    if tensor is None or rows is None or tensor.ndim < 2 or tensor.shape[-2] != n_queries:
        return tensor
    return tensor.index_select(-2, rows)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Cast additive masks and biases to the working dtype, keeping "forbidden" forbidden; booleans stay."""
    if tensor is None or tensor.dtype == torch.bool or tensor.dtype == dtype:
        return tensor
    tensor = tensor.detach()
    return tensor.to(dtype).masked_fill(forbidden_entries(tensor), -torch.inf)
