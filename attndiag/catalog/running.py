"""`explain`: run a method of the catalogue by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from attndiag.catalog.entries import CATALOG
from attndiag.catalog.record import REQUIRED, Method, UnknownMethodError, UnknownParameterError

if TYPE_CHECKING:
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt, Target
    from attndiag.scores import Scores


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
