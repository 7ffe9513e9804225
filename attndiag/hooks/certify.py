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
_ROWS_AT_ONCE = 256


def norm_failures(error: float | None, dtype: torch.dtype) -> list[str]:
    """What is wrong with a norm that was linearised with this error (`LinearisedNorm.error`) in a model of this dtype.

    Many families compute their norms in float32 whatever they read, so float64 is held to the float32 tolerance.
    """
    tolerance = max(TOLERANCE[dtype], TOLERANCE[torch.float32])
    if error is None or error <= tolerance:
        return []
    return [f"the linearised norm misses the layer's output by {error:.1e}, above {tolerance:.1e}"]


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
    by_formula, by_kernel, by_output = _Largest(), _Largest(), _Largest()
    # the kernel's own weights need a whole second call; a sampled certificate does without
    native = call.native_pattern if chosen is None or call.q is None else None
    excluded_rows = 0
    rows = torch.arange(call.n_queries, device=call.z.device) if chosen is None else chosen
    for part in rows.split(_ROWS_AT_ONCE):
        z = call.z.detach()[:, part].to(dtype)
        excluded = _excluded_rows(call, part)
        excluded_rows += 0 if excluded is None else int(excluded.expand(z.shape[:3]).sum())
        if call.q is not None:
            by_formula.add(head_outputs(call.formula_pattern(part)[0], v), z, excluded)
        if native is not None:
            by_kernel.add(head_outputs(native[:, :, part].to(dtype), v), z, excluded)
        if call.output is not None and call.attn_out is not None:
            inputs = z if call.output_gate is None else z * call.output_gate.detach()[:, part].to(dtype)
            predicted = inputs.flatten(2) @ call.output.w_o.to(dtype).flatten(0, 1) + call.output.b_o.to(dtype)
            by_output.add(predicted, call.attn_out.detach()[:, part].to(dtype), None)
    if not (by_formula.used or by_kernel.used):
        raise UnsupportedModelError(
            f"{call.module_name}: neither a pattern nor q and k were captured; please report it"
        )
    return Certificate(
        module_name=call.module_name,
        value_error=by_kernel.relative() if by_kernel.used else by_formula.relative(),
        formula_error=by_formula.relative() if by_formula.used else None,
        output_error=by_output.relative() if by_output.used else None,
        tolerance=TOLERANCE[call.z.dtype],
        rows=len(rows),
        excluded_rows=excluded_rows,
    )


@dataclass
class _Largest:
    """Largest difference and largest actual entry over blocks of rows; nan spreads."""

    difference: float = 0.0
    actual: float = 0.0
    used: bool = False

    def add(self, predicted: Tensor, actual: Tensor, excluded: Tensor | None) -> None:
        """Take in one block, leaving out rows [batch, query_pos, head or 1] that are `excluded`."""
        self.used = True
        difference, size = (predicted - actual).abs(), actual.abs()
        if excluded is not None:
            difference = difference.masked_fill(excluded[..., None], 0.0)
            size = size.masked_fill(excluded[..., None], 0.0)
        if difference.numel():
            # max() of a pair with nan depends on their order: add keeps it
            largest = float(difference.max())
            self.difference = largest if largest != largest else max(self.difference, largest)
            self.actual = max(self.actual, float(size.max()))

    def relative(self) -> float:
        """Difference over size; 0 for two all-zero tensors."""
        if self.difference == 0.0:
            return 0.0
        return self.difference / self.actual if self.actual > 0 or self.difference != self.difference else float("inf")


def _excluded_rows(call: AttentionCall, rows: Tensor) -> Tensor | None:
    """[batch, query_pos, head or 1] boolean: rows whose content is a convention (padding, no key allowed)."""
    excluded = None
    if call.fully_masked is not None:
        excluded = call.fully_masked.transpose(1, 2)[:, rows]
    if call.query_valid is not None:
        padded = ~call.query_valid[:, rows][..., None]
        excluded = padded if excluded is None else excluded | padded
    return excluded


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
