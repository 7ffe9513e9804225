"""Score many variants of one prompt: batches with their own unedited row, each distinct variant once, shared prefixes.

1. Equal variants are scored once; one that equals the prompt is not scored at all: its effect is exactly 0.
2. Variants are sorted by the first position at which they differ from the prompt and batched. Every batch holds the
   unedited prompt as its first row, and effects are differences within the batch, so what a batch's shape does to the
   rounding of one row it does to the other.
3. A causal model cannot feel a later change earlier, so a batch starts at its first changed position, on the keys and
   values that the unedited run left before it. Whether this gives the same m is measured on one variant first; where
   it does not, whole forwards are used and the record says why.
4. Logits are computed where the target reads them; everywhere only when the later tokens' losses are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from attndiag.errors import ShapeError, UnsupportedModelError
from attndiag.explanations.forwarding import NO_SEQUENCE_LOGITS, editing_embeddings
from attndiag.explanations.resolved import ResolvedTarget, logits_of
from attndiag.hooks.structure import MODEL_CACHE_NAMES
from attndiag.models.access import accepts
from attndiag.models.load import LoadedModel

PREFIX_TOLERANCE = 1e-5
"""How far m may be off with a shared prefix, relative to the size of the logits that it is read from (float32)."""


@dataclass(frozen=True, eq=False)
class Variants:
    """Changed versions of one prompt of n tokens; all tensors on the model's device.

    Attributes
    ----------
    ids : [variant, position]. mask : [variant, position], 1 where a token may be attended to.
    source : [variant, position], which token of the prompt stands here (for deleted tokens the rest moves left).
    blank : [variant, position] boolean, where the input embedding is replaced by `vector`.
    touched : [variant, position] boolean, in positions of the prompt: the tokens that were replaced.
    removed : [variant], how many tokens were taken out; that many places at the end are padding.
    vector : [d_model], what stands at blank places.
    """

    ids: Tensor
    mask: Tensor
    source: Tensor
    blank: Tensor
    touched: Tensor
    removed: Tensor
    vector: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def key(self) -> Tensor:
        """[variant, ...] whole numbers: equal rows are the same variant."""
        key = torch.cat([self.ids, self.mask, self.blank.long()], dim=1)
        # taking out either of two equal neighbours leaves the same text, but other tokens were touched
        return torch.cat([key, self.touched.long()], dim=1) if bool(self.removed.any()) else key

    def take(self, rows: Tensor) -> Variants:
        """Some of the variants."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _ROWS})


_ROWS = ("ids", "mask", "source", "blank", "touched", "removed")


@dataclass(eq=False)
class VariantScores:
    """What was measured, one entry a variant (on the CPU).

    Attributes
    ----------
    effect : m(prompt) - m(variant), within one batch. clean : m(prompt) of that batch.
    flips : whether the first choice at the target changed; nan for targets without one.
    ood : mean rise of the loss of the untouched tokens after the first change, nats; nan where there is none.
    rows : variants that were run (repeats and unchanged ones are not).
    prefix : how prefixes were treated, in words.
    """

    effect: Tensor
    clean: Tensor
    flips: Tensor
    ood: Tensor
    rows: int = 0
    prefix: str = ""


@dataclass(frozen=True, eq=False)
class _Measured:
    """One forward: m and first choice of each row, losses [row, position] of the tokens from `start` + 1 on."""

    value: Tensor
    top: Tensor
    losses: Tensor | None
    scale: float = field(default=1.0)


class _SharedPrefix(DynamicLayer):
    """Keys and values of one prompt before some position, the same for every row; nothing is kept that follows."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._prefix = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Prefix and new states in one row after the other; the prefix itself stays as it is."""
        rows, (keys, values) = key_states.shape[0], self._prefix
        return (
            torch.cat([keys.expand(rows, -1, -1, -1), key_states], dim=-2),
            torch.cat([values.expand(rows, -1, -1, -1), value_states], dim=-2),
        )


class VariantScorer:
    """Scores variants of one prompt (a resolved batch of one, without padding)."""

    def __init__(self, lm: LoadedModel, resolved: ResolvedTarget, *, losses: bool, reuse_prefix: bool) -> None:
        if len(resolved) != 1 or resolved.encoded.ragged:
            raise ShapeError(f"variants are scored for one unpadded prompt, got {len(resolved)} rows")
        self.lm = lm
        self.resolved = resolved
        self.ids = resolved.encoded.input_ids[0]
        self.causal_logits = resolved.kind not in NO_SEQUENCE_LOGITS and resolved.encoded.decoder is None
        self.losses = losses and self.causal_logits
        self.prefix = "not asked for"
        self._cache: list[tuple[Tensor, Any]] | None = None
        self._checked = False
        self._gives_positions: bool | None = None
        self._cache_argument = next((name for name in MODEL_CACHE_NAMES if accepts(lm.model, name)), "")
        if reuse_prefix:
            self._record_prefix()

    # ------------------------------------------------------------------------------------------------ scoring
    def score(self, variants: Variants, *, batch_size: int | None = None, per_place: int = 1) -> VariantScores:
        """Effects of all variants, in their order; `per_place` of them start at one position."""
        n = len(self.ids)
        count = len(variants)
        result = VariantScores(
            effect=torch.zeros(count, dtype=torch.float64),
            clean=torch.full((count,), torch.nan, dtype=torch.float64),
            flips=torch.zeros(count, dtype=torch.float64),
            ood=torch.zeros(count, dtype=torch.float64),
        )
        key = variants.key
        distinct, place = torch.unique(key, dim=0, return_inverse=True)
        first_of = torch.full((len(distinct),), count, dtype=torch.int64, device=key.device)
        first_of = first_of.scatter_reduce(0, place, torch.arange(count, device=key.device), "amin")
        changed = (variants.ids != self.ids) | (variants.mask == 0) | variants.blank
        starts = torch.where(changed.any(1), changed.int().argmax(1), n)
        todo = [int(index) for index in first_of.tolist() if int(starts[index]) < n]
        todo.sort(key=lambda index: int(starts[index]))
        size = self._rows_at_once(batch_size, per_place)
        done: dict[int, tuple[float, float, float, float]] = {}
        for begin in range(0, len(todo), size):
            some = torch.tensor(todo[begin : begin + size], device=key.device)
            found = self._batch(variants.take(some), int(starts[some].min()))
            done.update(zip(some.tolist(), found, strict=True))
        unchanged = self._unchanged() if len(todo) < len(distinct) else (0.0, torch.nan, torch.nan, torch.nan)
        for index, group in enumerate(place.tolist()):
            values = done.get(int(first_of[group]), unchanged)
            result.effect[index], result.clean[index], result.flips[index], result.ood[index] = values
        result.rows = len(todo)
        result.prefix = self.prefix
        return result

    def _unchanged(self) -> tuple[float, float, float, float]:
        """The prompt itself: no effect, no flip, no rise of any loss."""
        value = float(self._forward(self._clean(1), 0).value[0])
        return 0.0, value, torch.nan if self.resolved.kind == "cosine" else 0.0, 0.0 if self.losses else torch.nan

    def _batch(self, variants: Variants, start: int) -> list[tuple[float, float, float, float]]:
        rows = self._with_clean(variants)
        if self.losses and bool(variants.removed.any()):
            start = max(start - 1, 0)  # the token that moves into the gap is foretold by the one before it
        start = self._usable_start(rows, start)
        found = self._forward(rows, start)
        effect = (found.value[0] - found.value[1:]).double()
        flips = (found.top[1:] != found.top[0]).double()
        if self.resolved.kind == "cosine":
            flips = torch.full_like(flips, torch.nan)
        ood = (
            self._rise(found.losses, variants, start)
            if found.losses is not None
            else torch.full_like(effect, torch.nan)
        )
        clean = found.value[:1].double().expand_as(effect)
        return list(zip(effect.tolist(), clean.tolist(), flips.tolist(), ood.tolist(), strict=True))

    def _rise(self, losses: Tensor, variants: Variants, start: int) -> Tensor:
        """[variant], mean over untouched tokens after the first touched one of their loss minus the prompt's."""
        n, source, touched = len(self.ids), variants.source.cpu(), variants.touched.cpu()
        clean = torch.full((n,), torch.nan, dtype=torch.float64)
        clean[start + 1 :] = losses[0]
        own = torch.full((len(variants), n), torch.nan, dtype=torch.float64)
        own[:, start + 1 :] = losses[1:]
        # the loss of the token that now stands at i is that of token source[i] of the prompt
        rise = own - clean[source]
        first = touched.int().argmax(1, keepdim=True)
        counts = (source > first) & ~touched.gather(1, source)
        counts &= torch.arange(n) < (n - variants.removed.cpu())[:, None]
        counts &= ~torch.isnan(rise)
        number = counts.sum(1)
        total = rise.masked_fill(~counts, 0.0).sum(1)
        return torch.where(number > 0, total / number, torch.nan)

    # --------------------------------------------------------------------------------------------- forwards
    def _clean(self, rows: int) -> Variants:
        n = len(self.ids)
        device = self.ids.device
        nothing = torch.zeros(rows, n, dtype=torch.bool, device=device)
        return Variants(
            ids=self.ids.expand(rows, n),
            mask=torch.ones(rows, n, dtype=torch.int64, device=device),
            source=torch.arange(n, device=device).expand(rows, n),
            blank=nothing,
            touched=nothing,
            removed=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def _with_clean(self, variants: Variants) -> Variants:
        """The prompt itself in front of its variants."""
        clean = self._clean(1)
        joined = {name: torch.cat([getattr(clean, name), getattr(variants, name)]) for name in _ROWS}
        return Variants(**joined, vector=variants.vector)

    def _forward(self, rows: Variants, start: int) -> _Measured:
        """Run the rows from `start` on (0: whole), and read m."""
        resolved, encoded = self.resolved, self.resolved.encoded
        count = len(rows)
        inputs: dict[str, Any] = {
            name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in encoded.inputs.items()
        }
        inputs |= {"input_ids": rows.ids[:, start:], "attention_mask": rows.mask}
        if encoded.token_type_ids is not None:
            inputs["token_type_ids"] = encoded.token_type_ids[0][rows.source][:, start:]
        if self._keeps_places(rows):
            inputs["position_ids"] = torch.arange(start, len(self.ids), device=self.ids.device).expand(count, -1)
        if start:
            inputs |= {self._cache_argument: self._prefix_cache(start), "use_cache": True}
        positions = self._positions(rows)
        keep = None
        if (
            self.causal_logits
            and positions is not None
            and not self.losses
            and accepts(self.lm.model, "logits_to_keep")
        ):
            keep = torch.unique(positions)
            inputs["logits_to_keep"] = keep - start
        output = self._run(inputs, rows, start)
        if resolved.kind in NO_SEQUENCE_LOGITS or positions is None:
            changed = replace(resolved, encoded=replace(encoded, input_ids=rows.ids, attention_mask=rows.mask))
            value = changed.value(output)
            top = torch.zeros(count, dtype=torch.int64)
            if resolved.kind == "class_logit":
                top = logits_of(output, resolved.kind).argmax(-1).cpu()
            return _Measured(value.cpu(), top, None)
        logits = logits_of(output, resolved.kind)
        if keep is not None and logits.shape[1] == len(keep):
            places = torch.searchsorted(keep, positions)
        else:
            places = positions - start
        index = torch.arange(count, device=logits.device)[:, None]
        read = logits[index, places.to(logits.device)]
        losses = self._losses(logits, rows, start) if self.losses else None
        return _Measured(resolved.measure(read).cpu(), read[:, 0].argmax(-1).cpu(), losses, float(read.abs().max()))

    def _run(self, inputs: dict[str, Any], rows: Variants, start: int) -> Any:
        blank = rows.blank[:, start:]
        if not bool(blank.any()) or rows.vector is None:
            return self.lm.run(inputs)
        vector = rows.vector

        def edit(own: Tensor) -> Tensor:
            return torch.where(blank[..., None], vector.to(own), own)

        with editing_embeddings(self.lm.model, inputs["input_ids"], edit):
            return self.lm.run(inputs)

    def _losses(self, logits: Tensor, rows: Variants, start: int) -> Tensor:
        """[row, position], loss in nats of each token after `start`; row by row, so that no second copy is made."""
        found = []
        for row in range(len(rows)):
            before = logits[row, :-1].float()
            chosen = before.gather(-1, rows.ids[row, start + 1 :, None].to(before.device))[:, 0]
            found.append((torch.logsumexp(before, dim=-1) - chosen).cpu().double())
        return torch.stack(found)

    def _positions(self, rows: Variants) -> Tensor | None:
        """[row, step], where m is read: tokens taken out before a place move it to the left."""
        positions = self.resolved.positions
        if positions is None:
            return None
        positions = positions.expand(len(rows), -1)
        if self.resolved.encoded.decoder is not None:
            return positions
        gone = (rows.touched & (rows.removed > 0)[:, None]).cumsum(1)
        return positions - gone.gather(1, positions)

    def _keeps_places(self, rows: Variants) -> bool:
        """Whether position ids must be given, so that a masked token keeps its place where models count the mask."""
        masked_inside = bool((rows.mask.sum(1) + rows.removed < len(self.ids)).any())
        if not masked_inside or not accepts(self.lm.model, "position_ids"):
            return False
        if self._gives_positions is None:
            # some families count from another number: then their positions come from the ids and need no help
            self._gives_positions = False
            plain = self._forward(self._clean(1), 0)
            inputs = dict(self.resolved.inputs)
            inputs["position_ids"] = torch.arange(len(self.ids), device=self.ids.device)[None]
            given = self.resolved.value(self.lm.run(inputs)).cpu()
            self._gives_positions = bool((given - plain.value).abs().max() <= PREFIX_TOLERANCE * plain.scale)
        return self._gives_positions

    # --------------------------------------------------------------------------------------------- prefixes
    def _record_prefix(self) -> None:
        """Keep the keys and values of the unedited run, where the model has them to give."""
        model = self.lm.model
        if not self.causal_logits or not self._cache_argument or not accepts(model, "use_cache"):
            self.prefix = "whole forwards: the model or target has no key/value cache to share"
            return
        cache = DynamicCache()
        try:
            inputs = {**self.resolved.inputs, self._cache_argument: cache}
            self.lm.run(inputs, use_cache=True, **self._one_logit())
            kept = [(layer.keys, layer.values) for layer in cache.layers if isinstance(layer.keys, Tensor)]
            whole = len(kept) == len(cache.layers) and all(k.shape[-2] == len(self.ids) for k, _ in kept)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            self.prefix = f"whole forwards: the model does not fill a plain cache ({type(error).__name__}: {error})"
            return
        if not kept or not whole:
            self.prefix = "whole forwards: some layers keep no keys of the whole prompt"
            return
        self._cache = kept
        self.prefix = "kept, and not needed: no batch starts after the first token"

    def _one_logit(self) -> dict[str, Any]:
        return {"logits_to_keep": 1} if accepts(self.lm.model, "logits_to_keep") else {}

    def _prefix_cache(self, start: int) -> DynamicCache:
        if self._cache is None:
            raise UnsupportedModelError("a prefix was asked for and none was recorded")
        cache = DynamicCache()
        cache.layers = [_SharedPrefix(keys[:, :, :start], values[:, :, :start]) for keys, values in self._cache]
        return cache

    def _usable_start(self, rows: Variants, start: int) -> int:
        """`start` where prefixes are shared; 0 where they are not, or turn out to change m."""
        if self._cache is None or start == 0:
            return 0
        if not self._checked:
            self._checked = True
            two = rows.take(torch.tensor([0, len(rows) - 1], device=rows.ids.device))
            try:
                shared = self._forward(two, start)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
                self._refuse(f"{type(error).__name__}: {error}")
                return 0
            whole = self._forward(two, 0)
            off = float((shared.value - whole.value).abs().max()) / max(whole.scale, 1e-30)
            loose = next(self.lm.model.parameters()).dtype in (torch.bfloat16, torch.float16)
            if off > PREFIX_TOLERANCE * (1e3 if loose else 1):
                self._refuse(f"m differs by {off:.1e} of the logits' size")
                return 0
            self.prefix = f"shared (checked: {off:.1e} of the logits' size)"
        return start

    def _refuse(self, why: str) -> None:
        self._cache = None
        self.prefix = f"whole forwards: a shared prefix does not give the same m ({why})"

    def _rows_at_once(self, batch_size: int | None, per_place: int) -> int:
        """Variants in one batch, the unedited row not counted."""
        if batch_size is not None:
            if batch_size < 1:
                raise ValueError(f"batch_size is {batch_size}; expected at least 1")
            return batch_size
        n = len(self.ids)
        size = min(32, max(8, 4096 // n))
        if self._cache is not None:  # a batch costs from its first change on: eight positions at a time
            size = min(size, 8 * per_place)
        if self.losses:  # all logits of all rows are held at once: half a gigabyte of float32
            size = min(size, max(1, 2**27 // (n * self.lm.vocabulary)))
        return size
