"""Attention against gradients and leave-one-out effects, after Jain & Wallace (2019, arXiv 1902.10186).

    python scripts/replicate_attention_studies.py              3 small classifiers on 2 text sets, about 2 CPU minutes
    python scripts/replicate_attention_studies.py --seeds 1 --texts 600 --epochs 2 --instances 40       a quick look

Two synthetic text sets in which the strength of every word is known, and the label is the sign of the sum:

- `graded`: every word has a strength (Laplace), most are weak, as in reviews;
- `sparse`: words without meaning, and 1 to 5 evidence words of strength 1 or 2.

Classifiers: `bilstm`, a BiLSTM with additive attention, as in the paper; `words`, the same without the LSTM (its
feed-forward encoder), so that a state knows its own word only; `transformer`, one layer of 4 heads, a CLS token whose
row is the attention, residual, MLP.

For each text, over its words, by Kendall's tau-b as in the paper: attention with |gradient| at the word's one-hot entry
(attention held fixed), attention with the leave-one-out effect |y - y without the word|, gradient with leave-one-out
effect. Beside them the value-aware contribution |A_t <f_t, u>| (u: what the output reads), and tau with the strengths
themselves. Then the second experiment: the output under permuted attention, and an adversarial attention that is
as far away as it can be while the output moves by .01 at most.

Attention is captured through `attndiag.Adapter`, which checks that weights times values are what the module returns.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import t as student
from torch import Tensor, nn

import attndiag
from attndiag.core.scoring import additive_scores
from attndiag.stats.agreement import kendall_tau_b

Array = NDArray[np.float64]
FILLERS, EVIDENCE = 300, 40  # evidence words of each class
VOCAB = 1 + FILLERS + 2 * EVIDENCE  # 0 is padding
PUBLISHED = {"attention, gradient": 0.35, "attention, leave one out": 0.29, "gradient, leave one out": 0.66}
EPSILON = 0.01
MODELS = ("bilstm", "words", "transformer")
TEXTS = ("graded", "sparse")
SCALE = 0.3  # of the word vectors at the start; 1 is torch's default


@dataclass(frozen=True, eq=False)
class Texts:
    """ids [text, word] padded with 0, strength [text, word] (0 for fillers, signed), label [text]."""

    ids: Tensor
    strength: Tensor
    label: Tensor

    def take(self, which: Any) -> Texts:
        """Some of the texts."""
        return Texts(self.ids[which], self.strength[which], self.label[which])


def texts(kind: str, count: int, seed: int, *, shortest: int = 8, longest: int = 24) -> Texts:
    """Random texts of one kind, by seed."""
    rng = np.random.default_rng(seed)
    if kind == "graded":
        return _graded(count, rng, shortest, longest)
    zipf = 1 / np.arange(1, FILLERS + 1)
    ids, strength = np.zeros((count, longest), dtype=np.int64), np.zeros((count, longest))
    for row in range(count):
        n, total = int(rng.integers(shortest, longest + 1)), 0.0
        while total == 0:
            ids[row, :n] = 1 + rng.choice(FILLERS, n, p=zipf / zipf.sum())
            strength[row] = 0
            places = rng.choice(n, int(rng.integers(1, 6)), replace=False)
            word, sign = rng.integers(EVIDENCE, size=len(places)), rng.choice([-1, 1], len(places))
            ids[row, places] = 1 + FILLERS + word + EVIDENCE * (sign > 0)
            strength[row, places] = sign * (1 + word % 2)
            total = strength[row].sum()
    return Texts(torch.tensor(ids), torch.tensor(strength), torch.tensor((strength.sum(1) > 0).astype(np.float32)))


def _graded(count: int, rng: np.random.Generator, shortest: int, longest: int) -> Texts:
    """Every word has a strength of its own; few are strong. The lexicon is the same for every seed."""
    lexicon = np.random.default_rng(99)
    strength_of = np.concatenate([[0.0], lexicon.laplace(size=VOCAB - 1)])
    often = lexicon.permutation(1 / np.arange(1, VOCAB))
    length = rng.integers(shortest, longest + 1, count)
    ids = 1 + rng.choice(VOCAB - 1, (count, longest), p=often / often.sum())
    ids[np.arange(longest) >= length[:, None]] = 0
    strength = strength_of[ids]
    return Texts(torch.tensor(ids), torch.tensor(strength), torch.tensor((strength.sum(1) > 0).astype(np.float32)))


class Attention(nn.Module):
    """Context of one query over states: additive with one head, or scaled dot product with several.

    Returns z [batch, 1, head, d_value], weights [batch, head, 1, key_pos] and values [batch, head, key_pos, d_value].
    `given` weights are used instead of its own.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d_head = heads, width // heads
        self.additive = heads == 1
        self.w_q, self.w_k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, 1, bias=False)
        self.w_v = nn.Identity() if heads == 1 else nn.Linear(width, width)
        self.given: Tensor | None = None

    def forward(self, query: Tensor, states: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query [batch, width], states [batch, key_pos, width], real [batch, key_pos] boolean."""
        split = lambda x: x.unflatten(-1, (self.heads, self.d_head)).transpose(1, 2)  # noqa: E731
        values = split(self.w_v(states))
        if self.given is not None:
            weights = self.given
        else:
            if self.additive:
                q, k = query[:, None, None], states[:, None]
                scores = additive_scores(q, k, w_q=self.w_q.weight, w_k=self.w_k.weight, v=self.v.weight[0])
            else:
                q, k = split(self.w_q(query)[:, None]), split(self.w_k(states))
                scores = q @ k.transpose(2, 3) / math.sqrt(self.d_head)
            weights = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
        return (weights @ values).transpose(1, 2), weights, values


class Classifier(nn.Module):
    """Word ids or embeddings -> logit of class 1, [batch]."""

    def __init__(self, kind: str, width: int = 32) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, width, padding_idx=0)
        self.encoder = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.mix = nn.Linear(width, width)
        self.query = nn.Parameter(torch.randn(width) / math.sqrt(width))
        self.position = nn.Embedding(64, width)
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.attention = Attention(width, 4 if kind == "transformer" else 1)
        self.project = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def encode(self, embedded: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, states and which of them are real; the transformer's CLS token is its first state."""
        if self.kind == "transformer":
            # no positions for the words: the label knows no order
            states = torch.cat([self.query.expand(len(embedded), 1, -1), embedded], 1)
            real = torch.cat([torch.ones_like(real[:, :1]), real], 1)
            states = self.norm(states)
            return states[:, 0], states, real
        if self.kind == "words":
            return self.query.expand(len(embedded), -1), torch.tanh(self.mix(embedded)), real
        packed = nn.utils.rnn.pack_padded_sequence(embedded, real.sum(1), batch_first=True, enforce_sorted=False)
        states = nn.utils.rnn.pad_packed_sequence(self.encoder(packed)[0], True, total_length=real.shape[1])[0]
        return self.query.expand(len(embedded), -1), states, real

    def read(self, z: Tensor) -> Tensor:
        """Logit from the context z [batch, width]."""
        if self.kind != "transformer":
            return self.out(z)[:, 0]
        stream = self.query + self.project(z)
        return self.out(stream + self.mlp(self.norm_mlp(stream)))[:, 0]

    def forward(self, ids: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Logits of class 1; `embedded` [batch, word, width] stands in for the word vectors."""
        real = ids != 0
        embedded = self.embed(ids) if embedded is None else embedded
        query, states, real = self.encode(embedded, real)
        z, _, _ = self.attention(query, states, real)
        return self.read(z.flatten(1))


def train(kind: str, data: Texts, seed: int, *, epochs: int, scale: float = SCALE) -> Classifier:
    """A classifier, trained from a seed; in eval mode."""
    torch.manual_seed(seed)
    model = Classifier(kind)
    with torch.no_grad():
        model.embed.weight.mul_(scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-5)
    for _ in range(epochs):
        for rows in torch.randperm(len(data.ids)).split(64):
            loss = F.binary_cross_entropy_with_logits(model(data.ids[rows]), data.label[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


ADAPTER = {"attention": attndiag.Adapter(weights="output:1", values="output:2", output="output:0")}


def captured(model: Classifier, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [text, head, key], values [text, head, key, d_value] and logits, through the checked capture."""
    with attndiag.capture(model, modules=ADAPTER) as found:
        logits = model(ids)
    (call,) = found.calls
    call.certificate.check()
    return call.pattern[:, :, 0], call.v, logits


def measure(model: Classifier, data: Texts) -> dict[str, Array]:
    """[text, word] attention, gradient, leave-one-out effect and contribution; nan for padding."""
    ids, real = data.ids, data.ids != 0
    first = 1 if model.kind == "transformer" else 0
    with torch.no_grad():
        weights, values, logits = captured(model, ids)
        probability = logits.sigmoid()
    embedded = model.embed(ids).detach().requires_grad_()
    model.attention.given = weights[:, :, None]
    try:
        fixed = torch.autograd.grad(model(ids, embedded).sigmoid().sum(), embedded)[0]
        z = (weights[:, :, None] @ values).transpose(1, 2).flatten(1).requires_grad_()
        reading = torch.autograd.grad(model.read(z).sum(), z)[0].unflatten(1, (model.attention.heads, -1))
    finally:
        model.attention.given = None
    flowing = torch.autograd.grad(model(ids, embedded).sigmoid().sum(), embedded)[0]
    effect = torch.zeros(ids.shape)
    with torch.no_grad():
        for place in range(ids.shape[1]):
            # words behind the removed one move up
            shorter = torch.cat([ids[:, :place], ids[:, place + 1 :], ids.new_zeros(len(ids), 1)], 1)
            effect[:, place] = (model(shorter).sigmoid() - probability).abs()
    part = weights * torch.einsum("bhkd,bhd->bhk", values, reading)
    found = {
        "attention": weights.mean(1)[:, first:],
        "gradient": (fixed * embedded).sum(-1).abs(),
        "gradient through attention": (flowing * embedded).sum(-1).abs(),
        "leave one out": effect,
        "contribution": part.sum(1).abs()[:, first:],
    }
    return {name: np.where(real.numpy(), value.detach().double().numpy(), np.nan) for name, value in found.items()} | {
        "on CLS": weights[:, :, 0].mean(1).double().numpy() if first else np.full(len(ids), np.nan)
    }


PAIRS = (
    ("attention", "gradient"),
    ("attention", "leave one out"),
    ("gradient", "leave one out"),
    ("attention", "gradient through attention"),
    ("gradient through attention", "leave one out"),
    ("contribution", "leave one out"),
    ("contribution", "gradient"),
)


def taus(found: dict[str, Array], keep: NDArray[np.bool_]) -> dict[str, Array]:
    """tau-b of each text, by pair; nan where it is undefined."""
    fill = {name: np.where(keep, value, 0.0) for name, value in found.items() if value.ndim == 2}
    return {f"{one}, {two}": kendall_tau_b(fill[one], fill[two], keep) for one, two in PAIRS}


def js_divergence(a: Tensor, b: Tensor) -> Tensor:
    """[text, head] JSD of rows [text, head, key], in nats, at most ln 2."""
    middle = (a + b) / 2
    part = lambda p: torch.where(p > 0, p * (p.clamp_min(1e-30) / middle.clamp_min(1e-30)).log(), 0.0).sum(-1)  # noqa: E731
    return (part(a) + part(b)) / 2


def freedom(
    model: Classifier, data: Texts, seed: int, *, permutations: int = 100, steps: int = 150
) -> dict[str, Array]:
    """What other attention does: median |y - y'| of permuted weights, and the JSD of an adversary within .01 of y."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weights, values, logits = captured(model, data.ids)
    real = torch.cat([torch.ones_like(data.ids[:, :1]), data.ids], 1) if model.kind == "transformer" else data.ids
    real = (real != 0)[:, None].expand_as(weights)
    before = logits.sigmoid()

    def output(other: Tensor) -> Tensor:
        return model.read((other[:, :, None] @ values).transpose(1, 2).flatten(1)).sigmoid()

    moved = []
    with torch.no_grad():
        for _ in range(permutations):
            # every head by the same shuffle of the real places
            draw = torch.rand(weights[:, :1].shape, generator=generator).masked_fill(~real[:, :1], 2.0)
            shuffle = draw.argsort(-1).expand_as(weights)
            back = real[:, :1].logical_not().to(draw).mul(2).add(torch.arange(draw.shape[-1]) / draw.shape[-1])
            place = back.argsort(-1).expand_as(weights)
            other = torch.zeros_like(weights).scatter(-1, place, weights.gather(-1, shuffle))
            moved.append((output(other) - before).abs())
    free = (torch.randn(weights.shape, generator=generator) * 0.1).requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.1)
    best = torch.zeros(len(weights))
    for _ in range(steps):
        other = (free + weights.clamp_min(1e-6).log()).masked_fill(~real, -torch.inf).softmax(-1)
        gap = (output(other) - before).abs()
        distance = js_divergence(other, weights).mean(1)
        allowed = (gap <= EPSILON) & (distance > best)
        best = torch.where(allowed, distance.detach(), best)
        loss = (-distance + 50 * (gap - EPSILON / 2).clamp_min(0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"permuted": torch.stack(moved).median(0).values.double().numpy(), "adversary": best.double().numpy()}


def run(
    kind: str, text: str, seed: int, *, given: argparse.Namespace, scale: float = SCALE, epochs: int | None = None
) -> dict[str, Any]:
    """Everything about one classifier: numbers of single texts, and how good it is."""
    epochs = given.epochs if epochs is None else epochs
    model = train(kind, texts(text, given.texts, seed), seed, epochs=epochs, scale=scale)
    data = texts(text, given.instances, 10_000 + seed)
    with torch.no_grad():
        logits = model(data.ids)
    found = measure(model, data)
    real, strength = (data.ids != 0).numpy(), data.strength.numpy()
    known = np.where(real, np.abs(strength), 0.0)
    n, k = real.sum(1), (strength != 0).sum(1)
    own = taus(found, real)
    own |= {
        f"{name}, strength": kendall_tau_b(np.where(real, found[name], 0.0), known, real)
        for name in ("attention", "gradient", "leave one out", "contribution")
    }
    effect = np.where(real, found["leave one out"], 0.0)
    return {
        "accuracy": float(((logits > 0) == (data.label > 0)).float().mean()),
        "tau": own,
        "tau of fillers": taus(found, real & (strength == 0)),
        "between": 2 * k * (n - k) / (n * (n - 1)),
        "freedom": freedom(model, data, seed, permutations=given.permutations, steps=given.steps),
        "length": n,
        "certain": np.abs(logits.sigmoid().numpy() - 0.5) > 0.49,
        "largest weight": np.nanmax(found["attention"], 1),
        "on CLS": found["on CLS"],
        "idle": (real & (effect < EPSILON)).sum(1) / n,
    }


def interval(values: list[float]) -> str:
    """Mean over seeds with a 95 % t interval; a dash where nothing was defined."""
    if not values:
        return "-"
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.2f}"
    half = float(student.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{mean:.2f} ± {half:.2f}"


def table(title: str, rows: list[list[str]], head: list[str]) -> None:
    """A Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def over(runs: list[dict[str, Any]], pick: Any) -> str:
    """Interval over the runs of what `pick` takes from each, mean over texts first."""
    means = [np.asarray(pick(one), dtype=np.float64) for one in runs]
    return interval([float(np.nanmean(one)) for one in means if np.isfinite(one).any()])


def report(text: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """The tables of one text set."""
    kinds = list(runs)
    rows = [["accuracy", *(over(runs[kind], lambda one: one["accuracy"]) for kind in kinds), ""]]
    for name in runs[kinds[0]][0]["tau"]:
        published = f"{PUBLISHED[name]:.2f}" if name in PUBLISHED else ""
        rows.append([name, *(over(runs[kind], lambda run, n=name: run["tau"][n]) for kind in kinds), published])
    head = ["", *kinds, "published (SST)"]
    table(f"Texts: {text}. Kendall tau-b over the words of a text, mean over texts; ± over seeds.", rows, head)
    facts = {
        "median |y - y'| under permuted attention": lambda run: run["freedom"]["permuted"],
        "JSD of the adversary, nats (at most .69)": lambda run: run["freedom"]["adversary"],
        "the largest weight": lambda run: run["largest weight"],
        "share of words with an effect below .01": lambda run: run["idle"],
        "share of texts with abs(y - .5) > .49": lambda run: run["certain"],
    }
    facts = {name.replace("|y - y'|", "abs(y - y')"): pick for name, pick in facts.items()}
    rows = [[name, *(over(runs[kind], pick) for kind in kinds)] for name, pick in facts.items()]
    if "transformer" in kinds:
        on_cls = over(runs["transformer"], lambda run: run["on CLS"])
        rows.append(["weight on CLS", *(on_cls if kind == "transformer" else "" for kind in kinds)])
    table("Other attention, and what the models are like.", rows, ["", *kinds])
    split = {
        "8 to 12 words": lambda run: run["length"] <= 12,
        "20 to 24 words": lambda run: run["length"] >= 20,
        "saturated output": lambda run: run["certain"],
        "other outputs": lambda run: ~run["certain"],
    }
    rows = [
        [label, pair, *(over(runs[kind], lambda r, p=pair, c=choose: r["tau"][p][c(r)]) for kind in kinds)]
        for label, choose in split.items()
        for pair in PUBLISHED
    ]
    if text == "sparse":
        rows += [
            ["fillers alone", pair, *(over(runs[kind], lambda r, p=pair: r["tau of fillers"][p]) for kind in kinds)]
            for pair in PUBLISHED
        ]
    table("tau-b by kind of text.", rows, ["", "pair", *kinds])
    if text == "sparse":
        between = over(runs[kinds[0]], lambda run: run["between"])
        print(f"\nPairs of an evidence word and a filler: {between} of all pairs.")


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=6000, help="training texts")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--instances", type=int, default=200, help="texts that are measured")
    parser.add_argument("--permutations", type=int, default=100)
    parser.add_argument("--steps", type=int, default=150, help="of the adversary")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sets", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--scales", nargs="*", type=float, default=[0.1, 1.0], help="other sizes of the word vectors")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    rows: list[list[str]] = []
    for text in given.sets:
        seeds = range(given.seeds)
        runs = {kind: [run(kind, text, seed, given=given) for seed in seeds] for kind in given.models}
        report(text, runs)
        kind = given.models[0]
        some = range(min(given.seeds, 3))
        other = {scale: [run(kind, text, seed, given=given, scale=scale) for seed in some] for scale in given.scales}
        named = {f"{scale:g}": found for scale, found in sorted((other | {SCALE: runs[kind]}).items())}
        named[f"{SCALE:g}, untrained"] = [run(kind, text, seed, given=given, epochs=0) for seed in some]
        for name, found in named.items():
            taken = [over(found, lambda one, p=pair: one["tau"][p]) for pair in (*PUBLISHED, "gradient, strength")]
            rows.append([text, name, over(found, lambda one: one["accuracy"]), *taken])
    table(
        f"`{given.models[0]}` by the size of its word vectors at the start.",
        rows,
        ["texts", "size", "accuracy", *PUBLISHED, "gradient, strength"],
    )
    print(f"\n{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
