"""`explain`: run a method of the catalogue by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from attndiag.catalog.entries import CATALOG
from attndiag.catalog.record import REQUIRED, Method, UnknownMethodError, UnknownParameterError
from attndiag.errors import PromptError

if TYPE_CHECKING:
    from attndiag.explanations.causal_work import CausalWork
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt, Target
    from attndiag.scores import Scores

Progress = Callable[[int, int], None]


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
    progress: Progress | None = ...,
    steps_done: Progress | None = ...,
    **params: Any,
) -> Scores: ...


@overload
def explain(
    lm: LoadedModel,
    prompts: Sequence[Prompt | str],
    target: Target | Sequence[Target] | None = None,
    *,
    method: str = ...,
    progress: Progress | None = ...,
    steps_done: Progress | None = ...,
    **params: Any,
) -> list[Scores]: ...


def explain(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    target: Target | Sequence[Target] | None = None,
    *,
    method: str = "replacement",
    progress: Progress | None = None,
    steps_done: Progress | None = None,
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
    steps_done : called with (steps done, steps in all) within each prompt by the methods that take long (edges,
        patches); other methods never call it.
    params : parameters of the method, for example `baseline=`, `steps=`, `replacement=`, `layers=`.

    Returns
    -------
    `Scores` for one prompt, a list of them for many. `position` counts in the prompt's own token ids.

    Raises
    ------
    UnknownMethodError, UnknownParameterError : with the nearest names.
    PromptError : the method compares two prompts, and a prompt has no `pair`.
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
    if entry.reports and steps_done is not None:
        given["progress"] = steps_done
    corrupted = given.pop("corrupted", None) if entry.call == "pair" else None
    for done, (prompt, each) in enumerate(zip(batch, targets, strict=True), start=1):
        other = [counterfactual(prompt, corrupted, entry.name)] if entry.call == "pair" else []
        results.append(entry.function(lm, prompt, *other, *([each] if entry.targeted else []), **given))
        if progress is not None:
            progress(done, len(batch))
    return results[0] if one else results


def counterfactual(prompt: Prompt | str, corrupted: Prompt | str | None, method: str) -> Prompt | str:
    """The prompt to compare with: the given one, else the prompt's own `pair`.

    Raises
    ------
    PromptError : there is neither.
    """
    if corrupted is not None:
        return corrupted
    own = None if isinstance(prompt, str) else prompt.pair
    if own is None:
        raise PromptError(
            f"{method} compares a prompt with a counterfactual of the same length, and this prompt has no pair; give "
            "Prompt(..., pair=...) or corrupted="
        )
    return own


def work_of(lm: LoadedModel, prompt: Prompt | str, method: str, params: Mapping[str, Any]) -> CausalWork | None:
    """What a call will cost in forwards and memory; None for methods that are short.

    Raises
    ------
    UnknownMethodError, UnknownParameterError : with the nearest names.
    """
    entry = method_named(method)
    _check_parameters(entry, params)
    return None if entry.estimate is None else entry.estimate(lm, prompt, **{**entry.fixed, **params})


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
