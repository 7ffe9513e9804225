"""`contributions`: one captured attention call -> value-aware `Scores`.

Joins a record of the capture with the mathematics of `core.contributions`: takes the pattern (or q and k for backends
that never form one), v and W_O of the call, folds in what the block does with the output (branch factor, norms), and
stores beside the numbers what decides whether to believe them: the certificate of the capture and the completeness of
the decomposition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from attndiag.core.attention import forbidden_entries
from attndiag.errors import NotApplicableError
from attndiag.explanations.contribution_backends import WITH_RESIDUAL, Kind, Norm, by_kernel, by_parts
from attndiag.hooks.certify import TOLERANCE, Certificate, norm_failures
from attndiag.hooks.record import AttentionCall
from attndiag.scores import Scores, Sign

Backend = Literal["auto", "reference", "fused"]
CertificateKind = Literal["full", "sampled"]

_PAIR = ("batch", "query_pos", "key_pos")
_HEAD_PAIR = ("batch", "head", "query_pos", "key_pos")
_FUSED_KINDS = {"head_contribution", "contribution", *WITH_RESIDUAL, "projection", "target_attribution"}


@dataclass(frozen=True)
class _Form:
    """Axes, unit and sign of one kind, and what it needs of the block."""

    axes: tuple[str, ...]
    unit: str
    sign: Sign = "non-negative"
    residual: bool = False
    norm: bool = False


_FORMS: dict[str, _Form] = {
    "weight": _Form(_HEAD_PAIR, "mass"),
    "value_norm": _Form(_HEAD_PAIR, "value norm"),
    "head_contribution": _Form(_HEAD_PAIR, "residual norm"),
    "contribution": _Form(_PAIR, "residual norm"),
    "contribution_residual": _Form(_PAIR, "residual norm", residual=True),
    "contribution_norm": _Form(_PAIR, "norm-layer output norm", residual=True, norm=True),
    "mixing_ratio": _Form(("batch", "query_pos"), "ratio", residual=True),
    "projection": _Form(_PAIR, "residual norm", sign="signed"),
    "target_attribution": _Form(("batch", "head", "key_pos"), "logits", sign="signed"),
    "alti": _Form(_PAIR, "share of row", residual=True),
    "alti_l2": _Form(_PAIR, "share of row", residual=True),
}


def contributions(
    call: AttentionCall,
    kind: Kind = "contribution",
    backend: Backend = "auto",
    dtype: torch.dtype | None = None,
    *,
    norm: Norm = "own",
    direction: Tensor | None = None,
    query: int | None = None,
    certificate: CertificateKind = "full",
) -> Scores:
    """Value-aware contributions of one attention call.

    Parameters
    ----------
    call : a record from `attndiag.capture`.
    kind : with A the pattern, f_j^h = v_j^h W_O^h, T_ij = sum_h A_ij^h f_j^h and x the residual stream:

        - `"weight"`: A_ij^h, mass in [0, 1]; `"value_norm"`: A_ij^h ||v_j^h|| (depends on the basis of v).
        - `"head_contribution"`: A_ij^h ||f_j^h||; `"contribution"`: ||T_ij|| (Kobayashi 2020, arXiv 2004.10102).
        - `"contribution_residual"`: ||T_ij + 1[i=j] x_i||; `"contribution_norm"`: the same after the norm layer,
          linearised at its real input; `"mixing_ratio"` (Kobayashi 2021, arXiv 2109.07152).
        - `"projection"`: <T_ij, o_i> / ||o_i||, signed.
        - `"target_attribution"`: <T'_tj, u> by head for query t, T' what is added to the stream (factor and sandwich
          norm folded in), signed, direct path only (arXiv 2305.12535).
        - `"alti"`, `"alti_l2"`: rows normalised, the raw magnitude in `checks["raw"]` (arXiv 2203.04212).
    backend : `"reference"` reads the pattern and sums the parts one by one; `"fused"` computes straight from q and k
        (`core.fused`), the same numbers to 1e-5 without a pattern; `"auto"` takes `"fused"` wherever it can: q and k
        were seen, the recorded formula is certified, no output gate, a kind that it knows.
    dtype : dtype of the computation; None is float32, or float64 for a float64 call.
    norm : `"own"` uses the norm that follows attention in post-norm models; `"next"` asks for the norm that reads the
        residual stream after attention in pre-norm models.
    certificate : `"full"` measures every query row before the numbers may count as verified, `"sampled"` eight of them.
    direction, query : for `target_attribution`: u [d_model] or [batch, d_model] in the residual stream, and t. u is
        read where the branch is added: in post-norm models before the norm (`params["direction"]` says so), so give
        L_t^T u there for a direction behind it.

    Returns
    -------
    Scores with axes [batch, head, query_pos, key_pos] (weight, value_norm, head_contribution),
    [batch, head, key_pos] (target_attribution), [batch, query_pos] (mixing_ratio) or [batch, query_pos, key_pos].
    Rows of padded queries are nan. `checks` holds the certificate's errors, the largest completeness error over rows,
    `norm_error` of a norm that was linearised, and, for `contribution`, the smallest cancellation ratio; what is above
    tolerance is in `failures`.

    Raises
    ------
    NotApplicableError : the kind does not exist for this layer (norm of a pre-norm block, residual in cross-attention).
    UnsupportedModelError : no output projection or residual stream was found; the text says why.
    """
    if kind not in _FORMS:
        raise NotApplicableError(f"kind is {kind!r}; expected one of {', '.join(_FORMS)}")
    if backend == "streaming":
        raise NotApplicableError(
            'backend="streaming" never forms [query_pos, key_pos], which is what contributions returns; '
            "attndiag.top_contributions(call, top_k=16) streams"
        )
    if backend not in get_args(Backend):
        raise NotApplicableError(f"backend is {backend!r}; expected one of {', '.join(get_args(Backend))}")
    if norm not in get_args(Norm):
        raise NotApplicableError(f"norm is {norm!r}; expected one of {', '.join(get_args(Norm))}")
    if certificate not in get_args(CertificateKind):
        raise NotApplicableError(f"certificate is {certificate!r}; expected {' or '.join(get_args(CertificateKind))}")
    form = _FORMS[kind]
    if form.residual:
        _require_own_keys(call, kind)
    if form.residual and call.kind == "cross":
        raise NotApplicableError(
            f"{kind} puts the residual on the diagonal, and in cross-attention ({call.module_name}) no key is the "
            "query itself; use `contribution`"
        )
    work = dtype or (torch.float64 if call.z.dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        proof = call.certificate if certificate == "full" else call.sampled_certificate
        chosen = _choose_backend(call, kind, backend, proof)
        if chosen == "fused":
            values, checks = by_kernel(call, kind, work, norm, direction, query)
            checks["completeness_error"] = sum(e for e in (proof.formula_error, proof.output_error) if e is not None)
        else:
            values, checks = by_parts(call, kind, work, norm, direction, query)
    failures = list(proof.failures)
    tolerance = TOLERANCE[call.z.dtype]
    completeness = checks.get("completeness_error")
    if completeness is not None and not completeness <= tolerance:
        failures.append(f"the parts miss the module's output by {completeness:.1e}, above {tolerance:.1e}")
    failures += norm_failures(checks.get("norm_error"), call.z.dtype)
    params: dict[str, str] = {"norm": norm} if form.norm else {}
    if kind == "target_attribution" and call.site.place == "post":
        params = {"direction": "before the norm"}
    return Scores(
        values=_hide_padded_queries(values, call, form, query),
        axes=form.axes,
        method=kind,
        unit=form.unit,
        sign=form.sign,
        params=params,
        provenance={
            "module": call.module_name,
            "layer": call.layer,
            "call_index": call.call_index,
            "route": call.route,
            "kernel": call.kernel,
            "backend": chosen,
            "dtype": str(work).removeprefix("torch."),
            "model_dtype": str(call.z.dtype).removeprefix("torch."),
        },
        checks=checks
        | {
            "value_error": proof.value_error,
            "formula_error": proof.formula_error,
            "output_error": proof.output_error,
            "certified_rows": proof.rows,
        },
        failures=tuple(failures),
    )


def _require_own_keys(call: AttentionCall, kind: Kind) -> None:
    """Refuse the diagonal where it cannot be told: room behind the newest token, and no cache that told the past."""
    mask = call.mask
    if mask is None or call.kind == "cross" or call.diagonal_offset <= 0 or mask.shape[-1] != call.n_keys:
        return
    allowed = mask if mask.dtype == torch.bool else ~forbidden_entries(mask)
    if mask.ndim < 2 or mask.shape[-2] != call.n_queries:
        return
    own = allowed.diagonal(call.diagonal_offset, dim1=-2, dim2=-1)
    if call.query_valid is not None:
        own = own | ~call.query_valid[:, None, :]
    if not bool(own.all()):
        raise NotApplicableError(
            f"{kind} needs to know which key is the query itself, and in {call.module_name} the newest keys are masked "
            "(a static cache has empty room at its end); use a dynamic cache, or `contribution`, which has no diagonal"
        )


def _choose_backend(
    call: AttentionCall, kind: Kind, backend: Backend, proof: Certificate
) -> Literal["reference", "fused"]:
    """The backend in use; for `"auto"`, fused unless something stands in its way."""
    if backend == "reference":
        return "reference"
    obstacle = None
    if kind not in _FUSED_KINDS:
        obstacle = f"it computes {', '.join(sorted(_FUSED_KINDS))}, not {kind}"
    elif call.q is None or call.scale is None:
        obstacle = f"{call.module_name} computes its softmax itself, so q and k were not seen"
    elif call.output_gate is not None:
        obstacle = f"{call.module_name} gates its head outputs"
    elif call.output is None:
        obstacle = f"{call.module_name} has no output projection"
    elif kind in WITH_RESIDUAL and call.diagonal_offset != call.n_keys - call.n_queries:
        obstacle = f"{call.module_name} has room behind its newest key (a static cache), and it takes the last for own"
    elif not proof.formula_passed:
        obstacle = f"the recorded formula misses the output of {call.module_name} by {proof.formula_error:.1e}"
    elif backend == "auto" and call.z.dtype in (torch.bfloat16, torch.float16) and call.kernel == "eager":
        obstacle = "the kernel reports weights that it rounded itself, and those are what the model used"
    if obstacle is None:
        return "fused"
    if backend == "fused":
        raise NotApplicableError(f'backend="fused" cannot be used here: {obstacle}; use backend="reference" or "auto"')
    return "reference"


def _hide_padded_queries(values: Tensor, call: AttentionCall, form: _Form, query: int | None) -> Tensor:
    if call.query_valid is None:
        return values
    padded = ~call.query_valid
    if form.axes == ("batch", "head", "key_pos"):
        return values.masked_fill(padded[:, query, None, None], torch.nan)
    shape = [padded.shape[0], *(padded.shape[1] if axis == "query_pos" else 1 for axis in form.axes[1:])]
    return values.masked_fill(padded.reshape(shape), torch.nan)
