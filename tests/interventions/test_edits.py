"""Edits act where they say and nowhere else, on every form of attention, and predicted equals measured."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

import attndiag as ad
from attndiag.errors import ShapeError, UnsupportedModelError
from attndiag.hooks import edits
from attndiag.hooks.activations import layers_with, recording
from attndiag.hooks.sites import site_of
from attndiag.hooks.variants import ALL, NONE, Variants, losing_edges

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GQA = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 48,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 1,
}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
OSS = GQA | {"sliding_window": 5, "num_local_experts": 4}
# name, family, configuration, factory, implementation, stream
FORMS = [
    ("gpt2 sdpa", "gpt2", GPT2, AutoModelForCausalLM, "sdpa", "self"),
    ("gpt2 eager", "gpt2", GPT2, AutoModelForCausalLM, "eager", "self"),
    ("llama sdpa", "llama", GQA, AutoModelForCausalLM, "sdpa", "self"),
    ("llama eager", "llama", GQA, AutoModelForCausalLM, "eager", "self"),
    ("mistral window", "mistral", GQA | {"sliding_window": 5}, AutoModelForCausalLM, "sdpa", "self"),
    ("gemma2 soft-cap", "gemma2", GQA | {"sliding_window": 5}, AutoModelForCausalLM, "eager", "self"),
    ("gpt_oss sinks", "gpt_oss", OSS, AutoModelForCausalLM, None, "self"),
    ("gpt_neox parallel", "gpt_neox", COMMON, AutoModelForCausalLM, None, "self"),
    ("bert", "bert", COMMON, AutoModel, "sdpa", "self"),
    ("t5 encoder", "t5", T5, AutoModelForSeq2SeqLM, None, "encoder"),
    ("t5 decoder", "t5", T5, AutoModelForSeq2SeqLM, None, "self"),
    ("bart cross", "bart", BART, AutoModelForSeq2SeqLM, None, "cross"),
    ("bloom", "bloom", BLOOM, AutoModelForCausalLM, None, "self"),
    ("falcon", "falcon", COMMON, AutoModelForCausalLM, None, "self"),
    ("mpt", "mpt", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4}, AutoModelForCausalLM, None, "self"),
    ("deberta-v2", "deberta-v2", COMMON, AutoModel, None, "self"),
]  # fmt: skip
ROUTED = FORMS[:12]
N, QUERY, KEY, HEAD = 9, 6, 4, 2


def build(form: tuple) -> nn.Module:
    _, family, settings, factory, implementation, _ = form
    torch.manual_seed(1)
    options = {} if implementation is None else {"attn_implementation": implementation}
    model = factory.from_config(AutoConfig.for_model(family, **settings), **options).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            elif weight.ndim == 2:
                weight.mul_(1.5 if family == "t5" else 8)  # T5 scales no scores: they would saturate
    return model


def inputs_of(model: nn.Module, pad: str | None = None) -> dict[str, torch.Tensor]:
    """Two rows of nine tokens; with padding the second row has three tokens less."""
    ids = torch.randint(2, 64, (2, N), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if pad is not None:
        mask[1, slice(0, 2) if pad == "left" else slice(-2, None)] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if pad == "left" and "position_ids" in model.forward.__code__.co_varnames:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, :8]
    if "use_cache" in model.forward.__code__.co_varnames:
        given["use_cache"] = False
    return given


def calls_of(model: nn.Module, given: dict, *edits: ad.Knockout) -> tuple[dict, torch.Tensor]:
    """The calls by (stream, layer) and the model's output, with or without edits."""
    with torch.no_grad(), ExitStack() as stack:
        if edits:
            stack.enter_context(ad.edit(model, *edits))
        captured = stack.enter_context(ad.capture(model))
        output = model(**given)
    both = model.config.is_encoder_decoder
    found = {}
    for call in captured.calls:
        stream = (
            "cross" if call.kind == "cross" else "encoder" if both and "decoder" not in call.module_name else "self"
        )
        found[stream, call.layer] = call
    return found, output[0]


# the masks of these families under padding are the subject of the capture's tests
WITHOUT_PADDING = ("mpt", "gpt_neo", "deberta-v2", "gpt_oss")
PADDED_FORMS = [
    pytest.param(form, pad, id=f"{form[0]}-{pad}")
    for form in FORMS
    for pad in (None, "right", "left")
    if pad is None or form[1] not in WITHOUT_PADDING
]


@pytest.mark.parametrize(("form", "pad"), PADDED_FORMS)
@pytest.mark.parametrize("mode", ["remove", "renormalize"])
def test_a_knockout_changes_its_edge_and_nothing_before_it(form, pad, mode):
    model, stream = build(form), form[-1]
    given = inputs_of(model, pad)
    clean, output = calls_of(model, given)
    changed, moved = calls_of(model, given, ad.Knockout(1, HEAD, QUERY, KEY, mode=mode, stream=stream))
    before, after = clean[stream, 1], changed[stream, 1]
    shift = 2 if pad == "left" else 0
    expected = before.z.clone()
    for row in range(2):
        back = shift if row == 1 else 0
        query = QUERY + (
            back if stream != "cross" and not (stream == "self" and model.config.is_encoder_decoder) else 0
        )
        key = KEY + (back if stream != "self" or not model.config.is_encoder_decoder else 0)
        weights = before.pattern[row, HEAD, query].clone()
        if mode == "renormalize":
            sink = float(before.sink_mass[row, HEAD, query])
            weights[key] = 0
            weights /= weights.sum() + sink
        else:
            weights[key] = 0
        group = before.n_heads // before.n_kv_heads
        expected[row, query, HEAD] = weights @ before.v[row, HEAD // group]
    where = (expected != before.z).any(-1)
    assert int(where.sum()) == 2
    assert torch.allclose(after.z[where], expected[where], rtol=1e-4, atol=1e-5 * float(before.z.abs().max()))
    assert torch.equal(after.z[~where], before.z[~where])
    for place, call in clean.items():
        if place[1] == 0 and place[0] == stream:
            assert torch.equal(call.z, changed[place].z)
    assert not torch.equal(output, moved)
    if stream == "self" and form[1] not in ("bert", "deberta-v2"):
        assert torch.equal(output[0, :QUERY], moved[0, :QUERY])


@pytest.mark.parametrize("form", FORMS, ids=[form[0] for form in FORMS])
def test_value_zeroing_and_head_ablation_do_what_they_say(form):
    model, stream = build(form), form[-1]
    given = inputs_of(model)
    clean, _ = calls_of(model, given)
    before = clean[stream, 1]
    values = before.v.repeat_interleave(before.n_heads // before.n_kv_heads, 1)

    zeroed, _ = calls_of(model, given, ad.ValueZeroing(1, KEY, stream=stream))
    cut = values.clone()
    cut[:, :, KEY] = 0
    expected = (before.pattern @ cut).transpose(1, 2)
    assert torch.allclose(zeroed[stream, 1].z, expected, rtol=1e-4, atol=1e-5 * float(before.z.abs().max()))

    averaged, _ = calls_of(model, given, ad.MeanValue(1, KEY, HEAD, stream=stream))
    mean = values.clone()
    mean[:, HEAD, KEY] = values[:, HEAD].mean(1)
    expected = (before.pattern @ mean).transpose(1, 2)
    got = averaged[stream, 1].z
    assert torch.allclose(got[:, :, HEAD], expected[:, :, HEAD], rtol=1e-4, atol=1e-5 * float(before.z.abs().max()))
    others = [head for head in range(before.n_heads) if head != HEAD]
    assert torch.equal(got[:, :, others], before.z[:, :, others])

    for mode in ("zero", "mean"):
        gone, _ = calls_of(model, given, ad.HeadAblation(1, [0, HEAD], mode, stream=stream))
        wanted = before.z.clone()
        wanted[:, :, [0, HEAD]] = 0 if mode == "zero" else before.z[:, :, [0, HEAD]].mean(1, keepdim=True)
        assert torch.allclose(gone[stream, 1].z, wanted, rtol=1e-6, atol=1e-7 * float(before.z.abs().max()))

    uniform = torch.full_like(before.pattern[0, 0], 1 / before.n_keys)
    flat, _ = calls_of(model, given, ad.PatternReplacement(1, uniform, HEAD, stream=stream))
    expected = values[:, HEAD].mean(1, keepdim=True).expand(-1, before.n_queries, -1)
    assert torch.allclose(flat[stream, 1].z[:, :, HEAD], expected, rtol=1e-4, atol=2e-5 * float(before.z.abs().max()))


@pytest.mark.parametrize("form", FORMS, ids=[form[0] for form in FORMS])
@pytest.mark.parametrize("site", ["resid_pre", "resid_post", "head_out", "attn_out", "mlp_out"])
def test_patching_with_the_runs_own_activations_changes_nothing(form, site):
    """Clean values into the clean run leave every bit; clean values at all positions restore a corrupted run."""
    model, stream = build(form), form[-1]
    given = inputs_of(model)
    corrupted = given | {"input_ids": given["input_ids"].flip(1)}
    sites = site_of(model, 1, stream)
    kept: dict[str, torch.Tensor] = {}
    calls, output = calls_of(model, given)
    handles = []
    block = model.get_submodule(sites.block)

    def first(args, kwargs):
        return next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.is_floating_point())

    handles.append(
        block.register_forward_pre_hook(lambda _, a, k: kept.update(resid_pre=first(a, k).clone()), with_kwargs=True)
    )
    handles.append(
        block.register_forward_hook(
            lambda _, __, out: kept.update(resid_post=(out if isinstance(out, torch.Tensor) else out[0]).clone())
        )
    )
    for name, module in (("attn_out", sites.projection), ("mlp_out", sites.mlp)):
        handles.append(
            model.get_submodule(module).register_forward_hook(
                lambda _, __, out, name=name: kept.update(
                    {name: (out if isinstance(out, torch.Tensor) else out[0]).clone()}
                )
            )
        )
    try:
        with torch.no_grad():
            model(**given)
    finally:
        for handle in handles:
            handle.remove()
    kept["head_out"] = calls[stream, 1].z
    with torch.no_grad(), ad.edit(model, ad.Patch(1, site, kept[site], stream=stream)) as log:
        same = model(**given)[0]
    assert torch.equal(same, output)
    assert log.applied[0].largest_change == 0.0
    with torch.no_grad(), ad.edit(model, ad.Patch(1, site, kept[site], stream=stream)) as log:
        other = model(**corrupted)[0]
    assert log.applied[0].largest_change > 0
    if site == "resid_post" and stream == "self" and not model.config.is_encoder_decoder:
        assert torch.equal(other, output)


def test_edges_of_one_row_act_together(tiny_llama):
    ids = torch.arange(2, 12)[None]
    pair = [ad.Knockout(1, 1, 7, 2, "renormalize"), ad.Knockout(1, 1, 7, 3, "renormalize")]
    with torch.no_grad():
        with ad.edit(tiny_llama, *pair):
            several = tiny_llama(ids).logits
        with ad.edit(tiny_llama, ad.Knockout(1, 1, 7, [2, 3], "renormalize")):
            joint = tiny_llama(ids).logits
        with ad.edit(tiny_llama, pair[0]) as outer, ad.edit(tiny_llama, pair[1]) as inner:
            nested = tiny_llama(ids).logits
        assert len(outer.of(pair[0])) == 1
        assert len(inner.of(pair[1])) == 1
        with ad.edit(tiny_llama, ad.Knockout(1, 1, 7, 2), ad.ValueZeroing(1, 2, 1)):
            twice = tiny_llama(ids).logits
        with ad.edit(tiny_llama, ad.ValueZeroing(1, 2, 1)):
            once = tiny_llama(ids).logits
    assert torch.equal(several, joint)
    assert torch.equal(several, nested)
    assert torch.allclose(twice, once, atol=1e-5)


@pytest.mark.parametrize("mode", ["remove", "renormalize"])
@pytest.mark.parametrize("edge", [(ALL, ALL, 2), (ALL, 5, ALL), (ALL, 5, 2), (ALL, ALL, ALL), (1, ALL, 2)])
def test_a_row_of_a_batch_of_variants_loses_what_it_names_and_no_more(edge, mode, tiny_llama):
    """All heads of one key or one query are not the whole layer; the edits of the same name say what is right."""
    ids = torch.randint(2, 64, (1, 7))
    head, query, key = (None if part == ALL else part for part in edge)
    with torch.no_grad():
        with ad.edit(tiny_llama, ad.Knockout(1, head, query, key, mode=mode)):
            expected = tiny_llama(ids).logits
        clean = tiny_llama(ids).logits
        heads, queries, keys = torch.tensor([(NONE, 0, 0), edge]).T
        with losing_edges(tiny_llama, "model.layers.1.self_attn", "self") as listener:
            listener.variants = Variants(heads, queries, keys, mode)
            found = tiny_llama(ids.expand(2, -1)).logits
            listener.seen, listener.variants = 0, Variants(heads + 6, queries, keys, mode)
            with pytest.raises(ShapeError, match="has heads 0 to 3, got"):
                tiny_llama(ids.expand(2, -1))
    torch.testing.assert_close(found[0], clean[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[1], clean[0], atol=1e-3)


def test_two_threads_cannot_edit_one_model(tiny_llama, tiny_gpt2):
    ids = torch.arange(2, 9)[None]
    said: list[str] = []

    def elsewhere():
        try:
            with ad.edit(tiny_llama, ad.Knockout(0, 1, -1, 0)):
                pass
        except UnsupportedModelError as refusal:
            said.append(str(refusal))
        # another model is nobody's business
        with torch.no_grad(), ad.edit(tiny_gpt2, ad.Knockout(0, 1, -1, 0)) as log:
            tiny_gpt2(ids)
        said.append(f"{len(log.applied)} applied")

    with torch.no_grad(), ad.edit(tiny_llama, ad.Knockout(0, 1, -1, 0)):
        worker = threading.Thread(target=elsewhere)
        worker.start()
        worker.join()
        tiny_llama(ids)
    assert len(said) == 2 and "another thread is editing this LlamaForCausalLM" in said[0] and said[1] == "1 applied"
    assert not edits._sessions
    with torch.no_grad(), ad.edit(tiny_llama, ad.Knockout(0, 1, -1, 0)):
        tiny_llama(ids)


def test_an_edit_that_cannot_be_attached_leaves_no_session(tiny_llama, monkeypatch):
    def broken(_session):
        assert edits._sessions
        raise RuntimeError("cannot attach")

    monkeypatch.setattr(edits._Session, "attach", broken)
    with pytest.raises(RuntimeError, match="cannot attach"), ad.edit(tiny_llama, ad.Knockout(0, 1, -1, 0)):
        pass
    assert not edits._sessions


def test_attention_off_leaves_only_the_stream(tiny_gpt2):
    ids = torch.arange(2, 12)[None]
    with torch.no_grad(), ad.edit(tiny_gpt2, ad.AttentionOff(1)):
        off = tiny_gpt2(ids).logits
    attention = tiny_gpt2.transformer.h[1].attn
    with torch.no_grad():
        attention.c_proj.weight.zero_()
        attention.c_proj.bias.zero_()
        assert torch.equal(off, tiny_gpt2(ids).logits)


def test_edits_in_train_mode_with_a_cache_and_in_generation(tiny_llama):
    """A cached step sees the edges of its own queries; the prefix was edited when it was read."""
    ids = torch.arange(2, 12)[None]
    edit = ad.Knockout(1, 1, None, 3)
    with torch.no_grad():
        with ad.edit(tiny_llama, edit):
            whole = tiny_llama(ids, use_cache=False).logits
        with ad.edit(tiny_llama, edit) as log:
            first = tiny_llama(ids[:, :7], use_cache=True)
            rest = tiny_llama(ids[:, 7:], cache=first.cache, use_cache=True).logits
    assert torch.allclose(rest, whole[:, 7:], atol=1e-5)
    assert [each.entries for each in log.applied] == [4, 3]  # queries 3 to 6, then 7 to 9


def test_gradients_flow_through_an_edit(tiny_llama):
    ids = torch.arange(2, 12)[None]
    embedded = tiny_llama.model.embed_tokens(ids).detach().requires_grad_()
    with ad.edit(tiny_llama, ad.Knockout(1, 1, 9, 3, "renormalize")):
        tiny_llama(inputs_embeds=embedded).logits[0, -1, 5].backward()
    step = torch.randn_like(embedded)
    with torch.no_grad(), ad.edit(tiny_llama, ad.Knockout(1, 1, 9, 3, "renormalize")):
        up, down = (tiny_llama(inputs_embeds=embedded + sign * 1e-3 * step).logits[0, -1, 5] for sign in (1, -1))
    assert float((embedded.grad * step).sum()) == pytest.approx(float(up - down) / 2e-3, rel=2e-2)


@pytest.mark.parametrize("form", [FORMS[2], FORMS[12]], ids=["llama", "bloom traced"])
@pytest.mark.parametrize("outer", ["capture", "edit"])
def test_a_capture_sees_the_edited_heads_whichever_context_came_first(form, outer):
    model = build(form)
    given = inputs_of(model)
    contexts = [lambda: ad.capture(model), lambda: ad.edit(model, ad.HeadAblation(1, HEAD))]
    with torch.no_grad(), ExitStack() as stack:
        opened = [stack.enter_context(make()) for make in (contexts if outer == "capture" else contexts[::-1])]
        model(**given)
    captured = opened[0 if outer == "capture" else 1]
    assert [call.layer for call in captured.calls] == [0, 1]
    assert float(captured.calls[1].z[:, :, HEAD].abs().max()) == 0.0
    assert captured.calls[1].output is not None


def test_two_captures_of_a_traced_family_nest():
    model = build(FORMS[12])
    with torch.no_grad(), ad.capture(model) as outer, ad.capture(model) as inner:
        model(**inputs_of(model))
    assert [call.layer for call in outer.calls] == [call.layer for call in inner.calls] == [0, 1]
    assert torch.equal(outer.calls[1].z, inner.calls[1].z)


@pytest.mark.parametrize("where", ["normal", "inside a block", "after"])
def test_everything_is_restored(tiny_llama, where):
    def state():
        return [
            *((n, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for n, m in tiny_llama.named_modules()),
            AttentionInterface.get_interface,
            AttentionInterface.__getitem__,
        ]

    before = state()
    edit = ad.Knockout(0, 0, 5, 2)

    def run() -> None:
        with torch.no_grad(), ad.edit(tiny_llama, edit, ad.Patch(1, "mlp_out", torch.zeros(1, 1, 32))):
            if where == "inside a block":
                tiny_llama.model.layers[1](None)
            tiny_llama(torch.arange(2, 12)[None])
            if where == "after":
                raise TypeError("planted")

    if where == "normal":
        run()
    else:
        with pytest.raises((TypeError, AttributeError)):
            run()
    assert state() == before


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (ad.Knockout(5, 0, 1, 0), UnsupportedModelError, r"no self attention at layer 5 .* self: 0 to 1"),
        (ad.Knockout(0, 4, 1, 0), ShapeError, r"head 4 does not exist .* 4 query heads, 0 to 3"),
        (ad.Knockout(0, 0, 10, 0), ShapeError, r"query 10 is outside a prompt of 10 tokens; expected -10 to 9"),
        (ad.Knockout(0, 0, 1, -11), ShapeError, r"key -11 is outside"),
        (ad.Knockout(0, 0, 2, 7), ShapeError, r"the mask hides key 7 from query 2"),
        (ad.Knockout(0, 0, 2, 1, stream="cross"), UnsupportedModelError, "no cross attention"),
        (ad.HeadAblation(0, 0, "resample", torch.zeros(3, 3)), ShapeError, r"values of shape \(3, 3\) do not fit"),
        (ad.PatternReplacement(0, torch.zeros(3, 3), 0), ShapeError, r"a pattern of shape \(3, 3\) does not fit"),
        (ad.Patch(0, "resid_pre", torch.zeros(3)), ShapeError, r"do not fit \(1, 10, 32\)"),
    ],
)
def test_what_cannot_work_raises(tiny_llama, edit, error, text):
    with pytest.raises(error, match=text), torch.no_grad(), ad.edit(tiny_llama, edit):
        tiny_llama(torch.arange(2, 12)[None])


def test_an_edit_that_reaches_no_forward_raises(tiny_llama):
    edit = ad.Knockout(0, 0, 1, 0)
    with (
        pytest.raises(UnsupportedModelError, match=r"never reached model\.layers\.0\.self_attn"),
        ad.edit(tiny_llama, edit),
    ):
        pass
    part = pytest.raises(UnsupportedModelError, match="run the model as a whole")
    with part, torch.no_grad(), ad.edit(tiny_llama, edit):
        tiny_llama.model(torch.arange(2, 12)[None])
    with pytest.raises(ValueError, match="no edits were given"), ad.edit(tiny_llama):
        pass


@pytest.mark.parametrize("form", [FORMS[2], FORMS[3], FORMS[12]], ids=["llama sdpa", "llama eager", "bloom traced"])
@pytest.mark.parametrize("edited", [ad.Knockout(0, 0, 1, 0), ad.AttentionOff(1)])
def test_a_graph_that_was_frozen_before_raises(form, edited):
    model = build(form)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False).module()
    with pytest.raises(UnsupportedModelError, match="never reached"), ad.edit(model, edited):
        program(ids, use_cache=False)


@pytest.mark.parametrize("form", [FORMS[2], FORMS[3], FORMS[12]], ids=["llama sdpa", "llama eager", "bloom traced"])
def test_a_result_that_the_model_drops_raises(form, monkeypatch):
    """A layer that asks for attention and then goes its own way must not pass for an edited one."""
    model = build(form)
    name = site_of(model, 1, "self").attention
    attention, given = model.get_submodule(name), inputs_of(model)
    kept = {}
    handle = attention.register_forward_hook(lambda _, __, output: kept.update(output=output))
    with torch.no_grad():
        model(**given)
    handle.remove()

    def routed(*_args, **_kwargs):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(model.config._attn_implementation, eager_attention_forward)
        attend(attention, torch.ones(2, 4, N, 8), *[torch.ones(2, 2, N, 8)] * 2, None, scaling=1.0, dropout=0.0)
        return kept["output"]

    def watched(*_args, **_kwargs):
        torch.matmul(torch.softmax(torch.ones(2, 4, N, N), -1), torch.ones(2, 4, N, 8))
        return kept["output"]

    monkeypatch.setattr(attention, "forward", watched if form[1] == "bloom" else routed)
    dropped = pytest.raises(UnsupportedModelError, match="did not use the edited head outputs")
    with dropped, torch.no_grad(), ad.edit(model, ad.HeadAblation(1, 0)):
        model(**given)


def test_a_compiled_model_is_edited_as_written(tiny_llama):
    ids = torch.arange(2, 12)[None]
    with torch.no_grad(), ad.edit(tiny_llama, ad.Knockout(1, 1, 9, 3)):
        plain = tiny_llama(ids).logits
    compiled = torch.compile(tiny_llama, backend="eager")
    with torch.no_grad():
        compiled(ids)
        with ad.edit(compiled, ad.Knockout(1, 1, 9, 3)):
            edited = compiled(ids).logits
    assert torch.equal(plain, edited)


def test_what_stands_between_heads_and_projection_does_not_hide_an_edit():
    """BitNet has a norm there, so no linear map reads the head outputs: the module's own output proves the edit."""
    model = build(("bitnet", "bitnet", GQA, AutoModelForCausalLM, None, "self"))
    given = inputs_of(model)
    with torch.no_grad():
        clean = model(**given).logits
        with ad.capture(model) as captured, ad.edit(model, ad.Knockout(1, 1, -1, 3)) as log:
            edited = model(**given).logits
    assert not torch.equal(clean, edited)
    assert log.applied[0].entries == 2
    assert [call.layer for call in captured.calls] == [0, 1]
    off = pytest.raises(UnsupportedModelError, match="has no output projection to edit")
    with off, ad.edit(model, ad.AttentionOff(1)):
        model(**given)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bitnet", GQA),
        ("qwen3_next", GQA | {"layer_types": ["full_attention"] * 2, "num_experts": 4, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gates_and_norms_prove_an_edit_behind_a_cache_of_several_tokens(family, settings, implementation):
    model = build((family, family, settings, AutoModelForCausalLM, implementation, "self"))
    ids = inputs_of(model)["input_ids"]
    with torch.no_grad():
        with ad.edit(model, ad.Knockout(1, 1, -1, 3)):
            whole = model(ids, use_cache=False).logits[:, -1]
        cache = model(ids[:, :5], use_cache=True).past_key_values
        with ad.edit(model, ad.Knockout(1, 1, -1, 3)) as log:
            later = model(ids[:, 5:], past_key_values=cache).logits[:, -1]
        clean = model(ids, use_cache=False).logits[:, -1]
    torch.testing.assert_close(later, whole, rtol=1e-4, atol=1e-4)
    assert float((whole - clean).abs().max()) > 1e-3
    assert log.applied[0].entries == 2


def test_activations_of_layers_that_are_not_there(tiny_llama):
    missing = pytest.raises(
        ShapeError, match=r"layer 7 has no mlp_out \(self\); LlamaForCausalLM has it at layers 0, 1"
    )
    with missing, recording(tiny_llama, "mlp_out", [0, 7]):
        pass


ALBERT = {
    "vocab_size": 64, "embedding_size": 32, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3,
    "intermediate_size": 48,
}  # fmt: skip


@pytest.mark.parametrize(
    "edit", [ad.AttentionOff(0), ad.Patch(0, "resid_pre", torch.zeros(32)), ad.Patch(0, "mlp_out", torch.zeros(32))]
)
def test_shared_blocks_are_refused(edit):
    """One module stands for three layers: an edit of it would be one of all of them."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("albert", **ALBERT)).eval()
    shared = pytest.raises(UnsupportedModelError, match="makes 3 attention calls in one forward")
    with shared, ad.edit(model, ad.Knockout(0, 0, 1, 0)):
        model(torch.arange(2, 12)[None])
    thrice = pytest.raises(UnsupportedModelError, match="runs 3 times in one forward")
    with thrice, ad.edit(model, edit):
        model(torch.arange(2, 12)[None])
    with pytest.raises(UnsupportedModelError, match="shared blocks"):
        layers_with(model, "resid_pre", "self")


def test_differential_attention_has_no_single_head_but_one_stream():
    model = build(("diffllama", "diffllama", GQA, AutoModelForCausalLM, "eager", "self"))
    given = inputs_of(model)
    twice = pytest.raises(UnsupportedModelError, match="makes 2 attention calls in one forward")
    with twice, ad.edit(model, ad.Knockout(0, 0, 1, 0)):
        model(**given)
    with torch.no_grad(), recording(model, "resid_post", [0]) as kept:
        clean = model(**given).logits
    with torch.no_grad(), ad.edit(model, ad.Patch(0, "resid_post", kept.values[0])):
        same = model(**given).logits
    with torch.no_grad(), ad.edit(model, ad.Patch(0, "resid_post", torch.zeros(32), position=3)):
        without = model(**given).logits
    assert torch.equal(same, clean)
    assert torch.equal(without[:, :3], clean[:, :3])
    assert not torch.equal(without[:, 3:], clean[:, 3:])
