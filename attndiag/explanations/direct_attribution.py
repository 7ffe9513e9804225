"""`target_attributions`: what every head and key writes along the direction that the target reads, at the last block's
end.

1. One forward keeps the attention calls and finds the norm that reads what the last block returns.
2. g_t = dm/d(output of that norm) at each position t where m is read: W_U[target] - W_U[foil] for a logit difference.
3. u_t = L_t^T g_t, the norm frozen at its real input, and <T_tj, u_t> for every layer, head and key
   (ALTI-Logit, arXiv 2305.12535), what the block does to the branch (factor, sandwich norm) folded in.

The direct path only: what later layers make of the written vector is not in these numbers. For targets that are not
linear in the logits (log-probabilities) g_t is the gradient at the unedited run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.core.contributions import target_attribution
from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.contribution_backends import folded_output
from attndiag.explanations.interventions import provenance
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.hooks.capture_context import capture
from attndiag.hooks.certify import TOLERANCE, norm_failures
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.residual import SeenNorm, linearise_norm
from attndiag.hooks.sites import sites_of
from attndiag.hooks.structure import first_tensor, is_norm
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores


def target_attributions(
    lm: LoadedModel, prompt: Prompt | str, target: Target | None = None, *, layers: Sequence[int] | None = None
) -> Scores:
    """<T_tj^h, u_t> = A_tj^h <f_j^h, u_t> for each layer, head, query t and key j.

    Parameters
    ----------
    target : as in `attndiag.score`.
    layers : these only; all when None.

    Returns
    -------
    Scores [layer, head, query_pos, key_pos], signed, unit of the target; nan for queries at which the target is not
    read. `checks["completeness_error"]`: largest |sum_hj <T_tj^h, u> + bias part - <what the branch added, u>| over
    layers, relative to the largest |<what the branch added, u>|; `checks["norm_error"]`: largest error of the final
    norm and of the norms on the branches, linearised.

    Raises
    ------
    NotApplicableError : a post-norm model or an encoder-decoder: no straight path leads from a head to the target.
    UnsupportedModelError : the norm that reads the last block's output is no LayerNorm or RMSNorm, no gradient reaches
        it, or the blocks with attention do not sit in one list.
    """
    one = as_prompts(prompt)[0]
    resolved = resolve_target(lm, one, target)
    if resolved.encoded.decoder is not None:
        raise NotApplicableError(
            "target_attribution follows the residual stream to the target, and an encoder-decoder has two; use "
            "pattern_attribution"
        )
    calls, name, reader = _clean_run(lm, resolved)
    wanted = set(calls) if layers is None else {int(layer) for layer in layers}
    if not wanted <= set(calls):
        raise NotApplicableError(
            f"layers {sorted(wanted - set(calls))} have no attention weights; there are {sorted(calls)}"
        )
    slope = _slope(lm, resolved, name)
    queries = slope[0].abs().amax(-1).nonzero()[:, 0].tolist()
    numbers = sorted(wanted)
    heads = {calls[layer].n_heads for layer in numbers}
    if len(heads) > 1:
        counts = {layer: calls[layer].n_heads for layer in numbers}
        raise NotApplicableError(f"layers have different numbers of heads ({counts}); choose some with layers=")
    n = resolved.encoded.input_ids.shape[1]
    values = torch.full((len(numbers), heads.pop(), n, n), torch.nan, dtype=slope.dtype)
    failures: list[str] = []
    misses, sizes, norm_errors = [0.0], [1e-30], [0.0]
    with torch.no_grad():
        linear = None if reader is None else linearise_norm(reader)
        for index, layer in enumerate(numbers):
            call = calls[layer]
            for query in queries:
                # the gradient is that of one prompt, so a batch of one
                u = slope[:, query] if linear is None else linear.pull_back(slope[:, query], query)
                found, miss, size, norm_error = _one_layer(call, u, query)
                values[index, :, query] = found[0].cpu()
                misses.append(miss)
                sizes.append(size)
                norm_errors.append(norm_error)
            failures += [f"layer {layer}: {text}" for text in call.sampled_certificate.failures]
    if linear is not None:
        norm_errors.append(linear.error)
    failures += norm_failures(max(norm_errors), calls[numbers[0]].z.dtype)
    error = max(misses) / max(sizes)
    tolerance = TOLERANCE[calls[numbers[0]].z.dtype]
    if not error <= tolerance:
        failures.append(f"the parts miss what the branches added by {error:.1e}, above {tolerance:.1e}")
    tokens = list(resolved.encoded.tokens[0])
    return Scores(
        values=values,
        axes=("layer", "head", "query_pos", "key_pos"),
        method="target_attribution",
        unit=resolved.unit,
        sign="signed",
        labels={"layer": numbers, "query_pos": tokens, "key_pos": tokens},
        target=resolved.targets[0],
        params={"queries": queries, "norm": name if reader is not None else None},
        provenance=provenance(lm) | {"prompt": prompt_label(one)},
        checks={"completeness_error": error, "norm_error": max(norm_errors), "certificate": "sampled"},
        failures=tuple(failures),
    )


def _one_layer(call: AttentionCall, u: Tensor, query: int) -> tuple[Tensor, float, float, float]:
    """[batch, head, key_pos] along u at one query; how far they and the bias miss the branch's own part, and its size.

    The branch's part is what the block really added to the stream. Last: the error of the norm on the branch.
    """
    work = u.dtype
    w_o, b_o = call.w_o.to(work), call.b_o.to(work)
    folded = folded_output(call, w_o, b_o, norm=None)
    scale = None if folded.row_scale is None else folded.row_scale.to(work)
    gate = None if call.output_gate is None else call.output_gate.detach().to(work)
    found = target_attribution(
        call.pattern.to(work), call.v.detach().to(work), folded.w_o, u, query, row_scale=scale, gate=gate
    )
    site = call.site
    branch = call.attn_out if site.branch_norm is None else site.branch_norm.output
    if branch is None:
        return found, 0.0, 0.0, folded.norm_error or 0.0
    added = float(site.multiplier * (branch[0, query].detach().to(work) @ u[0]))
    bias = 0.0 if folded.bias is None else float(folded.bias.expand(*branch.shape[:2], -1)[0, query].to(work) @ u[0])
    # relative to the parts: they may cancel
    size = float(found.abs().sum()) + abs(bias)
    return found, abs(float(found.sum()) + bias - added), size, folded.norm_error or 0.0


def _stack(lm: LoadedModel) -> list[str]:
    """Names of all entries of the list that holds the blocks with attention: in hybrids other mixers stand there too.

    Raises
    ------
    UnsupportedModelError : attention sits outside numbered blocks, or in blocks of several lists, so that no block is
        known to be the last.
    """
    sites = sites_of(lm.model)
    outside = [site.attention for site in sites if site.block is None]
    if outside:
        raise UnsupportedModelError(f"{lm.info.architecture} has attention in no numbered block: {outside[0]}")
    lists = sorted({str(site.block).rpartition(".")[0] for site in sites})
    holder = lm.model.get_submodule(lists[0])
    if len(lists) > 1 or not isinstance(holder, nn.ModuleList | nn.Sequential):
        raise UnsupportedModelError(
            f"the blocks of {lm.info.architecture} sit in {', '.join(lists)}; target_attribution needs them in one "
            "list, whose last entry is the last block; use pattern_attribution"
        )
    return [f"{lists[0]}.{name}".removeprefix(".") for name in holder._modules]


def _clean_run(lm: LoadedModel, resolved: ResolvedTarget) -> tuple[dict[int, AttentionCall], str, SeenNorm | None]:
    """Attention calls by layer, the module whose output the target reads, and that module as a norm.

    Where no norm reads the last block, the module is the last block itself and there is no norm.
    """
    blocks = _stack(lm)
    calls: list[AttentionCall] = []
    last: list[Tensor] = []
    seen: list[SeenNorm] = []
    modules = dict(lm.model.named_modules())
    outside = {
        name: module
        for name, module in modules.items()
        if is_norm(module) and not any(name.startswith(f"{block}.") for block in blocks)
    }

    def leave(_module: nn.Module, _args: tuple, output: Any) -> None:
        hidden = first_tensor(output)
        if hidden is not None:
            last.append(hidden)

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict, _output: Any) -> None:
            read = first_tensor((*args, *kwargs.values()))
            if read is not None and last and read.shape == last[-1].shape and torch.equal(read, last[-1]):
                seen.append(SeenNorm(name, module, read, len(seen)))

        return hook

    handles = [modules[blocks[-1]].register_forward_hook(leave)]
    handles += [module.register_forward_hook(note(name), with_kwargs=True) for name, module in outside.items()]
    try:
        with torch.no_grad(), capture(lm, on_call=calls.append):
            lm.run(resolved.inputs)
    finally:
        for handle in handles:
            handle.remove()
    found = {int(call.layer): call for call in calls if call.layer is not None and call.kind == "self"}
    if not last:
        raise UnsupportedModelError(f"{blocks[-1]} returned no tensor in this forward, so nothing tells where it ends")
    if len(found) != len(calls):
        raise UnsupportedModelError(
            f"{lm.info.architecture} makes {len(calls)} attention calls in {len(found)} numbered layers; "
            "target_attribution needs one each"
        )
    post = [layer for layer, call in found.items() if call.site.require_known("target_attribution").place == "post"]
    if post:
        raise NotApplicableError(
            f"layers {sorted(post)} normalise the stream after each sum, so no straight path leads from a head to the "
            "target; use pattern_attribution, or alti"
        )
    return (found, seen[-1].name, seen[-1]) if seen else (found, blocks[-1], None)


def _slope(lm: LoadedModel, resolved: ResolvedTarget, name: str) -> Tensor:
    """dm/d(output of the named module) [1, position, d_model], in at least float32."""
    leaf: list[Tensor] = []

    def cut(_module: nn.Module, _args: tuple, output: Any) -> Any:
        hidden = first_tensor(output)
        if hidden is None:
            raise UnsupportedModelError(f"{name} returns no tensor")
        leaf.append(hidden.detach().requires_grad_())
        return leaf[-1] if isinstance(output, Tensor) else (leaf[-1], *output[1:])

    handle = lm.model.get_submodule(name).register_forward_hook(cut)
    try:
        with torch.enable_grad():
            value = resolved.value(lm.run(resolved.inputs, grad=True)).sum()
    finally:
        handle.remove()
    if not value.requires_grad:
        raise UnsupportedModelError(
            f"no gradient reaches {name} of {lm.info.name} (quantised or detached weights); use edge_effect"
        )
    found = torch.autograd.grad(value, leaf[-1], allow_unused=True)[0]
    if found is None:
        raise UnsupportedModelError(f"the target does not read {name}, so nothing tells the direction it is read along")
    return found if found.dtype == torch.float64 else found.float()
