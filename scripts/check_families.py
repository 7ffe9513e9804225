"""Capture a small random model of every transformers family and write down what comes of it.

    python scripts/check_families.py run --out family-records [--processes 2] [--only llama bert] [--fresh]
    python scripts/check_families.py table --out family-records --write docs/families.md
    python scripts/check_families.py show --out family-records

`run` leaves one JSON file a family and goes on where it stopped; `table` renders them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from families.check import check_family
from families.source import family_sources
from families.sweep import read_record, sweep
from families.table import render


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="build and capture families")
    runner.add_argument("--processes", type=int, default=2)
    runner.add_argument("--seconds", type=float, default=120.0, help="limit of one family")
    runner.add_argument("--gigabytes", type=float, default=10.0, help="address space of one family")
    runner.add_argument("--only", nargs="+", metavar="FAMILY")
    runner.add_argument("--fresh", action="store_true", help="run families again that have a record")
    table = commands.add_parser("table", help="render the records")
    table.add_argument("--write", type=Path, default=Path("docs/families.md"))
    show = commands.add_parser("show", help="print counts and everything that is not certified")
    for command in (runner, table, show):
        command.add_argument("--out", type=Path, required=True, help="folder of the records")
    arguments = parser.parse_args()
    return {"run": _run, "table": _table, "show": _show}[arguments.command](arguments)


def _run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of transformers, about configurations that nobody would train
    names = arguments.only or list(family_sources())
    unknown = sorted(set(names) - set(family_sources()))
    if unknown:
        print(f"no such families in transformers {transformers.__version__}: {', '.join(unknown)}", file=sys.stderr)
        return 2
    if arguments.fresh:
        for name in names:
            (arguments.out / f"{name}.json").unlink(missing_ok=True)
    started = time.monotonic()
    records = sweep(
        names,
        check_family,
        arguments.out,
        processes=arguments.processes,
        seconds=arguments.seconds,
        gigabytes=arguments.gigabytes,
        progress=_say,
    )
    print(f"{len(records)} families in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


def _say(record: dict[str, Any]) -> None:
    line = (
        f"{record['family']:28} {record['outcome']:14} {record.get('calls', '-'):>4} calls  {record.get('reason', '')}"
    )
    print(line[:200], file=sys.stderr)


def _records(folder: Path) -> list[dict[str, Any]]:
    return [read_record(folder, name) for name in family_sources() if (folder / f"{name}.json").exists()]


def _table(arguments: argparse.Namespace) -> int:
    arguments.write.parent.mkdir(parents=True, exist_ok=True)
    arguments.write.write_text(render(_records(arguments.out), transformers.__version__), encoding="utf-8")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    records = _records(arguments.out)
    print(dict(Counter((record["outcome"]) for record in records)))
    for record in records:
        if record["outcome"] != "certified":
            print(f"{record['family']}\t{record['outcome']}\t{record.get('reason', '')[:220]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
