"""Occlusion, LIME and kernel SHAP: captum's perturbation algorithms on this project's scorer.

All three put tokens on a baseline embedding and look at m; none needs a gradient. LIME and kernel SHAP fit a linear
model of m over which tokens are present, and answer with its coefficients.

- `occlusion`: m(x) - m(tokens of a window at the baseline), the windows averaged over each token (Zeiler 2014,
  arXiv 1311.2901).
- `lime`: ridge regression on random subsets, near ones counting more (Ribeiro 2016, arXiv 1602.04938).
- `kernel_shap`: least squares with Shapley weights (Lundberg 2017, arXiv 1705.07874).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from captum._utils.models.model import Model
from captum.attr import KernelShap, Lime, Occlusion
from torch import Tensor
from torch.utils.data import DataLoader

from attndiag.core.gradients import completeness_gap
from attndiag.errors import NotApplicableError
from attndiag.explanations.baselines import Keep, PathStart, path_start
from attndiag.explanations.gradients import Prompts, Targets, endpoints
from attndiag.explanations.sampled_gradients import seeded
from attndiag.explanations.token_records import EmbeddedBatch, Facts, Progress, embedded_batches, token_record
from attndiag.models.encoding import PaddingSide
from attndiag.models.load import LoadedModel
from attndiag.scores import Scores


def occlusion(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    baseline: str = "mean_embedding",
    keep: Keep = "sinks",
    window: int = 1,
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """m(x) - m(window at the baseline), each token the mean over the windows that cover it.

    Parameters
    ----------
    window : width in tokens; 1 is the effect of each token alone.
    batch_size : prompts in one batch, and perturbed rows in one forward.

    Returns
    -------
    One `Scores` a prompt over `position`, unit of m, positive where the token helped; nan at kept tokens.

    Raises
    ------
    ValueError : a window wider than the prompt. AttnDiagError : the baseline equals the input.
    """
    results = []
    for batch in embedded_batches(
        lm, prompts, target, batch_size=batch_size, padding_side=padding_side, progress=progress
    ):
        start = path_start(lm, batch.prompts, batch.resolved, batch.embeddings, baseline, keep)
        shortest = int(batch.resolved.encoded.lengths.min())
        if not 1 <= window <= shortest:
            raise ValueError(f"window is {window}, the shortest prompt has {shortest} tokens; expected 1 to that many")
        clean = batch.measure(batch.embeddings)
        with torch.no_grad():
            found = Occlusion(batch).attribute(
                batch.embeddings,
                sliding_window_shapes=(window, batch.embeddings.shape[-1]),
                baselines=start.embeddings,
                additional_forward_args=(batch.rows,),
                perturbations_per_eval=max(1, batch_size // len(batch.prompts)),
            )
        params = {"baseline": baseline, "keep": keep, "window": window}
        facts = Facts("occlusion", "captum", batch.resolved.unit, params)
        for row in range(len(batch.prompts)):
            # captum gives every dimension of a token the effect of the whole window
            checks = {"m": float(clean[row])}
            results.append(token_record(batch, row, found[row, :, 0], facts, kept=start.kept[row], checks=checks))
    return results


class _WeightedLinear(Model):
    """y ~ X w + c by weighted least squares in float64, ridge where asked; the interface that captum fits.

    With `exact_ends` the first two samples (all tokens, none) are met exactly, not merely with a large weight, so that
    the coefficients add up.
    """

    def __init__(self, ridge: float = 0.0, *, exact_ends: bool = False) -> None:
        self._ridge = ridge
        self._exact_ends = exact_ends
        self._weights: Tensor | None = None
        self.r_squared = math.nan

    def fit(self, train_data: DataLoader, **_kwargs: object) -> None:  # type: ignore[override]
        """Solve for the coefficients; the intercept is never shrunk."""
        x, y, weight = (torch.cat(parts).cpu().double() for parts in zip(*train_data, strict=True))
        if self._exact_ends:
            full, empty, x, y, weight = y[0], y[1], x[2:], y[2:], weight[2:]
            # the last coefficient is what the others leave of full - empty
            reduced = (y - empty) - x[:, -1] * (full - empty)
            found = _least_squares(x[:, :-1] - x[:, -1:], reduced, weight / weight.sum(), 0.0)
            self._weights = torch.cat([found, (full - empty - found.sum())[None]])
            residual = y - empty - x @ self._weights
        else:
            weight = weight / weight.sum()
            centre, mean = (weight[:, None] * x).sum(0), (weight * y).sum()
            # the weights sum to 1, so the penalty is scaled like the mean squared error of that many samples
            self._weights = _least_squares(x - centre, y - mean, weight, self._ridge / len(x))
            residual = (y - mean) - (x - centre) @ self._weights
        weight = weight / weight.sum()
        spread = float((weight * (y - (weight * y).sum()).square()).sum())
        self.r_squared = 1 - float((weight * residual.square()).sum()) / spread if spread > 0 else math.nan

    def representation(self) -> Tensor:
        """[feature], the coefficients."""
        if self._weights is None:
            raise RuntimeError("the surrogate was asked before it was fitted")
        return self._weights

    def __call__(self, x: Any) -> Any:
        """Predictions up to the intercept."""
        return x.double() @ self.representation()


def _least_squares(x: Tensor, y: Tensor, weight: Tensor, ridge: float) -> Tensor:
    """argmin_w of sum_i weight_i (y_i - x_i w)^2 + ridge |w|^2."""
    root = weight.sqrt()
    left, right = x * root[:, None], y * root
    if ridge:
        left = torch.cat([left, torch.eye(x.shape[1], dtype=x.dtype, device=x.device) * ridge**0.5])
        right = torch.cat([right, right.new_zeros(x.shape[1])])
    return torch.linalg.lstsq(left, right[:, None]).solution[:, 0]


def lime(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    baseline: str = "mean_embedding",
    keep: Keep = "sinks",
    samples: int = 256,
    kernel_width: float = 0.25,
    ridge: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """Coefficients of a ridge regression of m on which tokens are present, over random subsets.

    Each token stays with probability 1/2; a subset z has weight exp(-(1 - cos(z, 1))^2 / kernel_width^2), where 1 is
    the whole prompt.

    Returns
    -------
    One `Scores` a prompt over `position`, unit of m; nan at kept tokens. `checks`: `r_squared` (weighted), `samples`,
    `m`, `m_baseline`.

    Raises
    ------
    NotApplicableError : fewer than two tokens are left to vary.
    """

    def near(_original: Any, _perturbed: Any, present: Tensor, **_kwargs: Any) -> Tensor:
        share = present.double().mean().item()  # the cosine of a 0/1 vector with all ones is the root of its mean
        return torch.tensor([math.exp(-((1 - share**0.5) ** 2) / kernel_width**2)])

    def draw(original: Tensor, **kwargs: Any) -> Tensor:
        present = torch.randint(0, 2, (1, int(kwargs["num_interp_features"])))
        return present.to(original.device)

    params = {"samples": samples, "kernel_width": kernel_width, "ridge": ridge, "seed": seed}

    def make(batch: EmbeddedBatch, surrogate: _WeightedLinear) -> Lime:
        return Lime(batch, interpretable_model=surrogate, similarity_func=near, perturb_func=draw)

    return _surrogate_records(
        lm, prompts, target, "lime", make, ridge, params, (baseline, keep), batch_size, padding_side, progress
    )


def kernel_shap(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    baseline: str = "mean_embedding",
    keep: Keep = "sinks",
    samples: int = 512,
    seed: int = 0,
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """Shapley values of the tokens, by weighted least squares over drawn subsets; the sum is m(x) - m(baseline).

    Returns
    -------
    One `Scores` a prompt over `position`, unit of m; nan at kept tokens. `checks`: `completeness_gap`, `r_squared`,
    `samples`, `m`, `m_baseline`.

    Raises
    ------
    NotApplicableError : fewer than two tokens are left to vary. ValueError : not more samples than tokens.
    """

    def make(batch: EmbeddedBatch, surrogate: _WeightedLinear) -> Lime:
        algorithm = KernelShap(batch)
        algorithm.interpretable_model = surrogate
        return algorithm

    params = {"samples": samples, "seed": seed}
    return _surrogate_records(
        lm, prompts, target, "kernel_shap", make, 0.0, params, (baseline, keep), batch_size, padding_side, progress
    )


def _surrogate_records(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets,
    name: str,
    make: Any,
    ridge: float,
    params: dict[str, Any],
    where: tuple[str, Keep],
    batch_size: int,
    padding_side: PaddingSide | None,
    progress: Progress | None,
) -> list[Scores]:
    results = []
    baseline, keep = where
    for batch in embedded_batches(lm, prompts, target, batch_size=1, padding_side=padding_side, progress=progress):
        start = path_start(lm, batch.prompts, batch.resolved, batch.embeddings, baseline, keep)
        free = _free_positions(batch, start)
        if len(free) < 2:
            raise NotApplicableError(f"{name} needs two tokens that may vary, {len(free)} are left; keep fewer tokens")
        if params["samples"] < len(free) + 2:
            raise ValueError(f"samples is {params['samples']} for {len(free)} tokens; expected at least two more")
        clean, empty = endpoints(batch, start)
        # kept tokens equal their baseline, so it changes nothing which group they belong to
        groups = torch.zeros(batch.embeddings.shape[:2], dtype=torch.int64, device=batch.embeddings.device)
        groups[0, free] = torch.arange(len(free), device=groups.device)
        surrogate = _WeightedLinear(ridge, exact_ends=name == "kernel_shap")
        with seeded(params["seed"]), torch.no_grad():
            found = make(batch, surrogate).attribute(
                batch.embeddings,
                baselines=start.embeddings,
                feature_mask=groups[..., None],
                additional_forward_args=(batch.rows,),
                n_samples=params["samples"],
                perturbations_per_eval=batch_size,
                return_input_shape=False,
            )
        values = torch.zeros(batch.embeddings.shape[1], dtype=batch.embeddings.dtype, device=batch.embeddings.device)
        values[free] = found.reshape(-1).to(values)
        checks: dict[str, Any] = {"m": clean[0], "m_baseline": empty[0], "r_squared": surrogate.r_squared}
        if name == "kernel_shap":
            checks["completeness_gap"] = completeness_gap(float(values.cpu().double().sum()), clean[0] - empty[0])
        facts = Facts(name, "captum", batch.resolved.unit, {"baseline": baseline, "keep": keep, **params})
        results.append(token_record(batch, 0, values, facts, kept=start.kept[0], checks=checks))
    return results


def _free_positions(batch: EmbeddedBatch, start: PathStart) -> Sequence[int]:
    real = batch.resolved.encoded.attention_mask[0].bool()
    return (real & ~start.kept[0]).nonzero()[:, 0].tolist()
