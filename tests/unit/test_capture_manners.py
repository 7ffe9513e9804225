"""Manners of a capture: threads, hooks of other people, modules that change things, keys that are no tokens."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import attndiag
from attndiag.errors import NothingCapturedError, UnsupportedModelError
from attndiag.hooks.adapters import Adapter, join_steps
from attndiag.hooks.call_facts import attends_over
from attndiag.hooks.routed import RoutedArguments, listening, listening_apart

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from families.build import build_family, run

IDS = torch.arange(2, 12)[None]
GATED = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2, "num_experts": 2,
    "moe_intermediate_size": 16, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def gated() -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **GATED)).eval()


def small_llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


# ----------------------------------------------------------------------------------------------------------- threads
class Counting:
    """Counts the calls of one model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {id(module) for module in model.modules()}
        self.calls = 0

    def on_routed(self, arguments: RoutedArguments, output):
        self.calls += 1
        return output


def test_a_replay_in_one_thread_costs_another_no_calls():
    """Thread A mutes its own listener for a trial; meanwhile thread B runs its model and must be heard."""
    ours, theirs = small_llama(), small_llama()
    muted, done = threading.Event(), threading.Event()
    counts: dict[str, int] = {}
    failed: list[BaseException] = []

    def replaying() -> None:
        counter = Counting(ours)
        with torch.no_grad(), listening(counter):
            ours(IDS)
            with listening_apart():
                muted.set()
                assert done.wait(60)
                ours(IDS)  # a trial: not heard by what listened before ...
                inner = Counting(ours)
                with listening(inner):
                    ours(IDS)  # ... and heard by what came since
            ours(IDS)
        counts["replaying"], counts["inner"] = counter.calls, inner.calls

    def running() -> None:
        counter = Counting(theirs)
        with torch.no_grad(), listening(counter):
            assert muted.wait(60)
            theirs(IDS)
            done.set()
        counts["running"] = counter.calls

    def guarded(work) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)
            done.set()
            muted.set()

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (replaying, running)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not failed
    assert counts == {"replaying": 4, "inner": 2, "running": 2}


def test_two_captures_with_gate_trials_at_once():
    """Gate searches replay modules: in two threads, neither capture loses or gains a call."""
    models = [gated(), gated()]
    with torch.no_grad():
        expected = [model(IDS).logits for model in models]
    start = threading.Barrier(2)
    found: dict[int, list] = {}
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            start.wait(60)
            for _ in range(6):
                with torch.no_grad(), attndiag.capture(models[index]) as captured:
                    logits = models[index](IDS).logits
                assert torch.equal(logits, expected[index])
                found.setdefault(index, []).append(
                    [(c.layer, c.output_gate is not None, c.certificate.passed) for c in captured.calls]
                )
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert found == dict.fromkeys((0, 1), [[(0, True, True), (1, True, True)]] * 6)


# ------------------------------------------------------------------------------------------------ hooks of other people
def test_gate_trials_do_not_fire_the_users_hooks():
    model = gated()
    fired: dict[str, int] = {}

    def counting(name: str):
        def hook(*_args, **_kwargs) -> None:
            fired[name] = fired.get(name, 0) + 1

        return hook

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(counting(f"{name} after")))
        handles.append(module.register_forward_pre_hook(counting(f"{name} before"), with_kwargs=True))
    with torch.no_grad():
        model(IDS)
    alone = dict(fired)
    fired.clear()
    with torch.no_grad(), attndiag.capture(model) as captured:
        model(IDS)
    assert all(call.output_gate is not None for call in captured.calls)  # the trials ran
    assert fired == alone
    for handle in handles:
        handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# -------------------------------------------------------------------------------------------------------- adapters
class Sometimes(nn.Module):
    """Attention whose value map is skipped on demand: then the values are the memory itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = _Inner()

    def forward(self, memory: Tensor, skip: bool = False) -> Tensor:
        return self.attention(memory, skip)[0]


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(6, 6)

    def forward(self, memory: Tensor, skip: bool) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(memory @ memory.mT, -1)
        return weights @ (memory if skip else self.value(memory)), weights


def test_parts_of_the_last_forward_are_not_lent_to_this_one():
    model, memory = Sometimes().eval(), torch.randn(2, 5, 6)
    adapter = Adapter(weights="output:1", values="value", output="output:0", kind="self")
    with torch.no_grad(), attndiag.capture(model, modules={"attention": adapter}) as captured:
        model(memory)
        model(memory)
    assert [call.certificate.passed for call in captured.calls] == [True, True]
    with (
        pytest.raises(UnsupportedModelError, match=r"no module 'value' ran inside _Inner; these did: none"),
        torch.no_grad(),
        attndiag.capture(model, modules={"attention": adapter}),
    ):
        model(memory)
        model(memory, skip=True)


def test_joined_steps_keep_nothing_of_the_first_step_alone():
    model = small_llama()
    with torch.no_grad(), attndiag.capture(model, layers=[1]) as captured:
        model(IDS, attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0))
        model(IDS, attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0))
    joined = join_steps(captured.calls)
    for name in ("q", "k", "scale", "mask", "softcap", "sinks", "window", "position_bias", "replay", "past", "trace"):
        assert getattr(joined, name) is None, name
    assert not joined.is_causal
    assert joined.n_queries == 20
    assert joined.query_valid.shape == (1, 20)
    joined.certificate.check()
    torch.testing.assert_close(joined.pattern[:, :, 10:], captured.calls[1].pattern)
    written = attndiag.contributions(joined).require_verified().values
    torch.testing.assert_close(written[:, 10:], attndiag.contributions(captured.calls[1]).values, equal_nan=True)


# -------------------------------------------------------------------------------- keys that are no tokens, changed z
def test_what_the_keys_are_is_told_by_shapes():
    read = {"hidden_states": torch.zeros(2, 9, 32)}
    assert attends_over(torch.zeros(2, 4, 9, 8), read) == "tokens"
    assert attends_over(torch.zeros(6, 4, 3, 8), read) == "tokens"  # windows of three
    assert attends_over(torch.zeros(2, 4, 8, 9), read) == "channels"
    assert attends_over(torch.zeros(2, 9, 1, 32), read) == "states"
    assert attends_over(torch.zeros(2, 4, 1, 8), read) == "tokens"  # one learned query
    assert attends_over(torch.zeros(2, 9, 1, 32), {}) == "tokens"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "module", "attends"),
    [
        ("florence2", "Florence2VisionChannelAttention", "channels"),
        ("inkling2", "Inkling2BlockAttentionResidual", "states"),
        ("inkling2_loop", "Inkling2LoopBlockAttentionResidual", "states"),
    ],
)
def test_attention_over_something_else_is_marked(family, module, attends):
    built = build_family(family)
    with torch.no_grad(), attndiag.capture(built.model) as captured:
        run(built.model, built.inputs)
    kinds = {(call.module_class, call.attends) for call in captured.calls}
    assert {kind for name, kind in kinds if name == module} == {attends}
    assert {kind for name, kind in kinds if name != module} <= {"tokens", attends}
    assert any(kind == "tokens" for _, kind in kinds)
    for call in captured.calls:
        if call.attends == "tokens":
            continue
        call.certificate.check()  # the weights are what the model used; they are just not about tokens
        with pytest.raises(UnsupportedModelError, match=f"its keys are {attends}, not tokens"):
            attndiag.contributions(call)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["vits", "nystromformer"])
def test_head_outputs_that_are_changed_in_place_are_recorded_as_attention_left_them(family):
    built = build_family(family)
    with torch.no_grad(), attndiag.capture(built.model) as captured:
        run(built.model, built.inputs)
    changed = [call for call in captured.calls if call.output is None]
    assert changed
    for call in captured.calls:
        call.certificate.check()
    for call in changed:
        assert "changed in place" in call.output_reason
        with pytest.raises(UnsupportedModelError, match="changed in place"):
            attndiag.contributions(call)
        assert attndiag.contributions(call, "weight").verified


# ------------------------------------------------------------------------------------------- windows and list operands
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["hiera", "cvt"])
def test_windows_and_einsums_over_a_list_are_seen(family):
    built = build_family(family)
    with torch.no_grad():
        plain = run(built.model, built.inputs)
        with attndiag.capture(built.model) as captured:
            watched = run(built.model, built.inputs)
    assert torch.equal(plain.logits, watched.logits)
    assert not captured.refusals
    for call in captured.calls:
        certificate = call.certificate.check()
        assert certificate.output_error is not None
        assert certificate.output_error < 1e-5
        assert attndiag.contributions(call).verified
    if family == "hiera":
        batches = {call.z.shape[0] for call in captured.calls}
        assert len(batches) == 2  # windows are rows of their own, and the last stages have one window


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("longformer", "LongformerSelfAttention"),
        ("led", "LEDEncoderSelfAttention"),
        ("longt5", "LongT5LocalAttention"),
    ],
)
def test_sliding_chunks_stay_refused_by_name(family, name):
    """Their rows are bands of a matrix that is never formed; positions in them are not positions of the text."""
    built = build_family(family)
    try:
        with torch.no_grad(), attndiag.capture(built.model) as captured:
            run(built.model, built.inputs)
    except NothingCapturedError as error:
        assert f"{name} (no softmax over keys was seen in it)" in str(error)
    else:
        assert {(each.module_class, each.reason) for each in captured.refusals} == {
            (name, "no softmax over keys was seen in it")
        }
