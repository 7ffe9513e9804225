"""What a head's weights can do: does it copy, and which earlier heads does it read?

Circuits are products of weights alone (Elhage 2021, A Mathematical Framework for Transformer Circuits). Row-vector
convention throughout: a token t reads x_t = W_E[t], the head writes x W_V W_O, the logits are read with W_U. Norm
gains are folded into the matrix that reads the residual stream (`fold_norm`); the positive factor 1/s of the norm
changes no score here.

No [vocabulary, vocabulary] matrix is ever made; products run in float64. Every number is unchanged under
W_V -> W_V R, W_O -> R^-1 W_O, which changes nothing that the model computes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from attndiag.errors import ShapeError, UndefinedScoreWarning
from attndiag.shapes import OutputWeights, check_rank, check_same_size, expand_kv_heads

NEGLIGIBLE = 1e-9  # a circuit whose eigenvalues are this small beside the norms of its factors is rounding noise
PERTURBATION = 1e-12  # float64 eigenvalues that move visibly under this much are rounding noise too


def fold_norm(weight: Tensor, gain: Tensor | None, *, centre: bool) -> Tensor:
    """Fold the gain of the norm in front of a matrix that reads the residual stream.

    norm(x) W = ((x - mean x) gain / s) W = x (C diag(gain) W) / s, with C = I - 1 1^T / d where the norm centres.

    Parameters
    ----------
    weight : [..., d_model, m].
    gain : [d_model]; None for a norm without gain. Give 1 + weight for the families that use it.
    centre : True for LayerNorm, False for RMSNorm (it subtracts no mean).

    Returns
    -------
    [..., d_model, m].
    """
    if gain is not None:
        check_same_size("the gain's length", gain.shape[-1], "d_model of the weight", weight.shape[-2])
        weight = gain[:, None] * weight
    return weight - weight.mean(dim=-2, keepdim=True) if centre else weight


def embedding_circuit(w_u: Tensor, w_e: Tensor) -> Tensor:
    """W_U W_E: [d_model, d_model], once for all heads; `copying_score` takes it.

    Parameters
    ----------
    w_u : [d_model, vocabulary], final norm folded in (`fold_norm`).
    w_e : [vocabulary, d_model], raw: each head's own norm is folded into its W_V. Tied embeddings: w_u.T before
        folding.
    """
    check_same_size("vocabulary of w_u", w_u.shape[1], "vocabulary of w_e", w_e.shape[0])
    return w_u.double() @ w_e.double()


def copying_score(w_v: Tensor, w_o: OutputWeights, w_ue: Tensor) -> Tensor:
    """How much a head raises the logit of the token it reads: the sign of its OV circuit's eigenvalues.

    copying = sum Re(lambda) / sum |lambda|  over the eigenvalues of W_E W_V W_O W_U, which are those of the
    d_head x d_head product W_O (W_U W_E) W_V and zeros.

    Parameters
    ----------
    w_v : [kv_head, d_model, d_head], the head's norm folded in.
    w_o : [head, d_head, d_model].
    w_ue : [d_model, d_model] from `embedding_circuit`.

    Returns
    -------
    [head], in [-1, 1]: +1 copies, -1 suppresses what it reads. nan with an `UndefinedScoreWarning` where the circuit
    is zero, or where the eigenvalues are rounding noise (a circuit that maps tokens to other tokens in a chain).

    Notes
    -----
    Never a detector of induction alone: one-layer models and models long before induction have it near 1. The direct
    path only: what earlier layers did to the embedding is not in it. Elhage 2021 (A Mathematical Framework for
    Transformer Circuits), section on copying.
    """
    v, o = _head_weights(w_v, w_o)
    check_same_size("d_model of w_ue", w_ue.shape[0], "d_model of w_o", o.shape[2])
    circuit = o @ w_ue.double() @ v
    eigenvalues = torch.linalg.eigvals(circuit)
    size = eigenvalues.abs().sum(dim=-1)
    scale = _norm(o) * _norm(w_ue.double()) * _norm(v)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(circuit.shape, generator=generator, dtype=torch.float64).to(circuit.device)
    moved = torch.linalg.eigvals(circuit + noise * (PERTURBATION * _norm(circuit) / circuit.shape[-1])[:, None, None])
    score, again = (x.real.sum(dim=-1) / x.abs().sum(dim=-1) for x in (eigenvalues, moved))
    steady = ((again - score).abs() < 0.01) & ((moved.abs().sum(dim=-1) - size).abs() < 0.01 * size)
    return defined(score, (size > NEGLIGIBLE * scale) & steady, "the copying score", "the OV circuit is ~0")


def copying_logit_score(inputs: Tensor, w_v: Tensor, w_o: OutputWeights, w_u: Tensor) -> Tensor:
    """How much of what a head raises, over a sample of tokens, is the token that it reads.

    l_ab = x_a W_V W_O W_U[:, b];  raise_ab = relu(l_ab - mean_b l_ab);
    score = 2 mean_a (raise_aa / sum_b raise_ab) - 1

    Parameters
    ----------
    inputs : [token, d_model], what the head reads at each sampled token: embedding rows for the direct path.
    w_v, w_o : as in `copying_score`.
    w_u : [d_model, token], final norm folded in, the columns of **the same** tokens.

    Returns
    -------
    [head], in [-1, 1]: 1 where only the token read is raised, -1 where it is never raised; a head that raises all
    alike has 2 / token - 1. nan with an `UndefinedScoreWarning` where nothing is raised.

    References
    ----------
    Olsson 2022, arXiv 2209.11895, appendix (25 tokens). Deviations: each token is read alone with mass 1, so that the
    score is the circuit's and not the pattern's; the mean is over the sample; the ratio is scaled from [0, 1].
    """
    v, o = _head_weights(w_v, w_o)
    check_rank("inputs", inputs, "token d_model")
    check_same_size("tokens of inputs", inputs.shape[0], "tokens of w_u", w_u.shape[1])
    logits = (inputs.double() @ v) @ (o @ w_u.double())
    raised = torch.relu(logits - logits.mean(dim=-1, keepdim=True))
    total = raised.sum(dim=-1)
    share = torch.diagonal(raised, dim1=-2, dim2=-1) / total
    some = (total > NEGLIGIBLE * _norm(inputs.double()) * _norm(v)[:, None] * _norm(o)[:, None]).all(dim=-1)
    return defined(2 * share.mean(dim=-1) - 1, some, "the copying logit score", "some token raises no logit at all")


@dataclass(frozen=True, eq=False)
class Composition:
    """How strongly later heads read what earlier heads write, above chance.

    Parameters
    ----------
    score : [later_head, earlier_head], Frobenius ratio minus `baseline`; above 0 is more than random matrices give.
    baseline : mean ratio of Gaussian matrices of the same shapes.
    spread : their standard deviation, the unit in which `score` means something.
    """

    score: Tensor
    baseline: float
    spread: float


def composition_score(
    reads: Tensor,
    w_v: Tensor,
    w_o: OutputWeights,
    *,
    reads_other_side: Tensor,
    draws: int = 100,
    seed: int = 0,
) -> Composition:
    """Q-, K- or V-composition of later heads with earlier ones, minus a random-matrix baseline.

    ratio = ‖W_V W_O  R S‖_F / (‖W_V W_O‖_F ‖R S‖_F), where R reads the residual stream of the later head:

    - Q: R = W_Q, S = W_K^T;  K: R = W_K, S = W_Q^T;  V: R = W_V, S = W_O (all of the later head).

    Parameters
    ----------
    reads : R, [later_head or later_kv_head, d_model, d_head], norm folded in.
    w_v : [earlier_kv_head, d_model, d_head] of the earlier heads, norm folded in.
    w_o : [earlier_head, d_head, d_model] of the earlier heads.
    reads_other_side : S, [later_head, d_head, d_model].
    draws, seed : how many random pairs make the baseline.

    Returns
    -------
    `Composition`. nan with an `UndefinedScoreWarning` for a head whose own circuit is zero.

    Notes
    -----
    Of the weights at relative position 0: a rotary embedding turns W_Q against W_K by an angle that depends on the
    offset, which this leaves out. Elhage 2021 (A Mathematical Framework for Transformer Circuits).
    """
    ratio = composition_ratio(writing_side(w_v, w_o), reading_side(reads, reads_other_side))
    baseline, spread = composition_chance(w_v, w_o, reads, reads_other_side, draws=draws, seed=seed)
    return Composition(
        defined(ratio - baseline, ratio.isfinite(), "the composition score", "one of the two circuits is zero"),
        baseline,
        spread,
    )


def writing_side(w_v: Tensor, w_o: OutputWeights) -> Tensor:
    """A, [head, d_head, d_model], with A^T A = (W_V W_O)^T W_V W_O: what a head can write; zeros where that is ~0."""
    v, o = _head_weights(w_v, w_o)
    return _or_zero(torch.linalg.qr(v).R @ o, _norm(v) * _norm(o))


def reading_side(reads: Tensor, reads_other_side: Tensor) -> Tensor:
    """B, [head, d_model, d_head], with B B^T = R S (R S)^T: what a head can read; zeros where that is ~0.

    `reads` may have fewer (key/value) heads than the other side; they are expanded.
    """
    check_rank("reads", reads, "head d_model d_head")
    check_rank("reads_other_side", reads_other_side, "head d_head d_model")
    s = reads_other_side.double()
    r = expand_kv_heads(reads[None], s.shape[0])[0].double()
    check_same_size("d_head of reads", r.shape[2], "d_head of reads_other_side", s.shape[1])
    return _or_zero(r @ torch.linalg.qr(s.transpose(-1, -2)).R.transpose(-1, -2), _norm(r) * _norm(s))


def composition_ratio(writes: Tensor, reads: Tensor) -> Tensor:
    """‖A B‖_F / (‖A‖_F ‖B‖_F) for every pair, [reading head, writing head], in [0, 1]; nan where a side is zero.

    A and B from `writing_side` and `reading_side`: the same number as with the [d_model, d_model] products of whole
    circuits, from products of d_head rows.
    """
    check_same_size("d_model of reads", reads.shape[1], "d_model of writes", writes.shape[2])
    joint = torch.einsum("ecm,lmd->lecd", writes, reads)
    return _norm(joint) / (_norm(reads)[:, None] * _norm(writes)[None, :])


def composition_chance(
    w_v: Tensor, w_o: Tensor, reads: Tensor, reads_other_side: Tensor, *, draws: int = 100, seed: int = 0
) -> tuple[float, float]:
    """Mean and standard deviation of the composition ratio of Gaussian matrices with the shapes of these heads'."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, *matrix.shape[1:]) for matrix in (w_v, w_o, reads, reads_other_side)]
    ratios = torch.stack(
        [
            composition_ratio(writing_side(v, o), reading_side(r, s))
            for v, o, r, s in (
                [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(draws)
            )
        ]
    )
    return ratios.mean().item(), ratios.std().item()


def defined(values: Tensor, where: Tensor, what: str, why: str) -> Tensor:
    """Values, with nan and one `UndefinedScoreWarning` where they are undefined."""
    if not bool(where.all()):
        entries = torch.nonzero(~where).tolist()
        listed = ", ".join(str(entry[0] if len(entry) == 1 else tuple(entry)) for entry in entries[:5])
        more = f" and {len(entries) - 5} more" if len(entries) > 5 else ""
        warnings.warn(f"{what} is undefined for {listed}{more}: {why}", UndefinedScoreWarning, stacklevel=3)
    return torch.where(where, values, torch.nan)


def _or_zero(product: Tensor, scale: Tensor) -> Tensor:
    """Zeros in place of a product that is rounding noise beside its factors."""
    return torch.where((_norm(product) > NEGLIGIBLE * scale)[:, None, None], product, 0.0)


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix)


def _head_weights(w_v: Tensor, w_o: Tensor) -> tuple[Tensor, Tensor]:
    check_rank("w_v", w_v, "kv_head d_model d_head")
    check_rank("w_o", w_o, "head d_head d_model")
    v = expand_kv_heads(w_v[None], w_o.shape[0])[0]
    if v.shape[2] != w_o.shape[1] or v.shape[1] != w_o.shape[2]:
        raise ShapeError(
            f"w_v {tuple(w_v.shape)} [kv_head, d_model, d_head] does not fit w_o {tuple(w_o.shape)} "
            "[head, d_head, d_model]"
        )
    return v.double(), w_o.double()
