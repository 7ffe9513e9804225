"""W_O by what a module does: the same matrix for plain layers and wrappers, in the device and dtype that they read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from attndiag.errors import UnsupportedModelError
from attndiag.explanations.head_circuits import matrix_of
from attndiag.hooks.capture_context import capture
from attndiag.models.projections import OutputProjection


class Packed(nn.Module):
    """A linear map without floating parameters: integers and a step, as quantised layers keep them. Picky."""

    def __init__(self, linear: nn.Linear, reads: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.reads = linear.in_features, linear.out_features, reads
        self.step = float(linear.weight.detach().abs().max()) / 127
        packed = (linear.weight.detach() / self.step).round().to(torch.int8)
        self.packed = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.reads:
            raise RuntimeError(f"expected {self.reads}, got {x.dtype}")
        return x @ (self.packed.to(x.dtype) * self.step).T + 1


def test_a_module_of_integers_is_measured_in_what_it_reads():
    linear = nn.Linear(8, 6, bias=False)
    for dtype in (torch.float64, torch.bfloat16):
        module = Packed(linear, dtype)
        output = OutputProjection("o", module, 2, 4, device=torch.device("cpu"), dtype=dtype)
        expected = (module.packed.to(dtype) * module.step).T.reshape(2, 4, 6)
        close = 1e-12 if dtype == torch.float64 else 1e-2
        assert output.w_o.dtype == output.b_o.dtype == dtype
        assert torch.allclose(output.w_o, expected, atol=close, rtol=0)
        assert torch.equal(output.b_o, torch.ones(6, dtype=dtype))


def test_a_module_of_which_nothing_is_known_is_refused():
    output = OutputProjection("layers.0.o", Packed(nn.Linear(8, 6), torch.float32), 2, 4)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.o \(Packed\) has no floating parameter"):
        output.w_o  # noqa: B018
    with pytest.raises(UnsupportedModelError, match="those of its input"):
        output.b_o  # noqa: B018
    with pytest.raises(UnsupportedModelError, match="the matrix of Packed cannot be read or measured"):
        matrix_of(output.module)


def test_floats_of_one_byte_say_nothing_about_what_is_read():
    module = Packed(nn.Linear(8, 6), torch.bfloat16)
    module.stored = nn.Parameter(torch.zeros(6, 8).to(torch.float8_e4m3fn), requires_grad=False)
    assert OutputProjection("o", module, 2, 4, device=torch.device("cpu"), dtype=torch.bfloat16).w_o.shape == (2, 4, 6)


def test_capture_says_what_a_quantised_projection_reads(tiny_llama):
    model = tiny_llama.to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, LlamaAttention):
            module.o_proj = Packed(module.o_proj, torch.bfloat16)
    with torch.no_grad(), capture(model) as captured:
        model(input_ids=torch.arange(8)[None])
    for call in captured.calls:
        assert call.w_o.dtype == torch.bfloat16
        written = torch.einsum("bhqd,hdm->bqm", call.z.float().transpose(1, 2), call.w_o.float()) + call.b_o.float()
        assert torch.allclose(written, call.attn_out.float(), atol=0.05 * call.attn_out.abs().max().item(), rtol=0)
