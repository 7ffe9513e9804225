"""Draw the variants of a prompt that a `Replacement` stands for.

Draws depend on the seed, the prompt and the position alone: each (position, draw) has one uniform number, which is
looked up in the cumulative distribution of the tokens that are allowed there. So results do not depend on batches, on
the other items, or on the order in which they are asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attndiag.errors import NotApplicableError, UnsupportedModelError
from attndiag.explanations.baselines import pair_ids, single_token
from attndiag.explanations.forwarding import NO_SEQUENCE_LOGITS, embedding_modules, mean_embedding
from attndiag.explanations.replacement import Replacement
from attndiag.explanations.replacement_items import Item
from attndiag.explanations.resolve import is_masked_lm
from attndiag.explanations.resolved import ResolvedTarget, logits_of
from attndiag.explanations.variant_scoring import Variants
from attndiag.models.access import pad_id
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt


@dataclass(frozen=True, eq=False)
class Drawn:
    """Variants of one prompt.

    Attributes
    ----------
    variants : all of them, `draws` for each item that could be replaced, in order.
    owner : index of the item of each variant.
    reasons : item index -> why it has no variant.
    """

    variants: Variants
    owner: Tensor
    reasons: dict[int, str]


def draw_variants(
    lm: LoadedModel,
    prompt: Prompt,
    resolved: ResolvedTarget,
    items: Sequence[Item],
    replacement: Replacement,
    *,
    jointly: bool = True,
) -> Drawn:
    """The variants of every item.

    Parameters
    ----------
    resolved : a batch of one, without padding.
    jointly : `sampled` only: within an item each token is drawn given the tokens already drawn; otherwise given the
        prompt's own.

    Raises
    ------
    NotApplicableError : the replacement needs something that the model or prompt does not have.
    PromptError : no pair, or one of another length. TargetError : a named token that is not one token.
    """
    ids = resolved.encoded.input_ids[0]
    reasons = {index: item.reason for index, item in enumerate(items) if item.reason}
    name = replacement.name
    if name == "pair":
        other = pair_ids(lm, prompt, resolved, 0)
        for index, item in enumerate(items):
            same = [int(ids[place]) == int(other[place]) for place in item.positions]
            if index not in reasons and all(same):
                reasons[index] = "the counterfactual has the same token here"
    elif name == "sampled" and int(lm.tokenizer.bos_token_id is None):
        for index, item in enumerate(items):
            if item.positions[0] == 0:
                reasons.setdefault(index, "nothing stands before it, and the tokenizer has no BOS to start from")
    elif name == "delete":
        for index, item in enumerate(items):
            if len(item.positions) >= len(ids):
                reasons.setdefault(index, "nothing would be left")
    usable = [index for index in range(len(items)) if index not in reasons]
    owner = torch.tensor([index for index in usable for _ in range(replacement.draws)], dtype=torch.int64)
    chosen = [items[index] for index in usable]
    if name in ("attention_mask_out", "delete", "zero_embedding", "mean_embedding"):
        return Drawn(_structural(lm, ids, chosen, replacement), owner, reasons)
    if name == "pair":
        drawn = [torch.where(_touched(ids, item), other, ids)[None] for item in chosen]
    elif name == "token":
        index = single_token(lm, replacement.token if replacement.token is not None else "")
        drawn = [torch.where(_touched(ids, item), torch.full_like(ids, index), ids)[None] for item in chosen]
    elif name == "sampled":
        drawn = _from_the_model(lm, resolved, chosen, replacement, jointly)
    else:
        drawn = _place_by_place(lm, resolved, chosen, replacement)
    rows = torch.cat(drawn) if drawn else ids.new_zeros(0, len(ids))
    touched = [_touched(ids, item).expand(replacement.draws, -1) for item in chosen]
    plain = _unchanged(ids, len(rows))
    marks = torch.cat(touched) if touched else plain.blank
    return Drawn(replace(plain, ids=rows, touched=marks), owner, reasons)


def allowed_tokens(lm: LoadedModel) -> Tensor:
    """[vocabulary] boolean: ids that stand for text, in the embedding and in the tokenizer, special ones left out."""
    size = lm.vocabulary
    allowed = torch.zeros(size, dtype=torch.bool)
    known = [index for index in lm.tokenizer.get_vocab().values() if index < size]
    allowed[known] = True
    allowed[[index for index in lm.special_ids if index < size]] = False
    if not bool(allowed.any()):
        raise UnsupportedModelError(f"the tokenizer of {lm.info.name} has no token that could stand in for another")
    return allowed.to(lm.device)


def uniform_numbers(ids: Tensor, seed: int, draws: int) -> Tensor:
    """[position, draw] in [0, 1), float64: decided by the seed and the prompt, not by anything around them."""
    mixed = zlib.crc32(repr((seed, ids.tolist())).encode())
    return torch.rand(len(ids), draws, dtype=torch.float64, generator=torch.Generator().manual_seed(mixed))


def look_up(weights: Tensor, numbers: Tensor) -> Tensor:
    """Indices [draw] with probability proportional to `weights` [choice], by the inverse of their cumulative sum."""
    cumulative = weights.cpu().double().cumsum(0)
    total = float(cumulative[-1])
    if not total > 0:
        raise NotApplicableError("no token is left to draw from: every one that is allowed has probability 0")
    found = torch.searchsorted(cumulative, numbers * total, right=True)
    # rounding at the very end must not land on a choice without weight
    return found.clamp_max(int(weights.cpu().nonzero()[-1]))


# ------------------------------------------------------------------------------------------ tokens by distribution
def _from_the_model(
    lm: LoadedModel, resolved: ResolvedTarget, items: Sequence[Item], replacement: Replacement, jointly: bool
) -> list[Tensor]:
    if resolved.kind in NO_SEQUENCE_LOGITS or resolved.encoded.decoder is not None or is_masked_lm(lm):
        raise NotApplicableError(
            f"{lm.info.architecture} does not foretell its input token by token, so it cannot draw replacements; use "
            "masked_lm with a masked language model of the same tokenizer, frequency_band, or pair"
        )
    encoded = resolved.encoded
    ids = encoded.input_ids[0]
    allowed = allowed_tokens(lm)
    numbers = uniform_numbers(ids, replacement.seed, replacement.draws)
    logits = logits_of(lm.run(resolved.inputs), resolved.kind)[0]
    first = None
    if any(item.positions[0] == 0 for item in items):
        start = torch.tensor([[lm.bos_id]], device=ids.device)
        first = logits_of(lm.run({"input_ids": start, "attention_mask": torch.ones_like(start)}), resolved.kind)[0, -1]

    def draw(scores: Tensor, place: int, which: Tensor | slice) -> Tensor:
        return look_up(_weights(scores, allowed, int(ids[place])), numbers[place][which]).to(ids.device)

    drawn = [ids.expand(replacement.draws, -1).clone() for _ in items]
    depth = max((len(item.positions) for item in items), default=0)
    for turn in range(depth):
        waiting = [index for index, item in enumerate(items) if len(item.positions) > turn]
        if turn == 0 or not jointly:
            for index in waiting:
                place = items[index].positions[turn]
                scores = first if place == 0 else logits[place - 1]
                drawn[index][:, place] = draw(scores, place, slice(None))  # type: ignore[arg-type]
            continue
        # what was drawn so far changes what may follow: read the distribution after each draw
        for index in waiting:
            place = items[index].positions[turn]
            rows, inverse = torch.unique(drawn[index][:, :place], dim=0, return_inverse=True)
            for begin in range(0, len(rows), 16):
                some = rows[begin : begin + 16]
                scores = logits_of(lm.run({"input_ids": some, "attention_mask": torch.ones_like(some)}), resolved.kind)
                for offset in range(len(some)):
                    which = (inverse == begin + offset).cpu()
                    drawn[index][which.to(ids.device), place] = draw(scores[offset, -1], place, which)
    return drawn


def _place_by_place(
    lm: LoadedModel, resolved: ResolvedTarget, items: Sequence[Item], replacement: Replacement
) -> list[Tensor]:
    """Replacements whose tokens are chosen for each place by itself."""
    ids = resolved.encoded.input_ids[0]
    numbers = uniform_numbers(ids, replacement.seed, replacement.draws)
    choose = _chooser(lm, resolved, items, replacement)
    drawn = []
    for index, item in enumerate(items):
        rows = ids.expand(replacement.draws, -1).clone()
        for place in item.positions:
            rows[:, place] = choose(index, place, numbers[place]).to(ids.device)
        drawn.append(rows)
    return drawn


def _chooser(
    lm: LoadedModel, resolved: ResolvedTarget, items: Sequence[Item], replacement: Replacement
) -> Callable[[int, int, Tensor], Tensor]:
    """A function (item, position, uniform numbers [draw]) -> ids [draw]."""
    ids = resolved.encoded.input_ids[0]
    allowed = allowed_tokens(lm)
    if replacement.name == "uniform":
        return lambda _item, place, numbers: look_up(_without(allowed, int(ids[place])), numbers)
    if replacement.name == "frequency_band":
        rank = _ranks(replacement, allowed)

        def band(_item: int, place: int, numbers: Tensor) -> Tensor:
            own = int(ids[place])
            near = (rank.float().log2() - rank[own].float().log2()).abs() <= replacement.width
            return look_up(_without(allowed & near, own), numbers)

        return band
    if replacement.name == "masked_lm":
        masked = replacement.masked or lm
        weights = _masked_distributions(lm, masked, resolved, items)
        return lambda item, place, numbers: look_up(
            _weights(weights[item][items[item].positions.index(place)], allowed, int(ids[place])), numbers
        )
    return lambda _item, place, _numbers: _nearest(lm, int(ids[place]), replacement, allowed)


def _ranks(replacement: Replacement, allowed: Tensor) -> Tensor:
    """[vocabulary], rank by frequency from 1; the order of the vocabulary where no counts are given."""
    size = len(allowed)
    if replacement.counts is None:
        return torch.arange(1, size + 1, device=allowed.device)
    counts = torch.as_tensor(replacement.counts, dtype=torch.float64)
    if counts.ndim != 1 or len(counts) < size:
        raise ValueError(f"counts has shape {tuple(counts.shape)}; expected one number for each of {size} ids")
    order = torch.argsort(counts[:size], descending=True, stable=True)
    rank = torch.empty(size, dtype=torch.int64)
    rank[order] = torch.arange(1, size + 1)
    return rank.to(allowed.device)


def _nearest(lm: LoadedModel, own: int, replacement: Replacement, allowed: Tensor) -> Tensor:
    table = embedding_modules(lm.model)[0].weight.detach()
    near = torch.nn.functional.cosine_similarity(table.float(), table[own].float()[None], dim=-1)
    near = near.masked_fill(~_without(allowed, own), -torch.inf)
    word = _bare(lm, own)
    found: list[int] = []
    for index in torch.argsort(near, descending=True, stable=True).tolist():
        if not torch.isfinite(near[index]):
            break
        if replacement.variants or _bare(lm, index) != word:
            found.append(index)
            if len(found) == replacement.draws:
                return torch.tensor(found)
    raise NotApplicableError(
        f"only {len(found)} tokens are neighbours of {lm.tokenizer.decode([own])!r}, {replacement.draws} were asked for"
    )


def _bare(lm: LoadedModel, index: int) -> str:
    """A token's text without case and spacing; tokens of white space stay apart."""
    text = lm.tokenizer.decode([index])
    return text.strip().casefold() or text


def _masked_distributions(
    lm: LoadedModel, masked: LoadedModel, resolved: ResolvedTarget, items: Sequence[Item]
) -> list[Tensor]:
    """For each item [place, vocabulary]: logits of the masked model with all its places masked at once."""
    if not is_masked_lm(masked):
        raise NotApplicableError(
            f"{masked.info.architecture} is no masked language model; give one with Replacement.masked_lm(model)"
        )
    if masked.info.tokenizer_hash != lm.info.tokenizer_hash:
        raise NotApplicableError(
            f"{masked.info.name} reads other tokens than {lm.info.name}; masked_lm needs one tokenizer for both"
        )
    encoded = resolved.encoded
    ids = encoded.input_ids[0].to(masked.device)
    mask_id = masked.tokenizer.mask_token_id
    if mask_id is None:
        raise NotApplicableError(f"the tokenizer of {masked.info.name} has no mask token")
    found = []
    for begin in range(0, len(items), 16):
        some = items[begin : begin + 16]
        rows = torch.stack([torch.where(_touched(ids, item), torch.full_like(ids, mask_id), ids) for item in some])
        inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        if encoded.token_type_ids is not None:
            inputs["token_type_ids"] = encoded.token_type_ids.to(masked.device).expand(len(rows), -1)
        logits = masked.run(inputs).logits
        found += [logits[row, list(item.positions)] for row, item in enumerate(some)]
    return found


def _weights(scores: Tensor, allowed: Tensor, own: int) -> Tensor:
    """[vocabulary], probabilities with what may not be drawn set to 0; not normalised."""
    scores = scores.cpu().double()
    width = min(len(scores), len(allowed))
    usable = _without(allowed, own)[:width]
    kept = scores[:width].masked_fill(~usable.cpu(), -torch.inf)
    return torch.exp(kept - kept.max())


def _without(allowed: Tensor, own: int) -> Tensor:
    rest = allowed.clone()
    rest[own] = False
    return rest


# ------------------------------------------------------------------------------------------------ other changes
def _structural(lm: LoadedModel, ids: Tensor, items: Sequence[Item], replacement: Replacement) -> Variants:
    """Variants that change the mask, the length or the input embedding; one for each item."""
    plain = _unchanged(ids, len(items))
    if not items:
        return plain
    touched = torch.stack([_touched(ids, item) for item in items])
    if replacement.name == "attention_mask_out":
        return replace(plain, mask=(~touched).long(), touched=touched)
    if replacement.name == "delete":
        filler = pad_id(lm.tokenizer, lm.config)
        count = touched.sum(1)
        # a stable sort brings the tokens that stay to the front
        source = torch.argsort(touched.int(), dim=1, stable=True)
        left = torch.arange(len(ids), device=ids.device) < (len(ids) - count)[:, None]
        rows = torch.where(left, ids[source], torch.full_like(source, 0 if filler is None else filler))
        return replace(plain, ids=rows, mask=left.long(), source=source, touched=touched, removed=count)
    width = embedding_modules(lm.model)[0].weight.shape[1]
    vector = torch.zeros(width, device=lm.device) if replacement.name == "zero_embedding" else mean_embedding(lm)
    return replace(plain, blank=touched, touched=touched, vector=vector)


def _unchanged(ids: Tensor, count: int) -> Variants:
    n = len(ids)
    nothing = torch.zeros(count, n, dtype=torch.bool, device=ids.device)
    return Variants(
        ids=ids.expand(count, n),
        mask=torch.ones(count, n, dtype=torch.int64, device=ids.device),
        source=torch.arange(n, device=ids.device).expand(count, n),
        blank=nothing,
        touched=nothing,
        removed=torch.zeros(count, dtype=torch.int64, device=ids.device),
    )


def _touched(ids: Tensor, item: Item) -> Tensor:
    """[position] boolean, True at the item's positions."""
    found = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    found[list(item.positions)] = True
    return found
