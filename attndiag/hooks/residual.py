"""Where attention enters the residual stream, found by fitting the block's own tensors.

Families differ in where they keep norms: before attention (pre), after the sum (post), between attention and the sum
(sandwich), some with a factor on the branch, some with attention and MLP side by side. Nothing here looks at names or
classes: a hypothesis `u = x + m * o` is accepted when the tensors that were seen in the forward satisfy it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from attndiag.core.norms import LinearisedNorm
from attndiag.errors import UnsupportedModelError

FIT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True, eq=False)
class SeenNorm:
    """One call of a norm: what it read, and its place in the order of events."""

    name: str
    module: nn.Module
    input: Tensor
    order: int

    @cached_property
    def output(self) -> Tensor:
        """What the norm returned. Computed again: keeping it would cost a capture more memory than all of z."""
        with torch.no_grad():
            return self.module.forward(self.input)


@dataclass(frozen=True, eq=False)
class SeenChild:
    """One call of another child of the block, after attention."""

    output: Tensor
    order: int


@dataclass(eq=False)
class BlockTrace:
    """Tensors seen while one block ran. Filled by the capture, read once the block is left.

    `attention_order` is the place of one attention call in the order of events.
    """

    name: str
    input: Tensor
    output: Tensor | None = None
    norms: list[SeenNorm] = field(default_factory=list)
    children: list[SeenChild] = field(default_factory=list)
    order: int = 0
    attention_order: int = 0

    def next_order(self) -> int:
        """Number the next event of this block."""
        self.order += 1
        return self.order


Place = Literal["pre", "post", "sandwich", "parallel", "unknown"]


@dataclass(frozen=True, eq=False)
class ResidualSite:
    """How attention's output is added to the residual stream.

    Attributes
    ----------
    place : where the norm sits: `"pre"` (before attention only), `"post"` (after the sum), `"sandwich"` (between
        attention and the sum), `"parallel"` (attention and MLP read and write the same stream), `"unknown"`.
    resid_pre : x, [batch, query_pos, d_model], the stream that attention's output is added to.
    resid_mid : x + multiplier * (branch), the stream after the sum.
    multiplier : factor on the attention branch.
    branch_norm : the norm between attention and the sum (sandwich only).
    reader : the norm that reads `resid_mid`: the post norm, or in pre-norm models the norm before the MLP.
    error : residual of the accepted fit, relative.
    """

    place: Place
    resid_pre: Tensor | None = None
    resid_mid: Tensor | None = None
    multiplier: float = 1.0
    branch_norm: SeenNorm | None = None
    reader: SeenNorm | None = None
    error: float = float("nan")
    reason: str = ""

    def require_known(self, wanted: str) -> ResidualSite:
        """Return self, or raise `UnsupportedModelError` saying why the residual stream could not be located."""
        if self.place == "unknown" or self.resid_pre is None:
            raise UnsupportedModelError(
                f"{wanted} needs the residual stream, which could not be located: {self.reason}. "
                "`contribution` and `head_contribution` do not need it"
            )
        return self


def locate_residual(trace: BlockTrace | None, attn_out: Tensor | None) -> ResidualSite:
    """Find x, m and the norms such that `resid_mid = x + m * branch` holds for tensors of this block."""
    if trace is None or attn_out is None:
        return ResidualSite("unknown", reason="the module sits in no numbered block, or its output was not found")
    tolerance = FIT_TOLERANCE.get(attn_out.dtype, 1e-5)
    before = [norm for norm in trace.norms if norm.order < trace.attention_order]
    after = [norm for norm in trace.norms if norm.order > trace.attention_order]

    branch_norm = next((norm for norm in after if _same(norm.input, attn_out)), None)
    branch = attn_out if branch_norm is None else branch_norm.output
    readers = [norm for norm in after if norm is not branch_norm]
    streams = [norm.input for norm in reversed(before)] + [norm.output for norm in reversed(before)] + [trace.input]

    sums: list[tuple[Tensor, SeenNorm | None]] = [(norm.input, norm) for norm in readers]
    if trace.output is not None:
        sums.append((trace.output, None))
    best: ResidualSite | None = None
    for total, reader in sums:
        for stream in streams:
            fit = _fit(total, stream, branch)
            if fit is None or fit[1] > tolerance or (best is not None and best.error <= fit[1]):
                continue
            best = ResidualSite(
                _place(branch_norm, reader, stream, before), stream, total, fit[0], branch_norm, reader, fit[1]
            )
        if best is not None:
            return best
    if trace.output is not None:
        for child in trace.children:
            if child.order <= trace.attention_order or not _like(child.output, trace.output):
                continue
            for stream in streams:
                fit = _fit(trace.output - child.output, stream, branch)
                if fit is not None and fit[1] <= tolerance:
                    # with a norm on the branch the MLP may still read the sum; only its own norm would have told
                    place = "parallel" if branch_norm is None else "sandwich"
                    return ResidualSite(place, stream, None, fit[0], branch_norm, None, fit[1])
    return ResidualSite(
        "unknown", reason=f"no tensor seen in {trace.name or 'the block'} equals stream + factor * attention output"
    )


def _place(branch_norm: SeenNorm | None, reader: SeenNorm | None, stream: Tensor, before: list[SeenNorm]) -> Place:
    if branch_norm is not None:
        return "sandwich"
    # a norm that reads x before attention makes the block pre-norm; without one, the norm that reads the sum is post
    read_before = any(_same(norm.input, stream) for norm in before)
    return "pre" if read_before or reader is None else "post"


def _like(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


def _same(left: Tensor, right: Tensor) -> bool:
    if left.numel() != right.numel() or left.dtype != right.dtype:
        return False
    return left.data_ptr() == right.data_ptr() or torch.equal(left.reshape(-1), right.reshape(-1))


def _fit(total: Tensor, stream: Tensor, branch: Tensor) -> tuple[float, float] | None:
    """Least-squares m of `total - stream = m * branch` and the relative size of what is left over."""
    if not (_like(total, stream) and total.numel() == branch.numel()):
        return None
    work = torch.float64 if total.dtype == torch.float64 else torch.float32
    change = (total.detach().to(work) - stream.detach().to(work)).reshape(-1)
    direction = branch.detach().to(work).reshape(-1)
    energy = float(direction @ direction)
    if energy == 0.0:
        return None
    multiplier = float(direction @ change) / energy
    nearest = round(multiplier)
    if abs(multiplier - nearest) < 1e-4:
        multiplier = float(nearest)
    if multiplier == 0.0:
        return None
    scale = max(float(total.detach().abs().max()), float(stream.detach().abs().max()))
    left_over = float((change - multiplier * direction).abs().max())
    # relative to the summands: the sum itself was rounded at their size
    return multiplier, left_over / max(scale, 1e-30)


def linearise_norm(norm: SeenNorm) -> LinearisedNorm:
    """The norm frozen at its real input, its form (LayerNorm or RMSNorm, gain w or 1 + w) decided by what it returned.

    `error` of the result says how far it is off: enough to tell the form is not enough to call numbers verified.

    Raises
    ------
    UnsupportedModelError : no affine norm reproduces the module's output; the text gives the smallest error.
    """
    work = torch.float64 if norm.input.dtype == torch.float64 else torch.float32
    hidden, output = norm.input.detach().to(work), norm.output.detach().to(work)
    weight, bias = getattr(norm.module, "weight", None), getattr(norm.module, "bias", None)
    gain = (
        torch.ones(hidden.shape[-1], dtype=work, device=hidden.device) if weight is None else weight.detach().to(work)
    )
    offset = None if bias is None else bias.detach().to(work)
    eps = next(
        (
            float(value)
            for name in ("eps", "variance_epsilon", "epsilon")
            if (value := getattr(norm.module, name, None))
        ),
        0.0,
    )
    smallest = float("inf")
    for kind in ("rms", "layer"):
        for candidate in (gain, 1.0 + gain):
            linear = LinearisedNorm.at(hidden, gain=candidate, bias=offset, eps=eps, kind=kind)
            error = float((linear.output(hidden) - output).abs().max()) / max(float(output.abs().max()), 1e-30)
            # many families compute their norms in float32 whatever they read
            if error <= max(FIT_TOLERANCE.get(norm.input.dtype, 1e-5), 1e-5) * 2:
                return replace(linear, error=error)
            smallest = min(smallest, error)
    raise UnsupportedModelError(
        f"{norm.name} ({type(norm.module).__name__}) is neither LayerNorm nor RMSNorm: the nearest is off by "
        f"{smallest:.1e}. `contribution` and `contribution_residual` do not need it"
    )
