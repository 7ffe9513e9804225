"""`Prompt` and `Target`: what is read, and the one number that is asked about.

Plain data. Turning a prompt into token ids is the loaded model's work (`attndiag.models.load`), measuring a
target is the scorer's (`attndiag.explanations.target`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from attndiag.errors import PromptError, TargetError

TargetKind = Literal[
    "logit_diff", "logprob", "logit", "prob", "class_logit", "masked_token_logit", "cosine", "continuation_logprob"
]


@dataclass(frozen=True)
class Prompt:
    """One input.

    Parameters
    ----------
    text : the text as the model reads it. A leading or trailing space is significant.
    id : name within its prompt set; unique there.
    messages : chat turns (`{"role", "content"}`) instead of text; the model's chat template is applied and said so.
    decoder_text : for encoder-decoders, the text given to the decoder.
    target, foil : the answer and the alternative that it is measured against (first token each).
    pair : the author's counterfactual version of `text`, of the same length in tokens.
    spans : named character spans `{"subject": (start, end)}` in `text`.
    cluster : the template the prompt was made from; statistics resample clusters.
    meta : anything else, carried along unread.
    continuation : text that is scored as a whole, given the prompt.
    """

    text: str | None = None
    id: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    decoder_text: str | None = None
    target: str | None = None
    foil: str | None = None
    pair: str | None = None
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cluster: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    continuation: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise PromptError("a prompt has either text or messages; give exactly one of them")
        if self.text is not None and not isinstance(self.text, str):
            raise PromptError(f"prompt text must be a string, got {type(self.text).__name__}")
        if self.text == "" or (self.messages is not None and len(self.messages) == 0):
            raise PromptError("the prompt is empty; give at least one character")
        if self.foil is not None and self.target is None:
            raise PromptError("a foil needs a target to be compared with; add `target`")
        for name, span in self.spans.items():
            if self.text is None or not 0 <= span[0] < span[1] <= len(self.text):
                raise PromptError(f"span {name!r} = {tuple(span)} does not lie inside the text")


@dataclass(frozen=True)
class Target:
    """The scalar m that signed scores and effects are about.

    Build one with the constructors below; `kind` is one of `TargetKind`. Swapping answer and foil negates every
    signed number exactly. A multi-token answer stands for its first token, leading space included, unless
    `continuation_logprob` is asked for. Token kinds are read at the last token, and in masked language models at the
    mask token.

    Parameters
    ----------
    kind : what is measured.
    answer, foil : token texts; for `cosine` the text that the prompt is compared with; for `continuation_logprob`
        the continuation, the prompt's own when None.
    label, foil_label : classes by number or by name.
    pooling : how a sentence encoder's token vectors become one (`cosine` only).
    """

    kind: TargetKind
    answer: str | None = None
    foil: str | None = None
    label: int | str | None = None
    foil_label: int | str | None = None
    pooling: Literal["mean", "first"] = "mean"

    def __post_init__(self) -> None:
        if self.kind not in get_args(TargetKind):
            raise TargetError(f"unknown target kind {self.kind!r}; expected one of {', '.join(get_args(TargetKind))}")
        if self.answer is not None and self.answer == self.foil:
            raise TargetError(f"answer and foil are both {self.answer!r}; give two different texts")
        if self.label is not None and self.label == self.foil_label:
            raise TargetError(f"label and foil are both {self.label!r}; give two different classes")

    @classmethod
    def logit_diff(cls, answer: str, foil: str) -> Target:
        """logit(answer) - logit(foil), in logits."""
        return cls("logit_diff", answer, foil)

    @classmethod
    def logprob(cls, answer: str | None = None) -> Target:
        """Log-probability of the answer's first token, in nats; the model's own top-1 when no answer is given."""
        return cls("logprob", answer)

    @classmethod
    def logit(cls, answer: str | None = None) -> Target:
        """Logit of the answer's first token; the model's own top-1 when no answer is given."""
        return cls("logit", answer)

    @classmethod
    def prob(cls, answer: str | None = None) -> Target:
        """Probability of the answer's first token. Secondary only: it saturates near 0 and 1."""
        return cls("prob", answer)

    @classmethod
    def class_logit(cls, label: int | str | None = None, foil: int | str | None = None) -> Target:
        """Logit of a class (minus that of a foil class) of a classifier; its own top-1 when no label is given."""
        return cls("class_logit", label=label, foil_label=foil)

    @classmethod
    def masked_token_logit(cls, answer: str | None = None, foil: str | None = None) -> Target:
        """Logit of a token (minus that of a foil) at the prompt's single mask token."""
        return cls("masked_token_logit", answer, foil)

    @classmethod
    def cosine(cls, text: str, pooling: Literal["mean", "first"] = "mean") -> Target:
        """Cosine between the prompt's sentence embedding and that of `text`, which stays as the unedited model has it.

        `pooling="mean"` averages the token vectors without padding, `"first"` takes the first token's.
        """
        return cls("cosine", text, pooling=pooling)

    @classmethod
    def continuation_logprob(cls, continuation: str | None = None) -> Target:
        """Sum of the log-probabilities of a given continuation, in nats; the prompt's own when None."""
        return cls("continuation_logprob", continuation)

    @classmethod
    def from_prompt(cls, prompt: Prompt) -> Target:
        """What the prompt itself asks for.

        `logit_diff` where it has target and foil, `continuation_logprob` where it has only a continuation, else
        `logprob` of its target, or of the model's own top-1.
        """
        if prompt.target is not None and prompt.foil is not None:
            return cls.logit_diff(prompt.target, prompt.foil)
        if prompt.target is None and prompt.continuation is not None:
            return cls.continuation_logprob(prompt.continuation)
        return cls.logprob(prompt.target)

    def swapped(self) -> Target:
        """The same target with answer and foil exchanged: every signed number changes its sign."""
        if self.foil is None and self.foil_label is None:
            raise TargetError(f"a {self.kind} target without a foil cannot be swapped; give a foil")
        return replace(self, answer=self.foil, foil=self.answer, label=self.foil_label, foil_label=self.label)
