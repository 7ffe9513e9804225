"""`heads`: what every head of a model does on probes made for it.

Each probe answers one question and says what it is read against:

| probe | input | measures |
|---|---|---|
| `induction` | random tokens, twice | `prefix_matching_score`, losses of the two copies |
| `duplicate` | random tokens, twice | `duplicate_token_score` |
| `previous`, `current` | plain text | `previous_token_score`, `current_token_score` |
| `sink` | plain text | `sink_mass`, `sink_contribution_share`, `sink_norm_ratio`, `sink_rate` (layer) |
| `entropy` | plain text | `entropy`, `effective_support` |
| `output` | plain text | `relative_output_norm` (dormant heads are near 0) |
| `redundancy` | plain text | `redundancy` (head, other_head), `largest_similarity` |
| `copying` | weights | `copying_score` of the direct path |
| `composition` | weights | `q_composition`, `k_composition`, `v_composition` (head, earlier head) |

Layers are handled one at a time while the model runs, so the patterns of one layer are in memory at most. Where a
probe does not apply, the head is nan and the reason is in `not_measurable`: never a low score that looks measured.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attndiag.core.probes import SHORTEST
from attndiag.errors import NotApplicableError, UndefinedScoreWarning, UnsupportedModelError
from attndiag.explanations.head_ablation import (
    WAYS,
    Ablation,
    Head,
    NamedSet,
    Way,
    ablate_sets,
    copy_losses,
)
from attndiag.explanations.head_ablation_plan import plan_sets
from attndiag.explanations.head_circuits import output_value_circuits
from attndiag.explanations.head_composition import composition_scores, facts_of
from attndiag.explanations.head_inputs import HeadInput, induction_input, text_input, trained_context
from attndiag.explanations.head_measures import MEASURES, ON_TOKENS, ON_WEIGHTS, PROBES, View, measures, ranking_measure
from attndiag.explanations.head_table import HeadTable, NotMeasurable, Rows, SetEffect, labels_of
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.models.access import evaluating
from attndiag.models.load import LoadedModel, load
from attndiag.scores import Scores

Progress = Callable[[str, int, int], None]
Key = tuple[str, int, int | None]
EFFECTS: dict[Way, str] = dict(
    zip(WAYS, ("ablation_effect", "mean_ablation_effect", "ablation_effect_patterns_kept"), strict=True)
)


def heads(
    lm: LoadedModel | nn.Module,
    *,
    probes: Sequence[str] = ("induction", "previous"),
    ablate: int = 0,
    ablate_by: str = "prefix_matching",
    rows: int = 64,
    length: int = 50,
    seed: int = 0,
    bos: bool | None = None,
    texts: Sequence[str] | None = None,
    threshold: float = 0.4,
    ablation_rows: int = 4,
    progress: Progress | None = None,
) -> HeadTable:
    """Scores of every attention head, and the effect of taking the strongest induction heads away.

    Parameters
    ----------
    lm : a loaded model or any module that reads token ids.
    probes : out of `induction duplicate previous current sink entropy output redundancy copying
        composition`.
    ablate : how many heads, the highest scores first, are taken away one at a time; with any, the set above
        `threshold` as well, together, and 20 random sets of its size. See `explanations.head_ablation`.
    ablate_by : the score that says which: `prefix_matching`, `previous_token`, `sink`, or the name of any measure of
        single heads whose probe is asked for. `effect` takes every head away by itself first (one forward each).
    rows : random rows of the induction probe (and of the text probes for a model without a tokenizer).
    length : tokens a copy; shortened to what the trained context and the sliding window allow, which `facts` says.
    seed : of the random rows.
    bos : put BOS before random rows. None: where the model has one.
    texts : for the text probes; built-in English paragraphs by default.
    threshold : score above which a head belongs to the set that is ablated together; where `ablate_by` is no mass and
        no share, that set is the `ablate` highest.
    ablation_rows : rows of the induction probe on which effects are measured.
    progress : called with (what is being done, steps done, steps in all).

    Returns
    -------
    `HeadTable`. Masses in [0, 1] with baseline, sink mass and interval over rows beside them; effects in nats,
    positive where the head helped, in `scores`, those of sets in `sets`.

    Raises
    ------
    NotApplicableError : an unknown probe or score, a score to rank by and nothing to ablate, or ablations without
        the probe `induction`. A ranking score that turns out not to be measurable is told in `not_measurable`, with
        the reason, since the other probes have their numbers.
    UnsupportedModelError : the model reads no token ids.
    NothingCapturedError : the model has no attention that can be captured.
    """
    unknown = [probe for probe in probes if probe not in PROBES]
    if unknown or not probes:
        raise NotApplicableError(f"unknown probes {unknown}; choose out of {', '.join(PROBES)}")
    if rows < 1 or ablation_rows < 1:
        raise NotApplicableError(f"rows is {rows} and ablation_rows {ablation_rows}; expected at least 1")
    if ablate and "induction" not in probes:
        raise NotApplicableError('effects are measured on the induction probe; add "induction" to probes, or ablate=0')
    if not ablate and ablate_by != "prefix_matching":
        raise NotApplicableError(
            f"ablate_by={ablate_by!r} says which heads to take away, but ablate is 0; give ablate=20"
        )
    ranked_by = ranking_measure(ablate_by, probes) if ablate else ""
    loaded = lm if isinstance(lm, LoadedModel) else load(lm)
    survey = _survey(loaded)
    run = _Run(loaded, survey, tuple(probes), progress)
    on_tokens = [probe for probe in probes if probe in ON_TOKENS]
    on_text = [probe for probe in probes if probe not in (*ON_TOKENS, *ON_WEIGHTS)]
    with torch.no_grad():
        if on_tokens:
            make = lambda: induction_input(  # noqa: E731
                loaded, rows=rows, length=length, seed=seed, window=_narrowest(survey, on_tokens, run), bos=bos
            )
            run.measure(on_tokens, make)
        if on_text:
            run.measure(on_text, lambda: text_input(loaded, texts, rows=rows, length=2 * length, seed=seed, bos=bos))
        if "copying" in probes:
            run.measure_weights()
        if "composition" in probes:
            run.measure_composition(seed)
        if ablate:
            run.ablate(ablate, ranked_by, threshold, ablation_rows, seed)
    return run.table()


def survey_input(lm: LoadedModel) -> Tensor:
    """[1, position] different token ids to run a model once, whatever they mean."""
    return torch.arange(min(lm.vocabulary, trained_context(lm) or 64, 64))[None]


def _survey(lm: LoadedModel) -> dict[Key, AttentionCall]:
    """One short forward: which attention calls there are, and what can be said about them before any probe."""
    tokens = survey_input(lm)
    everything = torch.ones_like(tokens, dtype=torch.bool)
    seen: dict[Key, AttentionCall] = {}
    given = HeadInput(tokens, everything, everything, everything, "survey")
    with torch.no_grad(), evaluating(lm.model), capture(lm, on_call=lambda call: seen.update({_key(call): call})):
        lm.run(given.model_inputs(lm))
    return seen


def _key(call: AttentionCall) -> Key:
    return call.module_name, call.call_index, call.layer


def _narrowest(survey: dict[Key, AttentionCall], probes: Sequence[str], run: _Run) -> int | None:
    """The narrowest window that leaves room for a probe; layers with a narrower one are refused."""
    usable: list[int] = []
    narrow = 0
    for key, call in survey.items():
        if call.window is None or call.kind == "cross":
            continue
        if call.window - 1 < SHORTEST:
            narrow += 1
            for probe in probes:
                run.refuse(probe, f"its window of {call.window} keys is shorter than the shortest probe", key)
        else:
            usable.append(call.window)
    if narrow and narrow == len(survey):
        return min(call.window for call in survey.values() if call.window is not None)
    return min(usable, default=None)


class _Run:
    """Collects the measures of one call of `heads`."""

    def __init__(
        self, lm: LoadedModel, survey: dict[Key, AttentionCall], probes: tuple[str, ...], progress: Progress | None
    ) -> None:
        self.lm, self.probes, self.progress = lm, probes, progress
        self.labels = labels_of(list(survey))
        self.rows: dict[str, Rows] = {}
        self.reasons: dict[tuple[str, Any], str] = {}
        self.facts: dict[str, Any] = {}
        self.inputs: dict[str, str] = {}
        self.failures: dict[Key, tuple[str, ...]] = {}
        self.certified: set[Key] = set()
        self.losses: dict[str, list[Tensor]] = {}
        self.induction: HeadInput | None = None
        self.sets: list[SetEffect] = []
        self.pairs: dict[str, Scores] = {}

    def refuse(self, probe: str, reason: str, key: Key | None = None) -> None:
        """Note once why a probe has no number for a layer, or for the whole model."""
        self.reasons.setdefault((probe, None if key is None else self.labels[key]), reason)

    def collect(self, name: str, key: Key, values: Tensor, **beside: Tensor) -> None:
        """Add rows of one measure of one layer."""
        self.rows.setdefault(name, Rows()).add(key, values, **beside)

    def measure(self, probes: Sequence[str], make: Callable[[], HeadInput]) -> None:
        """Run the model over one kind of input and measure every call on the way."""
        try:
            given = make()
        except NotApplicableError as error:
            for probe in probes:
                self.refuse(probe, str(error))
            return
        for probe in probes:
            self.inputs[probe] = given.about
        if given.probe is not None:
            self.induction = given
            self.inputs["ablation"] = given.about
            self.facts |= {"length": given.probe.length, "rows": len(given), "bos": given.probe.bos}
        batches = list(given.batches(self.lm))
        for index, batch in enumerate(batches):
            on_call = lambda call, batch=batch: self._on_call(call, batch, probes)  # noqa: E731
            with evaluating(self.lm.model), capture(self.lm, on_call=on_call):
                output = self.lm.run(batch.model_inputs(self.lm))
            self._note_losses(output, batch)
            if self.progress is not None:
                self.progress(f"{', '.join(probes)} on {given.about}", index + 1, len(batches))

    def measure_weights(self) -> None:
        """Copying scores: one forward to find the weights, none to measure."""
        for key, circuit in output_value_circuits(self.lm, survey_input(self.lm)).items():
            if isinstance(circuit, str):
                self.refuse("copying", circuit, key)
                continue
            with self._explaining_gaps("copying", key):
                self.collect("copying_score", key, circuit.score()[None])

    def measure_composition(self, seed: int) -> None:
        """Composition of all pairs of heads: two forwards to find the weights."""
        progress = self.progress
        with self._explaining_gaps("composition", None):
            self.pairs, reasons = composition_scores(
                self.lm,
                survey_input(self.lm),
                seed=seed,
                progress=None if progress is None else lambda done, total: progress("composition", done, total),
            )
        for key, reason in reasons.items():
            self.refuse("composition", reason, key)
        self.facts |= facts_of(self.pairs)

    @contextmanager
    def _explaining_gaps(self, probe: str, key: Key | None) -> Iterator[None]:
        """Turn our own warnings about undefined numbers into reasons, where the other gaps are explained too."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for warning in caught:
            if issubclass(warning.category, UndefinedScoreWarning):
                self.refuse(probe, str(warning.message), key)
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _on_call(self, call: AttentionCall, batch: HeadInput, probes: Sequence[str]) -> None:
        key = _key(call)
        if key not in self.labels:
            raise UnsupportedModelError(
                f"{call.module_name} ran {call.call_index + 1} times here but not in the first forward: the number of "
                "attention calls depends on the input, so layers cannot be told apart"
            )
        if key not in self.certified:
            self.certified.add(key)
            self.failures[key] = call.sampled_certificate.failures
        if call.n_queries != batch.tokens.shape[1] or call.z.shape[0] != len(batch):
            for probe in probes:
                self.refuse(probe, "its queries are not the tokens of the input", key)
            return
        view = View(call, batch)
        for probe in probes:
            with self._explaining_gaps(probe, key):
                try:
                    for name, values, beside in measures(probe, view):
                        self.collect(name, key, values, **beside)
                except (NotApplicableError, UnsupportedModelError) as error:
                    self.refuse(probe, str(error), key)

    def _note_losses(self, output: Any, batch: HeadInput) -> None:
        """Losses of the two copies, for models whose output is a prediction of the next token."""
        logits = getattr(output, "logits", None)
        if batch.probe is None or not isinstance(logits, Tensor) or logits.shape[:2] != batch.tokens.shape:
            return
        if logits.shape[-1] < self.lm.vocabulary or "prefix_matching_score" not in self.rows:
            return
        for name, rows in zip(("first_copy_loss", "second_copy_loss"), copy_losses(logits, batch), strict=True):
            self.losses.setdefault(name, []).append(rows)

    def ablate(self, count: int, by: str, threshold: float, rows: int, seed: int) -> None:
        """Effects of the heads with the highest scores, one at a time and together."""
        if not self.losses or self.induction is None:
            self.refuse("ablation", "there are no losses of the induction probe: no causal language model was measured")
            return
        scored = self._ranking("prefix_matching_score")
        place = {head: key for head, key, _ in scored}
        given = self.induction.take(slice(rows))
        try:
            if by == EFFECTS["zero"]:
                everyone = self._effects(given, [NamedSet("single", (head,), "zero") for head in place])
                ranked = sorted(
                    ((item.heads[0], place[item.heads[0]], item.effect.mean().item()) for item in everyone),
                    key=lambda item: -item[2],
                )
            else:
                ranked = [item for item in self._ranking(by) if item[0] in place] if by in self.rows else []
            if not ranked:
                self.refuse("ablation", self._why_unranked(by))
                return
            scored_heads = [(head, score) for head, _, score in ranked]
            plan, no_random = plan_sets(scored_heads, place, count=count, by=by, threshold=threshold, seed=seed)
            if no_random:
                self.refuse("ablation", no_random)
            found = self._effects(given, plan)
        except (NotApplicableError, UnsupportedModelError) as error:
            self.refuse("ablation", str(error))
            return
        self.facts |= {"ablated_by": by, "ablation_route": found[0].route}
        self.sets += [SetEffect.of(item) for item in found if item.name != "single"]
        for way, name in EFFECTS.items():
            one = {item.heads[0]: item for item in found if item.name == "single" and item.way == way}
            for key in dict.fromkeys(place[head] for head in one):
                n_heads = self.rows["prefix_matching_score"].values[key][0].shape[1]
                mine = {head: item for (_, head), item in one.items() if place[item.heads[0]] == key}
                missing = torch.full_like(next(iter(mine.values())).effect, torch.nan)
                effect, control = (
                    torch.stack([getattr(mine[h], kind) if h in mine else missing for h in range(n_heads)], dim=1)
                    for kind in ("effect", "first_copy_effect")
                )
                self.collect(name, key, effect, first_copy_effect=control)

    def _why_unranked(self, by: str) -> str:
        """Why no head has the score by which heads are chosen."""
        probe = MEASURES[by].probe
        known = [
            ("" if at is None else f"layer {at}: ") + why for (name, at), why in self.reasons.items() if name == probe
        ]
        why = known[0] if known else "no layer with a number has it beside its prefix-matching score"
        return f"{by}, by which heads are chosen, is not measurable here ({why}); choose another with ablate_by"

    def _effects(self, given: HeadInput, plan: Sequence[NamedSet]) -> list[Ablation]:
        progress = self.progress
        return ablate_sets(
            self.lm,
            given,
            plan,
            progress=None if progress is None else lambda done, total: progress("ablations", done, total),
        )

    def _ranking(self, name: str) -> list[tuple[Head, Key, float]]:
        """Heads by a score, highest first: (layer number, head), where it sits, score."""
        found: list[tuple[Head, Key, float]] = []
        for key, batches in self.rows[name].values.items():
            if key[2] is not None:
                means = torch.cat(batches).mean(dim=0).tolist()
                found += [((key[2], head), key, score) for head, score in enumerate(means) if score == score]
        return sorted(found, key=lambda item: -item[2])

    def table(self) -> HeadTable:
        """Everything collected, as a table."""
        info = {"model": self.lm.info.name, "architecture": self.lm.info.architecture, "dtype": self.lm.info.dtype}
        failures = tuple(f"layer {self.labels[key]}: {text}" for key, texts in self.failures.items() for text in texts)
        scores = {}
        for name, measure in MEASURES.items():
            if name in self.rows:
                made = self.rows[name].table(
                    measure, self.labels, input=self.inputs.get(measure.probe, "weights"), **info
                )
                scores[name] = dataclasses.replace(made, failures=failures)
            elif name in self.pairs:
                scores[name] = self.pairs[name]
        facts = self.facts | {name: torch.cat(rows).mean().item() for name, rows in self.losses.items()}
        missing = tuple(NotMeasurable(probe, layer, reason) for (probe, layer), reason in self.reasons.items())
        return HeadTable(scores, missing, facts, tuple(self.sets))
