"""Audit a small random model of every transformers family: a finding on any of them is a false alarm, or news.

    python scripts/check_audits.py run --out audit-records [--processes 2] [--only llama bert]
    python scripts/check_audits.py show --out audit-records

`run` leaves one JSON file a family and goes on where it stopped; it ends with status 1 when anything was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from families.build import CouldNotBuildError, build_family
from families.source import family_sources
from families.sweep import read_record, sweep

import attndiag
from attndiag.errors import UnsupportedModelError


def audit_family(name: str) -> dict[str, Any]:
    """One record: outcome (`passed`, `found`, `refused`, `not built`), what was found, how many checks were made."""
    record: dict[str, Any] = {"family": name}
    try:
        built = build_family(name)
    except CouldNotBuildError as error:
        return record | {"outcome": "not built", "reason": str(error)}
    record |= {"model": type(built.model).__name__, "kind": built.kind}
    try:
        # text models are given token ids by the audit itself, so that padding can be tried
        found = attndiag.audit(built.model, inputs=None if built.kind == "text" else built.inputs)
    except UnsupportedModelError as first:
        try:
            found = attndiag.audit(built.model, inputs=built.inputs)
        except UnsupportedModelError as error:
            return record | {"outcome": "refused", "reason": f"{first}; with inputs: {error}"}
    return record | {
        "outcome": "passed" if found.passed else "found",
        "findings": [str(finding) for finding in found.findings],
        "reason": "; ".join(str(finding) for finding in found.findings),
        "checks": dict(Counter(check.state for check in found.checks)),
    }


def main() -> int:
    """Run the sweep or show its records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="audit families")
    runner.add_argument("--processes", type=int, default=2)
    runner.add_argument("--seconds", type=float, default=120.0, help="limit of one family")
    runner.add_argument("--only", nargs="+", metavar="FAMILY")
    show = commands.add_parser("show", help="print counts and everything that was found")
    for command in (runner, show):
        command.add_argument("--out", type=Path, required=True, help="folder of the records")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of transformers, about configurations that nobody would train
    if arguments.command == "run":
        names = arguments.only or list(family_sources())
        sweep(names, audit_family, arguments.out, processes=arguments.processes, seconds=arguments.seconds)
    names = [name for name in family_sources() if (arguments.out / f"{name}.json").exists()]
    records = [read_record(arguments.out, name) for name in names]
    print(dict(Counter(record["outcome"] for record in records)))
    for record in records:
        if record["outcome"] not in ("passed", "not built"):
            print(f"{record['family']}\t{record['outcome']}\t{record.get('reason', '')[:300]}")
    return 1 if any(record["outcome"] in ("found", "error") for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
