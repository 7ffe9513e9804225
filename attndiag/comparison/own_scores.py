"""`read_own_scores`: token scores that were made elsewhere, as entries of `compare(own=...)`.

| source | form |
|---|---|
| `.csv`, `.parquet`, `.jsonl`, a pandas table | `prompt` (its id), `score`, and `position` (with `token`, which is then checked) or `char_start`, `char_end`; several methods in a column `method` |
| `.json`, `.json.gz` of Inseq, or its `FeatureAttributionOutput` | `sequence_attributions`; scores with a dimension become its length and then shares of the step, as Inseq shows them |
| a tensor or array, or one each prompt | [batch, token], or [batch, token, dim] with `aggregate` (Captum) |
| Captum's `LLMAttributionResult`, or one each prompt | `seq_attr`, or `token_attr[step]` |
| interpreto's outputs, or a `.json` list of them | `attributions` and `elements` |

Positions count in this model's own tokens, special ones included. Named tokens are checked against them, see
`comparison.token_matching`. A token without a score is nan: undefined, never 0 (with character spans in a table, which
name what has a score, the rest is 0, as in `compare`). None of the packages is imported.

Captum 0.9 scores every output token after the first wrongly when `use_cached_outputs=True`, its default, meets
transformers 5: give `use_cached_outputs=False` there.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from attndiag.comparison.one_prompt import Own
from attndiag.comparison.own_tables import (
    Missing,
    OwnScoresError,
    as_array,
    checked,
    from_file,
    from_table,
    is_array,
    nothing,
)
from attndiag.comparison.token_matching import OwnTokens, TokenisationError, on_own_tokens, own_tokens
from attndiag.explanations.resolve import prompt_label
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt

Aggregate = Literal["sum", "norm"]
Array = NDArray[np.float64]


def read_own_scores(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    source: Any,
    *,
    aggregate: Aggregate | None = None,
    step: int | None = None,
    method: str | None = None,
    missing: Missing = "error",
) -> list[Own]:
    """Scores made elsewhere, one entry a prompt: `compare(lm, prompts, ..., own={"mine": read_own_scores(...)})`.

    Parameters
    ----------
    lm, prompts : as for `compare`; their tokens are what the scores are put on.
    source : a path or an object, see the module's text.
    aggregate : how a dimension of the embedding becomes one number: `"sum"` or its length `"norm"`. Needed for tensors
        with one; Inseq's own default is `"norm"`, divided by the sum over the tokens of the step.
    step : which generated token, or which class, the scores are about. None is the first for Inseq and generation, the
        whole sequence (`seq_attr`) for Captum.
    method : which one, where a table holds several.
    missing : prompts that the source says nothing about: an error, or all nan.

    Returns
    -------
    For each prompt an array [position], nan where undefined, or character spans (start, end, score).

    Raises
    ------
    OwnScoresError : unknown, repeated or missing prompts, positions or methods; values that are no numbers; wrong
        lengths; a form that is none of those above.
    TokenisationError : named tokens that are not ours; the text shows both.
    """
    for name, value, allowed in (
        ("aggregate", aggregate, get_args(Aggregate)),
        ("missing", missing, get_args(Missing)),
    ):
        if value is not None and value not in allowed:
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, allowed))}")
    batch = as_prompts(prompts)
    labels = [prompt_label(prompt) for prompt in batch]
    if len(set(labels)) < len(labels):
        raise OwnScoresError(f"the prompts are called {labels}; give each an id of its own")
    own = [own_tokens(lm, prompt, label) for prompt, label in zip(batch, labels, strict=True)]
    where = str(source) if isinstance(source, str | Path) else type(source).__name__
    if isinstance(source, str | Path):
        source = from_file(Path(source))
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return from_table(source, own, where, method, missing)
    if method is not None:
        raise OwnScoresError(f"{where}: only tables hold several methods; leave method out")
    if _field(source, "sequence_attributions") is not None:
        return _from_inseq(source, own, where, aggregate, 0 if step is None else step, missing)
    if is_array(source):
        source = as_array(source, where)
        if source.ndim < 2:
            source = source[None]
    rows = [source] if _one_result(source) else list(source) if isinstance(source, Sequence | np.ndarray) else None
    if rows is None:
        raise OwnScoresError(f"{where} is none of the forms that can be read; see attndiag.comparison.own_scores")
    if len(rows) != len(own):
        raise OwnScoresError(f"{where} holds scores of {len(rows)} prompts, {len(own)} were given; give one for each")
    return [_from_result(row, tokens, where, aggregate, step) for row, tokens in zip(rows, own, strict=True)]


def _field(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _one_result(source: Any) -> bool:
    return _field(source, "seq_attr") is not None or _field(source, "attributions") is not None


# --------------------------------------------------------------------------------------------------------- objects
def _from_inseq(
    source: Any, own: Sequence[OwnTokens], where: str, aggregate: Aggregate | None, step: int, missing: Missing
) -> list[Own]:
    sequences = list(_field(source, "sequence_attributions"))
    texts = _field(_field(source, "info") or {}, "input_texts")
    if texts is not None and len(texts) == len(sequences):
        # matched by what was read, since files hold no ids
        by_text: dict[str, Any] = {}
        for text, sequence in zip(texts, sequences, strict=True):
            if str(text) in by_text:
                raise OwnScoresError(f"{where} holds the input {str(text)!r} twice")
            by_text[str(text)] = sequence
        unknown = [text for text in by_text if text not in {one.text for one in own}]
        if unknown:
            raise OwnScoresError(f"{where} holds scores of {unknown[0]!r}, which is none of the prompts")
        ordered = [by_text.get(one.text) for one in own]
    elif len(sequences) == len(own):
        ordered = sequences
    else:
        raise OwnScoresError(f"{where} holds {len(sequences)} sequences for {len(own)} prompts; give one for each")
    return [
        nothing(tokens, where, missing)
        if sequence is None
        else _inseq_sequence(sequence, tokens, where, aggregate, step)
        for sequence, tokens in zip(ordered, own, strict=True)
    ]


def _inseq_sequence(sequence: Any, own: OwnTokens, where: str, aggregate: Aggregate | None, step: int) -> Own:
    """Source scores, or those of the prefix where the model has no source, for one generated token."""
    parts = {
        part: as_array(_field(sequence, f"{part}_attributions"), f"{where}, {part}_attributions")
        for part in ("source", "target")
        if _field(sequence, f"{part}_attributions") is not None
    }
    named = {
        part: [str(_field(token, "token")) for token in _field(sequence, part) or []] for part in ("source", "target")
    }
    if not parts:
        raise OwnScoresError(f"{where}: the sequence of prompt {own.label!r} holds no attributions")
    for part, values in parts.items():
        if values.ndim not in (2, 3) or values.shape[0] != len(named[part]):
            raise OwnScoresError(
                f"{where}: {part}_attributions of prompt {own.label!r} have shape {values.shape} for "
                f"{len(named[part])} tokens {named[part]}; expected [token, generated] or [token, generated, dim]"
            )
        if not -values.shape[1] <= step < values.shape[1]:
            raise OwnScoresError(f"{where}: step {step} of prompt {own.label!r}, which has {values.shape[1]} steps")
    at_step = {part: values[:, step] for part, values in parts.items()}
    if any(values.ndim == 2 for values in at_step.values()):
        if aggregate == "sum":
            at_step = {part: values.sum(-1) if values.ndim == 2 else values for part, values in at_step.items()}
        else:
            lengths = {part: np.linalg.norm(v, axis=-1) if v.ndim == 2 else v for part, v in at_step.items()}
            total = sum(float(np.nansum(values)) for values in lengths.values())
            at_step = {part: values / total if total > 0 else values * np.nan for part, values in lengths.items()}
    if "source" in at_step:
        return on_own_tokens(named["source"], at_step["source"], own)
    start = _field(sequence, "attr_pos_start")
    prefix = len(named["target"]) - parts["target"].shape[1] if start is None else int(start)
    return on_own_tokens(named["target"][:prefix], at_step["target"][:prefix], own)


def _from_result(row: Any, own: OwnTokens, where: str, aggregate: Aggregate | None, step: int | None) -> Own:
    if _field(row, "seq_attr") is not None:
        return _captum_llm(row, own, where, step)
    if _field(row, "attributions") is not None:
        return _interpreto(row, own, where, step)
    values = as_array(row, where)
    if values.ndim == (2 if aggregate is None else 3) and values.shape[0] == 1:
        values = values[0]  # Captum keeps the batch axis
    if values.ndim == 2:
        if aggregate is None:
            raise OwnScoresError(
                f"{where}: prompt {own.label!r} has scores of shape {values.shape}, one for each dimension of the "
                "embedding; say aggregate='sum' or 'norm'"
            )
        values = values.sum(-1) if aggregate == "sum" else np.linalg.norm(values, axis=-1)
    if values.ndim != 1:
        raise OwnScoresError(f"{where}: prompt {own.label!r} has scores of shape {values.shape}; expected [token]")
    n = len(own)
    # a ragged batch is filled up on the right; only what holds nothing may be cut off
    if len(values) > n and not np.nan_to_num(values[n:]).any():
        values = values[:n]
    if len(values) != n:
        raise TokenisationError(
            f"{where}: {len(values)} scores for prompt {own.label!r}, whose {n} tokens are {list(own.texts)}"
        )
    return checked(values, where, own)


def _captum_llm(row: Any, own: OwnTokens, where: str, step: int | None) -> Own:
    if step is None:
        values = as_array(_field(row, "seq_attr"), where)
    else:
        table = _field(row, "token_attr")
        if table is None:
            raise OwnScoresError(
                f"{where}: the result has no token_attr, only that of the whole sequence; leave step out"
            )
        table = as_array(table, where)
        if not -len(table) <= step < len(table):
            raise OwnScoresError(f"{where}: step {step} of prompt {own.label!r}, which has {len(table)} output tokens")
        values = table[step]
    names = [str(name) for name in _field(row, "input_tokens")]
    return on_own_tokens(names, checked(values, where, own), own)


def _interpreto(row: Any, own: OwnTokens, where: str, step: int | None) -> Own:
    values = as_array(_field(row, "attributions"), where)
    elements = _field(row, "elements")
    if elements is None or not all(isinstance(name, str) for name in elements):
        raise OwnScoresError(f"{where}: the output of prompt {own.label!r} names no elements")
    names = list(elements)
    generated = "generation" in str(_field(row, "model_task") or "").lower()
    if values.ndim == 2:
        rows = len(values)
        if step is None and not generated and rows > 1:
            raise OwnScoresError(f"{where}: prompt {own.label!r} has scores of {rows} classes; name one with step=")
        chosen = 0 if step is None else step
        if not -rows <= chosen < rows:
            raise OwnScoresError(f"{where}: step {chosen} of prompt {own.label!r}, which has {rows}")
        # what was generated stands behind the prompt
        keep = len(names) - rows if generated else len(names)
        values, names = values[chosen][:keep], names[:keep]
    if values.ndim != 1 or len(values) != len(names):
        raise OwnScoresError(
            f"{where}: prompt {own.label!r} has scores of shape {values.shape} for {len(names)} elements {names}"
        )
    return on_own_tokens(names, checked(values, where, own), own)
