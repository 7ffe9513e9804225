"""From attributions of embeddings to one `Scores` a prompt, positions as in the prompt's own token ids.

An attribution of an embedding has one number for each dimension. Two ways to one number for each token are in use and
rank differently, so both are kept and named: `sum` (signed; complete wherever the attribution is) and `norm`
(Euclidean length; non-negative). `values` holds the one that was asked for, `checks` both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attndiag.errors import UnsupportedModelError
from attndiag.explanations.baselines import continuation_tokens
from attndiag.explanations.forwarding import editing_embeddings, embed, measure_rows, take_rows
from attndiag.explanations.resolve import one_target_each, prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.models.encoding import PaddingSide
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

Aggregate = Literal["sum", "norm"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class EmbeddedBatch:
    """A batch of prompts with its target, as a function of the input embeddings.

    Attributes
    ----------
    prompts, resolved : what is asked.
    embeddings : [batch, position, d_model], what the input embedding returns for the prompts.
    """

    lm: LoadedModel
    prompts: tuple[Prompt, ...]
    resolved: ResolvedTarget
    embeddings: Tensor

    @property
    def rows(self) -> Tensor:
        """[batch], 0 .. batch-1: which prompt an embedding row belongs to. Attribution algorithms repeat it."""
        return torch.arange(len(self.prompts), device=self.embeddings.device)

    def __call__(self, embeddings: Tensor, rows: Tensor) -> Tensor:
        """m, one number for each row of `embeddings`, where row i belongs to prompt `rows[i]`."""
        resolved = take_rows(self.resolved, rows)
        with editing_embeddings(self.lm.model, resolved.encoded.input_ids, lambda own: embeddings.to(own)):
            value = measure_rows(self.lm, resolved, grad=torch.is_grad_enabled())
        if torch.is_grad_enabled() and embeddings.requires_grad and not value.requires_grad:
            raise UnsupportedModelError(
                f"no gradient reaches the input embeddings of {self.lm.info.name} (quantised or detached weights); use "
                "a method that needs none: occlusion, lime, kernel_shap, replacement"
            )
        return value

    def measure(self, embeddings: Tensor) -> Tensor:
        """m of every prompt at these embeddings, [batch], without gradients."""
        with torch.no_grad():
            return self(embeddings, self.rows)


def embedded_batches(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    target: Target | Sequence[Target] | None,
    *,
    batch_size: int,
    padding_side: PaddingSide | None,
    progress: Progress | None = None,
) -> Iterator[EmbeddedBatch]:
    """The prompts in batches, each with its resolved target and its embeddings. `progress` counts finished prompts."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")
    batch = as_prompts(prompts)
    targets = one_target_each(batch, target)
    for start in range(0, len(batch), batch_size):
        part = batch[start : start + batch_size]
        resolved = resolve_target(lm, part, targets[start : start + batch_size], padding_side=padding_side)
        yield EmbeddedBatch(lm, tuple(part), resolved, embed(lm.model, resolved.encoded.input_ids))
        if progress is not None:
            progress(start + len(part), len(batch))


@dataclass(frozen=True)
class Facts:
    """What is the same for every token of a record: name, unit and sign of the method, its parameters."""

    method: str
    backend: str
    unit: str
    params: Mapping[str, Any] = field(default_factory=dict)
    sign: Literal["signed", "non-negative"] = "signed"


def aggregated(attribution: Tensor, aggregate: Aggregate) -> tuple[Tensor, dict[str, Tensor]]:
    """One number for each token of [position, d_model]: the one asked for, and both by name."""
    if aggregate not in get_args(Aggregate):
        raise ValueError(f"aggregate is {aggregate!r}; expected one of {', '.join(get_args(Aggregate))}")
    both = {"sum": attribution.sum(-1), "norm": attribution.norm(dim=-1)}
    return both[aggregate], both


def token_record(
    batch: EmbeddedBatch,
    row: int,
    values: Tensor,
    facts: Facts,
    *,
    kept: Tensor | None = None,
    checks: Mapping[str, Any] | None = None,
    failures: Sequence[str] = (),
) -> Scores:
    """`Scores` over the tokens of one prompt, padding cut away.

    Parameters
    ----------
    values : [position] in the padded batch; tensors among `checks` of that length are cut alike.
    kept : [position] boolean: tokens that the method never moved; undefined, so nan.
    """
    resolved = batch.resolved
    encoded = resolved.encoded
    real = encoded.attention_mask[row].bool()
    continuation = continuation_tokens(resolved)[row]

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == len(real):
            value = value.detach()
            blank = value.masked_fill(kept, torch.nan) if kept is not None and value.is_floating_point() else value
            return blank[real].cpu()
        return value

    tokens = [token for token, keep in zip(encoded.tokens[row], real.tolist(), strict=True) if keep]
    return Scores(
        values=cut(values),
        axes=("position",),
        method=facts.method,
        unit=facts.unit,
        sign=facts.sign,
        labels={"position": tokens},
        target=resolved.targets[row],
        params=dict(facts.params),
        provenance={
            "model": batch.lm.info.name,
            "prompt": prompt_label(batch.prompts[row]),
            "dtype": batch.lm.info.dtype,
            "kernel": batch.lm.info.attn_implementation,
            "backend": facts.backend,
            "side": "decoder" if encoded.decoder is None else "encoder",
        },
        checks={
            "token_ids": encoded.input_ids[row][real].cpu(),
            "admissible": (~encoded.special[row] & ~continuation)[real].cpu(),
            **{name: cut(value) for name, value in (checks or {}).items()},
        },
        failures=tuple(failures),
    )
