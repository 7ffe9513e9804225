"""A person's own attention modules: three statements, checked, give the same record as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attndiag
from attndiag.errors import ShapeError, UnsupportedModelError, UnverifiedCaptureError
from attndiag.hooks.adapters import Adapter, join_steps
from attndiag.models.known.recurrent import DateTranslator, dates, trained_translator

STEP = Adapter(weights="output:1", values="argument:memory", output="output:0")


def captured_calls(model: nn.Module, adapter, rows: int = 5):
    data = dates(rows, seed=3)
    with torch.no_grad(), attndiag.capture(model, modules={"attention": adapter}) as captured:
        logits = model(data.source, data.target)
    return captured.calls, logits, data


@pytest.mark.parametrize("kind", ["additive", "general", "dot", "local"])
def test_every_step_of_a_recurrent_decoder(kind):
    torch.manual_seed(0)
    model = DateTranslator(kind).eval()
    calls, logits, data = captured_calls(model, STEP)
    with torch.no_grad():
        assert torch.equal(model(data.source, data.target), logits)
    assert [call.call_index for call in calls] == list(range(7))
    assert {(call.route, call.kind, call.output.module_name) for call in calls} == {("adapter", "cross", "project")}
    joined = join_steps(calls)
    assert tuple(joined.pattern.shape) == (5, 1, 7, 8)
    joined.certificate.check()
    sums = joined.pattern.sum(-1)
    if kind == "local":
        assert bool((sums < 0.999).any())  # rows lose what lies outside the window
    else:
        torch.testing.assert_close(sums, torch.ones_like(sums))
    scores = attndiag.contributions(joined)
    assert scores.verified
    parts = torch.einsum("bqk,bkd,dm->bqkm", joined.pattern[:, 0], joined.v[:, 0], model.project.weight.T)
    torch.testing.assert_close(scores.values, parts.norm(dim=-1), atol=1e-5, rtol=1e-4)


def test_parts_by_function_by_inner_module_and_by_class():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(6, 6, bias=False)
            self.weigh = nn.Softmax(-1)
            self.value = nn.Linear(6, 6)
            self.out = nn.Linear(6, 6)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            weights = self.weigh(scale * self.score(x) @ x.transpose(1, 2))
            return self.out(weights @ self.value(x))

    torch.manual_seed(0)
    model, x = nn.Sequential(Own()).eval(), torch.randn(2, 5, 6)
    named = Adapter(weights="weigh", values="value", output="out:input", projection="out", kind="self")
    by_function = Adapter(
        weights=lambda run: torch.softmax(run.inside["weigh"][0], -1),
        values=lambda run: run.module.value(run.arguments["x"]),
        output=lambda run: run.inside["out"][0],
        projection="out",
        kind="self",
    )

    class Statements:
        kind = "self"
        projection = "out"

        def weights(self, run):
            return run.inside["weigh"][1]

        def values(self, run):
            return run.inside["value"][1]

        def output(self, run):
            return run.inside["out"][0]

    patterns = []
    for adapter in (named, by_function, Statements()):
        with torch.no_grad(), attndiag.capture(model, modules={"0": adapter}) as captured:
            output = model(x)
        (call,) = captured.calls
        call.certificate.check()
        assert call.certificate.output_error < 1e-6
        assert (call.kind, call.output.module_name) == ("self", "0.out")
        torch.testing.assert_close(call.attn_out, output)
        patterns.append(call.pattern)
    assert torch.equal(patterns[0], patterns[1])
    assert torch.equal(patterns[0], patterns[2])


def test_statements_that_are_wrong_are_refused_with_the_error():
    torch.manual_seed(0)
    model = DateTranslator("additive").eval()
    wrong = Adapter(weights=lambda run: run.output[1] * 0.9, values="argument:memory", output="output:0")
    with pytest.raises(UnverifiedCaptureError, match=r"differ from its output by 1\.\de-01"):
        captured_calls(model, wrong)
    with pytest.raises(ShapeError, match=r"\(5, 8\), values \(5, 48\)"):
        captured_calls(model, Adapter(weights="output:1", values="argument:query", output="output:0"))
    with pytest.raises(UnsupportedModelError, match="was called with query, memory"):
        captured_calls(model, Adapter(weights="output:1", values="argument:states", output="output:0"))
    with pytest.raises(UnsupportedModelError, match="returned 2 items"):
        captured_calls(model, Adapter(weights="output:5", values="argument:memory", output="output:0"))
    with pytest.raises(UnsupportedModelError, match="no module 'softmax' ran inside"):
        captured_calls(model, Adapter(weights="softmax", values="argument:memory", output="output:0"))
    with pytest.raises(UnsupportedModelError, match="expected a tensor"):
        captured_calls(model, Adapter(weights=lambda _run: None, values="argument:memory", output="output:0"))
    with (
        pytest.raises(UnsupportedModelError, match="did you mean 'attention'"),
        attndiag.capture(model, modules={"atention": STEP}),
    ):
        pass
    with pytest.raises(ValueError, match="'self' or 'cross'"):
        Adapter(weights="a", values="b", output="c", kind="both")
    with pytest.raises(UnsupportedModelError, match="at least one call"):
        join_steps([])
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_steps_over_other_values_are_not_joined():
    torch.manual_seed(0)
    model = DateTranslator("dot").eval()
    (first, *_), _, _ = captured_calls(model, STEP)
    model.embed.weight.data.mul_(2)
    (other, *_), _, _ = captured_calls(model, STEP)
    with pytest.raises(UnsupportedModelError, match="reads other values"):
        join_steps([first, other])


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_multi_head_attention_with_and_without_an_adapter(batch_first):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=batch_first)}).eval()
    x, y = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    given = (x, y, y) if batch_first else tuple(t.transpose(0, 1) for t in (x, y, y))

    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model["attention"]

        def forward(self) -> Tensor:
            return self.attention(*given, average_attn_weights=False)[0]

    runner = Runs().eval()
    with torch.no_grad(), attndiag.capture(runner) as captured:
        output = runner()
    (call,) = captured.calls
    call.certificate.check()
    assert tuple(call.pattern.shape) == (2, 2, 4, 6)
    expected = output if batch_first else output.transpose(0, 1)
    torch.testing.assert_close(call.attn_out, expected)

    def values(run):
        source = run.arguments["value"] if batch_first else run.arguments["value"].transpose(0, 1)
        weight, bias = run.module.in_proj_weight[16:], run.module.in_proj_bias[16:]
        return nn.functional.linear(source, weight, bias).unflatten(-1, (2, 4)).transpose(1, 2)

    adapter = Adapter(
        weights="output:1",
        values=values,
        output=lambda run: (run.output[1] @ values(run)).transpose(1, 2),
        kind="cross",
    )
    with torch.no_grad(), attndiag.capture(runner, modules={"attention": adapter}) as again:
        runner()
    torch.testing.assert_close(again.calls[0].pattern, call.pattern)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["additive", "general", "local"])
def test_a_trained_translator_reads_each_token_off_its_place(kind):
    model = trained_translator(kind)
    calls, logits, data = captured_calls(model, STEP, rows=200)
    accuracy = float((logits.argmax(-1) == data.target).float().mean())
    call = join_steps(calls)
    errors = {
        "weight": float((call.pattern[:, 0].argmax(-1) != data.alignment).float().mean()),
        "contribution": float((attndiag.contributions(call).values.argmax(-1) != data.alignment).float().mean()),
    }
    assert accuracy > 0.9
    # bidirectional states carry a token into its neighbours, so an alignment may stand one place beside
    assert errors["weight"] < 0.35
    assert errors["contribution"] < 0.35
