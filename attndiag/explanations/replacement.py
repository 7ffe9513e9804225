"""`Replacement`: what stands in for a token when its effect is measured, as plain data.

effect_t = m(x) - mean_k m(x with token t replaced, draw k). Which replacement is used decides what the effect means, so
each has a name, its parameters and a seed, and results carry them. The drawing is in `samplers`.

- `pair`: the token of the prompt's own counterfactual at the same place; tokens that do not differ are undefined.
- `sampled`: draws from the model's own p(. | tokens before), the original excluded (causal language models).
- `frequency_band`: draws among tokens about as frequent as the original.
- `uniform`: draws from the whole vocabulary; mostly far out of distribution.
- `neighbour`: the nearest input embeddings. The nearest neighbour of a word is often itself in another case or without
  its leading space, a replacement that changes nothing; such variants are skipped unless asked for.
- `masked_lm`: draws from a masked language model with the same tokenizer (or the model itself), the place masked.
- `attention_mask_out`: the token stays in its place, nobody may attend to it.
- `delete`: the token is taken out; later tokens move one place to the left.
- `token`: one named token everywhere; there is no default id.
- `zero_embedding`, `mean_embedding`: the input embedding is replaced, by zeros or by the vocabulary's mean.

Special tokens, padding and a scored continuation are never replaced, special ids and ids without a text never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from attndiag.models.load import LoadedModel

ReplacementName = Literal[
    "pair",
    "sampled",
    "frequency_band",
    "uniform",
    "neighbour",
    "masked_lm",
    "attention_mask_out",
    "delete",
    "token",
    "zero_embedding",
    "mean_embedding",
]
_RANDOM = ("sampled", "frequency_band", "uniform", "masked_lm")
_SEVERAL = (*_RANDOM, "neighbour")


@dataclass(frozen=True)
class Replacement:
    """A way to replace tokens. Build one with the constructors below.

    Parameters
    ----------
    name : one of `ReplacementName`.
    draws : replacements for each token (nearest neighbours for `neighbour`); 1 where there is only one.
    seed : decides the draws together with the prompt, whatever the batch.
    token : `token` only: its text (one token, leading space included) or its id.
    width : `frequency_band` only: the ranks drawn from reach from rank / 2^width to rank * 2^width.
    counts : `frequency_band` only: how often each id occurs; None takes the order of the vocabulary, which for
        byte-pair tokenizers is about that of frequency.
    variants : `neighbour` only: True allows the same word in another case or spacing.
    masked : `masked_lm` only: a loaded masked language model; None is the explained model itself.
    """

    name: ReplacementName
    draws: int = 1
    seed: int = 0
    token: str | int | None = None
    width: float = 1.0
    counts: Sequence[float] | None = field(default=None, repr=False)
    variants: bool = False
    masked: LoadedModel | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.name not in get_args(ReplacementName):
            raise ValueError(f"unknown replacement {self.name!r}; expected {', '.join(get_args(ReplacementName))}")
        if self.draws < 1 or (self.draws > 1 and self.name not in _SEVERAL):
            only = " (it has only one)" if self.name not in _SEVERAL else ""
            raise ValueError(f"draws is {self.draws} for {self.name}{only}; expected at least 1")
        if (self.token is None) == (self.name == "token"):
            raise ValueError(f"token is {self.token!r} for {self.name}; Replacement.token(text or id) needs one")

    @classmethod
    def pair(cls) -> Replacement:
        """The prompt's own counterfactual, token by token."""
        return cls("pair")

    @classmethod
    def sampled(cls, draws: int = 16, seed: int = 0) -> Replacement:
        """Draws from the model's own distribution given what stands before."""
        return cls("sampled", draws, seed)

    @classmethod
    def frequency_band(
        cls, draws: int = 16, seed: int = 0, *, width: float = 1.0, counts: Sequence[float] | None = None
    ) -> Replacement:
        """Draws among tokens about as frequent as the original."""
        return cls("frequency_band", draws, seed, width=width, counts=counts)

    @classmethod
    def uniform(cls, draws: int = 16, seed: int = 0) -> Replacement:
        """Draws from the vocabulary."""
        return cls("uniform", draws, seed)

    @classmethod
    def neighbour(cls, draws: int = 1, *, variants: bool = False) -> Replacement:
        """The nearest input embeddings, by cosine."""
        return cls("neighbour", draws, variants=variants)

    @classmethod
    def masked_lm(cls, model: LoadedModel | None = None, draws: int = 16, seed: int = 0) -> Replacement:
        """Draws from a masked language model that reads both sides."""
        return cls("masked_lm", draws, seed, masked=model)

    @classmethod
    def attention_mask_out(cls) -> Replacement:
        """Nobody attends to the token; its place stays."""
        return cls("attention_mask_out")

    @classmethod
    def delete(cls) -> Replacement:
        """The token is taken out; positions after it shift."""
        return cls("delete")

    @classmethod
    def with_token(cls, token: str | int) -> Replacement:
        """One named token in place of each."""
        return cls("token", token=token)

    @classmethod
    def zero_embedding(cls) -> Replacement:
        """The zero vector as input embedding."""
        return cls("zero_embedding")

    @classmethod
    def mean_embedding(cls) -> Replacement:
        """The mean of the vocabulary's input embeddings."""
        return cls("mean_embedding")

    @classmethod
    def parse(cls, text: str) -> Replacement:
        """From a name with parameters, as on a command line: `"sampled"`, `"uniform:draws=8,seed=1"`, `"token: the"`.

        Raises
        ------
        ValueError : an unknown name or parameter.
        """
        name, _, rest = text.partition(":")
        if name == "token":
            return cls.with_token(int(rest) if rest.isdigit() else rest)
        given: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = part.partition("=")
            if key in ("draws", "seed"):
                given[key] = int(value)
            elif key == "width":
                given[key] = float(value)
            elif key == "variants":
                given[key] = value.lower() in ("1", "true", "yes", "")
            else:
                raise ValueError(f"unknown parameter {key!r} of a replacement; expected draws, seed, width, variants")
        if name in _RANDOM:
            given.setdefault("draws", 16)
        return cls(name, **given)  # type: ignore[arg-type]

    @property
    def random(self) -> bool:
        """True where other seeds give other tokens."""
        return self.name in _RANDOM

    @property
    def label(self) -> str:
        """Name with the parameters that matter, for tables and the names of metrics."""
        shown: list[str] = []
        if self.name in _SEVERAL:
            shown.append(f"draws={self.draws}")
        if self.random:
            shown.append(f"seed={self.seed}")
        if self.name == "token":
            shown.append(repr(self.token))
        if self.name == "frequency_band":
            shown.append(f"width={self.width:g}")
        if self.name == "neighbour" and self.variants:
            shown.append("variants")
        if self.masked is not None:
            shown.append(self.masked.info.name)
        return f"{self.name}({', '.join(shown)})" if shown else self.name
