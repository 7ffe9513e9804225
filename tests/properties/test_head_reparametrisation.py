"""v -> v R with W_O -> R^-1 W_O changes nothing that the model computes, so it may change no published number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attndiag.core import circuits, head_outputs


def change_of_basis(seed: int, kv: int, d_head: int) -> torch.Tensor:
    """Well conditioned and not orthogonal: orthogonal ones leave ‖v‖ alone too and would prove less."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(kv, d_head, d_head, generator=generator, dtype=torch.float64))
    stretch = torch.logspace(-1, 1, d_head, dtype=torch.float64)
    return q * stretch


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), group=st.sampled_from([1, 2]))
def test_no_published_number_depends_on_the_basis_of_the_values(seed, group):
    generator = torch.Generator().manual_seed(seed)
    batch, n_heads, n, d_head, d, vocabulary = 2, 4, 6, 3, 10, 12

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    pattern = draw(batch, n_heads, n, n).masked_fill(~allowed, -math.inf).softmax(dim=-1)
    x, w_v, w_o = draw(batch, n, d), draw(n_heads // group, d, d_head), draw(n_heads, d_head, d)
    w_e, w_u, w_q, w_k = draw(vocabulary, d), draw(d, vocabulary), draw(2, d, d_head), draw(2, d, d_head)
    basis = change_of_basis(seed, n_heads // group, d_head)
    inverse = torch.linalg.inv(basis).repeat_interleave(group, dim=0)

    def published(w_v: torch.Tensor, w_o: torch.Tensor) -> list[torch.Tensor]:
        v = x[:, None] @ w_v
        drain = head_outputs.value_drain(pattern, v, w_o)
        norm = head_outputs.head_output_norm(pattern, v, w_o)
        return [
            head_outputs.head_similarity(pattern, v, w_o),
            norm,
            head_outputs.dormant_heads(norm)[1],
            drain.contribution_share,
            drain.norm_ratio,
            drain.layer_contribution_share,
            circuits.copying_score(w_v, w_o, circuits.embedding_circuit(w_u, w_e)),
            circuits.copying_logit_score(w_e, w_v, w_o, w_u),
            circuits.composition_score(w_k, w_v, w_o, reads_other_side=w_q.transpose(1, 2), draws=2).score,
        ]

    for before, after in zip(published(w_v, w_o), published(w_v @ basis, inverse @ w_o), strict=True):
        assert before.isfinite().all()
        assert torch.allclose(before, after, atol=1e-7, rtol=1e-7)
    naive = (x[:, None] @ w_v).norm(dim=-1)
    assert not torch.allclose(naive, (x[:, None] @ w_v @ basis).norm(dim=-1), rtol=1e-3), "the change must be visible"


def test_the_property_test_would_see_a_dependence():
    basis = change_of_basis(0, 1, 3)
    assert torch.linalg.cond(basis).item() == pytest.approx(100)
