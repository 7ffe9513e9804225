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

from attndiag.core.attention import forbidden_entries
from attndiag.core.head_outputs import dormant_heads, head_output_norm, head_similarity, value_drain
from attndiag.core.heads import (
    MassScore,
    current_token_score,
    duplicate_token_score,
    earlier_followers,
    entropy_score,
    mass_on,
    prefix_matching_score,
    previous_token_score,
    sink_rate,
)
from attndiag.core.probes import SHORTEST
from attndiag.errors import NotApplicableError, UndefinedScoreWarning, UnsupportedModelError
from attndiag.explain.head_circuits import output_value_circuits
from attndiag.explain.head_inputs import HeadInput, induction_input, text_input, trained_context
from attndiag.explain.head_table import HeadTable, Measure, NotMeasurable, Rows, labels_of
from attndiag.hooks.capture_context import capture
from attndiag.hooks.record import AttentionCall
from attndiag.models.access import evaluating
from attndiag.models.load import LoadedModel, load

Progress = Callable[[str, int, int], None]
Key = tuple[str, int, int | None]
Found = tuple[str, Tensor, dict[str, Tensor]]

MEASURES = {
    measure.name: measure
    for measure in (
        Measure("prefix_matching_score", "mass", "induction"),
        Measure("duplicate_token_score", "mass", "duplicate"),
        Measure("previous_token_score", "mass", "previous"),
        Measure("current_token_score", "mass", "current"),
        Measure("sink_mass", "mass", "sink"),
        Measure("sink_contribution_share", "share", "sink"),
        Measure("sink_norm_ratio", "ratio", "sink"),
        Measure("sink_rate", "share of heads", "sink", axes=("layer",)),
        Measure("entropy", "nats", "entropy"),
        Measure("effective_support", "keys", "entropy"),
        Measure("relative_output_norm", "ratio", "output"),
        Measure("redundancy", "cosine", "redundancy", signed=True, axes=("layer", "head", "other_head")),
        Measure("largest_similarity", "cosine", "redundancy", signed=True),
        Measure("copying_score", "share", "copying", signed=True),
    )
}
PROBES = tuple(dict.fromkeys(measure.probe for measure in MEASURES.values()))
ON_TOKENS = ("induction", "duplicate")
ON_WEIGHTS = ("copying",)


def heads(
    lm: LoadedModel | nn.Module,
    *,
    probes: Sequence[str] = ("induction", "previous"),
    rows: int = 64,
    length: int = 50,
    seed: int = 0,
    bos: bool | None = None,
    texts: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> HeadTable:
    """Scores of every attention head.

    Parameters
    ----------
    lm : a loaded model or any module that reads token ids.
    probes : out of `induction duplicate previous current sink entropy output redundancy copying`.
    rows : random rows of the induction probe (and of the text probes for a model without a tokenizer).
    length : tokens a copy; shortened to what the trained context and the sliding window allow, which `facts` says.
    seed : of the random rows.
    bos : put BOS before random rows. None: where the model has one.
    texts : for the text probes; built-in English paragraphs by default.
    progress : called with (what is being done, batches done, batches in all).

    Returns
    -------
    `HeadTable`. Masses in [0, 1] with baseline, sink mass and interval over rows beside them.

    Raises
    ------
    NotApplicableError : an unknown probe.
    UnsupportedModelError : the model reads no token ids.
    NothingCapturedError : the model has no attention that can be captured.
    """
    unknown = [probe for probe in probes if probe not in PROBES]
    if unknown or not probes:
        raise NotApplicableError(f"unknown probes {unknown}; choose out of {', '.join(PROBES)}")
    if rows < 1:
        raise NotApplicableError(f"rows is {rows}; expected at least 1")
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
        view = _View(call, batch)
        for probe in probes:
            with self._explaining_gaps(probe, key):
                try:
                    for name, values, beside in _measures(probe, view):
                        self.collect(name, key, values, **beside)
                except (NotApplicableError, UnsupportedModelError) as error:
                    self.refuse(probe, str(error), key)

    def _note_losses(self, output: Any, batch: HeadInput) -> None:
        """Losses of the two copies, for models whose output is a prediction of the next token."""
        logits = getattr(output, "logits", None)
        probe = batch.probe
        if probe is None or not isinstance(logits, Tensor) or logits.shape[:2] != batch.tokens.shape:
            return
        if logits.shape[-1] < self.lm.vocabulary or "prefix_matching_score" not in self.rows:
            return
        targets = batch.tokens.to(logits.device)[:, 1:]
        losses = nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none").cpu()
        for name, mask in (("first_copy_loss", probe.first_copy), ("second_copy_loss", probe.scored_losses)):
            kept = mask[:, 1:]
            self.losses.setdefault(name, []).append((losses * kept).sum(dim=1).double() / kept.sum(dim=1))

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
        facts = self.facts | {name: torch.cat(rows).mean().item() for name, rows in self.losses.items()}
        missing = tuple(NotMeasurable(probe, layer, reason) for (probe, layer), reason in self.reasons.items())
        return HeadTable(scores, missing, facts)


class _View:
    """One call with the masks of its batch: what the measures are made from."""

    def __init__(self, call: AttentionCall, batch: HeadInput) -> None:
        self.call, self.batch = call, batch
        self.pattern = call.pattern
        self.tokens = batch.tokens.to(self.pattern.device)
        self.valid = batch.valid.to(self.pattern.device)
        self.queries = batch.queries.to(self.pattern.device)
        self.sinks = batch.sinks.to(self.pattern.device)
        self.second_copy = None if batch.probe is None else batch.probe.second_copy.to(self.pattern.device)
        self.self_attention = call.kind == "self" and call.n_queries == call.n_keys == batch.tokens.shape[1]

    def require_positions(self) -> None:
        """Scores of token positions need queries and keys on one axis."""
        if not self.self_attention:
            raise NotApplicableError("its keys come from another sequence, so no key is an earlier token of the query")

    @property
    def allowed(self) -> Tensor:
        """[batch, query, key] bool: keys that some head may see, padding left out."""
        call, n_q, n_k = self.call, self.call.n_queries, self.call.n_keys
        seen = torch.ones(1, n_q, n_k, dtype=torch.bool, device=self.pattern.device)
        if call.is_causal:
            seen = seen.tril()
        elif call.mask is not None:
            mask = call.mask if call.mask.dtype == torch.bool else ~forbidden_entries(call.mask)
            while mask.ndim < 4:
                mask = mask[None]
            seen = mask.any(dim=1).expand(-1, n_q, n_k)
        if call.route == "traced":
            # a traced softmax may have been masked by other means: the weights themselves tell
            seen = seen & (self.pattern != 0).any(dim=1)
        seen = seen.expand(self.pattern.shape[0], -1, -1)
        return seen & self.valid[:, None, :] if self.self_attention else seen

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pattern, v and W_O, for measures of what heads write."""
        if self.call.output_gate is not None:
            raise NotApplicableError(
                "an elementwise gate stands between the heads and W_O, so what a key writes depends on the query"
            )
        return self.pattern, self.call.v.detach(), self.call.w_o


def _measures(probe: str, view: _View) -> Iterator[Found]:
    """(measure, [row, head, ...], what stands beside it) of one probe on one call."""
    if probe == "induction":
        yield _mass("prefix_matching_score", _prefix_matching(view))
    elif probe == "duplicate":
        view.require_positions()
        _require_causal(view)
        masses = duplicate_token_score(
            view.pattern, view.tokens, queries=view.second_copy, allowed=view.allowed, sinks=view.sinks
        )
        yield _mass("duplicate_token_score", masses)
    elif probe in ("previous", "current"):
        view.require_positions()
        score = previous_token_score if probe == "previous" else current_token_score
        masses = score(view.pattern, queries=view.queries, allowed=view.allowed, sinks=view.sinks)
        yield _mass(f"{probe}_token_score", masses)
    elif probe == "sink":
        view.require_positions()
        yield from _sink_measures(view)
    elif probe == "entropy":
        spread = entropy_score(view.pattern, queries=view.queries, allowed=view.allowed)
        yield "entropy", spread.entropy, {"baseline": spread.uniform_entropy}
        yield "effective_support", spread.effective_support, {}
    elif probe == "output":
        norms = head_output_norm(*view.written, queries=view.queries)
        yield "relative_output_norm", dormant_heads(norms)[1], {}
    elif probe == "redundancy":
        similarity = head_similarity(*view.written, queries=view.queries)
        yield "redundancy", similarity, {}
        if similarity.shape[-1] > 1:
            own = torch.eye(similarity.shape[-1], dtype=torch.bool, device=similarity.device)
            others = similarity.masked_fill(own, -torch.inf).nan_to_num(nan=-torch.inf).amax(dim=-1)
            yield "largest_similarity", others.masked_fill(others.isinf(), torch.nan), {}


def _mass(name: str, masses: MassScore) -> Found:
    beside = {"baseline": masses.baseline, "sink_mass": masses.sink_mass, "outside_mass": masses.outside_mass}
    return name, masses.score, beside


def _prefix_matching(view: _View) -> MassScore:
    view.require_positions()
    _require_causal(view)
    followers = earlier_followers(view.tokens)
    reachable = (followers & view.allowed).any(dim=-1)
    if not bool(reachable[view.queries].all()):
        text = "" if view.call.window is None else f" (window of {view.call.window} keys)"
        raise NotApplicableError(f"the first copy is out of reach of the second{text}; ask for a smaller length")
    return prefix_matching_score(
        view.pattern, view.tokens, queries=view.queries, allowed=view.allowed, sinks=view.sinks
    )


def _require_causal(view: _View) -> None:
    """Whether the future is hidden is read off the mask and the weights, not off the model's class."""
    future = torch.ones(view.pattern.shape[2:], dtype=torch.bool, device=view.pattern.device).triu(diagonal=1)
    if bool((view.allowed & future).any()) and bool((view.pattern * future).any()):
        raise NotApplicableError(
            "its attention is not causal: the first copy sees the second, so nothing has to be found again"
        )


def _sink_measures(view: _View) -> Iterator[Found]:
    queries, sinks = view.queries, view.sinks
    keys = sinks[:, None, :].expand_as(view.allowed)
    on_sinks = mass_on(view.pattern, keys, queries=queries, allowed=view.allowed)
    yield "sink_mass", on_sinks.score, {"baseline": on_sinks.baseline, "outside_mass": on_sinks.outside_mass}
    yield "sink_rate", sink_rate(view.pattern, queries=queries)[0], {}
    drain = value_drain(*view.written, queries=queries, sinks=sinks, keys=view.valid)
    yield "sink_contribution_share", drain.contribution_share, {"sink_mass": drain.weight_share}
    yield "sink_norm_ratio", drain.norm_ratio, {}
