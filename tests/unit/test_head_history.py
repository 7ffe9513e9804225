"""Head scores over checkpoints: the shipped series, folders, and lists that are no history."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attndiag.errors import ModelLoadError, NotApplicableError
from attndiag.explanations.head_history import heads_over_checkpoints
from attndiag.models.known import induction_gpt2, induction_llama
from attndiag.models.series import load_series


def test_the_phase_change_of_the_shipped_series():
    history, control = (heads_over_checkpoints(load_series(name), rows=16) for name in ("induction", "control"))
    window = history.window()
    assert 475 <= window.start < window.end <= 650
    assert history.tables[0].facts["length"] == 31  # a context of 64 holds no more than BOS and twice 31
    assert max(control.curve()) < 0.1 and not control.window().found
    alone, beyond = history.learning_window(), history.learning_window(control)
    assert alone.found and beyond.found
    assert abs(beyond.end - window.end) < 40
    assert history.curve("second_copy_loss")[-1] < 0.5 < 4 < history.curve("first_copy_loss")[-1]
    best = history.curve()
    one = history.curve("prefix_matching_score", (1, 0))
    assert all(a >= b for a, b in zip(best, one, strict=True)) and max(history.curve("previous_token_score")) > 0.5
    frame = history.to_frame()
    assert set(frame["step"]) == set(history.steps) and len(frame) == 37 * 8 * 2
    with pytest.raises(NotApplicableError, match=r"there is no head \(2, 0\); layers are \[0, 1\]"):
        history.curve("prefix_matching_score", (2, 0))


def test_effects_follow_the_phase_change():
    series = load_series()
    steps = (300, 550, 900)
    history = heads_over_checkpoints([(s, series.at(s)) for s in steps], rows=8, ablate=8)
    together = history.set_curve()
    assert math.isnan(together[0])  # no head is above the threshold before the rise
    assert together[2] > 4 > together[1] > 0.5
    before, _, after = history.curve("ablation_effect")
    assert before < 0.5 and after > 3  # the previous-token head alone costs nearly everything
    kept = history.curve("ablation_effect_patterns_kept", (0, 3))
    assert history.curve("ablation_effect", (0, 3))[2] > 3 and abs(kept[2]) < 0.5


def test_folders_pairs_and_the_in_context_learning_score(tmp_path):
    series = load_series()
    words = Tokenizer(models.WordLevel(vocab={"<bos>": 0, **{f"t{i}": i for i in range(1, 64)}}, unk_token="t63"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for step in (0, 900):
        series.at(step).save_pretrained(tmp_path / f"checkpoint-{step}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", pad_token="<bos>")
    tokens = torch.cat([torch.zeros(4, 1, dtype=torch.long), torch.arange(1, 25).repeat(4, 2)], dim=1)
    calls: list[str] = []
    folders = heads_over_checkpoints(
        [tmp_path / "checkpoint-900", str(tmp_path / "checkpoint-0")],
        tokenizer=tokenizer,
        probes=["induction"],
        rows=2,
        losses_on=tokens,
        early=(2, 20),
        late=(27, 45),
        progress=lambda what, done, total: calls.append(f"{what} {done}/{total}"),
    )
    assert folders.steps == (0, 900)
    assert calls == ["heads at step 0 1/2", "heads at step 900 2/2"]
    pairs = heads_over_checkpoints([(900, series.at(900)), (0, series.at(0))], rows=2)
    # without the tokenizer the same tokens are admissible: BOS is known from the configuration
    assert folders.curve() == pytest.approx(pairs.curve(), abs=1e-6)
    first, last = folders.curve("icl_score")
    assert abs(first) < 0.2 and last < -2


def test_lists_that_are_no_history_are_refused(tmp_path):
    gpt2, llama = induction_gpt2().model, induction_llama().model
    with pytest.raises(ModelLoadError, match="step 2 is a LlamaForCausalLM, and the first is a GPT2LMHeadModel"):
        heads_over_checkpoints([(1, gpt2), (2, llama)], rows=1)
    with pytest.raises(ModelLoadError, match=r"step 2 is of another size: lm_head\.weight"):
        heads_over_checkpoints([(1, llama), (2, load_series().at(0))], rows=1)
    with pytest.raises(ModelLoadError, match=r"the step of .*final is unknown; give \(step, source\) pairs"):
        heads_over_checkpoints([tmp_path / "checkpoint-1", tmp_path / "final"])
    with pytest.raises(ModelLoadError, match="the step of LlamaForCausalLM is unknown"):
        heads_over_checkpoints([llama, llama])
    with pytest.raises(ModelLoadError, match="two checkpoints have the same step"):
        heads_over_checkpoints([(1, llama), (1, llama)])
    with pytest.raises(NotApplicableError, match="at least two checkpoints, got 1"):
        heads_over_checkpoints([(1, llama)])
    with pytest.raises(ModelLoadError, match="is one source; give a list"):
        heads_over_checkpoints(str(tmp_path))
    with pytest.raises(ModelLoadError, match="checkpoint-1"):
        heads_over_checkpoints([tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"])
    with pytest.raises(ModelLoadError, match="every source is a revision name"):
        heads_over_checkpoints([(1, llama), (2, llama)], model="some/model")


def test_missing_checkpoints_are_named(tmp_path):
    series = load_series()
    with pytest.raises(ModelLoadError, match="checkpoint-500"):
        heads_over_checkpoints([(0, series.at(0)), tmp_path / "checkpoint-500"], rows=2)
    # revisions of a hub model that is not there: the hub is off in the tests
    with pytest.raises(ModelLoadError, match="attndiag/no-such-model"):
        heads_over_checkpoints(["step0", "step1000"], model="attndiag/no-such-model")


def test_a_control_must_cover_the_run():
    series = load_series()
    history = heads_over_checkpoints([(s, series.at(s)) for s in (0, 450, 900)], rows=2)
    short = heads_over_checkpoints([(s, series.at(s)) for s in (0, 450)], rows=2)
    with pytest.raises(NotApplicableError, match=r"the control covers steps 0\.\.450, less than 0\.\.900"):
        history.learning_window(short)
    assert not math.isnan(history.learning_window().start)
