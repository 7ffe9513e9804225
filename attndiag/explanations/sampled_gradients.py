"""Gradient SHAP and DeepLift: captum's algorithms on this project's scorer, one prompt at a time.

Both lean on global state in captum (NumPy's and torch's generators; hooks on modules): it is seeded, watched and put
back here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from captum.attr import DeepLift, GradientShap
from captum.attr._core.deep_lift import SUPPORTED_NON_LINEAR
from torch import Tensor, nn

from attndiag.core.gradients import completeness_gap
from attndiag.errors import NotApplicableError
from attndiag.explanations.baselines import Keep, path_start
from attndiag.explanations.gradients import Prompts, Targets, endpoints, path_record
from attndiag.explanations.token_records import Aggregate, EmbeddedBatch, Progress, embedded_batches
from attndiag.models.encoding import PaddingSide
from attndiag.models.load import LoadedModel
from attndiag.scores import Scores

_RULES = tuple(SUPPORTED_NON_LINEAR)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's and NumPy's global generators start from `seed` within the block and are put back afterwards."""
    numpy_state = np.random.get_state()  # noqa: NPY002  (captum draws from the legacy generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002


def gradient_shap(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    baseline: str | Sequence[str] = ("zero", "mean_embedding"),
    keep: Keep = "sinks",
    samples: int = 64,
    noise: float = 0.0,
    seed: int = 0,
    aggregate: Aggregate = "sum",
    batch_size: int = 8,
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """Expected gradients: mean of (e + noise - b) * dm/de over baselines b and points of the path to the input.

    Parameters
    ----------
    baseline : one or several names; each sample draws one of them.
    samples : draws; they come in groups of `batch_size`, whose spread gives the Monte-Carlo standard error.
    noise : standard deviation of normal noise on the embeddings.

    Returns
    -------
    One `Scores` a prompt over `position`, unit of m; nan at kept tokens. `checks`: `se` (of `sum`), `samples`,
    `completeness_gap` against m(x) - mean m(baseline), `m`, `m_baseline`, `sum`, `norm`.

    Raises
    ------
    AttnDiagError : a baseline equals the input, or m does not tell them apart.
    """
    names = [baseline] if isinstance(baseline, str) else list(baseline)
    if samples < 2 or not names:
        raise ValueError(f"samples is {samples} with {len(names)} baselines; expected at least 2 samples, 1 baseline")
    group = max(1, min(batch_size, samples // 2))
    groups = samples // group
    results = []
    for batch in embedded_batches(lm, prompts, target, batch_size=1, padding_side=padding_side, progress=progress):
        starts = [path_start(lm, batch.prompts, batch.resolved, batch.embeddings, name, keep) for name in names]
        ends = [endpoints(batch, start) for start in starts]
        clean, empty = ends[0][0][0], sum(end[1][0] for end in ends) / len(ends)
        distribution = torch.cat([start.embeddings for start in starts])
        moved = (~starts[0].kept & batch.resolved.encoded.attention_mask.bool())[..., None]
        parts = []
        with seeded(seed):
            for _ in range(groups):
                found = GradientShap(batch).attribute(
                    batch.embeddings.clone(),
                    baselines=distribution,
                    n_samples=group,
                    stdevs=noise,
                    additional_forward_args=(batch.rows,),
                )
                parts.append((found.detach() * moved)[0])
        drawn = torch.stack(parts)
        attribution = drawn.mean(0)
        error = drawn.sum(-1).std(0) / groups**0.5
        gap = completeness_gap(float(attribution.cpu().double().sum()), clean - empty)
        params = {"baseline": tuple(names), "keep": keep, "noise": noise, "seed": seed, "aggregate": aggregate}
        checks = {"se": error, "samples": group * groups, "m": clean, "m_baseline": empty}
        results.append(path_record(batch, 0, attribution, starts[0], ("gradient_shap", params, aggregate), checks, gap))
    return results


class _ScoredModel(nn.Module):
    """The scorer as a module that owns the model, so that captum finds the activations inside."""

    def __init__(self, batch: EmbeddedBatch) -> None:
        super().__init__()
        self.inner = batch.lm.model
        self._batch = batch

    def forward(self, embeddings: Tensor, rows: Tensor) -> Tensor:
        """m of each row."""
        return self._batch(embeddings, rows)


def deeplift(
    lm: LoadedModel,
    prompts: Prompts,
    target: Targets = None,
    *,
    baseline: str = "mean_embedding",
    keep: Keep = "sinks",
    aggregate: Aggregate = "sum",
    padding_side: PaddingSide | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """DeepLift by the rescale rule, on models whose activations captum has a rule for.

    Captum applies the rule to activation *modules* of a few types (ReLU, Tanh, Sigmoid, ...). Attention, norms, SiLU
    and GELU have none and are passed by their plain gradient; where no rule fires at all the result is exactly
    gradient * (input - baseline), and that is refused rather than given another name.

    Returns
    -------
    One `Scores` a prompt over `position`, unit of m; nan at kept tokens. `checks`: `completeness_gap`, `rules_fired`
    (activations with a rule that ran), `m`, `m_baseline`, `sum`, `norm`.

    Raises
    ------
    NotApplicableError : no rule fires in this model.
    AttnDiagError : the baseline equals the input, or m does not tell them apart.
    """
    results = []
    for batch in embedded_batches(lm, prompts, target, batch_size=1, padding_side=padding_side, progress=progress):
        start = path_start(lm, batch.prompts, batch.resolved, batch.embeddings, baseline, keep)
        with _watching_rules(lm.model) as fired:
            clean, empty = endpoints(batch, start)
        repeated = {name for name in fired if fired.count(name) > 2}  # once for the input, once for the baseline
        if not fired or repeated:
            why = f"{sorted(repeated)[0]} runs several times a forward" if repeated else _without_rule(lm.model)
            raise NotApplicableError(
                f"no DeepLift rule fires in {lm.info.architecture} ({why}): the result would be gradient * (input - "
                "baseline). Use integrated_gradients or input_x_gradient"
            )
        with warnings.catch_warnings():
            # captum announces that it sets hooks; it removes them too, which the tests check
            warnings.filterwarnings("ignore", message="Setting forward, backward hooks")
            found = DeepLift(_ScoredModel(batch)).attribute(
                batch.embeddings.clone().requires_grad_(),
                baselines=start.embeddings,
                additional_forward_args=(batch.rows,),
            )
        found = found[0].detach()
        gap = completeness_gap(float(found.cpu().double().sum()), clean[0] - empty[0])
        params = {"baseline": baseline, "keep": keep, "rule": "rescale", "aggregate": aggregate}
        checks = {"rules_fired": len(set(fired)), "m": clean[0], "m_baseline": empty[0]}
        results.append(path_record(batch, 0, found, start, ("deeplift", params, aggregate), checks, gap))
    return results


@contextmanager
def _watching_rules(model: nn.Module) -> Iterator[list[str]]:
    """Names of the activation modules with a rule, as they run within the block."""
    fired: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: fired.append(name)

    handles = [m.register_forward_hook(note(name)) for name, m in model.named_modules() if type(m) in _RULES]
    try:
        yield fired
    finally:
        for handle in handles:
            handle.remove()


def _without_rule(model: nn.Module) -> str:
    """Activation modules that captum passes by their plain gradient."""
    names = {type(m).__name__ for m in model.modules() if "activation" in type(m).__module__ and type(m) not in _RULES}
    return f"its activations are {', '.join(sorted(names))}" if names else "it has no activation modules with a rule"
