"""The loader: every kind of source, every refusal, and nothing changed behind the caller's back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import attndiag
from attndiag.errors import ModelLoadError, PromptError
from attndiag.models import load as loading
from attndiag.models import opening
from attndiag.models.quiet import quiet_bars

WORDS = ["<s>", "</s>", "<pad>", "<unk>", "the", "cat", "sat", "on", "mat", "a", "dog", "ran"]


def word_tokenizer(*, adds_bos: bool = False, special: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """One id a word; only the special tokens that are named."""
    all_four = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    named = all_four if special is None else special
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id a byte, as GPT-2 writes bytes: several tokens for one character beyond ASCII."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    """A saved checkpoint with its tokenizer."""
    path = tmp_path / "checkpoint"
    tiny_llama.save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


def test_a_local_folder_gives_the_saved_model(folder: Path, tiny_llama: LlamaForCausalLM) -> None:
    lm = attndiag.load(folder, device="cpu")
    assert isinstance(lm.model, LlamaForCausalLM)
    assert not lm.model.training
    ids = torch.tensor([[4, 5, 6, 7, 4, 8]])
    assert torch.equal(lm.forward("the cat sat on the mat").logits, tiny_llama(ids, use_cache=False).logits)
    info = lm.info
    assert (info.source, info.location, info.revision) == ("folder", str(folder), None)
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert info.attn_implementation == "sdpa"
    assert info.n_parameters == sum(weight.numel() for weight in tiny_llama.parameters())
    assert (info.bos_token, info.pad_token, info.adds_bos, info.notes) == ("<s>", "<pad>", False, ())
    assert json.loads(json.dumps(info.as_dict()))["name"] == str(folder)
    assert lm.bos_id == 0
    assert lm.special_ids == {0, 1, 2, 3}
    assert lm.vocabulary == 64


def test_the_tokenizer_hash_tells_tokenizers_apart_and_ignores_settings(folder: Path) -> None:
    first, second = word_tokenizer(), word_tokenizer()
    second.padding_side = "left"
    second(["the cat", "the"], padding=True)
    assert loading.describe(nn.Linear(1, 1), first, name="x", source="object").tokenizer_hash == (
        loading.describe(nn.Linear(1, 1), second, name="x", source="object").tokenizer_hash
    )
    hashes = {
        attndiag.load(folder, tokenizer=reader, device="cpu").info.tokenizer_hash
        for reader in (None, word_tokenizer(adds_bos=True), byte_tokenizer())
    }
    assert len(hashes) == 3


def test_the_checkpoints_dtype_is_kept_unless_another_is_asked_for(folder: Path, tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.to(torch.bfloat16).save_pretrained(folder)
    assert attndiag.load(folder, device="cpu").info.dtype == "bfloat16"
    assert attndiag.load(folder, device="cpu", dtype="float32").info.dtype == "float32"
    assert attndiag.load(folder, device="cpu", dtype=torch.float64).info.dtype == "float64"
    with pytest.raises(ModelLoadError, match=r"dtype 'float31' is unknown; give 'auto'"):
        attndiag.load(folder, dtype="float31")


def test_the_attention_implementation_is_passed_on(folder: Path) -> None:
    lm = attndiag.load(folder, device="cpu", attn_implementation="eager")
    assert lm.info.attn_implementation == "eager"


def test_a_device_map_is_passed_to_transformers(folder: Path) -> None:
    lm = attndiag.load(folder, device={"": "cpu"})
    assert lm.info.device == "cpu"
    assert lm.forward("the cat").logits.shape == (1, 2, 64)


def test_an_absent_or_unknown_device_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="device 'abacus' is unknown; give 'auto', 'cpu'"):
        attndiag.load(folder, device="abacus")
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ModelLoadError, match=rf"device '{absent}' is not on this machine; give device='cpu'"):
        attndiag.load(folder, device=absent)


# --- sources that are not what they should be


def break_folder(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "truncated config":
        (folder / "config.json").write_text("{ not json")
    elif how == "one weight short":
        tensors = load_file(weights)
        del tensors["model.layers.1.self_attn.o_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "adapter only":
        (folder / "config.json").unlink()
        (folder / "adapter_config.json").write_text("{}")
    elif how == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = {"no class": None, "unknown class": ["LlamaForFortuneTelling"]}[how]
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("no config", r"holds no config\.json; give a folder that save_pretrained wrote"),
        ("no weights", r"holds a config but no weights \(\*\.safetensors\); complete the download"),
        ("truncated weights", r"cannot be read: .*incomplete or damaged"),
        ("truncated config", r"cannot be read: .*incomplete or damaged"),
        ("one weight short", r"lacks 1 weights of LlamaForCausalLM \(model\.layers\.1\.self_attn\.o_proj\.weight\)"),
        ("adapter only", r"holds an adapter only; merge it"),
        ("no tokenizer", r"has no tokenizer that can be read .*give tokenizer="),
        ("no class", r"names no class; add the class that was saved as `architectures`"),
        ("unknown class", r"is a LlamaForFortuneTelling, which transformers .* lacks; install"),
    ],
)
def test_a_broken_folder_says_what_is_wrong_and_what_to_do(folder: Path, how: str, text: str) -> None:
    break_folder(folder, how)
    with pytest.raises(ModelLoadError, match=text) as caught:
        attndiag.load(folder, device="cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_to_nothing_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    for nothing in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere", "weights.gguf"):
        with pytest.raises(ModelLoadError, match=r"there is no folder or file .*check the path"):
            attndiag.load(nothing)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"is a file; give its folder \(or a \.gguf file\)"):
        attndiag.load(tmp_path / "weights.bin")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(ModelLoadError, match=r"weights\.gguf cannot be read"):
        attndiag.load(tmp_path / "weights.gguf")


def test_a_hub_id_without_hub_or_cache_names_the_way_out() -> None:
    with pytest.raises(ModelLoadError, match=r"hub model 'some-one/some-model' .*offline.*local folder, or 'default'"):
        attndiag.load("some-one/some-model")
    with pytest.raises(ModelLoadError, match="Did you mean 'default'"):
        attndiag.load("defualt")


class RepositoryNotFoundError(Exception):
    """Bears the name of the hub client's error, which needs an HTTP response to be made."""


class GatedRepoError(Exception): ...


class RevisionNotFoundError(Exception): ...


class LocalEntryNotFoundError(Exception): ...


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (RepositoryNotFoundError, "there is no folder and no hub model 'a/b'"),
        (GatedRepoError, "is gated; ask for access"),
        (RevisionNotFoundError, "has no revision 'v7'"),
        (LocalEntryNotFoundError, "not cached and the hub cannot be reached; check the network"),
        (ValueError, "cannot be loaded: something; check the id and revision"),
    ],
)
def test_what_the_hub_says_becomes_one_line(cause: type[Exception], text: str) -> None:
    error = OSError("something\nwith many lines")
    error.__cause__ = cause("whatever")
    line = opening.explain(error, opening.Checkpoint("a/b", "a/b", False, revision="v7"))
    assert text in line
    assert "\n" not in line


def test_a_revision_is_for_hub_models(folder: Path, tiny_llama: LlamaForCausalLM) -> None:
    for source in (folder, "default", tiny_llama):
        with pytest.raises(ModelLoadError, match="revision='v1' means something for hub models only"):
            attndiag.load(source, revision="v1")


# --- model objects


def test_a_model_object_is_used_as_it_is(tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.train()
    tiny_llama.model.layers[0].eval()
    modes = [module.training for module in tiny_llama.modules()]
    lm = attndiag.load(tiny_llama, tokenizer=word_tokenizer())
    assert lm.model is tiny_llama
    assert lm.info.source == "object"
    assert lm.info.name == "LlamaForCausalLM"
    assert not lm.forward("the cat").logits.requires_grad
    assert lm.forward("the cat", grad=True).logits.requires_grad
    assert [module.training for module in tiny_llama.modules()] == modes


def test_modes_are_restored_when_the_forward_fails(tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.train()
    lm = attndiag.load(tiny_llama, tokenizer=word_tokenizer())
    with pytest.raises(IndexError):
        lm.run({"input_ids": torch.tensor([[999]])})
    assert all(module.training for module in tiny_llama.modules())


def test_arguments_that_would_change_a_model_object_are_refused(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(ModelLoadError, match=r"is on cpu, not meta; call model\.to"):
        attndiag.load(tiny_llama, device="meta")
    with pytest.raises(ModelLoadError, match=r"is torch\.float32, not torch\.float16; call model\.to"):
        attndiag.load(tiny_llama, dtype="float16")
    with pytest.raises(ModelLoadError, match=r"call model\.set_attn_implementation"):
        attndiag.load(tiny_llama, attn_implementation="eager")


def test_a_plain_module_without_tokenizer_is_accepted_until_text_is_needed() -> None:
    lm = attndiag.load(nn.Linear(3, 2))
    assert (lm.info.architecture, lm.info.n_parameters, lm.info.tokenizer_hash) == ("Linear", 8, None)
    with pytest.raises(
        ModelLoadError, match=r"encode needs a tokenizer and Linear was loaded without one; .*tokenizer="
    ):
        lm.encode("the cat")


def test_a_tokenizer_may_come_from_another_folder(folder: Path, tiny_llama: LlamaForCausalLM) -> None:
    lm = attndiag.load(tiny_llama, tokenizer=str(folder))
    assert lm.encode("the cat").input_ids.tolist() == [[4, 5]]
    shutil.rmtree(folder)
    with pytest.raises(ModelLoadError, match="has no tokenizer that can be read"):
        attndiag.load(tiny_llama, tokenizer="no-one/no-tokenizer")


# --- tokenizers without the usual tokens


def test_a_missing_pad_token_is_replaced_behind_the_mask_and_said(tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.config.pad_token_id = None
    reader = word_tokenizer(special={"eos_token": "</s>", "unk_token": "<unk>"})
    lm = attndiag.load(tiny_llama, tokenizer=reader)
    assert lm.info.pad_token == "</s>"
    assert lm.info.notes == (
        "no pad token: </s> fills ragged batches, behind the attention mask",
        "no BOS token: texts start with their first word",
    )
    encoded = lm.encode(["the cat sat", "the"])
    assert encoded.input_ids.tolist() == [[4, 5, 6], [4, 1, 1]]
    assert encoded.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert reader.pad_token is None
    with pytest.raises(ModelLoadError, match=r"neither BOS nor CLS token; set tokenizer\.bos_token"):
        _ = lm.bos_id


def test_with_nothing_to_pad_with_only_ragged_batches_are_refused(tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.config.pad_token_id = None
    reader = word_tokenizer(special={})
    lm = attndiag.load(tiny_llama, tokenizer=reader)
    assert lm.info.pad_token is None
    assert "cannot be batched" in lm.info.notes[0]
    assert lm.encode(["the cat", "a dog"]).input_ids.tolist() == [[4, 5], [9, 10]]
    with pytest.raises(PromptError, match=r"prompts of \[1, 2\] tokens need padding.*set tokenizer\.pad_token"):
        lm.encode(["the cat", "the"])


def test_the_tokenizer_keeps_its_settings(tiny_llama: LlamaForCausalLM) -> None:
    reader = word_tokenizer()
    reader.padding_side = "left"
    before = (reader.backend_tokenizer.to_str(), reader.padding_side, dict(reader.special_tokens_map))
    lm = attndiag.load(tiny_llama, tokenizer=reader)
    lm.forward(["the cat sat", "the"])
    assert (reader.backend_tokenizer.to_str(), reader.padding_side, dict(reader.special_tokens_map)) == before


# --- third-party bars


def test_progress_bars_come_back_even_after_an_error(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    from transformers import modeling_gguf_pytorch_utils as gguf_loading
    from transformers.utils import logging as hf_logging

    bar: Any = gguf_loading.tqdm
    drawn = hf_logging.is_progress_bar_enabled()
    with pytest.raises(ZeroDivisionError), quiet_bars():
        assert not hf_logging.is_progress_bar_enabled()
        list(gguf_loading.tqdm([1, 2], desc="never seen"))
        _ = 1 / 0
    assert gguf_loading.tqdm is bar
    assert hf_logging.is_progress_bar_enabled() is drawn
    capfd.readouterr()  # what saving the folder drew
    attndiag.load(folder, device="cpu")
    assert capfd.readouterr() == ("", "")
