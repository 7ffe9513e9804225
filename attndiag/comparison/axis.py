"""The one axis that all methods of a comparison share: a prompt's own tokens, one target, one set of admissible ones.

Methods speak about embeddings, edges, heads or their own tokens; side by side they can stand only on one axis. It is
that of the prompt's real token ids, special tokens included, so that nothing is ever shifted. Ranked and judged are the
admissible positions: no BOS, special or padding token, no scored continuation. Sinks (the first position, and every key
with a mean mass above .3) are admissible for verdicts and set aside where agreement is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attndiag.errors import ShapeError
from attndiag.explanations.replacement_items import admissible
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target

SINK_MASS = 0.3
Spans = Sequence[tuple[int, int, float]]


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """Positions of one prompt as plain data: what is kept of a `TokenAxis` beside results, without model or tensors.

    Parameters
    ----------
    tokens : text of each position.
    token_ids, admissible, special : [position].
    offsets : [position, 2] character places in `text`; -1 for tokens that stand for none.
    text : what the model reads.
    queries : where the target is read.
    kind, answer, foil, unit : of the target m; answer and foil empty where there is none.
    """

    tokens: tuple[str, ...]
    token_ids: NDArray[np.int64]
    admissible: NDArray[np.bool_]
    special: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    text: str
    queries: tuple[int, ...]
    kind: str
    answer: str
    foil: str
    unit: str

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class TokenAxis:
    """Positions of one prompt.

    Parameters
    ----------
    prompt, label : the prompt and its name.
    resolved : its target, everything decided.
    tokens : text of each position.
    token_ids, admissible : [position].
    offsets : [position, 2] character places in `text`; -1 for tokens that stand for none.
    text : what the model reads.
    queries : where the target is read; all real positions for targets read from the whole sequence.
    """

    prompt: Prompt
    label: str
    resolved: ResolvedTarget
    tokens: tuple[str, ...]
    token_ids: NDArray[np.int64]
    admissible: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    text: str
    queries: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def plain(self) -> PromptTokens:
        """Everything but the model's own objects."""
        target = self.resolved.targets[0]
        special = self.resolved.encoded.special[0].cpu().numpy()
        return PromptTokens(
            tokens=self.tokens,
            token_ids=self.token_ids,
            admissible=self.admissible,
            special=special,
            offsets=self.offsets,
            text=self.text,
            queries=self.queries,
            kind=target.kind,
            answer=_said(target.answer, target.label),
            foil=_said(target.foil, target.foil_label),
            unit=self.resolved.unit,
        )

    def place(self, scores: NDArray[np.floating] | Sequence[float], name: str) -> NDArray[np.float64]:
        """Scores with one entry for each position.

        Raises
        ------
        ShapeError : another length; the text shows the tokens, since another tokenisation is the usual reason.
        """
        values = np.asarray(scores, dtype=np.float64)
        if values.shape != (len(self),):
            raise ShapeError(
                f"{name} has shape {values.shape} for prompt {self.label!r}, whose {len(self)} tokens are "
                f"{list(self.tokens)}; give one score for each of them, or character spans (start, end, score)"
            )
        return values

    def from_spans(self, spans: Spans, name: str) -> NDArray[np.float64]:
        """Scores of character spans on the tokens: a span's score is spread evenly over the tokens that it overlaps.

        Tokens without a span get 0, tokens that stand for no text nan.

        Raises
        ------
        ShapeError : a span outside the text or without a token.
        """
        start, end = self.offsets[:, 0], self.offsets[:, 1]
        values = np.where(start >= 0, 0.0, np.nan)
        for first, last, score in spans:
            inside = (start >= 0) & (start < last) & (end > first)
            if not 0 <= first < last <= len(self.text) or not inside.any():
                raise ShapeError(
                    f"{name} names the characters {first} to {last} of prompt {self.label!r}, which hold no token of "
                    f"{list(self.tokens)} in its {len(self.text)} characters"
                )
            values[inside] += score / inside.sum()
        return values


def _said(text: str | None, label: int | str | None) -> str:
    return text if text is not None else "" if label is None else str(label)


def token_axis(lm: LoadedModel, prompt: Prompt, target: Target | None) -> TokenAxis:
    """The axis of one prompt.

    Raises
    ------
    TargetError, PromptError : see `attndiag.score`.
    """
    resolved = resolve_target(lm, prompt, target)
    encoded = resolved.encoded
    real = encoded.attention_mask[0].bool().cpu().numpy()
    read = (
        sorted({int(place) for place in resolved.positions[0].tolist()})
        if resolved.positions is not None and encoded.decoder is None
        else np.flatnonzero(real).tolist()
    )
    return TokenAxis(
        prompt=prompt,
        label=prompt_label(prompt),
        resolved=resolved,
        tokens=tuple(encoded.tokens[0]),
        token_ids=encoded.input_ids[0].cpu().numpy(),
        admissible=admissible(resolved).cpu().numpy(),
        offsets=encoded.offsets[0].cpu().numpy(),
        text=encoded.texts[0],
        queries=tuple(read),
    )


def sinks(pattern: NDArray[np.floating]) -> NDArray[np.bool_]:
    """[position] keys that draw mass whatever they say: the first, and those with a mean mass above .3.

    Parameters
    ----------
    pattern : [layer, head, query_pos, key_pos]; the mean is over layers, heads and the queries that see the key, the
        key's own query left out.
    """
    n = pattern.shape[-1]
    mass = pattern.mean(axis=(0, 1))
    found = np.zeros(n, dtype=bool)
    for key in range(n):
        seen = (mass[:, key] > 0) & (np.arange(len(mass)) != key)
        found[key] = bool(seen.any()) and float(mass[seen, key].mean()) > SINK_MASS
    found[0] = True
    return found
