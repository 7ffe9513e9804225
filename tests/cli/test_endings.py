"""What a run says of failed self-checks: which, where, what is blocked, what to do; and nothing of harmless ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from attndiag.commands.endings import Blocked, blocked_checks, blocked_in_words, say_blocked
from attndiag.runs.result_files import RESTARTED, UNTOUCHED

METHODS = ("weight", "integrated_gradients", "rollout")
GAP = "the scores miss m(x) - m(mean_embedding) by 12% of it, above 5%"


def _run(*rows: tuple[str, str, bool, str]) -> Any:
    return SimpleNamespace(
        checks=pd.DataFrame(list(rows), columns=["check", "prompt", "passed", "detail"]),
        comparison=SimpleNamespace(judged=dict.fromkeys(METHODS)),
        edges=SimpleNamespace(judged={"weight": None}),
        facts={"n_prompts": 90, "methods": list(METHODS)},
    )


def test_only_checks_that_block_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(
        ("scores of weight", "p0", True, ""),
        ("m above its noise floor", "p0", False, "|m| 0, floor 1"),
        ("scores of unjudged", "p0", False, "no verdict stands on it"),
        ("edges of weight", "p1", False, "odd"),
        (UNTOUCHED, "p2", False, "logits differ"),
        *(("scores of integrated_gradients", f"p{i}", False, GAP) for i in range(5)),
    )
    found = {one.check: one for one in blocked_checks(run)}
    assert list(found) == ["scores of integrated_gradients", "edges of weight", UNTOUCHED]
    assert found[UNTOUCHED].about == ("tokens", "edges") and found[UNTOUCHED].method == ""
    say_blocked(run, quiet=False)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        f"self-check failed: scores of integrated_gradients, on 5 of 90 prompts (p0, p1, p2 and 2 more); on p0: {GAP}"
    )
    assert told[1] == "  blocked: the verdicts on tokens of integrated_gradients on these prompts"
    assert "--set integrated_gradients.max_steps=512" in told[2] and "--methods weight,rollout" in told[2]
    assert "  blocked: all verdicts on tokens and verdicts on edges on this prompt" in told
    assert told[-1].startswith("everything else stands") and len(told) == 10
    say_blocked(run, quiet=True)
    say_blocked(_run(("m above its noise floor", "p0", False, "")), quiet=False)
    assert capsys.readouterr().err == ""


def test_a_restart_that_is_not_exact_blocks_edges() -> None:
    (one,) = blocked_checks(_run((RESTARTED, "p0", False, "error 1")))
    words = blocked_in_words(one, 1, METHODS)
    assert words[0] == f"self-check failed: {RESTARTED}, on 1 of 1 prompt (p0); on p0: error 1"
    assert words[1] == "  blocked: all verdicts on edges on this prompt" and "--dtype float32" in words[2]


def test_the_steps_that_are_advised_exist() -> None:
    import inspect

    from attndiag.commands.endings import _FINER
    from attndiag.explanations import gradients, sampled_gradients

    for method, setting in _FINER.items():
        function = getattr(gradients, method, None) or getattr(sampled_gradients, method)
        assert {setting.partition("=")[0], "baseline"} <= set(inspect.signature(function).parameters)


def test_a_ceiling_and_a_single_method_have_advice_that_can_be_followed() -> None:
    ceiling = Blocked("scores of replacement[pair]", ("a",), "x", "replacement[pair]", ("tokens",))
    assert blocked_in_words(ceiling, 2, METHODS)[2] == "  to do: choose other replacements with --replacement"
    alone = Blocked("scores of weight", ("a",), "x", "weight", ("tokens",))
    assert "choose other methods with --methods" in blocked_in_words(alone, 2, ["weight"])[2]
