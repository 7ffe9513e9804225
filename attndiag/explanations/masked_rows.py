"""What implementations return for a query that may read no key. Shown, because they differ; nothing is judged.

Three keys with the values 1, 2 and 4; the query may read none of them. attndiag's own definition is all-zero weights.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attndiag.core.attention import attention_scores, head_outputs, softmax_rows
from attndiag.core.masks import to_additive


@dataclass(frozen=True)
class MaskedRow:
    """One implementation's answer.

    output : what the query got from the values 1, 2, 4; `answer` the same in words.
    """

    implementation: str
    output: float
    answer: str


def fully_masked_rows() -> tuple[MaskedRow, ...]:
    """Ask every implementation that runs on this machine."""
    q, k = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 3, 8)
    v = torch.tensor([1.0, 2.0, 4.0])[None, None, :, None].expand(1, 1, 3, 8).contiguous()
    none = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
    lowest = torch.zeros(1, 1, 1, 3).fill_(torch.finfo(torch.float32).min)
    scores = q @ k.transpose(-1, -2) / 8**0.5
    answers = {
        "attndiag": head_outputs(softmax_rows(attention_scores(q, k, scale=1.0, mask=none))[0], v)[0, 0, 0, 0],
        "softmax of scores + -inf (eager)": (torch.softmax(scores + to_additive(none, dtype=torch.float32), -1) @ v)[
            0, 0, 0, 0
        ],
        "softmax of scores + lowest float (eager)": (torch.softmax(scores + lowest, -1) @ v)[0, 0, 0, 0],
        "scaled_dot_product_attention, boolean": F.scaled_dot_product_attention(q, k, v, attn_mask=none)[0, 0, 0, 0],
        "scaled_dot_product_attention, lowest float": F.scaled_dot_product_attention(q, k, v, attn_mask=lowest)[
            0, 0, 0, 0
        ],
        "flex_attention": _flex(q, k, v),
        "nn.MultiheadAttention, key_padding_mask": _multi_head(),
    }
    return tuple(MaskedRow(name, float(value), _in_words(float(value))) for name, value in answers.items())


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def nothing(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return torch.full_like(score, -torch.inf)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks to be compiled; one row needs no compiler
        return flex_attention(q, k, v, score_mod=nothing)[0, 0, 0, 0]  # type: ignore[index]


def _multi_head() -> Tensor:
    """One head with unit projections, so that values pass unchanged."""
    with torch.random.fork_rng(devices=[]):  # its weights are drawn and then overwritten
        module = nn.MultiheadAttention(8, 1, bias=False, batch_first=True).eval()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(8))
        values = torch.tensor([1.0, 2.0, 4.0])[None, :, None].expand(1, 3, 8).contiguous()
        output, _ = module(
            torch.ones(1, 1, 8), values, values, key_padding_mask=torch.ones(1, 3, dtype=torch.bool), need_weights=False
        )
    return output[0, 0, 0]


def _in_words(value: float) -> str:
    if value != value:
        return "nan"
    if value == 0.0:
        return "zeros"
    return "uniform over all keys" if abs(value - 7 / 3) < 1e-4 else "something else"
