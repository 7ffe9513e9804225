"""The run behind the first report, on a model whose right answers are known, and on prompts that go wrong."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import kendalltau

import attndiag
from attndiag.errors import InsufficientMemoryError, NotApplicableError, PromptError, RunFolderError
from attndiag.explanations.contributions import contributions
from attndiag.hooks.record import AttentionCall
from attndiag.models.known import KNOWN_MODELS
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt
from attndiag.runs import call_measures, weights_run
from attndiag.runs.call_measures import measure_call
from attndiag.runs.call_record import CallMeasures, CallSettings
from attndiag.runs.folder import RunFolder
from attndiag.runs.memory import MemoryEstimate, estimate_memory
from attndiag.runs.weights_run import RunSettings, estimate_run, measure_prompts, run_identity
from attndiag.stats.agreement import tau_needed


@pytest.fixture(scope="module")
def sink_lm() -> LoadedModel:
    known = KNOWN_MODELS["sink_against_value"]()
    return attndiag.load(known.model, tokenizer=known.tokenizer())


@pytest.fixture(scope="module")
def tiny_lm(tiny_folder: Path) -> LoadedModel:
    return attndiag.load(tiny_folder, device="cpu")


SINK_PROMPT = Prompt("<bos> MARK a b c Q", id="sink", target="ANS", foil="FOIL", cluster="known")


def value(heads: pd.DataFrame, measure: str, head: int | None = 0) -> float:
    rows = heads[(heads.measure == measure) & (heads["head"].isna() if head is None else heads["head"] == head)]
    (found,) = rows.value
    return float(found)


def test_the_tables_hold_the_known_answers_of_the_sink_model(sink_lm: LoadedModel, tmp_path: Path) -> None:
    outcome = measure_prompts(sink_lm, [SINK_PROMPT], tmp_path / "out")
    assert outcome.passed
    heads = outcome.folder.read("heads")
    for head, (at_sink, at_mark) in enumerate([(0.009, 1.0), (0.9, 0.1)]):
        assert value(heads, "sink_weight", head) == pytest.approx(0.9, abs=4e-6)
        share = at_sink / (at_sink + at_mark)
        assert value(heads, "sink_head_contribution_share", head) == pytest.approx(share, abs=4e-6)
        assert value(heads, "head_written", head) == pytest.approx(at_sink + at_mark, abs=4e-5)
    assert value(heads, "sink_f_norm", 0) == pytest.approx(0.01, abs=1e-5)
    assert value(heads, "sink_f_norm", 1) == pytest.approx(1.0, abs=1e-5)
    assert (value(heads, "top_key_differs", 0), value(heads, "top_key_differs", 1)) == (1.0, 0.0)
    # the two heads write along directions that are orthogonal, so a key's whole contribution is the root of squares
    sink, mark = np.hypot(0.009, 0.9), np.hypot(1.0, 0.1)
    assert value(heads, "sink_contribution_share", None) == pytest.approx(sink / (sink + mark), abs=1e-5)
    assert value(heads, "layer_written", None) == pytest.approx(sink + mark, abs=1e-4)

    pairs = outcome.folder.read("disagreements")
    strongest = pairs[(pairs.direction == "contribution_over_weight") & (pairs["head"] == 0)].iloc[0]
    assert (strongest.key_token, strongest.key_pos, strongest.key_class) == (" MARK", 1, "content")
    assert strongest.weight_share == pytest.approx(0.1, abs=1e-5)
    assert strongest.contribution_share == pytest.approx(1 / 1.009, abs=1e-5)

    scores = outcome.folder.read("scores")
    last = scores[(scores.method == "head_contribution") & scores["head"].isna()].set_index("source_pos").value
    assert last[0] == pytest.approx((0.009 + 0.9) / 2, abs=1e-5)
    assert last[1] == pytest.approx((1.0 + 0.1) / 2, abs=1e-5)


def test_rows_behind_the_strongest_pairs_are_in_the_scores(sink_lm: LoadedModel, tmp_path: Path) -> None:
    folder = measure_prompts(sink_lm, [SINK_PROMPT], tmp_path / "out").folder
    scores = folder.read("scores")
    for pair in folder.read("disagreements").itertuples():
        row = scores[(scores["head"] == pair.head) & (scores.query_pos == pair.query_pos)]
        weight = row[row.method == "weight"].set_index("source_pos").value
        written = row[row.method == "head_contribution"].set_index("source_pos").value
        assert weight[pair.key_pos] == pytest.approx(pair.weight)
        assert written[pair.key_pos] == pytest.approx(pair.head_contribution)
        assert written.sum() == pytest.approx(pair.row_written)


def test_the_task_check_and_the_provenance(sink_lm: LoadedModel, tmp_path: Path) -> None:
    swapped = Prompt(SINK_PROMPT.text, id="swapped", target="FOIL", foil="ANS")
    folder = measure_prompts(sink_lm, [SINK_PROMPT, swapped], tmp_path / "out", settings=RunSettings(seed=7)).folder
    right, wrong = folder.read("prompts").to_dict("records")
    assert (right["task_ok"], right["target_is_top1"], right["top1"]) == (True, True, "ANS")
    assert (wrong["task_ok"], wrong["target_is_top1"]) == (False, False)
    # what the heads write for ANS: .009 + 1.0 + .9 + .1
    assert right["logit_diff"] == pytest.approx(2.009, abs=1e-4)
    assert wrong["logit_diff"] == -right["logit_diff"]
    assert right["target_logprob"] == pytest.approx(np.log(right["target_prob"]), abs=1e-6)
    (run,) = folder.read("runs").to_dict("records")
    assert (run["n_prompts"], run["seed"], run["status"], run["kernel"]) == (2, 7, "complete", "eager")
    assert run["logits_equal"]
    assert run["architecture"] == "GPT2LMHeadModel"
    assert {"torch", "transformers", "numpy"} <= set(json.loads(run["versions"]))
    assert (folder.read("checks").certified).all()
    assert folder.read("checks").completeness_error.max() <= 1e-5
    tokens = folder.read("tokens")
    assert tokens[tokens.prompt == "sink"].text.tolist() == ["<bos>", " MARK", " a", " b", " c", " Q"]
    assert tokens[tokens.prompt == "sink"].is_special.tolist() == [True] + [False] * 5


def captured_measures(lm: LoadedModel, text: str) -> tuple[list[CallMeasures], list[dict[str, np.ndarray]]]:
    """What the run measures of each call, and the same call's own arrays for an independent look."""
    encoded = lm.encode(text)
    special = encoded.special[0].numpy()
    measured, arrays = [], []

    def keep(call) -> None:
        measured.append(measure_call(call, special, CallSettings()))
        arrays.append(
            {
                kind: contributions(call, kind, dtype=torch.float64).values[0].numpy()
                for kind in ("weight", "head_contribution", "contribution")
            }
        )

    with attndiag.capture(lm, on_call=keep):
        lm.run(encoded.inputs)
    return measured, arrays


def test_averages_equal_a_slow_loop(tiny_lm: LoadedModel) -> None:
    measured, arrays = captured_measures(tiny_lm, "When Mary and John went to the store, John gave a drink")
    for call, own in zip(measured, arrays, strict=True):
        n = own["weight"].shape[1]
        assert n > 12
        only_position_0 = call.per_layer["sink_keys"].values[0] == 1
        for head in range(4):
            weights, shares, taus, above = [], [], [], []
            for query in range(1, n):
                row, written = own["weight"][head, query], own["head_contribution"][head, query]
                weights.append(row[0])
                shares.append(written[0] / written.sum())
                if query >= 3:
                    taus.append(kendalltau(row[1 : query + 1], written[1 : query + 1]).statistic)
                if query >= 5:
                    above.append(taus[-1] >= tau_needed(query) - 1e-9)
            found = call.per_head
            assert found["sink_weight"].values[head] == pytest.approx(np.mean(weights), abs=1e-6)
            assert found["sink_weight"].n[head] == n - 1
            assert found["sink_head_contribution_share"].values[head] == pytest.approx(np.mean(shares), abs=1e-5)
            if only_position_0:
                assert found["rank_agreement"].values[head] == pytest.approx(np.mean(taus), abs=1e-6)
                assert (found["rank_agreement"].n[head], found["rank_agreement"].undefined[head]) == (len(taus), 2)
                assert found["rank_agreement_above_chance"].values[head] == pytest.approx(np.mean(above))
            differs = own["weight"][head, -1].argmax() != own["head_contribution"][head, -1].argmax()
            assert found["top_key_differs"].values[head] == float(differs)
        share = [own["contribution"][q, 0] / own["contribution"][q].sum() for q in range(1, n)]
        assert call.per_layer["sink_contribution_share"].values[0] == pytest.approx(np.mean(share), abs=1e-5)
        bound = own["head_contribution"].sum(axis=0)[1:]
        ratio = own["contribution"][1:][bound > 0] / bound[bound > 0]
        assert call.per_layer["cancellation"].values[0] == pytest.approx(np.median(ratio), abs=1e-5)
    assert any(call.per_layer["sink_keys"].values[0] == 1 for call in measured)


def test_the_strongest_pairs_are_the_strongest(tiny_lm: LoadedModel) -> None:
    measured, arrays = captured_measures(tiny_lm, "When Mary and John went to the store, John gave a drink")
    for call, own in zip(measured, arrays, strict=True):
        if call.per_layer["sink_keys"].values[0] != 1:
            continue
        difference = own["head_contribution"] / own["head_contribution"].sum(-1, keepdims=True) - own["weight"]
        for pair in call.pairs:
            sign = 1 if pair.direction == "contribution_over_weight" else -1
            keys = slice(1, None) if pair.key_class == "content" else slice(0, 1)
            best = (sign * difference[pair.head, 1:, keys]).max()
            assert sign * pair.difference == pytest.approx(best, abs=1e-5)


def test_prompts_that_go_wrong_become_rows_and_the_others_stay(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    prompts = [
        Prompt("When Mary and John went", id="fine", target=" to", foil=" and"),
        Prompt("x" * 400, id="long"),
        Prompt("When Mary", id="collide", target=" John gave", foil=" John went"),
        Prompt(messages=[{"role": "user", "content": "Hi"}], id="chat"),
        Prompt("When John went to the store", id="no-target"),
    ]
    outcome = measure_prompts(tiny_lm, prompts, tmp_path / "out")
    rows = outcome.folder.read("prompts").set_index("prompt")
    assert rows.status.to_dict() == {
        "fine": "ok",
        "long": "failed",
        "collide": "no_target",
        "chat": "failed",
        "no-target": "ok",
    }
    assert "400 tokens but the model has 128 positions; shorten it" in rows.error["long"]
    assert "start with the same token" in rows.error["collide"]
    assert "no chat template" in rows.error["chat"]
    assert rows.n_calls.to_dict() == {"fine": 2, "long": 0, "collide": 2, "chat": 0, "no-target": 2}
    assert pd.isna(rows.task_ok["no-target"]) and rows.top1["no-target"]
    assert (outcome.n_failed, outcome.n_without_target, outcome.passed) == (2, 1, False)
    assert set(outcome.folder.read("heads").prompt) == {"fine", "collide", "no-target"}


def test_a_prompt_of_one_token_has_undefined_numbers_not_zeros(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    folder = measure_prompts(tiny_lm, [Prompt("W", id="one")], tmp_path / "out").folder
    heads = folder.read("heads")
    undefined = heads[heads.measure.isin(["sink_weight", "sink_contribution_share", "rank_agreement"])]
    assert undefined.value.isna().all() and (undefined.n == 0).all()
    assert (undefined.error == "undefined in every row").all()


def test_what_was_measured_before_a_stop_stays(
    tiny_lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(f"When Mary and John went {i}", id=str(i)) for i in range(4)]
    done: list[int] = []

    def stop_in_the_third(_what: str, step: int, _total: int) -> None:
        done.append(step)
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_prompts(tiny_lm, prompts, tmp_path / "out", progress=stop_in_the_third)
    run = RunFolder.open(tmp_path / "out")
    assert run.read("prompts").prompt.tolist() == ["0", "1"]
    assert not run.finished
    assert run.about["n_prompts"] == 4
    whole = measure_prompts(tiny_lm, prompts, tmp_path / "whole").folder
    pd.testing.assert_frame_equal(
        run.read("heads"), whole.read("heads")[lambda heads: heads.prompt.isin(["0", "1"])].reset_index(drop=True)
    )


def test_two_runs_give_identical_tables(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    prompts = [Prompt("When Mary and John went", id="a"), Prompt("to the store, John", id="b")]
    first, second = (measure_prompts(tiny_lm, prompts, tmp_path / name).folder for name in ("one", "two"))
    assert first.run_id == second.run_id == run_identity(tiny_lm, prompts, RunSettings())
    for table in ("prompts", "tokens", "scores", "heads", "disagreements", "checks"):
        assert first.arrow(table).equals(second.arrow(table)), table


def test_the_identity_follows_what_is_measured(tiny_lm: LoadedModel, sink_lm: LoadedModel) -> None:
    prompts = [Prompt("When Mary", id="a")]
    ids = {
        run_identity(tiny_lm, prompts, RunSettings()),
        run_identity(sink_lm, prompts, RunSettings()),
        run_identity(tiny_lm, [Prompt("When Mary ", id="a")], RunSettings()),
        run_identity(tiny_lm, prompts, RunSettings(seed=1)),
        run_identity(tiny_lm, prompts, RunSettings(calls=CallSettings(backend="reference"))),
    }
    assert len(ids) == 5


def test_other_weights_are_another_run_and_what_is_carried_along_is_not(sink_lm: LoadedModel, tmp_path: Path) -> None:
    changed = copy.deepcopy(sink_lm.model)
    with torch.no_grad():
        next(iter(changed.parameters())).view(-1)[3] += 1
    other = attndiag.load(changed, tokenizer=sink_lm.tokenizer)
    assert (other.info.name, other.info.revision) == (sink_lm.info.name, sink_lm.info.revision)
    ids = [run_identity(lm, [SINK_PROMPT], RunSettings()) for lm in (sink_lm, other)]
    assert ids[0] != ids[1]
    assert run_identity(sink_lm, [replace(SINK_PROMPT, meta={"a": 1})], RunSettings()) == ids[0]
    measure_prompts(sink_lm, [SINK_PROMPT], tmp_path)
    with pytest.raises(RunFolderError, match=r"already holds a run.*It differs: weights: \w{16} there, \w{16} now"):
        measure_prompts(other, [SINK_PROMPT], tmp_path)


def test_what_lacked_memory_is_tried_again_and_nothing_else(
    sink_lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [SINK_PROMPT, replace(SINK_PROMPT, id="again"), replace(SINK_PROMPT, id="bad", target=None, foil=None)]
    plain, seen = weights_run._captured, []

    def short(lm, encoded, *rest):
        seen.append(encoded)
        if len(seen) == 2:
            raise InsufficientMemoryError("needs more")
        if len(seen) == 3:
            raise PromptError("never")
        return plain(lm, encoded, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(weights_run, "_captured", short)
        first = measure_prompts(sink_lm, prompts, tmp_path)
    assert (first.n_failed, first.passed, first.folder.finished) == (2, False, False)
    assert first.folder.read("prompts").transient.tolist() == [False, True, False]
    assert len(seen) == 3
    second = measure_prompts(sink_lm, prompts, tmp_path)
    assert (second.n_failed, second.folder.finished) == (1, True)
    assert second.folder.read("prompts").status.tolist() == ["ok", "ok", "failed"]


def test_the_check_of_the_output_is_noted_before_the_prompt_counts_as_done(
    sink_lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write_shard", stops)
        with pytest.raises(KeyboardInterrupt):
            measure_prompts(sink_lm, [SINK_PROMPT], tmp_path)
    assert RunFolder.open(tmp_path).about["runs"]["logits_equal"] is True
    outcome = measure_prompts(sink_lm, [SINK_PROMPT], tmp_path)
    assert outcome.passed and not replace(outcome, logits_equal=None).passed


def test_a_changed_output_is_noticed(tiny_lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_run, "_same_output", lambda *_: False)
    outcome = measure_prompts(tiny_lm, [Prompt("When Mary", id="a")], tmp_path / "out")
    assert outcome.logits_equal is False and not outcome.passed


def test_a_call_that_does_not_reproduce_the_model_is_not_certified(tiny_lm: LoadedModel) -> None:
    encoded = tiny_lm.encode("When Mary and John")
    kept: list[CallMeasures] = []

    def spoil(call) -> None:
        call.z.mul_(1.001)
        kept.append(measure_call(call, encoded.special[0].numpy(), CallSettings()))

    with attndiag.capture(tiny_lm, on_call=spoil):
        tiny_lm.run(encoded.inputs)
    assert not kept[0].certified
    assert "|A v - z|" in kept[0].checks["failures"]


STREAMED = (
    "sink_weight", "learned_sink_mass", "special_weight", "sink_head_contribution_share", "head_written", "sink_v_norm",
    "other_v_norm", "sink_f_norm", "other_f_norm", "rank_agreement", "rank_agreement_above_chance", "top_key_differs",
    "sink_contribution_share", "layer_written", "layer_rank_agreement", "layer_top_key_differs", "sink_keys",
)  # fmt: skip


@pytest.mark.parametrize("text", ["When Mary and John went to the store, John gave a drink", "When Mary", "When"])
def test_streamed_measures_equal_those_of_the_maps(tiny_lm: LoadedModel, text: str) -> None:
    encoded = tiny_lm.encode(text)
    special = encoded.special[0].numpy()
    both: list[tuple[CallMeasures, CallMeasures]] = []

    def measure(call: AttentionCall) -> None:
        maps, streamed = (
            measure_call(call, special, CallSettings(backend=backend, most_ranked_rows=8))
            for backend in ("reference", "streaming")
        )
        both.append((maps, streamed))

    with attndiag.capture(tiny_lm, on_call=measure):
        tiny_lm.run(encoded.inputs)
    assert both
    for maps, streamed in both:
        assert (maps.backend, streamed.backend) == ("reference", "streaming")
        assert streamed.certified and streamed.last_query == maps.last_query
        for group in ("per_head", "per_layer"):
            want, got = getattr(maps, group), getattr(streamed, group)
            # the median over all pairs is the one thing that a stream does not keep
            assert set(want) - set(got) <= {"cancellation"} and set(got) <= set(want) and set(got) <= set(STREAMED)
            for name in got:
                np.testing.assert_allclose(got[name].values, want[name].values, rtol=1e-4, atol=1e-5, err_msg=name)
                np.testing.assert_array_equal(got[name].n, want[name].n, err_msg=name)
                np.testing.assert_array_equal(got[name].undefined, want[name].undefined, err_msg=name)
        assert set(streamed.last_query_scores) == set(maps.last_query_scores)
        for name, values in streamed.last_query_scores.items():
            np.testing.assert_allclose(values, maps.last_query_scores[name], rtol=1e-4, atol=1e-6)


def assert_same_measures(one: CallMeasures, other: CallMeasures) -> None:
    for name, found in {**one.per_head, **one.per_layer}.items():
        want = {**other.per_head, **other.per_layer}[name]
        np.testing.assert_allclose(found.values, want.values, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(found.n, want.n, err_msg=name)


def test_a_masked_call_streams_alike() -> None:
    known = KNOWN_MODELS["sink_against_value"]()
    lm = attndiag.load(known.model, tokenizer=known.tokenizer())
    encoded = lm.encode(SINK_PROMPT)
    calls: list[AttentionCall] = []
    with attndiag.capture(lm, on_call=calls.append):
        lm.run(encoded.inputs)
    special = np.array([True] + [False] * 5)
    n = calls[0].n_keys
    # the same order of reading, told by a mask
    order = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    masked = replace(calls[0], is_causal=False, mask=order)
    one = measure_call(masked, special, CallSettings(backend="streaming"))
    assert_same_measures(one, measure_call(calls[0], special, CallSettings(backend="reference")))


@pytest.mark.parametrize("by", ["head", "window"])
def test_masks_by_head_and_narrow_windows_stream_alike(tiny_lm: LoadedModel, by: str) -> None:
    encoded = tiny_lm.encode("When Mary and John went to the store, John gave a drink to the other one there")
    calls: list[AttentionCall] = []
    with attndiag.capture(tiny_lm, on_call=calls.append):
        tiny_lm.run(encoded.inputs)
    call = calls[0]
    n, special = call.n_keys, encoded.special[0].numpy()
    order = torch.ones(n, n, dtype=torch.bool).tril()
    if by == "head":
        some = torch.rand(1, call.n_heads, n, n, generator=torch.Generator().manual_seed(0)) < 0.5
        mask = (some | torch.eye(n, dtype=torch.bool)) & order
    else:
        mask = (order & (torch.arange(n)[:, None] - torch.arange(n)[None] < 3))[None, None]
    changed = replace(call, is_causal=False, mask=mask)
    rows = n if by == "head" else 3
    both = [
        measure_call(changed, special, CallSettings(backend=backend, most_ranked_rows=rows))
        for backend in ("streaming", "reference")
    ]
    assert_same_measures(*both)


def test_a_call_whose_maps_do_not_fit_is_streamed_or_refused(
    tiny_lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = tiny_lm.encode("When Mary and John went")
    calls: list[AttentionCall] = []
    with attndiag.capture(tiny_lm, on_call=calls.append):
        tiny_lm.run(encoded.inputs)
    special = encoded.special[0].numpy()
    monkeypatch.setattr(call_measures, "available_bytes", lambda _: 1000)
    assert measure_call(calls[0], special, CallSettings()).backend == "streaming"
    hidden = replace(calls[0], q=None)
    with pytest.raises(InsufficientMemoryError, match="cannot be streamed; shorten the prompt"):
        measure_call(hidden, special, CallSettings())
    run = measure_prompts(tiny_lm, [Prompt("When Mary and John", id="a")], tmp_path / "out")
    assert run.folder.read("runs").backend.tolist() == ["streaming"]
    assert set(run.folder.read("checks").backend) == {"streaming"}


def test_bad_requests_are_refused_before_any_work(tiny_lm: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="there are no prompts; give at least one"):
        measure_prompts(tiny_lm, [], tmp_path / "out")
    twice = [Prompt("x", id="a"), Prompt("y", id="a")]
    with pytest.raises(PromptError, match="two prompts have the id 'a'"):
        measure_prompts(tiny_lm, twice, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        measure_prompts(tiny_lm, [Prompt("x")], tmp_path / "file")
    with pytest.raises(NotApplicableError, match="backend is 'swift'"):
        measure_prompts(
            tiny_lm, [Prompt("x y")], tmp_path / "swift", settings=RunSettings(calls=CallSettings(backend="swift"))
        )


def test_memory_is_estimated_before_and_too_much_is_refused(
    tiny_lm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = estimate_memory(tiny_lm, 10), estimate_memory(tiny_lm, 100)
    assert short.needed < long.needed
    assert short.weights == sum(p.numel() * 4 for p in tiny_lm.model.parameters())
    assert "for prompts of up to 10 tokens" in str(short)
    prompts = [Prompt("When Mary and John", id="a"), Prompt("x" * 400, id="too long to count")]
    assert estimate_run(tiny_lm, prompts).n_tokens == len(tiny_lm.encode(prompts[0]).input_ids[0])
    tight = MemoryEstimate(1, 500, 500, 1000, 9)
    assert not tight.fits
    monkeypatch.setattr(weights_run, "estimate_memory", lambda *_, **__: tight)
    outcome = measure_prompts(tiny_lm, [Prompt("When Mary", id="a")], tmp_path / "out")
    (error,) = outcome.folder.read("prompts").error
    assert error.startswith("prompt 'a' has 9 tokens and needs about 0 MB, but 0 MB are free; shorten the prompt")


def test_an_encoder_and_an_encoder_decoder(tmp_path: Path, tiny_folder: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertModel, T5Config, T5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    size = {"vocab_size": len(tokenizer), "pad_token_id": 0}
    bert = BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, **size)
    ).eval()
    prompts = [Prompt("When Mary and John went to", id="a", target=" the", decoder_text="John gave")]
    folder = measure_prompts(attndiag.load(bert, tokenizer=tokenizer), prompts, tmp_path / "bert").folder
    row = folder.read("prompts").iloc[0]
    assert (row.status, row.n_calls, row.n_certified) == ("ok", 2, 2)
    assert pd.isna(row.task_ok)

    t5 = T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, eos_token_id=0, **size
        )
    ).eval()
    folder = measure_prompts(attndiag.load(t5, tokenizer=tokenizer), prompts, tmp_path / "t5").folder
    checks = folder.read("checks")
    assert checks.kind.value_counts().to_dict() == {"self": 4, "cross": 2}
    assert checks.certified.all()
    assert folder.read("tokens").part.unique().tolist() == ["input", "decoder"]
