"""Exact edge effects equal one forward for each edge, on both routes, and the answers of the hand-built models."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

import attndiag as ad
from attndiag.errors import RunFolderError, ShapeError, UnsupportedModelError
from attndiag.explanations import edge_truth
from attndiag.hooks import restart
from attndiag.models import known

WORDS = {**{f"t{i}": i for i in range(63)}, "<mask>": 63}
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GQA = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 1,
}  # fmt: skip
RESTARTED = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "llama": GQA,
    "mistral": GQA | {"sliding_window": 4},
    "gemma2": GQA | {"sliding_window": 4},
    "gpt_oss": GQA | {"sliding_window": 4, "num_local_experts": 4},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": COMMON,
}
TEXT = "t5 t9 t3 t44 t17 t8"
TARGET = ad.Target.logit_diff("t7", "t30")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(vocab=WORDS, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", mask_token="<mask>")


def loaded(family: str, settings: dict, factory: type = AutoModelForCausalLM):
    torch.manual_seed(1)
    model = factory.from_config(AutoConfig.for_model(family, **settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            elif weight.ndim == 2:
                weight.mul_(5)
    return ad.load(model, tokenizer=tokenizer())


def brute_force(lm, prompt, target, effects: ad.Scores, mode: str, stream: str = "self") -> torch.Tensor:
    """Every third edge by one forward of its own; nan for the others, as for what is no edge."""
    clean = ad.score(lm, prompt, target).values
    expected = torch.full_like(effects.values, float("nan"))
    for place in (~effects.values.isnan()).nonzero().tolist()[::3]:
        layer = effects.labels["layer"][place[0]]
        with ad.edit(lm, ad.Knockout(layer, *place[1:], mode=mode, stream=stream)):
            expected[tuple(place)] = clean - ad.score(lm, prompt, target).values
    return expected


def measured_at(places: torch.Tensor, effects: ad.Scores) -> torch.Tensor:
    """The effects where `places` holds numbers."""
    return effects.values.masked_fill(places.isnan(), float("nan"))


@pytest.mark.parametrize("family", RESTARTED)
@pytest.mark.parametrize("mode", ["remove", "renormalize"])
def test_restarts_equal_one_forward_an_edge(family, mode):
    lm = loaded(family, RESTARTED[family])
    effects = ad.edge_effects(lm, TEXT, TARGET, mode=mode)
    assert effects.provenance["route"] == "restart", effects.provenance["route_reason"]
    assert effects.checks["restart_error"] < 1e-4
    expected = brute_force(lm, TEXT, TARGET, effects, mode)
    scale = float(expected.nan_to_num().abs().max())
    assert scale > 0
    assert torch.allclose(
        measured_at(expected, effects), expected, rtol=1e-3, atol=2e-5 * max(scale, 1), equal_nan=True
    )
    whole = ad.edge_effects(lm, TEXT, TARGET, mode=mode, route="forwards")
    assert whole.provenance["route"] == "forwards"
    assert torch.allclose(measured_at(expected, whole), expected, rtol=1e-3, atol=2e-5 * max(scale, 1), equal_nan=True)


def test_edges_outside_a_window_do_not_exist():
    effects = ad.edge_effects(loaded("mistral", RESTARTED["mistral"]), TEXT, TARGET)
    there = ~effects.values[0, 0].isnan()
    expected = torch.ones(6, 6, dtype=torch.bool).tril() & ~torch.ones(6, 6, dtype=torch.bool).tril(-4)
    assert torch.equal(there, expected)


@pytest.mark.parametrize("mode", ["remove", "renormalize"])
def test_a_continuation_is_read_at_several_positions(mode):
    lm = loaded("llama", RESTARTED["llama"])
    target = ad.Target.continuation_logprob(" t7 t30 t2")
    effects = ad.edge_effects(lm, TEXT, target, mode=mode)
    assert effects.provenance["route"] == "restart"
    expected = brute_force(lm, TEXT, target, effects, mode)
    assert torch.allclose(measured_at(expected, effects), expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_bidirectional_models_take_whole_forwards():
    lm = loaded("bert", COMMON, AutoModelForMaskedLM)
    prompt, target = "t5 t9 <mask> t44", ad.Target.masked_token_logit("t7", "t30")
    effects = ad.edge_effects(lm, prompt, target)
    assert effects.provenance["route"] == "forwards"
    assert not bool(effects.values.isnan().any())
    expected = brute_force(lm, prompt, target, effects, "remove")
    assert torch.allclose(measured_at(expected, effects), expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    with pytest.raises(UnsupportedModelError):
        ad.edge_effects(lm, prompt, target, route="restart")


@pytest.mark.parametrize("stream", ["self", "cross", "encoder"])
def test_encoder_decoders_take_whole_forwards(stream):
    lm = loaded("bart", BART, AutoModelForSeq2SeqLM)
    prompt = ad.Prompt("t5 t9 t8 t44", decoder_text="t3 t6")
    effects = ad.edge_effects(lm, prompt, TARGET, stream=stream)
    assert effects.provenance["route"] == "forwards"
    expected = brute_force(lm, prompt, TARGET, effects, "remove", stream)
    assert torch.allclose(measured_at(expected, effects), expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert effects.values.shape[2:] == {"self": (3, 3), "cross": (3, 4), "encoder": (4, 4)}[stream]


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_coarser_grains_equal_the_edits_of_that_name(family):
    lm = loaded(family, RESTARTED[family])
    clean = ad.score(lm, TEXT, TARGET).values

    def loss(edit) -> float:
        with ad.edit(lm, edit):
            return float(clean - ad.score(lm, TEXT, TARGET).values)

    keys = ad.edge_effects(lm, TEXT, TARGET, grain="key", layers=[1]).values
    heads = ad.edge_effects(lm, TEXT, TARGET, grain="head", layers=[1]).values
    layers = ad.edge_effects(lm, TEXT, TARGET, grain="layer").values
    for head in range(4):
        assert float(heads[0, head]) == pytest.approx(loss(ad.HeadAblation(1, head)), abs=1e-4)
        for key in (0, 3):
            assert float(keys[0, head, key]) == pytest.approx(loss(ad.ValueZeroing(1, key, head)), abs=1e-4)
    assert float(layers[1]) == pytest.approx(loss(ad.HeadAblation(1)), abs=1e-4)


def test_swapping_answer_and_foil_negates_every_effect():
    lm = loaded("llama", RESTARTED["llama"])
    effects = ad.edge_effects(lm, TEXT, TARGET).values
    assert torch.equal(effects.nan_to_num(), -ad.edge_effects(lm, TEXT, TARGET.swapped()).values.nan_to_num())


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("route", ["restart", "forwards"])
def test_heads_that_write_nothing_have_no_effect_and_train_mode_changes_nothing(family, route):
    lm = loaded(family, RESTARTED[family])
    block = lm.model.model.layers[1].self_attn if family == "llama" else lm.model.transformer.h[1].self_attention
    with torch.no_grad():  # head 2 writes nothing
        (block.o_proj if family == "llama" else block.dense).weight[:, 16:24] = 0
    quiet = ad.edge_effects(lm, TEXT, TARGET, route=route).values
    lm.model.train()
    loud = ad.edge_effects(lm, TEXT, TARGET, route=route).values
    assert lm.model.training
    assert torch.equal(quiet.nan_to_num(), loud.nan_to_num())
    dead = quiet[1, 2]
    assert float(dead[~dead.isnan()].abs().max()) == 0.0
    assert float(quiet[1, 1].nan_to_num().abs().max()) > 0


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("route", ["restart", "forwards"])
def test_the_sink_model_has_the_effects_it_was_built_with(implementation, route):
    built = known.sink_against_value()
    built.model.set_attn_implementation(implementation)
    lm = ad.load(built.model, tokenizer=built.tokenizer())
    effects = ad.edge_effects(lm, built.text(), ad.Target.logit_diff(*built.expected["target"]), route=route)
    for (layer, head, query, key), effect in built.expected["edge_effect"].items():
        assert float(effects.values[layer, head, query, key]) == pytest.approx(effect, abs=1e-5)


def test_an_interrupted_call_goes_on_where_it_stopped(tmp_path, monkeypatch):
    lm = loaded("gpt2", RESTARTED["gpt2"])
    whole = ad.edge_effects(lm, TEXT, TARGET)
    kept = tmp_path / "edges.pt"
    monkeypatch.setattr(edge_truth.time, "monotonic", iter(range(0, 10**6, 20)).__next__)  # write after every group

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ad.edge_effects(lm, TEXT, TARGET, resume=kept, progress=stop)
    measured: list[int] = []
    real = edge_truth._Runner.measure
    monkeypatch.setattr(
        edge_truth._Runner, "measure", lambda self, group, *rest: (measured.append(1), real(self, group, *rest))[1]
    )
    again = ad.edge_effects(lm, TEXT, TARGET, resume=kept)
    assert 0 < len(measured) < 2 * 6
    assert torch.equal(again.values.nan_to_num(), whole.values.nan_to_num())
    with pytest.raises(RunFolderError, match="another model, prompt, target or mode"):
        ad.edge_effects(lm, TEXT, TARGET.swapped(), resume=kept)


@pytest.mark.parametrize("route", ["forwards", "restart"])
def test_a_finished_file_still_says_what_the_clean_run_gives(tmp_path, route):
    lm = loaded("gpt2", RESTARTED["gpt2"])
    kept = tmp_path / "edges.pt"
    whole = ad.edge_effects(lm, TEXT, TARGET, layers=[1], route=route, resume=kept)
    again = ad.edge_effects(lm, TEXT, TARGET, layers=[1], route=route, resume=kept)
    assert torch.equal(again.values.nan_to_num(), whole.values.nan_to_num())
    m = float(ad.score(lm, TEXT, TARGET).values[0])
    assert again.checks["clean"] == pytest.approx(m, abs=1e-5) == whole.checks["clean"]


def test_a_restart_that_is_not_exact_is_not_used(monkeypatch):
    lm = loaded("gpt2", RESTARTED["gpt2"])
    monkeypatch.setattr(restart.Restart, "error", lambda _: 0.01)
    effects = ad.edge_effects(lm, TEXT, TARGET, layers=[0])
    assert effects.provenance["route"] == "forwards"
    assert "off by 1.0e-02" in effects.provenance["route_reason"]
    with pytest.raises(UnsupportedModelError, match="off by"):
        ad.edge_effects(lm, TEXT, TARGET, route="restart")


def test_progress_and_small_batches():
    lm = loaded("gpt2", RESTARTED["gpt2"])
    seen: list[tuple[int, int]] = []
    small = ad.edge_effects(lm, TEXT, TARGET, batch_tokens=1, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2 * 4 * 21, 2 * 4 * 21)
    large = ad.edge_effects(lm, TEXT, TARGET)
    assert torch.allclose(small.values, large.values, atol=1e-4, equal_nan=True)
    assert list(small.to_frame().columns) == [
        "layer", "layer_label", "head", "query_pos", "query_pos_label", "key_pos", "key_pos_label", "value", "method",
        "unit",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"layers": [7]}, ShapeError, "layer 7 does not exist; the model has layers 0 to 1"),
        ({"queries": [6]}, ShapeError, "query 6 is outside a prompt of 6 tokens"),
        ({"edges": [(0, 0, 1, 3)]}, ShapeError, "the mask hides key 3 from query 1"),
        ({"edges": [(0, 9, 1, 0)]}, ShapeError, r"edge \(0, 9, 1, 0\) is outside"),
        ({"grain": "head", "mode": "renormalize"}, ValueError, "nothing is left to renormalise"),
        ({"grain": "key", "queries": [1]}, ValueError, "leave queries out"),
        ({"route": "fast"}, ValueError, "expected 'auto', 'restart' or 'forwards'"),
    ],
)
def test_what_cannot_be_measured_raises(given, error, text):
    with pytest.raises(error, match=text):
        ad.edge_effects(loaded("gpt2", RESTARTED["gpt2"]), TEXT, TARGET, **given)


def test_nothing_is_left_behind():
    lm = loaded("gpt2", RESTARTED["gpt2"])
    before = ad.score(lm, TEXT, TARGET).values
    ad.edge_effects(lm, TEXT, TARGET, layers=[1])
    assert torch.equal(ad.score(lm, TEXT, TARGET).values, before)
    for module in lm.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.real_model
@pytest.mark.slow
def test_restarts_equal_brute_force_on_the_default_model(default_lm):
    """60 edges drawn over layers and positions, one forward each; the strongest edge of the prompt among them."""
    prompt = ad.Prompt("When Mary and John went to the store, John gave a drink to")
    target = ad.Target.logit_diff(" Mary", " John")
    generator = torch.Generator().manual_seed(0)
    edges = [(23, 3, 13, 9)]
    while len(edges) < 60:
        layer, head, query = (int(torch.randint(size, (), generator=generator)) for size in (30, 9, 14))
        edges.append((layer, head, query, int(torch.randint(query + 1, (), generator=generator))))
    effects = ad.edge_effects(default_lm, prompt, target, edges=edges)
    clean = ad.score(default_lm, prompt, target).values
    place = {layer: index for index, layer in enumerate(effects.labels["layer"])}
    fast, slow = [], []
    for layer, head, query, key in dict.fromkeys(edges):
        fast.append(float(effects.values[place[layer], head, query, key]))
        with ad.edit(default_lm, ad.Knockout(layer, head, query, key)):
            slow.append(float(clean - ad.score(default_lm, prompt, target).values))
    fast, slow = torch.tensor(fast), torch.tensor(slow)
    strong = slow.abs() >= slow.abs().median()
    assert bool(((fast - slow).abs()[strong] <= 1e-3 * slow.abs()[strong] + 2e-5).all())
    assert float((fast - slow).abs()[~strong].max()) < 1e-4
    assert float(slow[0]) == pytest.approx(2.9, abs=0.05)
