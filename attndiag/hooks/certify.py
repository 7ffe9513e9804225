"""Proof that a captured call is what the model used.

Three errors, each measured on the call's own tensors and relative to their largest entry:

- `value_error`: |A v - z| with the pattern that results are made of (the kernel's own weights where it tells them).
- `formula_error`: |A' v - z| with A' recomputed from q, k, scale, soft-cap, bias, mask and sinks. Backends that never
  see a pattern stand on this one.
- `output_error`: |sum_h z_h W_O^h + b_O - module output|.

Tolerances: 1e-5 in float32 (1e-10 in float64), and four units in the last place in bf16 and fp16.
`probe_pattern` asks an opaque kernel for the weights that it really used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attndiag.core.attention import head_outputs
from attndiag.errors import UnsupportedModelError, UnverifiedCaptureError

if TYPE_CHECKING:
    from attndiag.hooks.record import AttentionCall

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}


@dataclass(frozen=True)
class Certificate:
    """Measured errors of one call; None where the thing does not exist for it.

    Attributes
    ----------
    value_error, formula_error, output_error : relative to the largest entry of what they are compared with.
    tolerance : what they are held against; follows from the dtype of the call.
    rows : how many query rows were compared (of each batch entry and head).
    excluded_rows : rows left out because no key is allowed there or the query is padding.
    module_name : whose certificate this is.
    """

    module_name: str
    value_error: float
    formula_error: float | None
    output_error: float | None
    tolerance: float
    rows: int
    excluded_rows: int

    @property
    def failures(self) -> tuple[str, ...]:
        """The checks that failed, in words; empty for a verified call."""
        errors = {
            "|A v - z|": self.value_error,
            "|A v - z| by the recorded formula": self.formula_error,
            "|z W_O + b_O - module output|": self.output_error,
        }
        # written so that nan fails
        return tuple(
            f"{name} is {error:.1e} of scale, above {self.tolerance:.1e}"
            for name, error in errors.items()
            if error is not None and not error <= self.tolerance
        )

    @property
    def passed(self) -> bool:
        """True when nothing failed."""
        return not self.failures

    @property
    def formula_passed(self) -> bool:
        """True when the pattern recomputed from the record reproduces z, so that it may be computed tile by tile."""
        return self.formula_error is not None and self.formula_error <= self.tolerance

    def check(self) -> Certificate:
        """Return self, or raise `UnverifiedCaptureError` with the module and the errors."""
        if self.failures:
            raise UnverifiedCaptureError(
                f"{self.module_name}: the capture does not reproduce the model: {'; '.join(self.failures)}. "
                "Results made from it would be about another computation. If the tensors were changed in place after "
                "the call, analyse it inside `on_call`; in train mode call model.eval() first"
            )
        return self


def certify(call: AttentionCall, rows: int | None = None) -> Certificate:
    """Measure a call's certificate over all query rows, or over `rows` of them spread evenly (first and last kept)."""
    chosen = None
    if rows is not None and rows < call.n_queries:
        last = call.n_queries - 1
        chosen = torch.tensor(sorted({round(step * last / (rows - 1)) for step in range(rows)}), device=call.z.device)
    with torch.no_grad():
        return _measure(call, chosen)


def _measure(call: AttentionCall, chosen: Tensor | None) -> Certificate:
    dtype = torch.float64 if call.z.dtype == torch.float64 else torch.float32
    v = call.v.detach().to(dtype)
    z = _rows(call.z.detach(), 1, chosen).to(dtype)
    excluded = _excluded_rows(call, chosen)

    formula_error = None
    if call.q is not None:
        formula_error = _relative_error(head_outputs(call.formula_pattern(chosen)[0], v), z, excluded)
    # the kernel's own weights need a whole second call; a sampled certificate does without
    native = call.native_pattern if chosen is None or formula_error is None else None
    if native is not None:
        value_error = _relative_error(head_outputs(_rows(native, 2, chosen).to(dtype), v), z, excluded)
    elif formula_error is not None:
        value_error = formula_error
    else:
        raise UnsupportedModelError(
            f"{call.module_name}: neither a pattern nor q and k were captured; please report it"
        )

    output_error = None
    if call.output is not None and call.attn_out is not None:
        gate = call.output_gate
        inputs = z if gate is None else z * _rows(gate.detach(), 1, chosen).to(dtype)
        predicted = inputs.flatten(2) @ call.output.w_o.to(dtype).flatten(0, 1) + call.output.b_o.to(dtype)
        output_error = _relative_error(predicted, _rows(call.attn_out.detach(), 1, chosen).to(dtype), None)
    total = call.z.shape[0] * call.n_heads * z.shape[1]
    return Certificate(
        module_name=call.module_name,
        value_error=value_error,
        formula_error=formula_error,
        output_error=output_error,
        tolerance=TOLERANCE[call.z.dtype],
        rows=z.shape[1],
        excluded_rows=0 if excluded is None else int(excluded.expand(z.shape[:3]).sum()) if total else 0,
    )


def _rows(tensor: Tensor, axis: int, chosen: Tensor | None) -> Tensor:
    return tensor if chosen is None else tensor.index_select(axis, chosen)


def _excluded_rows(call: AttentionCall, chosen: Tensor | None) -> Tensor | None:
    """[batch, query_pos, head or 1] boolean: rows whose content is a convention (padding, no key allowed)."""
    excluded = None
    if call.fully_masked is not None:
        excluded = _rows(call.fully_masked.transpose(1, 2), 1, chosen)
    if call.query_valid is not None:
        padded = ~_rows(call.query_valid, 1, chosen)[..., None]
        excluded = padded if excluded is None else excluded | padded
    return excluded


def _relative_error(predicted: Tensor, actual: Tensor, excluded: Tensor | None) -> float:
    """Largest absolute difference over largest absolute actual value; 0 for two all-zero tensors, nan spreads."""
    difference = (predicted - actual).abs()
    scale = actual.abs()
    if excluded is not None:
        difference = difference.masked_fill(excluded[..., None], 0.0)
        scale = scale.masked_fill(excluded[..., None], 0.0)
    if difference.numel() == 0:
        return 0.0
    largest, reference = float(difference.max()), float(scale.max())
    if largest == 0.0:
        return 0.0
    return largest / reference if reference > 0 else float("inf")


def probe_pattern(call: AttentionCall) -> Tensor:
    """The weights that an opaque kernel really used, [batch, head, query_pos, key_pos].

    The kernel runs again with the values replaced by blocks of identity columns, so that its output *is* a block of
    the pattern: ceil(n_keys / d_value) calls. For certification and for kernels that report nothing, not for daily use.

    Raises
    ------
    UnsupportedModelError : the call cannot be repeated (a traced softmax).
    """
    if call.replay is None:
        raise UnsupportedModelError(
            f"{call.module_name}: the model computes its softmax itself, so there is no kernel to ask; "
            "`call.pattern` holds the weights that it used"
        )
    width = call.v.shape[-1]
    blocks = []
    for start in range(0, call.n_keys, width):
        stop = min(start + width, call.n_keys)
        identity = torch.zeros_like(call.v)
        identity[:, :, torch.arange(start, stop), torch.arange(stop - start)] = 1.0
        blocks.append(call.replay(identity)[0][..., : stop - start])
    return torch.cat(blocks, dim=-1).transpose(1, 2)
