"""Baselines: where a path to the prompt's own embeddings starts, by name.

- `zero`: the zero vector; far from anything that the model was trained on.
- `mean_embedding`: mean of the input embedding over the vocabulary.
- `pad`: the embedding of the token that fills ragged batches.
- `token=TEXT`: the embedding of one named token, the text taken as it stands (`"token= the"`, `"token=[MASK]"`).
- `pair`: the embeddings of the prompt's own counterfactual, token by token; in distribution, so the path is short.

Some tokens are kept: on the path they stay what they are. By default these are the special tokens and the first
one, where trained decoders put the mass that they have no use for: moving it changes every later position at once, and
the path becomes too steep to integrate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attndiag.errors import AttnDiagError, PromptError, TargetError
from attndiag.explanations.forwarding import embed, mean_embedding
from attndiag.explanations.resolve import prompt_label
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.models.access import pad_id
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt

NAMES = ("zero", "mean_embedding", "pad", "pair", "token=TEXT")
Keep = Literal["sinks", "none"] | Sequence[int]


@dataclass(frozen=True, eq=False)
class PathStart:
    """Baselines of one batch.

    Attributes
    ----------
    name : as the caller said it.
    embeddings : [batch, position, d_model]; equal to the input's where a token is kept, and on padding.
    kept : [batch, position] boolean.
    """

    name: str
    embeddings: Tensor
    kept: Tensor


def path_start(
    lm: LoadedModel,
    prompts: Sequence[Prompt],
    resolved: ResolvedTarget,
    embeddings: Tensor,
    baseline: str,
    keep: Keep = "sinks",
) -> PathStart:
    """The baseline of every prompt of a batch.

    Raises
    ------
    ValueError : an unknown name, or kept positions outside the prompt.
    PromptError : `pair` without a counterfactual, or one of another length.
    AttnDiagError : the baseline equals the input at every token that is not kept.
    """
    kept = kept_tokens(resolved, keep)
    encoded = resolved.encoded
    if baseline == "pair":
        ids = torch.stack([pair_ids(lm, prompt, resolved, row) for row, prompt in enumerate(prompts)])
        start = embed(lm.model, ids)
    else:
        start = _vector(lm, baseline, embeddings).expand_as(embeddings)
    start = torch.where((kept | ~encoded.attention_mask.bool())[..., None], embeddings, start)
    for row, prompt in enumerate(prompts):
        if torch.equal(start[row], embeddings[row]):
            raise AttnDiagError(
                f"the baseline {baseline!r} equals the input {prompt_label(prompt)!r} at every token that is not kept, "
                "so every attribution would be 0; choose another baseline or keep fewer tokens"
            )
    return PathStart(baseline, start, kept)


def kept_tokens(resolved: ResolvedTarget, keep: Keep) -> Tensor:
    """[batch, position] boolean: tokens that stay what they are (positions count in each prompt, without padding)."""
    encoded = resolved.encoded
    real = encoded.attention_mask.bool()
    first = real.int().argmax(1)
    if isinstance(keep, str):
        if keep not in ("sinks", "none"):
            raise ValueError(f"keep is {keep!r}; expected 'sinks', 'none' or positions")
        kept = encoded.special & real if keep == "sinks" else torch.zeros_like(real)
        if keep == "sinks":
            kept[torch.arange(len(first), device=first.device), first] = True
    else:
        kept = torch.zeros_like(real)
        for row, length in enumerate(encoded.lengths.tolist()):
            for position in keep:
                if not -length <= position < length:
                    raise ValueError(f"keep names position {position}, but prompt {row} has {length} tokens")
                kept[row, int(first[row]) + position % length] = True
    # a continuation is scored, not explained: its tokens are the same on the whole path
    kept |= continuation_tokens(resolved)
    return kept


def continuation_tokens(resolved: ResolvedTarget) -> Tensor:
    """[batch, position] boolean: tokens of a scored continuation that are part of the input."""
    encoded = resolved.encoded
    found = torch.zeros_like(encoded.attention_mask, dtype=torch.bool)
    if resolved.kind != "continuation_logprob" or encoded.decoder is not None or resolved.positions is None:
        return found
    for row in range(len(resolved)):
        counted = (
            resolved.positions[row] if resolved.counted is None else resolved.positions[row][resolved.counted[row]]
        )
        found[row, counted + 1] = True
    return found


def pair_ids(lm: LoadedModel, prompt: Prompt, resolved: ResolvedTarget, row: int) -> Tensor:
    """[position], ids of the prompt's counterfactual in the padding of its batch.

    Raises
    ------
    PromptError : there is no pair, or it has another number of tokens; both tokenisations are shown.
    """
    label = prompt_label(prompt)
    if prompt.pair is None:
        raise PromptError(f"{label!r} has no counterfactual; give `pair`, or choose another baseline or replacement")
    encoded = resolved.encoded
    real = encoded.attention_mask[row].bool()
    text = prompt.pair
    if resolved.kind == "continuation_logprob" and encoded.decoder is None:
        text += (
            resolved.targets[row].answer if resolved.targets[row].answer is not None else prompt.continuation
        ) or ""
    other = lm.encode(Prompt(text)).input_ids[0]
    if len(other) != int(real.sum()):
        mine = [lm.tokenizer.decode([index]) for index in encoded.input_ids[row][real].tolist()]
        theirs = [lm.tokenizer.decode([index]) for index in other.tolist()]
        raise PromptError(
            f"the counterfactual of {label!r} has {len(theirs)} tokens and the prompt {len(mine)}: {theirs} against "
            f"{mine}; a pair must have the same length in tokens"
        )
    ids = encoded.input_ids[row].clone()
    ids[real] = other
    return ids


def single_token(lm: LoadedModel, text: str | int) -> int:
    """The id of one named token, special tokens included; raises `TargetError` for texts that are several."""
    width = lm.vocabulary
    if isinstance(text, int):
        if not 0 <= text < width:
            raise TargetError(f"token {text} is outside the vocabulary of {lm.info.name}, which has {width} ids")
        return text
    ids = list(lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []
    unknown = lm.tokenizer.unk_token_id
    if len(ids) != 1 or (ids[0] == unknown and text != lm.tokenizer.unk_token) or ids[0] >= width:
        raise TargetError(
            f"{text!r} is not one token of {lm.info.name} but {ids}; name one token (leading spaces count) or its id"
        )
    return int(ids[0])


def _vector(lm: LoadedModel, baseline: str, embeddings: Tensor) -> Tensor:
    if baseline == "zero":
        return torch.zeros(embeddings.shape[-1], dtype=embeddings.dtype, device=embeddings.device)
    if baseline == "mean_embedding":
        return mean_embedding(lm).to(embeddings)
    if baseline == "pad":
        filler = pad_id(lm.tokenizer, lm.config)
        if filler is None:
            raise ValueError(f"{lm.info.name} has no token that could pad; choose another baseline: {', '.join(NAMES)}")
        return embed(lm.model, torch.tensor([filler], device=lm.device))[0]
    if baseline.startswith("token="):
        index = single_token(lm, baseline.removeprefix("token="))
        return embed(lm.model, torch.tensor([index], device=lm.device))[0]
    raise ValueError(f"baseline is {baseline!r}; expected one of {', '.join(NAMES)}")
