"""Names at the top level: what catches everything raised on purpose, limits to judge by, the shipped prompts."""

from __future__ import annotations

import subprocess
import sys

import pytest

import attndiag


def test_what_is_raised_on_purpose_is_caught_by_the_public_name() -> None:
    from attndiag import errors

    kinds = [one for name, one in vars(errors).items() if name.endswith("Error")]
    assert len(kinds) > 5 and all(issubclass(one, attndiag.AttnDiagError) for one in kinds)
    with pytest.raises(attndiag.AttnDiagError):
        attndiag.read_prompts("no-such-file.jsonl")


def test_the_shipped_prompts_are_those_of_the_commands() -> None:
    prompts = attndiag.shipped_prompts()
    assert {prompt.id for prompt in prompts} >= {"ioi-1", "code-1"} and all(prompt.target for prompt in prompts)


def test_edges_are_judged_by_given_limits(tiny_folder) -> None:
    lm = attndiag.load(tiny_folder, device="cpu")
    limits = attndiag.Thresholds(margin=0.5)
    found = attndiag.edge_verdicts(lm, "When Mary went", methods=["weight"], thresholds=limits)
    assert found.judged["weight"].thresholds == limits


def test_the_error_to_catch_costs_no_torch() -> None:
    code = "import sys, attndiag; attndiag.AttnDiagError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
