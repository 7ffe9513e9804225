"""Methods side by side: one axis, one target, known answers, what does not fit, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import attndiag
from attndiag.catalog import UnknownMethodError
from attndiag.comparison.axis import sinks, token_axis
from attndiag.comparison.methods import PromptMethods
from attndiag.comparison.one_prompt import compare_prompt
from attndiag.comparison.side_by_side import Comparison, tables
from attndiag.core.mixing import rollout
from attndiag.errors import NotApplicableError, ShapeError
from attndiag.models.known import randomised_sink
from attndiag.models.load import LoadedModel
from attndiag.models.vocabulary import learned_places
from attndiag.runs.plan import make_plan
from attndiag.stats.agreement import tau_b

PROMPTS = [
    attndiag.Prompt("<bos> w5 w9 w13 w30 w7 w21", id="one", cluster="x"),
    attndiag.Prompt("<bos> w40 w41 w8 w17 w9", id="two", cluster="y"),
]
EDGE_METHODS = ["weight", "weight@L1", "weight@L1H2", "rollout", "flow", "contribution", "head_contribution"]


def compare(*given: object, **more: object) -> Comparison:
    """Methods side by side on tokens alone, by a run in memory."""
    return attndiag.run(*given, edges=None, heads=False, **more).comparison  # type: ignore[arg-type]


def compare_unseen(lm: LoadedModel, prompts: list[attndiag.Prompt], *given: object, target=None, **more) -> Comparison:
    """The same for a model without attention, on which no capture can be checked."""
    plan = make_plan(*given, edges=None, heads=False, **more)
    results = [compare_prompt(lm, prompt, target, plan.compared) for prompt in prompts]
    return tables(results, plan.compared, primary=plan.primary)


def tau(found: Comparison, first: str, second: str) -> float:
    table = found.agreement_summary
    row = table[(table["first"] == first) & (table["second"] == second) & (table.measure == "tau_b")]
    return float(row["mean"].iloc[0])


def test_on_a_linear_model_gradients_and_replacement_say_the_same(linear_lm: LoadedModel) -> None:
    found = compare_unseen(
        linear_lm,
        PROMPTS,
        ["input_x_gradient", "saliency"],
        target=attndiag.Target.logit(),
        replacements=["zero_embedding"],
        metrics=["aopc_comprehensiveness", "naopc_comprehensiveness", "effect_tau", "lds"],
        primary=("input_x_gradient", "saliency"),
    )
    assert tau(found, "input_x_gradient", "replacement[zero_embedding]") == pytest.approx(1.0)
    table = found.faithfulness.set_index(["prompt", "metric", "method"]).value
    for prompt in ("one", "two"):
        for metric in ("effect_tau", "lds", "naopc_comprehensiveness"):
            assert table[prompt, f"{metric}[zero_embedding]", "input_x_gradient"] == pytest.approx(1.0, abs=1e-6)
        name = "aopc_comprehensiveness[zero_embedding]"
        assert table[prompt, name, "input_x_gradient"] > table[prompt, name, "random"]
    methods = found.methods.set_index("method")
    assert methods.loc["input_x_gradient", "verdict"] == methods.loc["replacement[zero_embedding]", "verdict"]
    effects = found.scores.pivot_table(index=["prompt", "position"], columns="method", values="score")
    np.testing.assert_allclose(
        effects["input_x_gradient"].drop(index=0, level=1),
        effects["replacement[zero_embedding]"].dropna(),
        atol=1e-9,
    )
    assert methods.loc["replacement[zero_embedding]", "circular"]
    assert not methods.loc["input_x_gradient", "circular"]
    circular = found.faithfulness[found.faithfulness.circular]
    assert set(circular.method) == {"replacement[zero_embedding]"}
    assert found.differences.primary.sum() == 4
    assert (found.differences.p_holm >= found.differences.p).all()
    assert not found.blocked


def test_every_method_stands_on_the_tokens_of_the_prompt(lm: LoadedModel) -> None:
    methods = [*EDGE_METHODS, "input_x_gradient", "pattern_attribution", "edge_effect"]
    found = compare(lm, PROMPTS[:1], methods, replacements=["mean_embedding"], metrics=[])
    assert found.problems.empty
    table = found.scores.pivot(index="position", columns="method", values="score")
    assert list(found.scores[found.scores.method == "weight"].token) == [
        "<bos>",
        " w5",
        " w9",
        " w13",
        " w30",
        " w7",
        " w21",
    ]
    assert table.shape == (7, len(methods) + 1)
    for name in EDGE_METHODS:
        if name != "flow":
            assert table[name].sum() == pytest.approx(1.0, abs=1e-6)
    with attndiag.capture(lm) as captured:
        lm.forward(PROMPTS[0])
    patterns = [call.pattern for call in captured.calls]
    np.testing.assert_allclose(table["weight@L1H2"], patterns[1][0, 2, -1], atol=1e-9)
    np.testing.assert_allclose(table["weight"], torch.stack(patterns)[:, 0, :, -1].mean((0, 1)), atol=1e-9)
    np.testing.assert_allclose(table["rollout"], rollout(patterns, holds_residual=False)[0, -1], atol=1e-9)
    # the first-order effect of an edge is its attribution
    assert np.corrcoef(table["pattern_attribution"], table["edge_effect"])[0, 1] > 0.5
    assert not found.scores[found.scores.position == 0].admissible.any()
    pairs = found.agreement.groupby(["first", "second"]).ngroups
    assert pairs == (len(methods) + 1) * len(methods) // 2


def test_what_does_not_fit_is_a_row_with_its_reason_and_the_rest_goes_on(linear_lm: LoadedModel) -> None:
    found = compare_unseen(
        linear_lm, PROMPTS[:1], ["weight", "input_x_gradient"], replacements=["zero_embedding"], metrics=[]
    )
    assert "weight" in set(found.problems.method)
    assert set(found.scores.method) == {"input_x_gradient", "replacement[zero_embedding]"}
    assert "weight" not in found.judged


def test_layers_and_heads_that_are_not_there(llama_lm: LoadedModel) -> None:
    found = compare(
        llama_lm, PROMPTS[:1], ["weight@L9", "weight@L0H7", "contribution@L0H1"], replacements=[], metrics=[]
    )
    reasons = dict(zip(found.problems.method, found.problems.reason, strict=True))
    assert "the layers with attention weights are [0, 1]" in reasons["weight@L9"]
    assert "heads 0 to 3" in reasons["weight@L0H7"]
    assert "no heads" in reasons["contribution@L0H1"]
    assert found.verdicts.empty


def test_prompts_do_not_influence_each_other(llama_lm: LoadedModel) -> None:
    given = {"methods": ["weight", "input_x_gradient"], "replacements": ["uniform:draws=3"], "metrics": ["effect_tau"]}
    both, swapped = compare(llama_lm, PROMPTS, **given), compare(llama_lm, PROMPTS[::-1], **given)
    for name in ("scores", "agreement", "faithfulness"):
        one, other = getattr(both, name), getattr(swapped, name)
        assert len(one) == len(other) > 0
        other = other.sort_values("prompt", kind="stable").reset_index(drop=True)
        pd.testing.assert_frame_equal(one.sort_values("prompt", kind="stable").reset_index(drop=True), other)
    again = compare(llama_lm, PROMPTS, **given)
    pd.testing.assert_frame_equal(both.verdicts, again.verdicts)


def test_a_swap_of_answer_and_foil_negates_scores_and_keeps_verdicts(llama_lm: LoadedModel) -> None:
    # the task check would fail one of the two: judge without it
    given = {"methods": ["input_x_gradient"], "replacements": ["mean_embedding"], "metrics": []}
    one, two = (
        compare(llama_lm, PROMPTS[:1], target=attndiag.Target.logit_diff(*pair), **given)
        for pair in (("w5", "w9"), ("w9", "w5"))
    )
    np.testing.assert_allclose(one.scores.score, -two.scores.score, atol=1e-6)
    assert {one.prompts.task[0] == "", two.prompts.task[0] == ""} <= {True, False}
    assert any("not the model's first choice" in found.prompts.task[0] for found in (one, two))


def test_own_scores_join_by_token_or_by_characters(llama_lm: LoadedModel) -> None:
    text = PROMPTS[0].text or ""
    spans = [(text.index("w9"), text.index("w30"), 3.0)]
    found = compare(
        llama_lm,
        PROMPTS[:1],
        ["weight"],
        replacements=[],
        own={"mine": [np.arange(7.0)], "words": [spans]},
        metrics=[],
    )
    table = found.scores.pivot(index="position", columns="method", values="score")
    assert table["mine"].tolist() == list(range(7))
    # two tokens share the span
    assert table["words"].tolist()[2:5] == [1.5, 1.5, 0.0]
    axis = token_axis(llama_lm, PROMPTS[0], None)
    with pytest.raises(ShapeError, match=r"shape \(3,\) for prompt 'one', whose 7 tokens are \['<bos>', ' w5'"):
        axis.place(np.ones(3), "mine")
    with pytest.raises(ShapeError, match="hold no token"):
        axis.from_spans([(0, 999, 1.0)], "words")


def test_own_scores_of_another_tokenisation_are_a_problem_of_one_prompt_and_cost_nothing_else(
    llama_lm: LoadedModel,
) -> None:
    found = attndiag.run(
        llama_lm,
        PROMPTS,
        ["weight"],
        replacements=[],
        own={"mine": [np.ones(3), np.arange(6.0)], "never": [np.ones(3), np.ones(3)]},
        metrics=[],
        edges=None,
        heads=False,
    )
    problems = found.comparison.problems
    problems = problems[problems.prompt != ""]
    assert list(zip(problems.prompt, problems.method, strict=True)) == [
        ("one", "mine"),
        ("one", "never"),
        ("two", "never"),
    ]
    assert problems.reason.str.startswith("ShapeError").all()
    assert found.comparison.prompts.prompt.tolist() == ["one", "two"]
    assert set(found.comparison.scores.groupby("method").prompt.nunique().items()) == {("weight", 2), ("mine", 1)}
    assert found.facts["failed_everywhere"] == ["never"] and not found.passed


def test_whether_own_scores_have_signs_is_one_answer_for_all_prompts(llama_lm: LoadedModel) -> None:
    """Below 0 on the second prompt alone: the first is ranked by value too."""
    signed, spans, sizes = np.arange(6.0) - 2, [(0, 5, -1.0)], [np.arange(7.0), np.arange(6.0)]
    own = {"signed": [np.arange(7.0), signed], "spans": [np.arange(7.0), spans], "sizes": sizes}
    given = {"replacements": [], "own": own, "metrics": []}
    found = compare(llama_lm, PROMPTS, ["weight"], **given)
    kinds = found.scores.groupby(["method", "prompt"]).signed.unique().map(list).to_dict()
    for name, want in (("signed", True), ("spans", True), ("sizes", False)):
        assert kinds[name, "one"] == kinds[name, "two"] == [want]
    # the prompts that come first do not decide
    first = compare(llama_lm, PROMPTS, ["weight"], limit=1, **given).scores
    assert first[first.method == "signed"].signed.all()


def test_constant_scores_are_undefined_and_counted(llama_lm: LoadedModel) -> None:
    found = compare(
        llama_lm,
        PROMPTS[:1],
        ["weight"],
        replacements=["mean_embedding"],
        own={"flat": [np.ones(7)]},
        metrics=["aopc_comprehensiveness"],
    )
    flat = found.verdicts[found.verdicts.method == "flat"]
    assert set(flat.verdict) == {"undefined"}
    assert set(flat.reason) == {"constant scores"}
    summary = found.agreement_summary
    pair = summary[(summary["second"] == "flat") & (summary.measure == "tau_b")]
    assert pair.undefined_share.tolist() == [1.0, 1.0]
    row = found.faithfulness[found.faithfulness.method == "flat"]
    assert row.undefined.tolist() == ["constant scores rank nothing"]
    assert row.value.isna().all()


def test_a_prompt_of_one_token_is_undefined(llama_lm: LoadedModel) -> None:
    found = compare(llama_lm, "<bos> w5", ["weight"], replacements=["mean_embedding"], metrics=["effect_tau"])
    assert set(found.verdicts.verdict) == {"undefined"}
    assert "at least 3 are needed" in found.verdicts.reason[0]
    nothing = compare(llama_lm, "<bos>", ["weight"], replacements=["mean_embedding"], metrics=["effect_tau"])
    assert "replacement[mean_embedding]" in set(nothing.problems.method)
    assert "faithfulness" in set(nothing.problems.method)


def test_failed_checks_block_and_are_reported(llama_lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PromptMethods._by_row

    def broken(self: PromptMethods, *args: object) -> object:
        from dataclasses import replace

        return replace(plain(self, *args), failures=("completeness",))  # type: ignore[arg-type]

    monkeypatch.setattr(PromptMethods, "_by_row", broken)
    found = compare(llama_lm, PROMPTS[:1], ["weight"], replacements=["mean_embedding"], metrics=[])
    assert found.blocked
    mine = found.verdicts[found.verdicts.method == "weight"]
    assert set(mine.verdict) == {"undefined"}
    assert set(mine.reason) == {"blocked by failed self-checks: completeness"}
    assert found.methods.set_index("method").loc["weight", "blocked_prompts"] == 1


def test_two_replacements_decide_whether_there_is_a_verdict(llama_lm: LoadedModel) -> None:
    found = compare(llama_lm, PROMPTS, ["weight"], replacements=["mean_embedding", "uniform:draws=2"], metrics=[])
    for prompt, value in zip(found.prompts.prompt, found.prompts.replacement_tau, strict=True):
        kinds = set(found.verdicts[found.verdicts.prompt == prompt].verdict)
        assert ("replacement_dependent" in kinds) == (value < 0.5)


def test_the_effect_of_a_token_shows_where_the_sink_model_looks() -> None:
    """MARK carries the answer in planted heads, and mass in none: replacing it has an effect without weight."""
    seed = next(seed for seed in range(50) if len(randomised_sink(seed).expected["planted"]) >= 3)
    built = randomised_sink(seed)
    lm = attndiag.load(built.model, tokenizer=built.tokenizer())
    words = {index: word for word, index in built.vocab.items()}
    text = " ".join(words[int(index)] for index in built.prompt_ids[0])
    target = attndiag.Target.logit_diff("ANS", "FOIL")
    found = compare(
        lm, text, ["weight", "head_contribution"], target=target, replacements=["zero_embedding"], metrics=[]
    )
    mark = found.verdicts[found.verdicts.token.str.strip() == "MARK"].set_index("method")
    assert mark.loc["weight", "claim"] == "low"
    assert mark.loc["weight", "verdict"] == "disagree"
    assert mark.loc["head_contribution", "claim"] == "high"
    assert mark.loc["head_contribution", "verdict"] == "agree"


def test_the_first_key_and_heavy_keys_are_sinks() -> None:
    pattern = np.zeros((1, 1, 4, 4))
    pattern[0, 0] = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.5, 0.4, 0], [0.1, 0.5, 0.2, 0.2]]
    assert sinks(pattern).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"methods": []}, ValueError, "at least one"),
        ({"methods": ["weight", "weight"]}, ValueError, "each once"),
        ({"methods": ["wieght"]}, UnknownMethodError, "did you mean 'weight'"),
        ({"methods": ["mixing_ratio"]}, NotApplicableError, "no reading on the token axis"),
        ({"methods": ["saliency@L3"]}, NotApplicableError, "one layer or head"),
        ({"methods": ["replacement"]}, NotApplicableError, "`replacements`"),
        ({"methods": ["weight"], "own": {"weight": [[1.0]]}}, ValueError, "each name once"),
        ({"methods": ["weight"], "own": {"recency": [[1.0]]}}, ValueError, r"\['recency'\], as the controls are"),
        ({"methods": ["weight"], "own": {"mine": []}}, ValueError, "0 entries for 1 prompts"),
        ({"methods": ["weight"], "primary": ("weight", "x")}, ValueError, r"names \['x'\]"),
        ({"methods": ["weight"], "replacements": ["nope"]}, ValueError, "unknown replacement"),
    ],
)
def test_bad_plans_are_refused_before_any_work(
    llama_lm: LoadedModel, arguments: dict, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        compare(llama_lm, PROMPTS[:1], **arguments)


def test_results_are_plain_and_the_evidence_is_the_ceiling(llama_lm: LoadedModel) -> None:
    found = compare(llama_lm, PROMPTS, ["weight"], replacements=["mean_embedding"], metrics=[])
    roles = found.methods.set_index("method").role
    assert roles.to_dict() == {"weight": "method", "replacement[mean_embedding]": "ceiling"}
    first = found.prompts.iloc[0]
    assert (first.text, first.target_kind, first.unit) == (PROMPTS[0].text, "logprob", "nats")
    axis = token_axis(llama_lm, PROMPTS[0], attndiag.Target.logit_diff("w5", "w9"))
    plain = axis.plain
    assert (plain.kind, plain.answer, plain.foil, plain.unit) == ("logit_diff", "w5", "w9", "logits")
    assert plain.tokens == axis.tokens and len(plain) == 7 and plain.special.tolist() == [True] + [False] * 6


def test_a_method_without_a_score_for_a_token_says_so_in_the_faithfulness_table(llama_lm: LoadedModel) -> None:
    holes = np.arange(7.0)
    holes[[1, 3]] = np.nan
    found = compare(
        llama_lm,
        PROMPTS[:1],
        ["weight"],
        replacements=["mean_embedding"],
        own={"holes": [holes]},
        metrics=["aopc_comprehensiveness", "effect_tau"],
    )
    rows = found.faithfulness[found.faithfulness.method == "holes"]
    assert set(rows.metric) == set(found.faithfulness[found.faithfulness.method == "weight"].metric)
    assert len(rows) == 2 and rows.value.isna().all()
    assert set(rows.undefined) == {"no score for ' w5' (1), ' w13' (3), so it orders not all tokens"}
    assert set(found.differences[found.differences["first"] == "holes"].undefined_share) == {1.0}


def test_rare_tokens_first_is_a_control_where_the_vocabulary_has_an_order(tiny_folder: Path) -> None:
    prompts = [
        attndiag.Prompt("When Mary and John went to the store", id="one"),
        attndiag.Prompt("John gave a drink to Mary", id="two"),
    ]
    lm = attndiag.load(tiny_folder)
    wanted = {"replacements": ["mean_embedding"], "metrics": ["aopc_comprehensiveness", "effect_tau"]}
    found = compare(lm, prompts, ["weight"], **wanted)
    rows = found.faithfulness[found.faithfulness.method == "token_frequency"]
    assert len(rows) == 2 * len(prompts) and rows.control.all() and not rows.circular.any()
    assert np.isfinite(rows.value).all() and (rows.undefined == "").all()
    # nothing of the other prompts is in it
    alone = compare(lm, prompts[1:], ["weight"], **wanted).faithfulness
    again = rows[rows.prompt == "two"].value.tolist()
    assert alone[alone.method == "token_frequency"].value.tolist() == again
    # a control is judged against nothing
    assert set(found.differences["first"]) == {"weight", "replacement[mean_embedding]"}
    # tau with the effects of single tokens, by hand
    axis = token_axis(lm, prompts[1], None)
    scores = found.scores[(found.scores.prompt == "two") & found.scores.admissible]
    effects = scores[scores.method == "replacement[mean_embedding]"].set_index("position").score
    places = learned_places(lm.tokenizer, axis.token_ids[effects.index])
    tau_of = alone[(alone.method == "token_frequency") & alone.metric.str.startswith("effect_tau")].value.item()
    assert tau_of == pytest.approx(tau_b(places, np.abs(effects.to_numpy())))


def test_without_an_order_of_the_vocabulary_the_control_says_why_it_has_no_value(llama_lm: LoadedModel) -> None:
    metrics = ["aopc_comprehensiveness", "effect_tau"]
    found = compare(llama_lm, PROMPTS, ["weight"], replacements=["mean_embedding"], metrics=metrics)
    rows = found.faithfulness[found.faithfulness.method == "token_frequency"]
    assert len(rows) == len(PROMPTS) * 2 and rows.value.isna().all() and rows.control.all()
    assert set(rows.undefined) == {
        "WordLevel has no learned order of tokens; BPE, Unigram and WordPiece vocabularies have"
    }
    assert "token_frequency" not in set(found.differences["first"])
