"""The catalogue of methods, and `explain`, which runs one by name.

An entry says what a method gives (scope, sign, unit), what it costs, what it needs and where it comes from; the code
behind it is imported when it is used, so that the catalogue can be read without torch.

Scopes: `token`, one number for each position of the prompt; `edge`, for each layer, head, query and key (or query and
key); `head`; `row`, for each layer and query.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, overload

from attndiag.errors import AttnDiagError

if TYPE_CHECKING:
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt, Target
    from attndiag.scores import Scores

Scope = Literal["token", "edge", "head", "row"]
Call = Literal["prompts", "prompt", "untargeted"]


REQUIRED = "required"
"""Stands for the default of a parameter that has none."""


class UnknownMethodError(AttnDiagError, ValueError):
    """No entry of the catalogue has this name; the text names those that are near."""


class UnknownParameterError(AttnDiagError, TypeError):
    """The method has no such parameter, or one that it needs is missing; the text lists what it has."""


@dataclass(frozen=True)
class Method:
    """One entry.

    Parameters
    ----------
    name : unique; what `Scores.method` says, except where one function serves several entries.
    what : one line.
    home : `"module:function"`.
    scope, sign, unit : of the values. The unit `target` is that of the target (logits, nats, ...).
    cost : in forwards and backwards of one prompt of n tokens.
    needs : what the model or prompt must have; empty where any model will do.
    source : paper, or "definition".
    call : how the function is called: with many prompts and a target, with one, or with prompts alone.
    fixed : parameters that make the function this entry.
    """

    name: str
    what: str
    home: str
    scope: Scope
    sign: Literal["signed", "non-negative"]
    unit: str
    cost: str
    needs: tuple[str, ...] = ()
    source: str = "definition"
    call: Call = "prompts"
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Any]:
        """The code behind the entry."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(module), name)

    @property
    def targeted(self) -> bool:
        """False where the numbers are about no target."""
        return self.call != "untargeted"

    @property
    def parameters(self) -> dict[str, Any]:
        """Keyword parameters with their defaults, as the function has them; `REQUIRED` where there is none."""
        known = {"lm", "prompt", "prompts", "target", "progress", *self.fixed}
        given = inspect.signature(self.function).parameters.values()
        return {
            each.name: REQUIRED if each.default is each.empty else each.default
            for each in given
            if each.name not in known
        }


_GRADIENTS = "attndiag.explain.gradients"
_SAMPLED = "attndiag.explain.sampled_gradients"
_SURROGATES = "attndiag.explain.surrogates"
_EDGES = "attndiag.explain.pattern_gradients:pattern_gradients"
_FREEDOM = "attndiag.explain.pattern_freedom"
_CONTRIBUTIONS = "attndiag.explain.model_contributions:model_contributions"


def _contribution(kind: str, what: str, source: str, **more: Any) -> Method:
    given: dict[str, Any] = {
        "scope": "edge",
        "sign": "non-negative",
        "unit": "residual norm",
        "cost": "1 forward",
        "needs": ("attention weights", "an output projection"),
        "call": "untargeted",
        "fixed": {"kind": kind},
    }
    return Method(kind, what, _CONTRIBUTIONS, source=source, **{**given, **more})


def catalogue(methods: Sequence[Method]) -> Mapping[str, Method]:
    """Entries by name, read-only.

    Raises
    ------
    ValueError : two entries have one name.
    """
    found: dict[str, Method] = {}
    for method in methods:
        if method.name in found:
            raise ValueError(f"two methods are called {method.name!r}: {found[method.name].home} and {method.home}")
        found[method.name] = method
    return MappingProxyType(found)


CATALOG = catalogue(
    [
        # ------------------------------------------------------------------------------- tokens
        Method(
            "replacement",
            "effect of replacing a token, a word or a span, m(x) - mean m(replaced)",
            "attndiag.explain.replacement_effects:replacement_effects",
            "token",
            "signed",
            "target",
            "n * draws forwards, shorter with a shared prefix",
        ),
        Method(
            "saliency",
            "length of the gradient in each token's embedding",
            f"{_GRADIENTS}:saliency",
            "token",
            "non-negative",
            "target per embedding unit",
            "1 forward + 1 backward",
            ("gradients",),
            "Simonyan 2013, arXiv 1312.6034",
        ),
        Method(
            "input_x_gradient",
            "embedding times gradient",
            f"{_GRADIENTS}:input_x_gradient",
            "token",
            "signed",
            "target",
            "1 forward + 1 backward",
            ("gradients",),
            "Shrikumar 2016, arXiv 1605.01713",
        ),
        Method(
            "integrated_gradients",
            "gradients along the path from a named baseline, completeness gap measured",
            f"{_GRADIENTS}:integrated_gradients",
            "token",
            "signed",
            "target",
            "32 to 992 forwards + backwards (steps double until the gap closes)",
            ("gradients",),
            "Sundararajan 2017, arXiv 1703.01365",
        ),
        Method(
            "gradient_shap",
            "expected gradients over baselines and points of the path, with standard error",
            f"{_SAMPLED}:gradient_shap",
            "token",
            "signed",
            "target",
            "64 forwards + backwards (samples)",
            ("gradients",),
            "Lundberg 2017, arXiv 1705.07874",
        ),
        Method(
            "deeplift",
            "rescale rule, only where captum has a rule for the model's activations",
            f"{_SAMPLED}:deeplift",
            "token",
            "signed",
            "target",
            "2 forwards + 1 backward",
            ("gradients", "activation modules with a rule (ReLU, Tanh, ...)"),
            "Shrikumar 2017, arXiv 1704.02685",
        ),
        Method(
            "occlusion",
            "m(x) - m(window of tokens at a baseline embedding)",
            f"{_SURROGATES}:occlusion",
            "token",
            "signed",
            "target",
            "n forwards",
            (),
            "Zeiler 2014, arXiv 1311.2901",
        ),
        Method(
            "lime",
            "ridge regression of m on which tokens are present",
            f"{_SURROGATES}:lime",
            "token",
            "signed",
            "target",
            "256 forwards (samples)",
            (),
            "Ribeiro 2016, arXiv 1602.04938",
        ),
        Method(
            "kernel_shap",
            "Shapley values of the tokens by weighted least squares",
            f"{_SURROGATES}:kernel_shap",
            "token",
            "signed",
            "target",
            "512 forwards (samples)",
            (),
            "Lundberg 2017, arXiv 1705.07874",
        ),
        # -------------------------------------------------------------------------------- edges
        Method(
            "edge_effect",
            "exact effect of removing each edge, or renormalising its row without it",
            "attndiag.explain.edge_truth:edge_effects",
            "edge",
            "signed",
            "target",
            "one restarted forward for each edge",
            ("attention weights",),
            call="prompt",
        ),
        Method(
            "pattern_gradient",
            "gradient in each attention weight",
            _EDGES,
            "edge",
            "signed",
            "target per unit of weight",
            "1 forward + 1 backward",
            ("attention weights", "gradients"),
            fixed={"kind": "gradient"},
        ),
        Method(
            "pattern_attribution",
            "weight times its gradient: the first-order effect of removing an edge",
            _EDGES,
            "edge",
            "signed",
            "target",
            "1 forward + 1 backward",
            ("attention weights", "gradients"),
            "attribution patching, arXiv 2310.10348",
            fixed={"kind": "attribution"},
        ),
        # -------------------------------------------------------------------------------- heads
        Method(
            "pattern_freedom",
            "how far an adversary moves a head's pattern while m stays within epsilon; uniform and permuted beside it",
            f"{_FREEDOM}:pattern_freedom",
            "head",
            "non-negative",
            "nats",
            "170 forwards and 60 backwards for each head",
            ("attention weights", "gradients"),
            "Jain 2019, arXiv 1902.10186; Wiegreffe 2019, arXiv 1908.04626",
            call="prompt",
        ),
        Method(
            "frozen_pattern",
            "effect of running with the weights that a head has on another prompt",
            f"{_FREEDOM}:frozen_pattern",
            "head",
            "signed",
            "target",
            "2 forwards and one for each head",
            ("attention weights", "another prompt of the same length"),
            "Wiegreffe 2019, arXiv 1908.04626",
            call="prompt",
        ),
        Method(
            "temperature_sweep",
            "effect of dividing a head's scores by t, with the entropies",
            f"{_FREEDOM}:temperature_sweep",
            "head",
            "signed",
            "target",
            "8 forwards for each head (temperatures)",
            ("attention weights",),
            call="prompt",
        ),
        # -------------------------------------------------------------------- edges, about no target
        _contribution("weight", "the attention weights", "definition", unit="mass", needs=("attention weights",)),
        _contribution(
            "value_norm",
            "weight times length of the value; depends on the basis of the values",
            "Kobayashi 2020, arXiv 2004.10102",
            unit="value norm",
            needs=("attention weights",),
        ),
        _contribution(
            "head_contribution", "length of what a key writes through one head", "Kobayashi 2020, arXiv 2004.10102"
        ),
        _contribution(
            "contribution", "length of what a key writes through all heads together", "Kobayashi 2020, arXiv 2004.10102"
        ),
        _contribution(
            "contribution_residual",
            "the same with the residual stream on the diagonal",
            "Kobayashi 2021, arXiv 2109.07152",
            needs=("attention weights", "an output projection", "a residual stream"),
        ),
        _contribution(
            "contribution_norm",
            "the same after the norm layer, linearised at its input",
            "Kobayashi 2021, arXiv 2109.07152",
            unit="norm-layer output norm",
            needs=("attention weights", "an output projection", "a norm after the residual, or norm='next'"),
        ),
        _contribution(
            "mixing_ratio",
            "share of what a position takes from others, against what it keeps",
            "Kobayashi 2021, arXiv 2109.07152",
            unit="ratio",
            scope="row",
            needs=("attention weights", "an output projection", "a residual stream"),
        ),
        _contribution(
            "projection", "part of the attention output that a key accounts for", "definition", sign="signed"
        ),
        _contribution(
            "alti",
            "share of a row by L1 distance to the block's output",
            "Ferrando 2022, arXiv 2203.04212",
            unit="share of row",
            needs=("attention weights", "an output projection", "a residual stream"),
        ),
        _contribution(
            "alti_l2",
            "the same by L2 distance",
            "Ferrando 2022, arXiv 2203.04212",
            unit="share of row",
            needs=("attention weights", "an output projection", "a residual stream"),
        ),
    ]
)
"""Every method by name."""


def method_named(name: str) -> Method:
    """The entry of that name; `UnknownMethodError` names the nearest ones otherwise."""
    if name in CATALOG:
        return CATALOG[name]
    near = difflib.get_close_matches(name, CATALOG, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(CATALOG)}"
    raise UnknownMethodError(f"there is no method {name!r}; {hint}")


@overload
def explain(
    lm: LoadedModel,
    prompts: Prompt | str,
    target: Target | None = None,
    *,
    method: str = ...,
    progress: Callable[[int, int], None] | None = ...,
    **params: Any,
) -> Scores: ...


@overload
def explain(
    lm: LoadedModel,
    prompts: Sequence[Prompt | str],
    target: Target | Sequence[Target] | None = None,
    *,
    method: str = ...,
    progress: Callable[[int, int], None] | None = ...,
    **params: Any,
) -> list[Scores]: ...


def explain(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    target: Target | Sequence[Target] | None = None,
    *,
    method: str = "replacement",
    progress: Callable[[int, int], None] | None = None,
    **params: Any,
) -> Scores | list[Scores]:
    """Run one method of the catalogue.

    Parameters
    ----------
    lm : what `attndiag.load` returned.
    prompts : one prompt, or many.
    target : what the scores are about, for all prompts or one each; each prompt's own when None. Methods about no
        target (weights, contributions) leave it unread.
    method : a name of `CATALOG`; `attndiag methods` lists them.
    progress : called with (prompts done, prompts in all).
    params : parameters of the method, for example `baseline=`, `steps=`, `replacement=`, `layers=`.

    Returns
    -------
    `Scores` for one prompt, a list of them for many. `position` counts in the prompt's own token ids.

    Raises
    ------
    UnknownMethodError, UnknownParameterError : with the nearest names.
    Others as the method's own function says.
    """
    entry = method_named(method)
    _check_parameters(entry, params)
    one = not isinstance(prompts, Sequence) or isinstance(prompts, str)
    batch: list[Any] = [prompts] if one else list(prompts)  # type: ignore[list-item]
    given = {**entry.fixed, **params}
    if entry.call == "prompts":
        found = entry.function(lm, batch, target, progress=progress, **given)
        return found[0] if one else found
    targets = list(target) if isinstance(target, Sequence) else [target] * len(batch)
    if len(targets) != len(batch):
        raise ValueError(f"{len(targets)} targets were given for {len(batch)} prompts; give one, or one each")
    results = []
    for done, (prompt, each) in enumerate(zip(batch, targets, strict=True), start=1):
        results.append(entry.function(lm, prompt, *([each] if entry.targeted else []), **given))
        if progress is not None:
            progress(done, len(batch))
    return results[0] if one else results


def _check_parameters(entry: Method, params: Mapping[str, Any]) -> None:
    known = entry.parameters
    for name in params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownParameterError(
                f"{entry.name} has no parameter {name!r}; {hint}it takes {', '.join(sorted(known)) or 'none'}"
            )
    missing = [name for name, default in known.items() if default is REQUIRED and name not in params]
    if missing:
        raise UnknownParameterError(f"{entry.name} needs {' and '.join(missing)}; give {missing[0]}=")
