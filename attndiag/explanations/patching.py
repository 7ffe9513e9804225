"""Activation patching between two prompts, and attribution patching, its first-order estimate.

The two prompts have equally many tokens; one activation of one run is put into the other:

- `noise`: the clean run with one activation of the corrupted run; effect = m(clean) - m(patched): necessity.
- `denoise`: the corrupted run with one activation of the clean run; effect = m(patched) - m(corrupted): sufficiency.

Attribution patching (Nanda 2023; Syed 2023, arXiv 2310.10348) estimates all of them from one gradient:
(a_clean - a_corrupted) . dm/da, with the gradient of the run that is patched; the exact effect of the largest ones
comes along, with the rank correlation between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attndiag.core.gradients import head_gradient
from attndiag.errors import PromptError, ShapeError, UnsupportedModelError
from attndiag.explanations.causal_work import patching_work
from attndiag.explanations.forwarding import editing_embeddings
from attndiag.explanations.interventions import provenance
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.hooks.activations import Activations, layers_with, recording
from attndiag.hooks.edit_kinds import Patch, Site, Stream
from attndiag.hooks.edits import edit
from attndiag.models.access import evaluating
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores
from attndiag.stats.agreement import spearman

Direction = Literal["noise", "denoise"]
Progress = Callable[[int, int], None]


def activation_patching(
    lm: LoadedModel,
    clean: Prompt | str,
    corrupted: Prompt | str,
    target: Target | None = None,
    *,
    site: Site,
    mode: Direction,
    layers: Sequence[int] | None = None,
    stream: Stream = "self",
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Scores:
    """Exact effect of every single activation of a site, by patching it between two runs.

    Parameters
    ----------
    clean, corrupted : prompts with equally many tokens. The target is decided on the clean one.
    site : `"resid_pre"`, `"resid_post"`, `"attn_out"`, `"mlp_out"`: one patch for each (layer, position);
        `"head_out"`: one for each (layer, head, position).
    mode : `"noise"` or `"denoise"` (see above).
    batch_size : patches in one forward; each batch has an unpatched row of its own, so equal prompts give exactly 0.

    Returns
    -------
    Scores
        Signed, axes [layer, position] or [layer, head, position], in the unit of the target. Checks: `clean` and
        `corrupted`, m of the two runs.

    Raises
    ------
    PromptError : the prompts differ in length; both tokenisations are shown.
    ShapeError, UnsupportedModelError : layers or sites that do not exist.
    InsufficientMemoryError : one batch does not fit; see `causal_work`.
    """
    patching_work(lm, clean, site=site, layers=layers, stream=stream, batch_size=batch_size).require_fit()
    pair = _Pair(lm, clean, corrupted, target, site, mode, layers, stream)
    places = pair.places()
    values = torch.full(pair.shape, float("nan"))
    done = 0
    for layer, found in places.items():
        for start in range(0, len(found), batch_size):
            part = found[start : start + batch_size]
            for place, effect in zip(part, pair.patched(layer, part), strict=True):
                values[(pair.layers.index(layer), *place)] = effect
            done += len(part)
            if progress is not None:
                progress(done, sum(len(each) for each in places.values()))
    return pair.scores(values, "activation_patching", {})


def attribution_patching(
    lm: LoadedModel,
    clean: Prompt | str,
    corrupted: Prompt | str,
    target: Target | None = None,
    *,
    site: Site,
    mode: Direction,
    layers: Sequence[int] | None = None,
    stream: Stream = "self",
    top: int = 20,
) -> Scores:
    """First-order estimate of `activation_patching`, every activation in one backward.

    effect of a ~ sum over its entries of (a_clean - a_corrupted) * dm/da, with the gradient of the run that is patched.

    Parameters
    ----------
    top : so many of the largest estimates are measured exactly, too.

    Returns
    -------
    Scores
        As `activation_patching`; the exact values of the largest come in `checks["exact"]` (place -> effect), their
        rank correlation with the estimate in `checks["spearman_of_top"]` (nan for fewer than three).
    """
    pair = _Pair(lm, clean, corrupted, target, site, mode, layers, stream)
    values = pair.estimates()
    order = values.abs().flatten().argsort(descending=True, stable=True)[:top]
    places = [tuple(int(i) for i in torch.unravel_index(index, values.shape)) for index in order]
    exact = {}
    for index, *place in places:
        layer = pair.layers[index]
        exact[(layer, *place)] = pair.patched(layer, [tuple(place)])[0]
    estimated = [float(values[place]) for place in places]
    enough = len(exact) > 2
    agreement = (
        spearman(torch.tensor(estimated).numpy(), torch.tensor(list(exact.values())).numpy()) if enough else None
    )
    checks = {"exact": exact, "spearman_of_top": float("nan") if agreement is None else float(agreement)}
    return pair.scores(values, "attribution_patching", checks)


class _Pair:
    """Two runs of equal length and what is patched between them."""

    def __init__(
        self,
        lm: LoadedModel,
        clean: Prompt | str,
        corrupted: Prompt | str,
        target: Target | None,
        site: Site,
        mode: Direction,
        layers: Sequence[int] | None,
        stream: Stream,
    ) -> None:
        if mode not in ("noise", "denoise"):
            raise ValueError(
                f"mode is {mode!r}; expected 'noise' (corrupted into clean) or 'denoise' (clean into corrupted)"
            )
        self.lm, self.site, self.mode, self.stream = lm, site, mode, stream
        there = layers_with(lm.model, site, stream)
        self.layers = sorted(there) if layers is None else sorted({int(layer) for layer in layers})
        for layer in self.layers:
            if layer not in there:
                raise ShapeError(
                    f"layer {layer} has no {site}; the model has it at layers {min(there)} to {max(there)}"
                )
        self.clean = resolve_target(lm, clean, target)
        self.prompts = as_prompts([clean, corrupted])
        self.corrupted = _same_length(lm, self.clean, self.prompts[1])
        self.m_clean, self.a_clean = self._run(self.clean)
        self.m_corrupted, self.a_corrupted = self._run(self.corrupted)
        first = self.a_clean.values[self.layers[0]]
        self.length = first.shape[1]
        self.shape = (len(self.layers), *((first.shape[2],) if site == "head_out" else ()), self.length)

    @property
    def base(self) -> ResolvedTarget:
        """The run that is patched."""
        return self.clean if self.mode == "noise" else self.corrupted

    def places(self) -> dict[int, list[tuple[int, ...]]]:
        """For each layer, (position,) or (head, position)."""
        return {
            layer: [tuple(place) for place in torch.ones(self.shape[1:]).nonzero().tolist()] for layer in self.layers
        }

    def patched(self, layer: int, places: Sequence[tuple[int, ...]]) -> list[float]:
        """Effects of single patches, each in a row of its own, against an unpatched row of the same batch."""
        rows = len(places) + 1
        source = (self.a_corrupted if self.mode == "noise" else self.a_clean).values[layer]
        where = torch.zeros(rows, self.length, *self.shape[1:-1], dtype=torch.bool, device=source.device)
        for row, place in enumerate(places, start=1):
            where[(row, place[-1], *place[:-1])] = True
        inputs = {name: value.expand(rows, *value.shape[1:]) for name, value in self.base.inputs.items()}
        with edit(self.lm, Patch(layer, self.site, source, where=where, stream=self.stream)):
            m = self.base.value(self.lm.run(inputs))
        change = m[0] - m[1:] if self.mode == "noise" else m[1:] - m[0]
        return change.tolist()

    def estimates(self) -> Tensor:
        """(a_clean - a_corrupted) . dm/da at every place."""
        gradients = self._gradients()
        found = []
        for layer, gradient in zip(self.layers, gradients, strict=True):
            change = self.a_clean.values[layer] - self.a_corrupted.values[layer]
            product = (change * gradient).sum(-1)[0]
            found.append(product.T if self.site == "head_out" else product)
        return torch.stack(found).cpu()

    def scores(self, values: Tensor, method: str, checks: dict[str, Any]) -> Scores:
        """The record."""
        side = self.clean.encoded
        decodes = side.decoder is not None and self.stream != "encoder"
        tokens = list((side.decoder if decodes else side).tokens[0])  # type: ignore[union-attr]
        return Scores(
            values=values,
            axes=("layer", *(("head",) if self.site == "head_out" else ()), "position"),
            method=method,
            unit=self.clean.unit,
            sign="signed",
            labels={"layer": self.layers, "position": tokens},
            target=self.clean.targets[0],
            params={"site": self.site, "mode": self.mode, "stream": self.stream},
            provenance=provenance(self.lm)
            | {"clean": prompt_label(self.prompts[0]), "corrupted": prompt_label(self.prompts[1])},
            checks={"clean": self.m_clean, "corrupted": self.m_corrupted} | checks,
        )

    def _run(self, resolved: ResolvedTarget) -> tuple[float, Activations]:
        with evaluating(self.lm.model), recording(self.lm.model, self.site, self.layers, self.stream) as kept:
            m = float(resolved.value(self.lm.run(resolved.inputs)))
        return m, kept

    def _gradients(self) -> list[Tensor]:
        model, ids = self.lm.model, self.base.encoded.input_ids
        with (
            evaluating(model),
            editing_embeddings(model, ids, lambda own: own.detach().requires_grad_()),
            recording(model, self.site, self.layers, self.stream) as kept,
        ):
            m = self.base.value(self.lm.run(self.base.inputs, grad=True)).sum()
        if not m.requires_grad:
            raise UnsupportedModelError(
                f"no gradient reaches {self.site} of {self.lm.info.name}; use activation_patching"
            )
        wanted = [kept.values[layer] for layer in self.layers]
        # where the kept head outputs are a view of what the model went on with, the gradient comes by way of W_O
        after = [kept.projected[layer] for layer in self.layers if layer in kept.projected]
        found = torch.autograd.grad(m, [*wanted, *after], allow_unused=True)
        behind = dict(
            zip((layer for layer in self.layers if layer in kept.projected), found[len(wanted) :], strict=True)
        )
        gradients = []
        for index, layer in enumerate(self.layers):
            gradient, later = found[index], behind.get(layer)
            if gradient is None and later is not None and kept.calls[layer].output is not None:
                call = kept.calls[layer]
                later = later.reshape(call.z.shape[0], call.n_queries, -1)
                gate = None if call.output_gate is None else call.output_gate.detach()
                gradient = head_gradient(later, call.w_o.to(later), gate)
            if gradient is None:
                raise UnsupportedModelError(
                    f"no gradient reaches {self.site} at layer {layer}; use activation_patching"
                )
            gradients.append(gradient.detach())
        return gradients


def _same_length(lm: LoadedModel, clean: ResolvedTarget, corrupted: Prompt) -> ResolvedTarget:
    """The clean target read on the corrupted prompt: same ids, same positions."""
    target = clean.targets[0]
    if clean.kind == "continuation_logprob":
        encoded = resolve_target(lm, corrupted, target).encoded
    else:
        encoded = lm.encode(corrupted)
    for one, other in ((clean.encoded, encoded), (clean.encoded.decoder, encoded.decoder)):
        if one is not None and other is not None and one.input_ids.shape != other.input_ids.shape:
            raise PromptError(
                f"clean and corrupted prompt must have equally many tokens: {one.input_ids.shape[1]} "
                f"{list(one.tokens[0])} against {other.input_ids.shape[1]} {list(other.tokens[0])}"
            )
    return ResolvedTarget(
        clean.targets, encoded, clean.positions, clean.answer_ids, clean.foil_ids, clean.counted, clean.reference
    )
