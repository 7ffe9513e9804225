"""Are attention scores of the size that a softmax can use, and is the scale the one that this model should have?

For every call: mean and variance of the components of q and k; the spread of q.k before and after the scale; the gap
between the two largest scores of a row; the share of rows whose largest weight is above .99; the mean Frobenius norm of
the softmax Jacobian diag(a) - a a^T, which is 0 for saturated and for one-key rows and carries every gradient. All of
it as the model is, with the scale left out, and for the same architecture freshly initialised.

For independent zero-mean unit-variance components Var(q.k) = d_head (Vaswani 2017, arXiv 1706.03762), hence the usual
1 / sqrt(d_head). Families differ (T5 has no scale, Granite and Gemma 2 have their own), so the scale is judged against
what the stock class of the same configuration uses, and only without one against 1 / sqrt(d_head).
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attndiag.core.attention import NEG_INF, attention_scores, forbidden_entries, softmax_rows
from attndiag.errors import NothingCapturedError
from attndiag.explanations.findings import Finding
from attndiag.explanations.probing import Probe, run_probe
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.models.load import LoadedModel

if TYPE_CHECKING:
    import pandas as pd

MAX_FRESH_PARAMETERS = 600_000_000
SCALE_TOLERANCE = 0.01


@dataclass(frozen=True)
class ScaleRow:
    """Statistics of one call in one variant.

    Attributes
    ----------
    module_name, layer, call_index : the call.
    variant : `"as used"`, `"without scale"`, `"fresh"` (freshly initialised), `"fresh without scale"`.
    scale : factor on q.k in this variant; d_head : width of q and k.
    q_mean, q_var, k_mean, k_var : of the components, over batch, heads, positions and components.
    dot_sd : standard deviation of q.k over visible pairs; score_sd : of the scores that enter the softmax.
    top_gap : mean difference between the two largest scores of a row, over rows with two keys or more.
    saturated : share of those rows whose largest weight is above .99.
    jacobian : mean Frobenius norm of the softmax Jacobian over those rows, in [0, .5 sqrt(2)].
    """

    module_name: str
    layer: int | None
    call_index: int
    variant: str
    scale: float
    d_head: int
    q_mean: float
    q_var: float
    k_mean: float
    k_var: float
    dot_sd: float
    score_sd: float
    top_gap: float
    saturated: float
    jacobian: float


@dataclass(frozen=True, eq=False)
class ScaleAudit:
    """What `scale_audit` measured.

    Attributes
    ----------
    rows : one for each call and variant.
    findings : scales that are not what they should be.
    reference : what the scale was judged against, in words.
    unmeasured : modules without q and k (a softmax of their own), with the reason.
    """

    rows: tuple[ScaleRow, ...]
    findings: tuple[Finding, ...]
    reference: str
    unmeasured: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """One row for each call and variant."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows])


def scale_audit(lm: LoadedModel, probe: Probe, *, seed: int = 0) -> ScaleAudit:
    """Measure the scores of every attention call and judge the scale.

    Parameters
    ----------
    lm : the model.
    probe : its inputs.
    seed : of the fresh initialisation; the caller's random state is kept.
    """
    calls = _calls(lm, probe)
    fresh, why_not = _fresh_calls(lm, probe, seed)
    rows: list[ScaleRow] = []
    findings: list[Finding] = []
    unmeasured: list[str] = []
    for call in calls:
        if call.q is None or call.k is None or call.scale is None:
            unmeasured.append(f"{call.module_name}: the model computes its softmax itself, q and k are not seen")
            continue
        rows += [_statistics(call, "as used"), _statistics(call, "without scale", scale=1.0)]
        other = fresh.get((call.module_name, call.call_index))
        if other is not None and other.scale is not None:
            rows += [_statistics(other, "fresh"), _statistics(other, "fresh without scale", scale=1.0)]
        finding = _judge(call, other)
        if finding is not None:
            findings.append(finding)
    reference = (
        "the scale of the stock class under the same configuration"
        if fresh
        else f"1 / sqrt(d_head), because {why_not or 'no fresh model ran'}"
    )
    return ScaleAudit(tuple(rows), _by_kind(findings), reference, tuple(unmeasured))


def stock_class(model: nn.Module) -> type[nn.Module] | None:
    """The class of transformers that a model is, or derives from; None for anything else."""
    return next((c for c in type(model).__mro__ if c.__module__.startswith("transformers.models.")), None)


def _calls(lm: LoadedModel, probe: Probe) -> list[AttentionCall]:
    try:
        with capture(lm) as captured:
            run_probe(lm, probe)
    except NothingCapturedError:
        return []
    return captured.calls


def _fresh_calls(lm: LoadedModel, probe: Probe, seed: int) -> tuple[dict[tuple[str, int], AttentionCall], str]:
    """Calls of the same architecture with new random weights, or the reason why there are none."""
    kind = stock_class(lm.model)
    if kind is None:
        return {}, f"{type(lm.model).__name__} derives from no class of transformers"
    size = sum(parameter.numel() for parameter in lm.model.parameters())
    if size > MAX_FRESH_PARAMETERS:
        return {}, f"a second model of {size / 1e9:.1f} billion parameters is not made"
    config = copy.deepcopy(lm.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).to(device=lm.device, dtype=next(lm.model.parameters()).dtype).eval()
    other = LoadedModel(model, None, lm.info)
    return {(call.module_name, call.call_index): call for call in _calls(other, probe)}, ""


def _statistics(call: AttentionCall, variant: str, *, scale: float | None = None) -> ScaleRow:
    work = torch.float64 if call.z.dtype == torch.float64 else torch.float32
    q, k = call.q.detach().to(work), call.k.detach().to(work)  # type: ignore[union-attr]
    used = float(call.scale) if scale is None else scale  # type: ignore[arg-type]
    mask = _mask(call, work)
    bias = None if call.position_bias is None else call.position_bias.detach().to(work)
    visible = attention_scores(q, k, scale=0.0, mask=mask) != NEG_INF
    dots = attention_scores(q, k, scale=1.0)[visible]
    scores = attention_scores(q, k, scale=used, softcap=call.softcap, position_bias=bias, mask=mask)
    pattern, _ = softmax_rows(scores, sinks=None if call.sinks is None else call.sinks.detach().to(work))
    rows = visible.sum(-1) > 1
    if call.query_valid is not None:
        rows = rows & call.query_valid[:, None]
    top = scores[rows].topk(2, dim=-1).values if bool(rows.any()) else scores.new_zeros(0, 2)
    weights = pattern[rows]
    return ScaleRow(
        module_name=call.module_name,
        layer=call.layer,
        call_index=call.call_index,
        variant=variant,
        scale=used,
        d_head=q.shape[-1],
        q_mean=float(q.mean()),
        q_var=float(q.var(correction=0)),
        k_mean=float(k.mean()),
        k_var=float(k.var(correction=0)),
        dot_sd=float(dots.std(correction=0)),
        score_sd=float(scores[visible].std(correction=0)),
        top_gap=float((top[:, 0] - top[:, 1]).mean()),
        saturated=float((weights.amax(-1) > 0.99).to(work).mean()),
        jacobian=float(jacobian_norm(weights).mean()),
    )


def jacobian_norm(weights: Tensor) -> Tensor:
    """Frobenius norm of diag(a) - a a^T for rows a [..., key_pos]; in [0, 1 / sqrt(2)].

    ||diag(a) - a a^T||^2 = sum a^2 - 2 sum a^3 + (sum a^2)^2.
    """
    squares = weights.square().sum(-1)
    return (squares - 2 * weights.pow(3).sum(-1) + squares.square()).clamp_min(0).sqrt()


def _mask(call: AttentionCall, work: torch.dtype) -> Tensor | None:
    if call.is_causal:
        position = torch.arange(call.n_keys, device=call.z.device)
        return (position[None, :] <= position[: call.n_queries, None])[None, None]
    mask = call.mask
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask.detach().to(work).masked_fill(forbidden_entries(mask), NEG_INF)


def _judge(call: AttentionCall, fresh: AttentionCall | None) -> Finding | None:
    """A finding where the scale is not that of the stock class, or, without one, is off by sqrt(d_head)."""
    d_head = call.q.shape[-1]  # type: ignore[union-attr]
    used, root = float(call.scale), math.sqrt(d_head)  # type: ignore[arg-type]
    known = fresh is not None and fresh.scale is not None
    expected = float(fresh.scale) if known else 1 / root  # type: ignore[union-attr, arg-type]
    ratio = used / expected if expected else float("inf")
    if _near(ratio, 1.0):
        return None
    kind = "missing_scale" if _near(ratio, root) else "double_scale" if _near(ratio, 1 / root) else "wrong_scale"
    if kind == "wrong_scale" and not known:
        return None  # without a reference another scale is a choice, not a fault
    source = "the stock class" if known else "1 / sqrt(d_head)"
    text = f"q.k is multiplied by {used:.4g}, {ratio:.3g} times the {expected:.4g} of {source} (d_head {d_head})"
    layers = () if call.layer is None else (call.layer,)
    evidence = {"scale": used, "expected": expected, "ratio": ratio, "d_head": d_head}
    return Finding(kind, (call.module_name,), layers, text, evidence)  # type: ignore[arg-type]


def _by_kind(findings: list[Finding]) -> tuple[Finding, ...]:
    """One finding for all modules that share a fault and its size."""
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.text), []).append(finding)
    return tuple(
        Finding(
            group[0].kind,
            tuple(name for finding in group for name in finding.modules),
            tuple(sorted({layer for finding in group for layer in finding.layers})),
            group[0].text,
            group[0].evidence,
        )
        for group in groups.values()
    )


def _near(value: float, target: float) -> bool:
    return abs(value / target - 1) <= SCALE_TOLERANCE
