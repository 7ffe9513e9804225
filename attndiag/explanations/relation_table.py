"""The table of one relation: every head's mass and share against both rules, and knock-outs of the edge.

Filled by `relation_probe.probe_relation`, which says what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from attndiag.core.relations import Pair, RelationMass, pools, relation_mass
from attndiag.errors import NotApplicableError, TargetError, UnsupportedModelError
from attndiag.explanations.head_ablation import Head
from attndiag.explanations.head_table import HeadTable, Measure, NotMeasurable, Rows, half_width, labels_of
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.hooks.edit_kinds import Knockout
from attndiag.hooks.edits import edit
from attndiag.models.encoding import Encoded
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target

Key = tuple[str, int, int | None]
Progress = Callable[[str, int, int], None]

RELATION_MEASURES = {
    measure.name: measure
    for measure in (
        Measure("relation_mass", "mass", "relation"),
        Measure("relation_mass_best_offset", "mass", "relation"),
        Measure("relation_mass_shuffled", "mass", "relation"),
        Measure("relation_share", "share", "relation"),
        Measure("relation_share_best_offset", "share", "relation"),
        Measure("relation_share_shuffled", "share", "relation"),
        Measure("relation_offset", "tokens", "relation", signed=True),
        Measure("relation_p", "probability", "relation"),
        Measure("relation_p_any", "probability", "relation"),
        Measure("relation_effect", "", "relation", signed=True),
        Measure("relation_effect_shuffled", "", "relation", signed=True),
    )
}


@dataclass(eq=False)
class SeenPair:
    """One prompt on the way: its pair, and the query's row in every attention call."""

    prompt: Prompt
    encoded: Encoded
    pair: Pair
    sinks: Tensor
    masses: dict[Key, Tensor] = field(default_factory=dict)
    shares: dict[Key, Tensor] = field(default_factory=dict)
    visible: dict[Key, Tensor] = field(default_factory=dict)

    @property
    def usable(self) -> Tensor:
        """[key_pos] bool: keys that some layer shows the query, sinks left out."""
        return torch.stack(list(self.visible.values())).any(dim=0) & ~self.sinks


@dataclass(eq=False)
class RelationTable:
    """Turns what was seen into the measures of every head."""

    lm: LoadedModel
    name: str
    seen: list[SeenPair]
    left_out: dict[str, str]
    keys: list[Key]
    reasons: dict[tuple[str, Any], str]
    mode: Literal["remove", "renormalize"]
    target: Target | None
    seed: int

    def measure(self, draws: int, knock_out: int, progress: Progress | None) -> HeadTable:
        """Masses and shares of all heads at once (p_any is over all of them), then the knock-outs."""
        labels = labels_of(self.keys)
        rows: dict[str, Rows] = {}
        measured = [key for key in self.keys if all(key in seen.masses for seen in self.seen)]
        for key in list(measured):
            hidden = [s for s in self.seen if not bool(s.visible[key][s.pair.start : s.pair.stop].all())]
            if hidden:
                measured.remove(key)
                self.reasons["relation", key] = (
                    f"its window hides the related tokens in {len(hidden)} of {len(self.seen)} prompts"
                )
        if not measured:
            raise NotApplicableError(
                f"the relation {self.name} can be measured in no layer: {set(self.reasons.values())}"
            )
        self._collect(rows, measured, "masses", "relation_mass", draws)
        with_shares = [key for key in measured if all(key in seen.shares for seen in self.seen)]
        if with_shares:
            self._collect(rows, with_shares, "shares", "relation_share", draws)
        facts: dict[str, Any] = {
            "relation": self.name,
            "pairs": len(self.seen),
            "clusters": len({seen.prompt.cluster or prompt_label(seen.prompt) for seen in self.seen}),
            "distances": sorted({seen.pair.distance for seen in self.seen}),
            "left_out": dict(self.left_out),
        }
        unit = ""
        if knock_out > 0:
            unit, more = self._knock_out(rows, measured, knock_out, progress)
            facts |= more
        info = {"model": self.lm.info.name, "architecture": self.lm.info.architecture, "dtype": self.lm.info.dtype}
        scores = {}
        for name, measure in RELATION_MEASURES.items():
            if name in rows:
                with_unit = measure if measure.unit else replace(measure, unit=unit)
                scores[name] = rows[name].table(with_unit, labels, input=f"{len(self.seen)} prompts", **info)
        missing = tuple(
            NotMeasurable(probe, labels[key], reason) for (probe, key), reason in self.reasons.items() if key
        )
        whole = tuple(NotMeasurable(probe, None, reason) for (probe, key), reason in self.reasons.items() if not key)
        return HeadTable(scores, whole + missing, facts)

    def _collect(self, rows: dict[str, Rows], keys: list[Key], what: str, name: str, draws: int) -> None:
        heads = [getattr(self.seen[0], what)[key].shape[0] for key in keys]
        joined = [torch.cat([getattr(seen, what)[key] for key in keys]) for seen in self.seen]
        found = relation_mass(
            joined, [s.pair for s in self.seen], [s.usable for s in self.seen], draws=draws, seed=self.seed
        )
        parts = {
            "": found.mass,
            "_best_offset": found.best_offset[None],
            "_shuffled": found.shuffled[None],
        }
        if name == "relation_mass":
            if not found.alternatives:
                self.reasons["relation_shuffled", None] = (
                    f"every pair has the same distance, {self.seen[0].pair.distance} tokens: the relation cannot be "
                    "told from a fixed offset on these prompts"
                )
            self._collect_mass_only(rows, keys, heads, found)
        for suffix, values in parts.items():
            for key, part in zip(keys, values.split(heads, dim=1), strict=True):
                beside = self._beside(key) if suffix == "" and name == "relation_mass" else {}
                rows.setdefault(name + suffix, Rows()).add(key, part, **beside)

    def _collect_mass_only(self, rows: dict[str, Rows], keys: list[Key], heads: list[int], found: RelationMass) -> None:
        for name, values in (("offset", found.offset), ("p", found.p), ("p_any", found.p_any)):
            for key, part in zip(keys, values[None].split(heads, dim=1), strict=True):
                rows.setdefault(f"relation_{name}", Rows()).add(key, part)

    def _beside(self, key: Key) -> dict[str, Tensor]:
        """What a uniform row would give, and the sinks' mass of the same queries, by prompt."""
        uniform = [s.pair.width / max(1, int(s.visible[key].sum())) for s in self.seen]
        sinks = [s.masses[key][:, s.sinks].sum(dim=1) for s in self.seen]
        return {"baseline": torch.tensor(uniform), "sink_mass": torch.stack(sinks)}

    def _knock_out(
        self, rows: dict[str, Rows], keys: list[Key], count: int, progress: Progress | None
    ) -> tuple[str, dict[str, Any]]:
        """Effects of the edge of the heads with the most mass; beside each, an edge of the same head elsewhere."""
        means = {key: torch.cat(rows["relation_mass"].values[key]).mean(dim=0) for key in keys if key[2] is not None}
        numbers = [key[2] for key in means]
        if len(set(numbers)) != len(numbers) or not means:
            self.reasons["relation_effect", None] = "its layers have no numbers of their own, so no edge can be named"
            return "", {}
        ranked = sorted(((value, key, h) for key, row in means.items() for h, value in enumerate(row.tolist())),
                        key=lambda item: -item[0])[:count]  # fmt: skip
        try:
            resolved = [resolve_target(self.lm, seen.prompt, self.target) for seen in self.seen]
        except TargetError as error:
            self.reasons["relation_effect", None] = str(error)
            return "", {}
        units = {each.unit for each in resolved}
        if len(units) > 1:
            self.reasons["relation_effect", None] = f"targets are in {' and '.join(sorted(units))}; give one target="
            return "", {}
        chosen = [(key[2], head) for _, key, head in ranked]
        elsewhere = self._elsewhere()
        effects = torch.full((len(self.seen), len(chosen)), torch.nan, dtype=torch.float64)
        controls, together = effects.clone(), effects[:, :1].clone()
        for index, (seen, each, other) in enumerate(zip(self.seen, resolved, elsewhere, strict=True)):
            clean = self._m(each, [], seen.pair)
            for column, head in enumerate(chosen):
                effects[index, column] = clean - self._m(each, [head], seen.pair)
                if other is not None:
                    controls[index, column] = clean - self._m(each, [head], other)
            together[index, 0] = clean - self._m(each, chosen, seen.pair)
            if progress is not None:
                progress(f"knocking out {self.name}", index + 1, len(self.seen))
        for key in dict.fromkeys(key for _, key, _ in ranked):
            here = [(column, head) for column, (_, k, head) in enumerate(ranked) if k == key]
            n_heads = len(means[key])
            for name, values in (("relation_effect", effects), ("relation_effect_shuffled", controls)):
                known = values if name == "relation_effect" else values[~values.isnan().any(dim=1)]
                if not len(known):
                    continue
                full = torch.full((len(known), n_heads), torch.nan, dtype=torch.float64)
                for column, head in here:
                    full[:, head] = known[:, column]
                rows.setdefault(name, Rows()).add(key, full)
        mean, half = together.mean().item(), half_width(together)[0].item()
        return resolved[0].unit, {
            "knocked_out": chosen,
            "effect_together": mean,
            "effect_together_low": mean - half,
            "effect_together_high": mean + half,
            "mode": self.mode,
        }

    def _elsewhere(self) -> list[Pair | None]:
        """For each prompt a block of the same width at another pair's distance that shares no key with the related."""
        generator = torch.Generator().manual_seed(self.seed)
        found: list[Pair | None] = []
        for seen, pool in zip(
            self.seen, pools([s.pair for s in self.seen], [s.usable for s in self.seen]), strict=True
        ):
            apart = [seen.pair.at(d) for d in pool if abs(d - seen.pair.distance) >= seen.pair.width]
            pick = int(torch.randint(max(1, len(apart)), (1,), generator=generator))
            found.append(apart[pick] if apart else None)
        return found

    def _m(self, resolved: ResolvedTarget, heads: Sequence[Head], pair: Pair) -> float:
        keys = list(range(pair.start, pair.stop))
        edits = [Knockout(layer, head, pair.query, keys, mode=self.mode) for layer, head in heads]
        with torch.no_grad(), edit(self.lm, *edits) if edits else nullcontext():
            value = float(resolved.value(self.lm.run(resolved.inputs))[0])
        if math.isnan(value):
            raise UnsupportedModelError("the target is not a number on one of the prompts")
        return value
