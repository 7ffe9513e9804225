"""The scorer: every kind of target on every kind of model; batches equal singles; the impossible raises."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

import attndiag as ad
from attndiag.errors import ShapeError, TargetError, UnsupportedModelError
from attndiag.explanations.target import noise_floor, resolve_target
from attndiag.models import known

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
}  # fmt: skip
# BERT pools its first position, padding or not; BART takes no position ids
REFUSE_LEFT = ("classifier", "encoder-decoder", "encoder-decoder continuation")
TEXTS = ["t5 t9 t3 t44 t17", "t8 t2", "t11 t12 t13"]


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {**{f"t{i}": i for i in range(61)}, "<mask>": 61, "<cls>": 62, "<unk>": 63}
    words = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", mask_token="<mask>", cls_token="<cls>", unk_token="<unk>"
    )


def loaded(family: str, settings: dict, factory: type, **more):
    torch.manual_seed(1)
    model = factory.from_config(AutoConfig.for_model(family, **settings, **more))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(5)
    return ad.load(model.eval(), tokenizer=tokenizer())


@pytest.fixture
def decoder():
    return loaded("llama", COMMON | {"num_key_value_heads": 2}, AutoModelForCausalLM)


def test_every_token_kind_reads_the_last_logits(decoder):
    prompt = TEXTS[0]
    with torch.no_grad():
        logits = decoder.model(**decoder.encode(prompt).inputs).logits[0, -1]

    def value(target) -> float:
        return float(ad.score(decoder, prompt, target).values)

    assert value(ad.Target.logit("t7")) == pytest.approx(float(logits[7]), abs=1e-5)
    assert value(ad.Target.logit_diff("t7", "t30")) == pytest.approx(float(logits[7] - logits[30]), abs=1e-5)
    assert value(ad.Target.logprob("t7")) == pytest.approx(float(logits.log_softmax(-1)[7]), abs=1e-5)
    assert value(ad.Target.prob("t7")) == pytest.approx(float(logits.softmax(-1)[7]), abs=1e-6)
    top = int(logits.argmax())
    own = ad.score(decoder, prompt)
    assert own.checks["answer_ids"] == [top]
    assert own.checks["top1_is_answer"] == [True]
    assert float(own.values) == pytest.approx(float(logits.log_softmax(-1)[top]), abs=1e-5)
    assert own.unit == "nats"


def test_a_continuation_is_the_sum_of_its_tokens(decoder):
    prompt, continuation = TEXTS[0], " t7 t30 t2"
    with torch.no_grad():
        logprobs = decoder.model(**decoder.encode(prompt + continuation).inputs).logits[0].log_softmax(-1)
    expected = sum(float(logprobs[4 + step, token]) for step, token in enumerate((7, 30, 2)))
    found = ad.score(decoder, prompt, ad.Target.continuation_logprob(continuation))
    assert float(found.values) == pytest.approx(expected, abs=1e-4)
    own = ad.score(decoder, ad.Prompt(prompt, continuation=continuation))
    assert torch.equal(own.values, found.values)
    resolved = resolve_target(decoder, prompt, ad.Target.continuation_logprob(continuation))
    assert resolved.encoded.special[0].tolist() == [False] * 5 + [True] * 3


def models_and_targets():
    llama = COMMON | {"num_key_value_heads": 2}
    return {
        "decoder": (loaded("llama", llama, AutoModelForCausalLM), ad.Target.logit_diff("t7", "t30"), TEXTS),
        "top-1": (loaded("llama", llama, AutoModelForCausalLM), None, TEXTS),
        "continuation": (
            loaded("llama", llama, AutoModelForCausalLM),
            [ad.Target.continuation_logprob(text) for text in (" t3", " t4 t5", " t6 t7 t8")],
            TEXTS,
        ),
        "masked": (
            loaded("bert", COMMON, AutoModelForMaskedLM),
            ad.Target.masked_token_logit("t7", "t30"),
            ["t5 <mask> t3 t44 t17", "t8 <mask>", "<mask> t12 t13"],
        ),
        "classifier": (
            loaded("bert", COMMON, AutoModelForSequenceClassification, num_labels=3),
            ad.Target.class_logit(2, 0),
            TEXTS,
        ),
        "decoder classifier": (
            loaded("llama", llama, AutoModelForSequenceClassification, num_labels=3),
            ad.Target.class_logit("LABEL_1"),
            TEXTS,
        ),
        "sentence encoder": (loaded("bert", COMMON, AutoModel), ad.Target.cosine("t1 t2 t3 t4"), TEXTS),
        "first token": (loaded("bert", COMMON, AutoModel), ad.Target.cosine("t1 t2 t3 t4", "first"), TEXTS),
        "encoder-decoder": (
            loaded("bart", BART, AutoModelForSeq2SeqLM),
            ad.Target.logit_diff("t7", "t30"),
            [ad.Prompt(text, decoder_text=more) for text, more in zip(TEXTS, ("t3", None, "t4 t5 t6"), strict=True)],
        ),
        "encoder-decoder continuation": (
            loaded("bart", BART, AutoModelForSeq2SeqLM),
            ad.Target.continuation_logprob(" t7 t30"),
            [ad.Prompt(text, decoder_text="t3") for text in TEXTS],
        ),
    }


@pytest.mark.parametrize("kind", list(models_and_targets()))
@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_equal_singles(kind, side):
    lm, target, prompts = models_and_targets()[kind]
    if kind == "decoder classifier" and side == "left":
        lm.model.config.pad_token_id = 0
    each = target if isinstance(target, list) else [target] * len(prompts)
    if side == "left" and kind in REFUSE_LEFT:
        with pytest.raises(UnsupportedModelError, match="left padding changes"):
            ad.score(lm, prompts, target, padding_side=side)
        return
    singles = torch.cat([ad.score(lm, p, t).values for p, t in zip(prompts, each, strict=True)])
    batch = ad.score(lm, prompts, target, padding_side=side)
    assert torch.allclose(batch.values, singles, rtol=1e-5, atol=1e-5), (batch.values, singles)
    assert not bool((singles == 0).any())
    assert torch.allclose(ad.score(lm, prompts, target, batch_size=2, padding_side=side).values, singles, atol=1e-5)


def test_a_cosine_is_between_sentence_vectors():
    lm = loaded("bert", COMMON, AutoModel)
    with torch.no_grad():
        one, two = (lm.model(**lm.encode(text).inputs).last_hidden_state[0].mean(0) for text in (TEXTS[0], TEXTS[2]))
    found = float(ad.score(lm, TEXTS[0], ad.Target.cosine(TEXTS[2])).values)
    assert found == pytest.approx(float(torch.cosine_similarity(one, two, 0)), abs=1e-5)
    assert float(ad.score(lm, TEXTS[0], ad.Target.cosine(TEXTS[0])).values) == pytest.approx(1, abs=1e-6)


def test_swapping_negates_exactly(decoder):
    target = ad.Target.logit_diff("t7", "t30")
    assert torch.equal(ad.score(decoder, TEXTS, target).values, -ad.score(decoder, TEXTS, target.swapped()).values)
    lm = loaded("bert", COMMON, AutoModelForSequenceClassification, num_labels=3)
    target = ad.Target.class_logit(2, 0)
    assert torch.equal(ad.score(lm, TEXTS, target).values, -ad.score(lm, TEXTS, target.swapped()).values)


def test_the_value_is_differentiable_and_broadcasts(decoder):
    resolved = resolve_target(decoder, TEXTS[0], ad.Target.logprob("t7"))
    embedded = decoder.model.get_input_embeddings()(resolved.encoded.input_ids).detach().requires_grad_()
    value = resolved.value(decoder.run({"inputs_embeds": embedded}, grad=True))
    value.sum().backward()
    assert float(embedded.grad.abs().max()) > 0
    many = resolved.value(decoder.run({"inputs_embeds": embedded.detach().expand(3, -1, -1)}))
    assert torch.allclose(many, value.detach().expand(3), atol=1e-5)
    two = resolve_target(decoder, TEXTS[:2], ad.Target.logprob("t7"))
    with pytest.raises(ShapeError, match=r"the target has 2 rows .* output 3"):
        two.value(decoder.run({"inputs_embeds": embedded.detach().expand(3, -1, -1)}))
    assert torch.allclose(two.row(0).value(decoder.run(two.inputs))[:1], value.detach(), atol=1e-5)


def test_the_mode_is_eval_within_and_restored(decoder):
    clean = ad.score(decoder, TEXTS, ad.Target.logit("t7")).values
    torch.manual_seed(0)
    decoder.model.train()
    decoder.model.model.layers[0].self_attn.attention_dropout = 0.9
    decoder.model.model.layers[1].eval()
    before = [module.training for module in decoder.model.modules()]
    assert torch.equal(ad.score(decoder, TEXTS, ad.Target.logit("t7")).values, clean)
    assert [module.training for module in decoder.model.modules()] == before
    with pytest.raises(TargetError):
        ad.score(decoder, TEXTS, ad.Target.masked_token_logit("t7"))
    assert [module.training for module in decoder.model.modules()] == before


def test_the_models_own_choice_is_that_of_the_unedited_run(decoder):
    """Inside an edit a target without answer still means the clean top-1, and so does a cosine reference."""
    clean = ad.score(decoder, TEXTS[0])
    ablated = ad.AttentionOff(0), ad.AttentionOff(1)
    with ad.edit(decoder, *ablated):
        inside = ad.score(decoder, TEXTS[0])
        changed = ad.score(decoder, TEXTS[0], ad.Target.logit("t7")).checks["top1_ids"]
    assert inside.checks["answer_ids"] == clean.checks["answer_ids"]
    assert inside.checks["top1_ids"] == changed
    assert not torch.equal(inside.values, clean.values)
    lm = loaded("bert", COMMON, AutoModel)
    target = ad.Target.cosine(TEXTS[0])
    with ad.edit(lm, ad.AttentionOff(1)):
        assert float(ad.score(lm, TEXTS[0], target).values) < 0.9999


def test_the_noise_floor_is_small_and_reproducible(decoder):
    floor = noise_floor(decoder, TEXTS, ad.Target.logit("t7"))
    assert 0 <= floor.checks["floor"] < 1e-4
    assert floor.values.shape == (3,)
    assert float(noise_floor(decoder, TEXTS[0], ad.Target.logit("t7"), rounds=2).checks["floor"]) < 1e-4
    with pytest.raises(ValueError, match="expected at least 1"):
        noise_floor(decoder, TEXTS, rounds=0)


def test_losses_of_the_induction_model_are_the_computed_ones():
    built = known.induction_gpt2()
    lm = ad.load(built.model, tokenizer=built.tokenizer())
    words = built.text().split()
    half = (len(words) - 1) // 2
    # the second copy's first token cannot be predicted
    seen, rest = words[: half + 2], words[half + 2 :]
    found = ad.score(lm, " ".join(seen), ad.Target.continuation_logprob(" " + " ".join(rest)))
    assert -float(found.values) / len(rest) == pytest.approx(built.expected["loss_second"], abs=1e-4)
    first = ad.score(lm, words[0], ad.Target.continuation_logprob(" " + " ".join(words[1 : half + 1])))
    assert -float(first.values) / half == pytest.approx(math.log(63 + math.e), abs=1e-3)


def test_from_prompt():
    assert ad.Target.from_prompt(ad.Prompt("a", target=" b", foil=" c")).kind == "logit_diff"
    assert ad.Target.from_prompt(ad.Prompt("a", target=" b")) == ad.Target.logprob(" b")
    assert ad.Target.from_prompt(ad.Prompt("a", continuation=" b c")).kind == "continuation_logprob"
    assert ad.Target.from_prompt(ad.Prompt("a")) == ad.Target.logprob()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (ad.Target.logit_diff("t7 t8", "t7 t9"), r"'t7 t8' = 't7' \(7\) \+ 't8' \(8\) and foil .* start with the same"),
        (ad.Target.logit("zebra"), r"'zebra' is outside the vocabulary of LlamaForCausalLM: it becomes .*<unk>"),
        (ad.Target.logit(" "), r"' ' is outside the vocabulary .* no token"),
        (ad.Target.logit(""), "is an empty text"),
        (ad.Target("logit", "t7", "t8"), "a logit target takes no foil; use Target.logit_diff"),
        (ad.Target("logit_diff", "t7"), "logit_diff needs an answer and a foil"),
        (ad.Target.masked_token_logit("t7"), "is no masked language model"),
        (ad.Target.class_logit(0), "is no classifier"),
        (ad.Target.cosine("t7"), "returns no last_hidden_state"),
        (ad.Target.continuation_logprob(), "has no continuation"),
        ([ad.Target.logit("t7")] * 2, "2 targets were given for 1 prompts"),
    ],
)
def test_what_cannot_be_measured_raises(decoder, target, text):
    with pytest.raises(TargetError, match=text):
        ad.score(decoder, [TEXTS[0]], target)


def test_targets_that_contradict_themselves_raise():
    with pytest.raises(TargetError, match="answer and foil are both ' a'"):
        ad.Target.logit_diff(" a", " a")
    with pytest.raises(TargetError, match="label and foil are both 1"):
        ad.Target.class_logit(1, 1)
    with pytest.raises(TargetError, match="unknown target kind 'loss'"):
        ad.Target("loss")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="cannot be swapped"):
        ad.Target.logit(" a").swapped()


def test_a_mask_token_is_needed_exactly_once():
    lm = loaded("bert", COMMON, AutoModelForMaskedLM)
    with pytest.raises(TargetError, match="holds 0 mask tokens"):
        ad.score(lm, "t1 t2", ad.Target.logit("t7"))
    with pytest.raises(TargetError, match="holds 2 mask tokens"):
        ad.score(lm, "<mask> t2 <mask>", ad.Target.logit("t7"))
    one = ad.score(lm, "<mask> t2", ad.Target.logit("t7")).values
    assert torch.equal(one, ad.score(lm, "<mask> t2", ad.Target.masked_token_logit("t7")).values)


def test_classes_by_name_and_number():
    lm = loaded("bert", COMMON, AutoModelForSequenceClassification, num_labels=3)
    with torch.no_grad():
        logits = lm.model(**lm.encode(TEXTS[0]).inputs).logits[0]
    for label in (1, "LABEL_1"):
        assert float(ad.score(lm, TEXTS[0], ad.Target.class_logit(label)).values) == pytest.approx(float(logits[1]))
    assert float(ad.score(lm, TEXTS[0], ad.Target.class_logit()).values) == pytest.approx(float(logits.max()))
    with pytest.raises(TargetError, match=r"'happy' is no class of .* it has 3: LABEL_0, LABEL_1, LABEL_2"):
        ad.score(lm, TEXTS[0], ad.Target.class_logit("happy"))
    with pytest.raises(TargetError, match="label and foil are both class 1"):
        ad.score(lm, TEXTS[0], ad.Target.class_logit(1, "LABEL_1"))
    with pytest.raises(TargetError, match="logits with 3 axes"):
        ad.score(lm, TEXTS[0], ad.Target.logit("t7"))


def test_one_batch_has_one_kind(decoder):
    prompts = [ad.Prompt("t1 t2", target="t3", foil="t4"), ad.Prompt("t1 t2")]
    with pytest.raises(TargetError, match="cannot measure logit_diff and logprob at once"):
        ad.score(decoder, prompts)


@pytest.mark.real_model
@pytest.mark.slow
def test_the_default_model_on_the_prompt_of_the_docs(default_lm):
    prompt = ad.Prompt("When Mary and John went to the store, John gave a drink to", target=" Mary", foil=" John")
    found = ad.score(default_lm, prompt)
    assert float(found.values) == pytest.approx(6.12, abs=0.05)
    assert found.checks["top1_is_answer"] == [True]
    assert float(ad.score(default_lm, prompt, ad.Target.prob(" Mary")).values) == pytest.approx(0.923, abs=0.005)
    assert noise_floor(default_lm, prompt, rounds=3).checks["floor"] < 1e-4
    with pytest.raises(TargetError, match="merges with the end"):
        ad.score(default_lm, "The capital of Fra", ad.Target.continuation_logprob("nce is Paris"))


def test_only_a_refusal_of_the_text_is_taken_for_one() -> None:
    from attndiag.explanations.resolve import _ids_after

    class Tokenizer:
        unk_token_id = None

        def __init__(self, error: Exception) -> None:
            self.error = error

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            if text == "ab":
                raise self.error
            return {"input_ids": [1]}

    # what tokenizers raise for a word outside a closed vocabulary
    assert _ids_after(Tokenizer(Exception("no such word")), "a", "b", [7]) == [7]
    with pytest.raises(ValueError, match="a fault of another kind"):
        _ids_after(Tokenizer(ValueError("a fault of another kind")), "a", "b", [7])
