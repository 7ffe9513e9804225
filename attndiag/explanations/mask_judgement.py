"""From who-reaches-whom to named faults.

A fault is named by its shape: one step ahead, everything ahead and nothing behind, one's own position missing, a window
of another width, padding that is read. What a model is *meant* to do is asked of its class and, where that does not
say, of the majority of its layers; `audit(causal=...)` overrides both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attndiag.explanations.findings import Finding
from attndiag.explanations.mask_audit import BatchReach, BlockReach, PaddingReach
from attndiag.explanations.visible import MaskShape, Visible, shape_of
from attndiag.hooks.structure import module_parts
from attndiag.models.load import LoadedModel

_TWO_WAY = ("xlnet", "xlm", "flaubert")
"""Families whose language models look both ways unless the caller hands them a permutation."""


def expected_causal(lm: LoadedModel, visible: Visible, others: list[Visible], told: bool | None) -> bool:
    """Whether this call is meant to hide the future."""
    if visible.kind == "cross" or is_encoder_part(lm, visible.module_name):
        return False
    if told is not None:
        return told
    by_class = causal_by_class(lm)
    if by_class is not None:
        return by_class
    alike = [v for v in others if v.kind == "self" and not is_encoder_part(lm, v.module_name)]
    hiding = sum(_hides_far_future(v) for v in alike)
    return 2 * hiding >= len(alike) > 0


def causal_by_class(lm: LoadedModel) -> bool | None:
    """What the name of the class and its configuration promise; None where they say nothing."""
    config, name = lm.config, type(lm.model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return True  # asked of decoder parts only
    if config is None or getattr(config, "model_type", "") in _TWO_WAY:
        return None
    if any(word in name for word in ("MaskedLM", "PreTraining", "Bidirectional")):
        return None
    if name.endswith(("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")):
        # families that serve as encoders too (they have a masked language model) say which they are
        return bool(vars(config).get("is_decoder", True)) or not _has_masked_model(lm.model)
    return None


def _has_masked_model(model: nn.Module) -> bool:
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return any(name.endswith("ForMaskedLM") for module in modules if module is not None for name in vars(module))


def is_encoder_part(lm: LoadedModel, module_name: str) -> bool:
    """True for modules of the encoder of an encoder-decoder."""
    return bool(getattr(lm.config, "is_encoder_decoder", False)) and "decoder" not in module_parts(module_name)


def judge_masks(visible: list[Visible], meant: Mapping[str, bool]) -> list[Finding]:
    """Faults that the visible keys of an unpadded batch show."""
    groups = _Groups()
    for call in visible:
        if call.kind == "cross":
            continue
        shape = shape_of(call)
        if meant[call.module_name] and not shape.causal:
            if _inverted(call):
                text = "queries read what a causal mask hides and nothing that it shows: the mask is upside down"
                groups.add(call, "inverted_mask", text, {"future_reach": shape.future_reach})
                continue
            ahead = "the next token" if shape.future_reach == 1 else f"up to {shape.future_reach} tokens ahead"
            text = f"queries read {ahead}; with q, k and v of all other positions held fixed they still do"
            groups.add(call, "future_leak", text, {"future_reach": shape.future_reach, "vanishes_when_frozen": False})
        if shape.hidden_heads:
            heads = "all heads" if len(shape.hidden_heads) == call.keys.shape[1] else f"heads {shape.hidden_heads}"
            text = f"queries do not read their own position ({heads})"
            groups.add(call, "hidden_diagonal", text, {"heads": shape.hidden_heads})
        found = _window_fault(call, shape) if meant[call.module_name] else None
        if found is not None:
            groups.add(call, "window_mismatch", *found)
    return groups.findings()


def judge_padded_masks(
    lm: LoadedModel, visible: list[Visible], real: Tensor, side: str, already: list[Finding]
) -> list[Finding]:
    """Faults that the visible keys of a padded batch show; `real` is [row, position], True where tokens are."""
    groups = _Groups()
    known = {(finding.kind, name) for finding in already for name in finding.modules}
    real = real.cpu()
    for call in visible:
        reads_encoder = call.kind == "cross" or is_encoder_part(lm, call.module_name)
        padded_here = reads_encoder or not getattr(lm.config, "is_encoder_decoder", False)
        if not padded_here or call.keys.shape[-1] != real.shape[1] or call.keys.shape[0] != real.shape[0]:
            continue
        keys = call.keys.any(1)  # any head: [row, query_pos, key_pos]
        if keys.shape[1] == real.shape[1] and call.kind == "self":
            keys = keys & real[:, :, None]
        on_padding, on_tokens = keys & ~real[:, None, :], keys & real[:, None, :]
        if not bool(on_padding.any()) or ("inverted_mask", call.module_name) in known:
            continue
        if side == "right" and ("future_leak", call.module_name) in known:
            continue  # padding on the right is the future
        rows = (~real).any(-1)
        if not bool(on_tokens[rows].any()):
            text = f"with {side} padding queries read padding and no token: the mask is upside down"
            groups.add(call, "inverted_mask", text, {"side": side})
        elif ("padding_leak", call.module_name) not in known:
            share = float(on_padding.sum() / (real[:, None, :].expand_as(keys) | on_padding).sum())
            text = f"with {side} padding tokens read padded positions; the mask lets them through"
            groups.add(call, "padding_leak", text, {"side": side, "vanishes_when_frozen": False, "share": share})
    return groups.findings()


def judge_blocks(
    lm: LoadedModel,
    blocks: list[BlockReach],
    visible: list[Visible],
    meant: Mapping[str, bool],
    told: bool | None,
) -> list[Finding]:
    """Blocks that let the future through although their attention does not: tokens are mixed outside the mask."""
    groups = _Groups()
    for block in blocks:
        inside = [v for v in visible if v.module_name.startswith(f"{block.name}.") or v.module_name == block.name]
        own = [v for v in inside if v.kind == "self"]
        causal = any(meant.get(v.module_name, False) for v in own) if own else _default_meant(lm, block.name, told)
        if not causal:
            continue
        ahead = _ahead(block.reach)
        by_mask = max((shape_of(v).future_reach for v in own), default=0)
        if ahead > by_mask:
            text = (
                f"an output depends on states up to {ahead} positions ahead, while the mask lets through "
                f"{by_mask or 'none'}; with q, k and v held fixed the leak vanishes, so something else in the block "
                "mixes tokens"
            )
            groups.add_named(block.name, block.layer, "upstream_mix", text, {
                "future_reach": ahead, "vanishes_when_frozen": True,
            })  # fmt: skip
    return groups.findings()


def judge_tokens(
    lm: LoadedModel, reach: Tensor, meant: Mapping[str, bool], told: bool | None, already: list[Finding]
) -> list[Finding]:
    """A leak of the whole model that no block and no mask explains."""
    ahead = _ahead(reach)
    decoder = {name: value for name, value in meant.items() if not is_encoder_part(lm, name)}
    causal = all(decoder.values()) if decoder else _default_meant(lm, "", told)
    if not causal or ahead == 0 or any(f.kind in ("future_leak", "inverted_mask", "upstream_mix") for f in already):
        return []
    text = f"outputs depend on tokens up to {ahead} positions ahead; no block does, so it happens before or after them"
    return [Finding("upstream_mix", (), (), text, {"future_reach": ahead, "vanishes_when_frozen": True})]


def judge_batch(batch: BatchReach) -> list[Finding]:
    """Rows of a batch that reach each other."""
    if batch.output_change <= batch.noise:
        return []
    where = f"first seen in {batch.first_block}" if batch.first_block else "outside of the blocks"
    text = f"other rows of the batch change an output by {batch.output_change:.1e} of its size, {where}"
    modules = () if batch.first_block is None else (batch.first_block,)
    layers = () if batch.layer is None else (batch.layer,)
    return [Finding("batch_leak", modules, layers, text, {
        "change": batch.output_change, "vanishes_when_frozen": True,
    })]  # fmt: skip


def judge_padding(found: PaddingReach, already: list[Finding]) -> list[Finding]:
    """Padding that reaches real positions although no mask lets it, and padded queries that reach pooled outputs."""
    findings: list[Finding] = []
    # these reach across padding as they reach across anything
    across = {"padding_leak", "inverted_mask", "upstream_mix", "batch_leak"}
    if found.side == "right":
        across.add("future_leak")  # padding on the right is the future
    explained = any(f.kind in across for f in already)
    evidence = {"side": found.side, "noise": found.noise}
    if not explained and found.embedding_change is not None and found.embedding_change > found.noise:
        text = (
            f"what stands in {found.side} padding changes outputs at tokens by {found.embedding_change:.1e} of their "
            "size, while no mask lets it through"
        )
        change = {"change": found.embedding_change, "vanishes_when_frozen": True}
        findings.append(Finding("padding_leak", (), (), text, {**evidence, **change}))
    changes = found.unpadded_change
    # positions that a model does not take from its caller shift under left padding: a limit, not a leak
    if not findings and not explained and changes is not None and changes > 50 * found.noise and found.side == "right":
        text = f"{found.side} padding changes outputs at tokens by {changes:.1e} of their size"
        findings.append(Finding("padding_variance", (), (), text, {**evidence, "change": changes}))
    moved = found.query_change is not None and found.query_change > found.noise
    # a pooler that reads position 0 is sound where position 0 is a token: a limit, see `padding_limits`
    names = found.pooled_moved if found.side == "right" and not findings else ()
    if not explained and (moved or names):
        listed = f" ({', '.join(names)})" if names else ""
        text = f"what padded positions hold behind the last block changes outputs{listed or ' at tokens'}"
        findings.append(Finding("padded_query_leak", (), (), text, {**evidence, "change": found.query_change}))
    return findings


def padding_limits(found: PaddingReach) -> str:
    """What must not be done with a model that is sound; empty where there is nothing to say."""
    if found.side == "right":
        return ""
    said = []
    if found.pooled_moved:
        said.append(f"{', '.join(found.pooled_moved)} is read off padded positions: pad on the right")
    if found.unpadded_change is not None and found.unpadded_change > 50 * found.noise:
        said.append(f"left padding shifts positions (outputs move by {found.unpadded_change:.1e}): pad on the right")
    return "; ".join(said)


class _Groups:
    """Findings of one kind and one text, over all the modules where they were seen."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[list[str], list[int], dict]] = {}

    def add(self, call: Visible, kind: str, text: str, evidence: dict) -> None:
        self.add_named(call.module_name, call.layer, kind, text, evidence)

    def add_named(self, name: str, layer: int | None, kind: str, text: str, evidence: dict) -> None:
        names, layers, _ = self._found.setdefault((kind, text), ([], [], evidence))
        if name not in names:
            names.append(name)
        if layer is not None and layer not in layers:
            layers.append(layer)

    def findings(self) -> list[Finding]:
        return [
            Finding(kind, tuple(names), tuple(sorted(layers)), text, evidence)  # type: ignore[arg-type]
            for (kind, text), (names, layers, evidence) in self._found.items()
        ]


def _inverted(call: Visible) -> bool:
    """None of the keys that a causal mask (with the window that the kernel was told) lets through, and the future."""
    keys = call.keys.any(1)
    if call.query_valid is not None:
        keys = keys & call.query_valid[:, :, None].bool()
    n_queries, n_keys = keys.shape[-2:]
    distance = torch.arange(n_keys - n_queries, n_keys)[:, None] - torch.arange(n_keys)[None, :]
    meant = (distance >= 0) & (distance < (call.window or n_keys))
    # the last query has no key left, and frameworks disagree about such rows
    return not bool(keys[:, :-1][:, meant[:-1]].any()) and bool(keys[:, distance < 0].any())


def _window_fault(call: Visible, shape: MaskShape) -> tuple[str, dict] | None:
    n_keys = call.keys.shape[-1]
    told = call.window
    if told is None or told >= n_keys - 1 or shape.chunk is not None:
        return None
    seen = shape.window if shape.window is not None else min(shape.past_reach + 1, n_keys)
    if seen == told:
        return None
    much = f"{seen} keys" if shape.window is not None else f"all {n_keys} keys of the probe"
    text = f"a window of {told} keys is configured and queries read {much}"
    return text, {"configured": told, "seen": seen, "vanishes_when_frozen": False}


def _hides_far_future(call: Visible) -> bool:
    n_queries, n_keys = call.keys.shape[-2:]
    far = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(2 + n_keys - n_queries)
    return bool(far.any()) and float(call.keys.any(1)[:, far].float().mean()) < 0.1


def _default_meant(lm: LoadedModel, name: str, told: bool | None) -> bool:
    if is_encoder_part(lm, name) and name:
        return False
    return bool(causal_by_class(lm)) if told is None else told


def _ahead(reach: Tensor) -> int:
    """How far an earlier position is reached by a later one."""
    changed, observed = reach.nonzero(as_tuple=True)
    return int((changed - observed).max().clamp_min(0)) if len(changed) else 0
