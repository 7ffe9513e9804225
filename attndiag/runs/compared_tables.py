"""A compared run as tidy tables: Parquet and CSV, units and the run's id in each, `columns.csv` beside them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attndiag.catalog import CATALOG
from attndiag.comparison.misled import rate_of_prompts, rates_by_head, rates_by_layer, rates_by_prompt
from attndiag.runs.compared_folder import ComparedFolder
from attndiag.runs.compared_schemas import COMPARED_TABLES, describe_compared_columns
from attndiag.runs.folder import PLAIN_CSV_ROWS, explained, write_csv
from attndiag.stats.evidence import PRESENT
from attndiag.stats.verdicts import HIGH

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from attndiag.comparison.edges import EdgeVerdicts
    from attndiag.runs.compared_run import ComparedRun
    from attndiag.stats.rates import Rate

# units of the columns of `ComparedRun.heads` by a word of their name, ends of intervals included; counts have none,
# effects that of the target
_HEAD_UNITS = {"misleads": "rate", "score": "mass", "mass": "mass", "effect": "target", "size": "target"}


def write_tables(folder: ComparedFolder, run: ComparedRun) -> None:
    """Write every table; those that are there are replaced, one by one and whole.

    Raises
    ------
    RunFolderError : disk full or folder not writable.
    """
    import pyarrow.parquet as pq

    for name, table in tidy_tables(run).items():
        folder.write(
            f"tables/{name}.parquet", lambda file, table=table: pq.write_table(table, file, compression="zstd")
        )
        plain, packed = f"tables/{name}.csv", f"tables/{name}.csv.gz"
        wanted, other = (plain, packed) if table.num_rows <= PLAIN_CSV_ROWS else (packed, plain)
        folder.write(wanted, lambda file, table=table, path=wanted: write_csv(file, table, path.endswith(".gz")))
        with explained(folder.path / other):
            (folder.path / other).unlink(missing_ok=True)
    text = io.StringIO()
    rows = list(describe_compared_columns())
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    folder.write("tables/columns.csv", lambda file: file.write(text.getvalue().encode()))


def tidy_tables(run: ComparedRun) -> dict[str, pa.Table]:
    """Table name -> pyarrow table, for every entry of `COMPARED_TABLES`."""
    found = run.comparison
    verdicts = found.verdicts
    units = dict(zip(found.prompts["prompt"], found.prompts["unit"], strict=True)) if len(found.prompts) else {}
    if len(verdicts):
        verdicts = verdicts.rename(columns={"position": "pos"}).assign(unit=verdicts["prompt"].map(units))
    frames: dict[str, pd.DataFrame | Sequence[Mapping[str, Any]]] = {
        "runs": [_run_row(run)],
        "prompts": _prompt_rows(run),
        "tokens": run.tokens,
        "scores": _score_rows(run),
        "misleading": [] if run.edges is None else _misleading_rows(run.edges),
        "heads": _head_rows(run),
        "edges": [] if run.edges is None else _edge_frame(run.edges),
        "agreement": found.agreement,
        "faithfulness": found.faithfulness,
        "differences": found.differences,
        "verdicts": verdicts,
        "methods": _method_rows(run),
        "checks": run.checks,
        "problems": found.problems,
        "timings": run.timings,
    }
    return {name: _as_table(name, str(run.facts["run"]), frames[name]) for name in COMPARED_TABLES}


def _as_table(name: str, run_id: str, rows: pd.DataFrame | Sequence[Mapping[str, Any]]) -> pa.Table:
    schema = COMPARED_TABLES[name]
    if not len(rows):
        return schema.empty()
    columns: dict[str, Any] = {"run": run_id}
    for column in schema.columns[1:]:
        if isinstance(rows, Sequence):
            values: list[Any] = [row.get(column.name) for row in rows]
        elif column.name in rows:
            values = rows[column.name].tolist()
        else:
            continue
        if column.type == "string":
            values = [None if value is None or value != value else _storable(str(value)) for value in values]
        columns[column.name] = values
    return schema.table(columns)


def _storable(text: str) -> str:
    """Text that a UTF-8 file can hold: lone surrogates, which some byte tokens give, become question marks."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _run_row(run: ComparedRun) -> dict[str, Any]:
    return {
        name: json.dumps(value, default=str) if isinstance(value, Mapping | list | tuple) else value
        for name, value in run.facts.items()
    }


def _prompt_rows(run: ComparedRun) -> list[dict[str, Any]]:
    rows = [{**row, "status": "ok"} for row in run.comparison.prompts.to_dict("records")]
    return rows + [{**one, "status": "failed"} for one in run.failed]


def _score_rows(run: ComparedRun) -> list[dict[str, Any]]:
    found = run.comparison
    params = {name: json.dumps(given) for name, given in run.facts["plan"]["params"].items()}
    targets = {
        row["prompt"]: f"{row['target_kind']}({', '.join(filter(None, (row['target'], row['foil'])))})"
        for row in found.prompts.to_dict("records")
    }
    rows = [
        {
            **row,
            "params": params.get(row["method"]),
            "target": targets[row["prompt"]],
            "source_pos": row["position"],
            "value": row["score"],
        }
        for row in found.scores.to_dict("records")
    ]
    rows += [
        {"prompt": row["prompt"], "method": row["method"], "error": row["reason"]}
        for row in found.problems.to_dict("records")
        # without a prompt: what was asked of the model alone
        if row["prompt"] and row["method"] not in ("", "edges", "faithfulness", "sinks")
    ]
    return rows


def _head_rows(run: ComparedRun) -> list[dict[str, Any]]:
    if run.heads is None:
        return []
    rows: list[dict[str, Any]] = []
    for one in run.heads.to_dict("records"):
        for name, value in one.items():
            if name in ("layer", "head", "unit"):
                continue
            # effects in several units have it in their names, see `ComparedRun.heads`
            bare, _, own = str(name).partition("[")
            unit = next((unit for part, unit in _HEAD_UNITS.items() if part in bare.split("_")), "")
            unit = (own.rstrip("]") or one.get("unit")) if unit == "target" else unit
            rows.append({"layer": one["layer"], "head": one["head"], "measure": name, "unit": unit, "value": value})
    return rows


def _misleading_rows(edges: EdgeVerdicts) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for method in edges.judged:
        found: list[tuple[dict[str, Any], Rate]] = [
            *(
                ({"by": "head", "layer": layer, "head": head}, rate)
                for (layer, head), rate in rates_by_head(edges, method).items()
            ),
            *(({"by": "layer", "layer": layer}, rate) for layer, rate in rates_by_layer(edges, method).items()),
            ({"by": "prompts"}, rate_of_prompts(edges, method)),
        ]
        rows += [
            {
                "method": method,
                **place,
                "misleads": rate.wrong,
                "decided": rate.decided,
                "rate": rate.share,
                "low": rate.low,
                "high": rate.high,
                "clusters": rate.clusters,
            }
            for place, rate in found
        ]
        rows += [
            {
                "method": method,
                "by": "prompt",
                "prompt": prompt,
                "misleads": wrong,
                "decided": decided,
                "rate": wrong / decided if decided else None,
            }
            for prompt, (wrong, decided) in rates_by_prompt(edges, method).items()
        ]
    return rows


def _method_rows(run: ComparedRun) -> list[dict[str, Any]]:
    rows = [
        {**row, "about": "tokens", "blocked": row["blocked_prompts"]}
        for row in run.comparison.methods.to_dict("records")
    ]
    for name, whole in run.edges.whole.items() if run.edges is not None else ():
        judged = run.edges.judged[name]  # type: ignore[union-attr]
        rows.append(
            {
                "method": name,
                "about": "edges",
                "verdict": whole.verdict,
                "hit_rate": whole.hit_rate.value,
                "hit_rate_low": whole.hit_rate.low,
                "hit_rate_high": whole.hit_rate.high,
                "p_chance": whole.p_chance,
                "weights_without_effect": whole.weights_without_effect,
                "effects_without_weight": whole.effects_without_weight,
                **judged.counts,
                "circular": False,
                "role": "method",
                "blocked": int(judged.blocked.sum()),
            }
        )
    return rows


def _edge_frame(edges: EdgeVerdicts) -> pd.DataFrame:
    """Edges that are claimed high or have an effect, with the share of their row's mass that they hold together."""
    import pandas as pd

    parts: list[pd.DataFrame] = []
    complete = edges.complete
    queries = np.array([edges.queries[prompt] for prompt, _, _, _ in edges.rows])
    for name, found in edges.judged.items():
        keep = (found.verdict != "") & ((found.claim == HIGH) | (found.shown.state == PRESENT))
        row, key = np.nonzero(keep)
        share = np.nan_to_num(found.share, nan=0.0)
        parts.append(
            pd.DataFrame(
                {
                    "prompt": [edges.rows[index][0] for index in row],
                    "cluster": [edges.rows[index][1] for index in row],
                    "layer": [edges.rows[index][2] for index in row],
                    "head": [edges.rows[index][3] for index in row],
                    "query_pos": queries[row] if len(row) else [],
                    "key_pos": key,
                    "token": [edges.tokens[edges.rows[r][0]][k] for r, k in zip(row, key, strict=True)],
                    "method": name,
                    "value": edges.claims[name][row, key],
                    "value_unit": CATALOG[name].unit,
                    "verdict": found.verdict[row, key],
                    "claim": found.claim[row, key],
                    "share": found.share[row, key],
                    "state": found.shown.state[row, key],
                    "effect": edges.effects[row, key],
                    "effect_low": found.shown.low[row, key],
                    "effect_high": found.shown.high[row, key],
                    "absent_below": found.shown.absent_below[row],
                    "present_from": found.shown.present_from[row],
                    "unit": [edges.units[index] for index in row],
                    "estimate": edges.estimates[row, key],
                    "mass_kept": np.where(keep, share, 0.0).sum(axis=1)[row],
                    "complete": complete[row],
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
