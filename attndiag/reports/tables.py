"""The tables of a run -> the numbers of its report. No model here: a folder is all it takes.

Averages are over prompts, each prompt counting the same, and only certified calls enter: `coverage` says how many of
all calls those are. An undefined number is left out and counted, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from attndiag.errors import RunFolderError
from attndiag.runs.folder import RunFolder
from attndiag.runs.measures import HEAD_MEASURES, LAYER_MEASURES

# pairs shown on the page: of each direction, and of those about a sink
STRONGEST_SHOWN, SINKS_SHOWN, OF_ONE_PROMPT = 8, 4, 2


@dataclass(frozen=True)
class Coverage:
    """How many attention calls stand behind the numbers."""

    certified: int
    calls: int

    @property
    def share(self) -> float:
        """certified / calls; nan without a call."""
        return self.certified / self.calls if self.calls else float("nan")

    def __str__(self) -> str:
        percent = f"{100 * self.share:.1f}".removesuffix(".0") if self.calls else "0"
        return f"{percent} % certified ({self.certified:,} of {self.calls:,} calls)"


@dataclass(frozen=True, eq=False)
class Summary:
    """Everything that figures and page show.

    Parameters
    ----------
    run : the row of `runs`, as a dictionary.
    finished : False for a run that was stopped; the numbers are then about the prompts that are there.
    prompts : the table `prompts`.
    places : one row a layer in order of the forward: `place` (0, 1, ...), `label`, `module`, `layer`, `kind`.
    heads : mean over prompts of every head measure, one row a head: `place`, `label`, `head`, measures.
    layers : mean over prompts of every layer measure, and of the head measures over heads, one row a place.
    spread : quantiles over heads (10 %, 90 %) of the head measures, columns (measure, quantile), one row a place.
    by_prompt : one row a prompt: mean over layers and heads of the sink numbers, top-key rate, rank agreement.
    clusters : the same by cluster, with the task check.
    pairs : the strongest disagreements that the page shows, with their rows of scores in `rows`.
    rows : for each entry of `pairs`, tokens with weight share and contribution share.
    checks : one row a self-check: `check`, `worst`, `tolerance`, `passed`, `of`.
    timings : seconds by kind of work, in falling order.
    refusals : layers that could not be measured, with the reason.
    coverage : see `Coverage`.
    """

    run: dict[str, Any]
    finished: bool
    prompts: pd.DataFrame
    places: pd.DataFrame
    heads: pd.DataFrame
    layers: pd.DataFrame
    spread: pd.DataFrame
    by_prompt: pd.DataFrame
    clusters: pd.DataFrame
    pairs: pd.DataFrame
    rows: list[pd.DataFrame]
    checks: pd.DataFrame
    timings: pd.DataFrame
    refusals: pd.DataFrame
    coverage: Coverage

    @property
    def measured(self) -> pd.DataFrame:
        """Prompts that were measured."""
        return self.prompts.query("status != 'failed'")

    @property
    def failed(self) -> pd.DataFrame:
        """Prompts that could not be measured, or whose target could not."""
        return self.prompts.query("status != 'ok'")

    @property
    def n_heads(self) -> int:
        """Heads in all places together."""
        return len(self.heads)

    @property
    def passed(self) -> bool:
        """Every self-check passed, every call is certified and every prompt was measured."""
        certified = self.coverage.certified == self.coverage.calls
        return bool(self.checks.ok.all()) and certified and self.finished and self.failed.empty

    def overall(self, measure: str) -> float:
        """Mean over prompts of a column of `by_prompt`; nan where it is nowhere defined."""
        return float(self.by_prompt[measure].mean()) if measure in self.by_prompt else float("nan")


def summarise(folder: RunFolder) -> Summary:
    """Read a run and work out what its report says.

    Raises
    ------
    RunFolderError : the run holds no measured prompt or no certified call, or a table is damaged.
    """
    run = run_facts(folder)
    prompts = folder.read("prompts").sort_values("index", ignore_index=True)
    heads_table, checks_table = folder.read("heads"), folder.read("checks")
    if heads_table.empty:
        reasons = prompts.error.dropna()
        why = f"; the first reason: {reasons.iloc[0]}" if len(reasons) else ""
        raise RunFolderError(f"{folder.path} holds no measured prompt, so there is nothing to report{why}")
    if not checks_table.certified.any():
        reasons = checks_table.failures.dropna()
        raise RunFolderError(
            f"{folder.path}: not one of its {len(checks_table)} attention calls is certified, so no number can be "
            f"reported; the first reason: {reasons.iloc[0] if len(reasons) else 'none was written down'}"
        )
    places = find_places(checks_table)
    certified = heads_table[heads_table.certified].merge(places[["module", "place", "label"]], on="module")
    of_heads = certified[certified["head"].notna()]
    of_layers = certified[certified["head"].isna()]
    heads = _heads(of_heads)
    by_prompt = _by_prompt(of_heads, of_layers, prompts)
    pairs, rows = strongest(folder, places)
    return Summary(
        run=run,
        finished=folder.finished,
        prompts=prompts,
        places=places,
        heads=heads,
        layers=_layers(of_heads, of_layers, places),
        spread=_spread(heads),
        by_prompt=by_prompt,
        clusters=_clusters(by_prompt),
        pairs=pairs,
        rows=rows,
        checks=_checks(run, checks_table),
        timings=_timings(folder.read("timings")),
        refusals=folder.read("refusals").drop_duplicates(["module", "reason"], ignore_index=True),
        coverage=Coverage(int(checks_table.certified.sum()), len(checks_table)),
    )


def run_facts(folder: RunFolder) -> dict[str, Any]:
    """The row of `runs`; in an unfinished run, what was known when it started."""
    table = folder.read("runs")
    if len(table):
        row = table.iloc[0].to_dict()
        return {name: None if _missing(value) else value for name, value in row.items()}
    return {"kernel": None, "logits_equal": None, "seconds": None} | dict(folder.about.get("runs", {}))


def _missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value))


def find_places(checks: pd.DataFrame) -> pd.DataFrame:
    """The attention modules in the order in which the model calls them, with a short label each.

    A single stack of self-attention is labelled by its layer numbers. Otherwise E, D and X stand for an encoder's, a
    decoder's and a cross-attention's layers, M for anything else.
    """
    places = checks.drop_duplicates("module").filter(["module", "layer", "kind"]).reset_index(drop=True)
    places["place"] = np.arange(len(places))
    layers = places.layer
    if (places.kind == "self").all() and layers.notna().all() and layers.is_unique:
        places["label"] = [f"{layer:.0f}" for layer in layers]
        return places
    labels = []
    for module, layer, kind in zip(places.module, layers, places.kind, strict=True):
        parts = str(module).split(".")
        letter = "X" if kind == "cross" else next((p[0].upper() for p in parts if p in ("encoder", "decoder")), "M")
        labels.append(f"{letter}{layer:.0f}" if pd.notna(layer) else f"{letter}{len(labels)}")
    twice = {label for label in labels if labels.count(label) > 1}
    places["label"] = [f"{lab}#{i}" if lab in twice else lab for i, lab in enumerate(labels)]
    return places


def _wide(table: pd.DataFrame, index: Sequence[str], measures: Sequence[str]) -> pd.DataFrame:
    """Mean of `value` by `index`, one column a measure; measures that nobody has are nan columns."""
    wide = table.pivot_table(index=list(index), columns="measure", values="value", aggfunc="mean", dropna=False)
    return wide.reindex(columns=list(measures))


def _heads(of_heads: pd.DataFrame) -> pd.DataFrame:
    mean = _wide(of_heads, ["place", "head"], HEAD_MEASURES)
    mean = mean.dropna(how="all").reset_index()
    mean["head"] = mean["head"].astype(int)
    mean["label"] = mean.place.map(dict(zip(of_heads.place, of_heads.label, strict=True)))
    mean["sink_gap"] = mean.sink_head_contribution_share - mean.sink_weight
    mean["f_ratio"] = mean.sink_f_norm / mean.other_f_norm
    mean["v_ratio"] = mean.sink_v_norm / mean.other_v_norm
    return mean


def _layers(of_heads: pd.DataFrame, of_layers: pd.DataFrame, places: pd.DataFrame) -> pd.DataFrame:
    from_heads = _wide(of_heads, ["place"], HEAD_MEASURES)
    from_layers = _wide(of_layers, ["place"], LAYER_MEASURES)
    both = from_heads.join(from_layers, how="outer").reindex(places.place)
    return both.reset_index().merge(places[["place", "label"]], on="place")


def _spread(heads: pd.DataFrame) -> pd.DataFrame:
    """10 % and 90 % over the heads of a place, of the prompt means."""
    quantiles = heads.groupby("place")[list(HEAD_MEASURES)].quantile([0.1, 0.9])
    return cast("pd.DataFrame", quantiles.unstack())


_SINK_NUMBERS = ("sink_weight", "sink_head_contribution_share", "sink_contribution_share")


def _by_prompt(of_heads: pd.DataFrame, of_layers: pd.DataFrame, prompts: pd.DataFrame) -> pd.DataFrame:
    from_heads = _wide(of_heads, ["prompt"], HEAD_MEASURES)
    from_layers = _wide(of_layers, ["prompt"], LAYER_MEASURES)
    numbers = from_heads.join(from_layers, how="outer").reset_index()
    about = prompts[["prompt", "index", "cluster", "status", "n_tokens", "logit_diff", "target_prob", "task_ok"]]
    return about.merge(numbers, on="prompt", how="inner").sort_values("index", ignore_index=True)


def _clusters(by_prompt: pd.DataFrame) -> pd.DataFrame:
    named = by_prompt.assign(cluster=by_prompt.cluster.fillna("(none)"))
    groups = named.groupby("cluster", sort=False)
    wanted = [*_SINK_NUMBERS, "rank_agreement", "top_key_differs", "logit_diff", "target_prob"]
    table = groups[wanted].mean()
    table.insert(0, "prompts", groups.size())
    checked = named[named.task_ok.notna()].groupby("cluster").task_ok
    table["task_checked"] = checked.size().reindex(table.index).fillna(0).astype(int)
    table["task_right"] = checked.sum().reindex(table.index).fillna(0).astype(int)
    return table.reset_index()


def _checks(run: dict[str, Any], checks: pd.DataFrame) -> pd.DataFrame:
    """One row a self-check: the worst value seen, what it is held against, how many passed of how many."""
    names = {
        "value_error": "pattern times values gives the head outputs",
        "formula_error": "pattern recomputed from q and k does too",
        "output_error": "head outputs times W_O give the module's output",
        "completeness_error": "contributions of all keys add up to the module's output",
    }
    rows = []
    equal = run.get("logits_equal")
    if equal is not None:
        rows.append(("outputs with and without capture are bit-equal (first prompt)", np.nan, np.nan, int(equal), 1))
    for column, meaning in names.items():
        # the others may not exist for a call; the first always does, so a missing one was undefined and fails
        known = checks if column == "value_error" else checks[checks[column].notna()]
        if len(known):
            passed = int((known[column] <= known.tolerance).sum())
            rows.append((meaning, float(known[column].max()), float(known.tolerance.max()), passed, len(known)))
    table = pd.DataFrame(rows, columns=["check", "worst", "tolerance", "passed", "of"])
    table["ok"] = table.passed == table.of
    return table


def _timings(timings: pd.DataFrame) -> pd.DataFrame:
    total = timings.groupby("work", sort=False).seconds.agg(["sum", "count"]).reset_index()
    return total.sort_values("sum", ascending=False, ignore_index=True)


def strongest(folder: RunFolder, places: pd.DataFrame) -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """The pairs that the page shows: the strongest, one a head, at most two a prompt, with the rows behind them."""
    found = folder.read("disagreements")
    found = found[found.certified].merge(places[["module", "place", "label"]], on="module")
    found = found.reindex(found.difference.abs().sort_values(ascending=False, kind="stable").index)
    chosen: list[int] = []
    for direction, key_class, wanted in (
        ("contribution_over_weight", "content", STRONGEST_SHOWN),
        ("weight_over_contribution", "content", STRONGEST_SHOWN),
        ("weight_over_contribution", "sink", SINKS_SHOWN),
    ):
        group = found[(found.direction == direction) & (found.key_class == key_class)]
        heads: set[tuple[int, int]] = set()
        of_prompt: dict[str, int] = {}
        for index, place, head, prompt in zip(group.index, group.place, group["head"], group.prompt, strict=True):
            if len(heads) == wanted:
                break
            if (place, head) in heads or of_prompt.get(prompt, 0) == OF_ONE_PROMPT:
                continue
            heads.add((place, head))
            of_prompt[prompt] = of_prompt.get(prompt, 0) + 1
            chosen.append(index)
    pairs = found.loc[chosen].reset_index(drop=True)
    return pairs, _rows_behind(folder, pairs)


def _rows_behind(folder: RunFolder, pairs: pd.DataFrame) -> list[pd.DataFrame]:
    scores = folder.read("scores")
    scores = scores[scores["head"].notna() & scores.prompt.isin(pairs.prompt)]
    tokens = folder.read("tokens")
    rows = []
    for pair in pairs.itertuples():
        here = scores[
            (scores.prompt == pair.prompt)
            & (scores.module == pair.module)
            & (scores["head"] == pair.head)
            & (scores.query_pos == pair.query_pos)
        ]
        shares = here.pivot_table(index="source_pos", columns="method", values="value")
        shares = shares / shares.sum()
        in_decoder = pair.kind == "self" and "decoder" in str(pair.module).split(".")
        known = tokens[tokens.prompt == pair.prompt]
        side = known[known.part == ("decoder" if in_decoder and (known.part == "decoder").any() else "input")]
        row = side.set_index("pos")[["text", "is_special"]].join(shares, how="left").fillna({"text": ""})
        rows.append(
            row.rename(columns={"weight": "weight_share", "head_contribution": "contribution_share"}).reset_index()
        )
    return rows


def parameters(run: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run."""
    return dict(json.loads(run.get("params") or "{}"))
