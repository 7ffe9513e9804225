"""The numbers of `explanations.contributions` for one call, in two ways: part by part, and straight from q and k.

Both take what the block does behind W_O (branch factor, sandwich norm, norm after the sum) from `folded_output`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from attndiag.core import contributions as maths
from attndiag.core.fused import attention_contributions
from attndiag.core.norms import FoldedOutput, fold_output
from attndiag.errors import NotApplicableError
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.residual import linearise_norm

Kind = Literal[
    "weight",
    "value_norm",
    "head_contribution",
    "contribution",
    "contribution_residual",
    "contribution_norm",
    "mixing_ratio",
    "projection",
    "target_attribution",
    "alti",
    "alti_l2",
]
Norm = Literal["own", "next"]
WITH_RESIDUAL = ("contribution_residual", "contribution_norm")


def by_kernel(
    call: AttentionCall,
    kind: Kind,
    work: torch.dtype,
    norm: Norm,
    direction: Tensor | None,
    query: int | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Scores and checks from q and k, no pattern formed. Completeness follows from the certificate: A v = z, z W_O."""
    w_o, b_o = call.w_o.to(work), call.b_o.to(work)
    options: dict[str, Any] = {}
    norm_error: float | None = None
    wanted = [kind]
    directions = None
    if kind in WITH_RESIDUAL:
        folded = folded_output(call, w_o, b_o, norm=norm if kind == "contribution_norm" else None)
        w_o, norm_error = folded.w_o, folded.norm_error
        options = {"row_scale": folded.row_scale, "residual": folded.residual}
    elif kind == "contribution":
        wanted.append("cancellation")
    elif kind == "target_attribution":
        folded = _folded_branch(call, w_o, b_o)
        w_o, options["row_scale"], norm_error = folded.w_o, folded.row_scale, folded.norm_error
        directions, options["target_query"] = _direction(direction, query, work), query
        if directions.ndim == 2:
            directions = directions[:, None].expand(-1, call.n_queries, -1)
    elif kind == "projection":
        attn_out = call.z.detach().to(work).flatten(2) @ w_o.flatten(0, 1) + b_o
        size = attn_out.norm(dim=-1, keepdim=True)
        directions = maths.undefined_where_zero(attn_out, size, "projection")
    q, k, scale = cast(Tensor, call.q), cast(Tensor, call.k), cast(float, call.scale)
    result = attention_contributions(
        q.to(work),
        k.to(work),
        call.v.to(work),
        w_o,
        scale=scale,
        mask=call.mask,
        is_causal=call.is_causal,
        softcap=call.softcap,
        sinks=call.sinks,
        position_bias=call.position_bias,
        directions=directions,
        outputs=wanted,
        layer=call.module_name,
        **options,
    )
    checks: dict[str, Any] = {"formulation": result.formulation, "refined_pairs": result.refined_pairs}
    if norm_error is not None:
        checks["norm_error"] = norm_error
    if result.cancellation is not None:
        seen = result.cancellation[~result.cancellation.isnan()]
        checks["smallest_cancellation"] = float(seen.min()) if seen.numel() else 1.0
    if kind == "projection" and directions is not None:
        checks["bias_part"] = (directions * b_o).sum(-1)
    return getattr(result, kind), checks


def _direction(direction: Tensor | None, query: int | None, work: torch.dtype) -> Tensor:
    if direction is None or query is None:
        raise NotApplicableError("target_attribution needs `direction` (u in the residual stream) and `query` (t)")
    return direction.to(work)


def by_parts(
    call: AttentionCall,
    kind: Kind,
    work: torch.dtype,
    norm: Norm,
    direction: Tensor | None,
    query: int | None,
) -> tuple[Tensor, dict[str, Any]]:
    """Scores and checks from the pattern, the parts summed one by one; arguments as in `contributions`."""
    pattern, v = call.pattern.to(work), call.v.detach().to(work)
    if kind == "weight":
        return pattern, {}
    if kind == "value_norm":
        return maths.value_norm(pattern, v), {}

    w_o, b_o = call.w_o.to(work), call.b_o.to(work)
    gate = None if call.output_gate is None else call.output_gate.detach().to(work)
    attn_out = None if call.attn_out is None else call.attn_out.detach().to(work)
    checks: dict[str, Any] = {}
    if attn_out is not None:
        errors = maths.completeness_error(pattern, v, w_o, attn_out, bias=b_o, gate=gate)
        checks["completeness_error"] = float(_rows_that_count(errors, call).max())

    if kind == "head_contribution":
        return _head_contribution(pattern, v, w_o, gate), checks
    if kind == "contribution":
        values = maths.contribution(pattern, v, w_o, gate=gate)
        written = _head_contribution(pattern, v, w_o, gate).sum(1)
        ratio = torch.where(written > 0, values / written, torch.inf)
        checks["smallest_cancellation"] = min(float(ratio.min()), 1.0)
        return values, checks
    if kind == "projection":
        values, bias_part = maths.projection(pattern, v, w_o, bias=b_o, gate=gate)
        return values, checks | {"bias_part": bias_part}
    if kind == "target_attribution":
        u, folded = _direction(direction, query, work), _folded_branch(call, w_o, b_o)
        if folded.norm_error is not None:
            checks["norm_error"] = folded.norm_error
        return maths.target_attribution(
            pattern, v, folded.w_o, u, cast(int, query), row_scale=folded.row_scale, gate=gate
        ), checks

    # the vector whose parts are measured: after the norm in post-norm blocks, the stream itself in the others
    after_norm = kind == "contribution_norm" or (kind != "contribution_residual" and call.site.place == "post")
    folded = folded_output(call, w_o, b_o, norm=norm if after_norm else None)
    if folded.norm_error is not None:
        checks["norm_error"] = folded.norm_error
    common: dict[str, Any] = {
        "residual": folded.residual,
        "row_scale": folded.row_scale,
        "diagonal_offset": call.diagonal_offset,
        "gate": gate,
    }
    if kind in WITH_RESIDUAL:
        return maths.contribution(pattern, v, folded.w_o, **common), checks
    if kind == "mixing_ratio":
        return maths.mixing_ratio(pattern, v, folded.w_o, **common), checks
    measure: Callable[..., tuple[Tensor, Tensor]] = maths.alti if kind == "alti" else maths.alti_l2
    shares, raw = measure(pattern, v, folded.w_o, bias=folded.bias, **common)
    return shares, checks | {"raw": raw}


def _folded_branch(call: AttentionCall, w_o: Tensor, b_o: Tensor) -> FoldedOutput:
    """W_O and row scale with which T_ij is what the block adds to the stream."""
    call.site.require_known("target_attribution")
    return folded_output(call, w_o, b_o, norm=None)


def folded_output(call: AttentionCall, w_o: Tensor, b_o: Tensor, *, norm: Norm | None) -> FoldedOutput:
    """What the block does between W_O and the stream (branch factor, sandwich norm, norm after the sum), folded.

    Parameters
    ----------
    norm : None leaves the norm after the sum out; `"own"` takes the post norm; `"next"` the norm that reads the sum.

    Raises
    ------
    NotApplicableError : there is no such norm in this block.
    UnsupportedModelError : the residual stream could not be located.
    """
    site = call.site.require_known("the residual stream")
    reader = None
    if norm is not None:
        if site.place != "post" and norm == "own":
            raise NotApplicableError(
                f"{call.module_name} is a {site.place}-norm block: no norm follows the sum with the residual. "
                'Ask for norm="next" to take the norm that reads the stream, or use contribution_residual'
            )
        if site.reader is None:
            raise NotApplicableError(
                f"{call.module_name}: no norm of this block reads the stream after attention ({site.place}); "
                "use contribution_residual"
            )
        reader = linearise_norm(site.reader)
    sandwich = None if site.branch_norm is None else linearise_norm(site.branch_norm)
    return fold_output(
        w_o,
        b_o,
        resid_pre=None if site.resid_pre is None else site.resid_pre.detach().to(w_o.dtype),
        multiplier=site.multiplier,
        sandwich=sandwich,
        norm=reader,
    )


def _head_contribution(pattern: Tensor, v: Tensor, w_o: Tensor, gate: Tensor | None) -> Tensor:
    if gate is None:
        return maths.head_contribution(pattern, v, w_o)
    group = pattern.shape[1] // v.shape[1]
    heads = [
        maths.contribution(
            pattern[:, h : h + 1], v[:, h // group : h // group + 1], w_o[h : h + 1], gate=gate[:, :, h : h + 1]
        )
        for h in range(pattern.shape[1])
    ]
    return torch.stack(heads, dim=1)


def _rows_that_count(per_query: Tensor, call: AttentionCall) -> Tensor:
    """Drop rows whose content is a convention (padding, no key allowed in some head)."""
    keep = torch.ones(per_query.shape, dtype=torch.bool, device=per_query.device)
    if call.query_valid is not None:
        keep &= call.query_valid
    if call.fully_masked is not None:
        keep &= ~call.fully_masked.any(1).expand_as(keep)
    kept = per_query[keep]
    return kept if kept.numel() else per_query.new_zeros(1)
