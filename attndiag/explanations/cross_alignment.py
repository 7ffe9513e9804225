"""Which source token does each target token come from? Cross-attention asked in four ways.

For encoder-decoders whose rows all have the same length, and a known right alignment:

- `weight`: mean over heads of A_ij in the decoder's view of the source, layer by layer and summed over layers;
- `contribution`: ‖T_ij‖ of the same calls (Kobayashi 2020, arXiv 2004.10102), likewise; heads one by one, too: `weight
  heads` and `head_contribution heads`;
- `edge_effect`: what the target's log-probability loses when decoder position i can no longer read source position j,
  in every layer and head at once (A_ij = 0, the rest of the row untouched), and in single layers: an intervention, not
  an estimate;
- `replacement_effect`: what it loses, on the mean over draws, when source token j is another one of its class.

Scores of one target point at a source; `pointing` compares what they point at with the truth. Note that an encoder may
carry a token to its neighbours, so that a faithful explanation of the decoder can point beside the token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attndiag.errors import ShapeError, UnsupportedModelError
from attndiag.explanations.contributions import contributions
from attndiag.hooks.capture_context import capture
from attndiag.hooks.edit_kinds import Knockout
from attndiag.hooks.edits import edit
from attndiag.hooks.sites import sites_of
from attndiag.models.access import evaluating
from attndiag.stats.alignment import alignment_error_rate, strongest_links
from attndiag.stats.inference import Estimate, clustered_bootstrap

Replace = Callable[[Tensor, int, int], Tensor]


@dataclass(frozen=True, eq=False)
class CrossScores:
    """Scores of every source token for every target token.

    Attributes
    ----------
    by_method : name -> [row, target, source], or [row, head, target, source] with the heads of all layers. `weight` and
        `contribution` are sums over layers, `weight layer 1` and the like single layers. Non-negative, but for the
        effects, which are signed log-probabilities (nats).
    clean : [row, target], log-probability of the right target in the unedited run.
    right : [row, target] boolean, the unedited run predicts it.
    certified : every captured call reproduces what the model computed.
    """

    by_method: dict[str, Tensor]
    clean: Tensor
    right: Tensor
    certified: bool


@dataclass(frozen=True, eq=False)
class Pointing:
    """How often scores point at a wrong source.

    Attributes
    ----------
    errors : name -> [row], alignment error rate of each row (mean over heads where there are some), in [0, 1].
    estimates : name -> mean over rows with a bootstrap interval.
    against_weights : name -> mean over rows of (error - error of the weights of the same layer or heads, summed layers
        for the effects), with an interval; negative is better than weights.
    """

    errors: dict[str, NDArray[np.float64]]
    estimates: dict[str, Estimate]
    against_weights: dict[str, Estimate]


def cross_scores(
    model: nn.Module,
    source: Tensor,
    decoder_ids: Tensor,
    target: Tensor,
    *,
    replace: Replace | None = None,
    draws: int = 4,
) -> CrossScores:
    """All four scores of a batch.

    Parameters
    ----------
    model : an encoder-decoder of transformers; runs in eval mode and is left as it was.
    source : [row, source position]; decoder_ids : [row, target position], what the decoder reads; no padding.
    target : [row, target position], the token that is asked about at each position.
    replace : (source, position, seed) -> sources with that position changed; None leaves `replacement_effect` out.
    draws : replacements of each position.

    Raises
    ------
    ShapeError : rows or lengths do not fit.
    UnsupportedModelError : no cross-attention in numbered layers was captured.
    """
    if source.shape[0] != decoder_ids.shape[0] or decoder_ids.shape != target.shape:
        raise ShapeError(
            f"source {tuple(source.shape)}, decoder_ids {tuple(decoder_ids.shape)} and target {tuple(target.shape)} do "
            "not fit; expected [row, source], [row, target] and [row, target]"
        )
    layers = sorted({int(s.layer) for s in sites_of(model) if s.stream == "cross" and s.layer is not None})
    if not layers:
        raise UnsupportedModelError(f"{type(model).__name__} has no cross-attention in numbered layers")

    def measured(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, decoder_input_ids=decoder_ids, use_cache=False).logits
        return logits.log_softmax(-1)

    with torch.no_grad(), evaluating(model):
        with capture(model) as captured:
            whole = measured(source)
        calls = [call for call in captured.calls if call.kind == "cross"]
        weights = {f"weight layer {call.layer}": call.pattern.mean(1) for call in calls}
        written = {f"contribution layer {call.layer}": contributions(call).require_verified().values for call in calls}
        by_head = [contributions(call, "head_contribution").values for call in calls]
        heads = {
            "weight heads": torch.cat([call.pattern for call in calls], 1),
            "head_contribution heads": torch.cat(by_head, 1),
        }

        def asked(logprobs: Tensor) -> Tensor:
            return logprobs.gather(-1, target[..., None])[..., 0]

        clean = asked(whole)

        def without(cut_layers: list[int]) -> Tensor:
            lost = torch.zeros(*target.shape, source.shape[1], device=target.device)
            for query in range(target.shape[1]):
                for key in range(source.shape[1]):
                    cut = [Knockout(layer, query=query, key=key, stream="cross") for layer in cut_layers]
                    with edit(model, *cut):
                        lost[:, query, key] = (clean - asked(measured(source)))[:, query]
            return lost

        effects = without(layers)
        single = {f"edge_effect layer {layer}": without([layer]) for layer in layers}
        replaced = torch.zeros_like(effects)
        for key in range(source.shape[1] if replace is not None else 0):
            for draw in range(draws):
                replaced[:, :, key] += (clean - asked(measured(replace(source, key, draw)))) / draws  # type: ignore[misc]
    found = {
        "weight": torch.stack(list(weights.values())).sum(0),
        "contribution": torch.stack(list(written.values())).sum(0),
        "edge_effect": effects,
    }
    if replace is not None:
        found["replacement_effect"] = replaced
    return CrossScores(
        by_method=found | weights | written | single | heads,
        clean=clean,
        right=whole.argmax(-1) == target,
        certified=all(call.certificate.passed for call in captured.calls),
    )


def pointing(scores: CrossScores, alignment: Tensor, *, draws: int = 2000, seed: int = 0) -> Pointing:
    """Alignment error of every method, with bootstrap intervals over rows.

    Parameters
    ----------
    alignment : [row, target], the source position that each target comes from.
    draws, seed : of the bootstrap; rows are drawn with replacement, the same for every method.
    """
    n_source = next(iter(scores.by_method.values())).shape[-1]
    truth = np.arange(n_source) == alignment.cpu().numpy()[..., None]
    errors: dict[str, NDArray[np.float64]] = {}
    for name, values in scores.by_method.items():
        links = strongest_links(values.double().cpu().numpy())
        if links.ndim == 4:
            whole = np.broadcast_to(truth[:, None], links.shape)
            errors[name] = alignment_error_rate(links, whole).mean(axis=1)
        else:
            errors[name] = alignment_error_rate(links, truth)
    rows = np.arange(alignment.shape[0])
    estimates = {name: clustered_bootstrap(e, rows, draws=draws, seed=seed) for name, e in errors.items()}
    against = {
        name: clustered_bootstrap(e - errors[_weights_of(name)], rows, draws=draws, seed=seed)
        for name, e in errors.items()
        if not name.startswith("weight")
    }
    return Pointing(errors, estimates, against)


def _weights_of(name: str) -> str:
    """The weights that a method is held against: of the same layer, of single heads, or summed over layers."""
    _, _, where = name.partition(" ")
    return f"weight {where}" if where else "weight"
