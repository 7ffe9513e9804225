"""`resolve_target`: from the words of a target to token ids and positions, checked against model and prompts.

What depends on the model itself (its own top-1, a reference embedding) is fixed from the unperturbed run: edits that
are active rest meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from attndiag.errors import TargetError
from attndiag.explanations.resolved import ResolvedTarget, sentence_embedding
from attndiag.hooks.pausing import edits_paused
from attndiag.models.encoding import Encoded, PaddingSide
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target, TargetKind

_NEEDS_FOIL = ("logit_diff",)
_TAKES_FOIL = ("logit_diff", "masked_token_logit")


def resolve_target(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    target: Target | Sequence[Target] | None = None,
    *,
    padding_side: PaddingSide | None = None,
) -> ResolvedTarget:
    """Decide what a target means on these prompts: token ids, positions, the model's own top-1.

    Parameters
    ----------
    lm : model with tokenizer.
    prompts : one batch.
    target : for all prompts, or one each; each prompt's own (`Target.from_prompt`) when None.
    padding_side : as in `lm.encode`.

    Raises
    ------
    TargetError : answer and foil start with the same token (both tokenisations are shown), a text outside the
        vocabulary, a class that does not exist, a prompt without exactly one mask token in a masked language model, a
        kind that the model has no output for, prompts of different kinds in one batch, a continuation whose tokens
        merge with the prompt's.
    """
    batch = as_prompts(prompts)
    targets = one_target_each(batch, target)
    kinds = {each.kind for each in targets}
    if len(kinds) > 1:
        raise TargetError(
            f"one batch cannot measure {' and '.join(sorted(kinds))} at once; give target=, or score the prompts "
            "in groups"
        )
    kind = targets[0].kind
    if kind == "continuation_logprob":
        return _resolve_continuation(lm, batch, targets, padding_side)
    encoded = lm.encode(batch, padding_side=padding_side)
    if kind == "cosine":
        return _resolve_cosine(lm, targets, encoded)
    if kind == "class_logit":
        return _resolve_classes(lm, targets, encoded)
    positions = _positions(lm, batch, encoded, kind)[:, None]
    answers, foils = [], []
    for row, (prompt, each) in enumerate(zip(batch, targets, strict=True)):
        answer, foil = _answer_and_foil(lm, prompt, each, encoded, row)
        answers.append(answer)
        foils.append(foil)
    resolved = ResolvedTarget(tuple(targets), encoded, positions)
    if any(answer is None for answer in answers):
        own = _own_top1(lm, resolved)
        answers = [int(top) if answer is None else answer for answer, top in zip(answers, own, strict=True)]
    device = encoded.input_ids.device
    foil_ids = None
    if any(foil is not None for foil in foils):
        if any(foil is None for foil in foils):
            raise TargetError("some targets of the batch have a foil and some have none; score them in groups")
        foil_ids = torch.tensor(foils, device=device)[:, None]
    return replace(resolved, answer_ids=torch.tensor(answers, device=device)[:, None], foil_ids=foil_ids)


def prompt_label(prompt: Prompt) -> str:
    """What a prompt is called in tables: its id, else its text."""
    if prompt.id is not None:
        return prompt.id
    return prompt.text if prompt.text is not None else str(prompt.messages[-1].get("content", ""))  # type: ignore[index]


def one_target_each(batch: Sequence[Prompt], target: Target | Sequence[Target] | None) -> list[Target]:
    """One target for each prompt: the one that was given, the list that was given, or each prompt's own."""
    if target is None:
        return [Target.from_prompt(prompt) for prompt in batch]
    if isinstance(target, Target):
        return [target] * len(batch)
    if len(target) != len(batch):
        raise TargetError(f"{len(target)} targets were given for {len(batch)} prompts; give one, or one each")
    return list(target)


def _answer_and_foil(
    lm: LoadedModel, prompt: Prompt, target: Target, encoded: Encoded, row: int
) -> tuple[int | None, int | None]:
    if target.foil is not None and target.kind not in _TAKES_FOIL:
        raise TargetError(
            f"a {target.kind} target takes no foil; use Target.logit_diff({target.answer!r}, {target.foil!r})"
        )
    if target.kind in _NEEDS_FOIL and (target.answer is None or target.foil is None):
        raise TargetError(f"{target.kind} needs an answer and a foil; got {target.answer!r} and {target.foil!r}")
    if target.answer is None:
        if target.foil is not None:
            raise TargetError(f"a foil {target.foil!r} without an answer; give the answer too")
        return None, None
    side = encoded if encoded.decoder is None else encoded.decoder
    before = "" if target.kind == "masked_token_logit" or is_masked_lm(lm) else side.texts[row]
    answer = _text_ids(lm, target.answer, before, prompt)
    if target.foil is None:
        return answer[0], None
    foil = _text_ids(lm, target.foil, before, prompt)
    if answer[0] == foil[0]:
        raise TargetError(
            f"answer {target.answer!r} = {_shown(lm, answer)} and foil {target.foil!r} = {_shown(lm, foil)} start with "
            f"the same token on {prompt_label(prompt)!r}, so their difference is 0 by construction; choose texts whose "
            "first tokens differ, or Target.continuation_logprob"
        )
    return answer[0], foil[0]


def _text_ids(lm: LoadedModel, text: str, before: str, prompt: Prompt) -> list[int]:
    """Ids of `text` where it follows `before`; by itself where its first letters would merge into the prompt's last."""
    if text == "":
        raise TargetError(f"the target of {prompt_label(prompt)!r} is an empty text; give at least one character")
    tokenizer = lm.tokenizer
    try:
        ids = _plain_ids(tokenizer, text)
    except Exception as error:
        _require_unreadable(error)
        raise TargetError(
            f"{text!r} cannot be tokenised by {lm.info.name}: {error}; choose a text of its vocabulary"
        ) from error
    ids = _ids_after(tokenizer, before, text, ids) if before and ids else ids
    unknown = tokenizer.unk_token_id
    if not ids or (unknown is not None and unknown in ids and text != tokenizer.unk_token):
        raise TargetError(
            f"{text!r} is outside the vocabulary of {lm.info.name}: it becomes "
            f"{_shown(lm, ids) if ids else 'no token'}; choose a text that the tokenizer knows (leading spaces count)"
        )
    width = getattr(lm.config, "vocab_size", None) or lm.vocabulary
    if max(ids) >= width:
        raise TargetError(f"{text!r} becomes token {max(ids)}, but the model has {width} logits; resize its embeddings")
    return ids


def _ids_after(tokenizer: Any, before: str, text: str, alone: list[int]) -> list[int]:
    """Ids of `text` behind `before`, where the joint text is the two in a row; `alone` where it is not.

    Tokenizers that put a word mark before every text give other ids to a text alone than to one that follows another.
    """
    first = _plain_ids(tokenizer, before)
    try:
        joint = _plain_ids(tokenizer, before + text)
    except Exception as error:  # run together the two may be no word of a closed vocabulary
        _require_unreadable(error)
        return alone
    if joint[: len(first)] != first or len(joint) == len(first):
        return alone
    behind = joint[len(first) :]
    return alone if tokenizer.unk_token_id in behind else behind


def _require_unreadable(error: Exception) -> None:
    """Raise again what is no refusal of a text: tokenizers without an unknown token refuse with a bare Exception."""
    if type(error) is not Exception:
        raise error


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _shown(lm: LoadedModel, ids: Sequence[int]) -> str:
    return " + ".join(f"{lm.tokenizer.decode([index])!r} ({index})" for index in ids)


def is_masked_lm(lm: LoadedModel) -> bool:
    """True where the model fills in mask tokens: its logits at a position are about that position itself."""
    if getattr(lm.config, "is_encoder_decoder", False):
        return False
    return type(lm.model).__name__ in set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())


def _positions(lm: LoadedModel, batch: Sequence[Prompt], encoded: Encoded, kind: TargetKind) -> Tensor:
    """[batch]: the last token (of the decoder); in masked language models the mask token."""
    masked = is_masked_lm(lm)
    if kind == "masked_token_logit" and not masked:
        raise TargetError(
            f"{lm.info.architecture} is no masked language model, so it has no mask token to read; use Target.logit"
        )
    if not masked:
        return encoded.last if encoded.decoder is None else encoded.decoder.last
    mask_id = lm.tokenizer.mask_token_id
    found = encoded.input_ids == mask_id
    for prompt, count in zip(batch, found.sum(1).tolist(), strict=True):
        if count != 1:
            raise TargetError(
                f"{prompt_label(prompt)!r} holds {count} mask tokens; a target on {lm.info.architecture} is read at "
                f"exactly one {lm.tokenizer.mask_token!r}"
            )
    return found.int().argmax(1)


def _own_top1(lm: LoadedModel, resolved: ResolvedTarget) -> list[int]:
    with edits_paused():
        output = lm.run(resolved.inputs)
    return resolved.top1(output)


def _resolve_classes(lm: LoadedModel, targets: Sequence[Target], encoded: Encoded) -> ResolvedTarget:
    resolved = ResolvedTarget(tuple(targets), encoded)
    count = int(getattr(lm.config, "num_labels", 0))
    if not type(lm.model).__name__.endswith("ForSequenceClassification"):
        raise TargetError(f"{lm.info.architecture} is no classifier, so it has no class logits; use Target.logit_diff")
    labels = [_class_number(lm, each.label, count) for each in targets]
    if any(label is None for label in labels):
        own = _own_top1(lm, resolved)
        labels = [top if label is None else label for label, top in zip(labels, own, strict=True)]
    foils = [_class_number(lm, each.foil_label, count) for each in targets]
    if len({foil is None for foil in foils}) > 1:
        raise TargetError("some targets of the batch have a foil and some have none; score them in groups")
    for label, foil in zip(labels, foils, strict=True):
        if label == foil:
            raise TargetError(f"label and foil are both class {label}; give two different classes")
    device = encoded.input_ids.device
    return replace(
        resolved,
        answer_ids=torch.tensor(labels, device=device)[:, None],
        foil_ids=None if foils[0] is None else torch.tensor(foils, device=device)[:, None],
    )


def _class_number(lm: LoadedModel, label: int | str | None, count: int) -> int | None:
    if label is None:
        return None
    names = dict(getattr(lm.config, "label2id", None) or {})
    number = names.get(label) if isinstance(label, str) else label
    if number is None or not 0 <= int(number) < count:
        raise TargetError(f"{label!r} is no class of {lm.info.name}; it has {count}: {', '.join(map(str, names))}")
    return int(number)


def _resolve_cosine(lm: LoadedModel, targets: Sequence[Target], encoded: Encoded) -> ResolvedTarget:
    if any(not each.answer for each in targets):
        raise TargetError("a cosine target needs the text that the prompt is compared with: Target.cosine(text)")
    if len({each.pooling for each in targets}) > 1:
        raise TargetError("one batch cannot pool in two ways; score the prompts in groups")
    texts = sorted({str(each.answer) for each in targets})
    reference = []
    for text in texts:
        other = lm.encode(text)
        with edits_paused():
            output = lm.run(other.inputs)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None:
            raise TargetError(
                f"{lm.info.architecture} returns no last_hidden_state to make a sentence embedding of; load the model "
                "without its head, or choose a target on its logits"
            )
        mask = (other if other.decoder is None else other.decoder).attention_mask
        reference.append(sentence_embedding(hidden, mask.to(hidden.device), targets[0].pooling)[0])
    rows = torch.stack([reference[texts.index(str(each.answer))] for each in targets])
    return ResolvedTarget(tuple(targets), encoded, reference=rows)


def _resolve_continuation(
    lm: LoadedModel, batch: list[Prompt], targets: Sequence[Target], padding_side: PaddingSide | None
) -> ResolvedTarget:
    if is_masked_lm(lm):
        raise TargetError(f"{lm.info.architecture} reads both ways and scores no continuation; use masked_token_logit")
    texts = []
    for prompt, each in zip(batch, targets, strict=True):
        text = each.answer if each.answer is not None else prompt.continuation
        if not text:
            raise TargetError(f"{prompt_label(prompt)!r} has no continuation; give Target.continuation_logprob(text)")
        texts.append(text)
    before = lm.encode(batch, padding_side=padding_side)
    if before.decoder is not None:
        longer = [replace(p, decoder_text=(p.decoder_text or "") + text) for p, text in zip(batch, texts, strict=True)]
        encoded = lm.encode(longer, padding_side=padding_side)
        first, whole = before.decoder, encoded.decoder
    else:
        # what a chat template made is plain text by now; it holds its special tokens already
        joint = [Prompt(rendered + text) for rendered, text in zip(before.texts, texts, strict=True)]
        encoded = lm.encode(joint, padding_side=padding_side)
        first, whole = before, encoded
    if whole is None:
        raise TargetError(f"{lm.info.architecture} encoded a decoder text without a decoder")
    steps, special, template = [], torch.ones_like(whole.special), torch.zeros_like(whole.template)
    for row, prompt in enumerate(batch):
        real, known = whole.attention_mask[row].bool(), first.attention_mask[row].bool()
        ids, start = whole.input_ids[row][real].tolist(), first.input_ids[row][known].tolist()
        if ids[: len(start)] != start or len(ids) == len(start):
            raise TargetError(
                f"the continuation {texts[row]!r} merges with the end of {prompt_label(prompt)!r}: alone the prompt is "
                f"{_shown(lm, start[-4:])}, with it {_shown(lm, ids[max(len(start) - 4, 0) :])}; move the space to the "
                "start of the continuation"
            )
        offset = int(real.int().argmax())
        here = slice(offset, offset + len(start))
        special[row, here], template[row, here] = first.special[row][known], first.template[row][known]
        steps.append([(offset + index - 1, ids[index]) for index in range(len(start), len(ids))])
    width = max(len(each) for each in steps)
    filled = [each + [(0, 0)] * (width - len(each)) for each in steps]
    device = encoded.input_ids.device
    whole = replace(whole, special=special, template=template)
    return ResolvedTarget(
        tuple(targets),
        replace(encoded, decoder=whole) if before.decoder is not None else whole,
        positions=torch.tensor([[position for position, _ in each] for each in filled], device=device),
        answer_ids=torch.tensor([[index for _, index in each] for each in filled], device=device),
        counted=torch.tensor([[step < len(each) for step in range(width)] for each in steps], device=device),
    )
