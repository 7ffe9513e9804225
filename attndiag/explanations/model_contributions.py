"""`model_contributions`: every layer of a model in one forward, one layer in memory at a time.

While the forward runs, each attention call is turned into scores as soon as its block is left and is then let go, so
that contributions of all layers cost little more than the forward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.contribution_backends import Kind, Norm
from attndiag.explanations.contributions import Backend, CertificateKind, contributions
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.models.access import accepts
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.scores import Scores


def model_contributions(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    kind: Kind = "contribution",
    *,
    layers: Collection[int] | None = None,
    backend: Backend = "auto",
    dtype: torch.dtype | None = None,
    norm: Norm = "own",
    certificate: CertificateKind = "sampled",
    progress: Callable[[int, int | None], None] | None = None,
) -> Scores:
    """Contributions of all self-attention layers, from one forward.

    Parameters
    ----------
    lm : what `attndiag.load` returned.
    prompts : one batch; a string stands for `Prompt(text)`.
    kind, backend, dtype, norm, certificate : as in `attndiag.contributions`; the certificate is the sampled one here,
        since the full one costs about as much as the contributions.
    layers : these only; all when None.
    progress : called with (layers done, layers in all or None) after each layer.

    Returns
    -------
    Scores with a `layer` axis before the axes of the kind. Labels name the layers, and the tokens where there is one
    prompt. `checks` holds the largest error over the layers; every layer that fails a check is named in `failures`.

    Raises
    ------
    UnsupportedModelError : the layers differ in shape (encoder-decoders, models that pool), or a layer calls its
        attention twice; take `attndiag.capture` and `attndiag.contributions` for those.
    NotApplicableError : `target_attribution`, which needs a target; `attndiag.explain` serves it.
    Others as in `attndiag.capture` and `attndiag.contributions`.
    """
    if kind == "target_attribution":
        raise NotApplicableError(
            "target_attribution is about a target, which gives each prompt a direction and a position of its own; use "
            "attndiag.explain(lm, prompt, target, method='target_attribution')"
        )
    encoded = lm.encode(prompts)
    done: list[tuple[int | None, Scores]] = []

    def measure(call: AttentionCall) -> None:
        scores = contributions(call, kind, backend, dtype, norm=norm, certificate=certificate)
        done.append((call.layer, scores))
        if progress is not None:
            progress(len(done), None if layers is None else len(layers))

    options: dict[str, Any] = {"logits_to_keep": 1} if accepts(lm.model, "logits_to_keep") else {}
    with capture(lm, layers=layers, on_call=measure):
        lm.run(encoded.inputs, **options)

    numbers = [layer for layer, _ in done]
    shapes = {tuple(scores.values.shape) for _, scores in done}
    if len(shapes) > 1 or len(set(numbers)) < len(numbers) or None in numbers:
        raise UnsupportedModelError(
            f"{lm.info.name} made calls at layers {numbers} with {len(shapes)} different shapes, which do not stack; "
            "capture it and call attndiag.contributions on each call"
        )
    first = done[0][1]
    tokens = [text for row in encoded.tokens for text in row] if len(encoded.tokens) == 1 else None
    labels: dict[str, Sequence[Any]] = {"layer": numbers}
    for axis in ("query_pos", "key_pos"):
        if tokens is not None and axis in first.axes and first.values.shape[first.axes.index(axis)] == len(tokens):
            labels[axis] = tokens
    errors = ("value_error", "formula_error", "output_error", "completeness_error", "norm_error")
    return Scores(
        values=torch.stack([scores.values for _, scores in done]),
        axes=("layer", *first.axes),
        method=kind,
        unit=first.unit,
        sign=first.sign,
        labels=labels,
        params=first.params,
        provenance={key: first.provenance[key] for key in ("route", "kernel", "dtype", "model_dtype")}
        | {"model": lm.info.name, "backend": "+".join(sorted({s.provenance["backend"] for _, s in done}))},
        checks={
            name: max(values)
            for name in errors
            if (values := [s.checks[name] for _, s in done if s.checks.get(name) is not None])
        }
        | {"certificate": certificate},
        failures=tuple(f"layer {layer}: {failure}" for layer, scores in done for failure in scores.failures),
    )
