"""A recurrent encoder-decoder with additive or multiplicative attention, on dates whose right alignment is known.

The task: a date in one of three orders (day month year, month day year, year month day) becomes year-month-day, token
by token. Years are four digits, days two digits and months one token, so every target token has exactly one source
position that it must be read off: `Dates.alignment`.

Attention (`Memory`): `additive` v^T tanh(W_q q + W_k k) (Bahdanau 2015, arXiv 1409.0473), `general` q^T W k and `dot`
q.k (Luong 2015, arXiv 1508.04025), and `local`, Luong's local form with a predicted position: `general` scores, their
softmax times a Gaussian around p = length * sigmoid(v_p^T tanh(W_p q)), so that its rows sum to less than 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attndiag.core.scoring import additive_scores, dot_scores, general_scores

SOURCE_LENGTH = 8  # order token, then seven tokens of the date
TARGET_LENGTH = 7
DIGITS, MONTHS = 10, 12
VOCAB = 3 + DIGITS + 2 * MONTHS
_ORDERS = ("dmy", "mdy", "ymd")


@dataclass(frozen=True, eq=False)
class Dates:
    """source [row, 8], target [row, 7], alignment [row, 7]: the source position of each target token."""

    source: Tensor
    target: Tensor
    alignment: Tensor


def dates(rows: int, seed: int = 0) -> Dates:
    """Random dates, by seed."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(3, (rows,), generator=generator)
    year = torch.randint(10, (rows, 4), generator=generator)
    month = torch.randint(MONTHS, (rows, 1), generator=generator)
    day = torch.randint(10, (rows, 2), generator=generator)
    parts = {"y": year + 3, "m": month + 3 + DIGITS, "d": day + 3}
    source = torch.zeros(rows, SOURCE_LENGTH, dtype=torch.long)
    alignment = torch.zeros(rows, TARGET_LENGTH, dtype=torch.long)
    for index, name in enumerate(_ORDERS):
        here = order == index
        start = 1
        places = {}
        source[here, 0] = index
        for letter in name:
            width = parts[letter].shape[1]
            source[here, start : start + width] = parts[letter][here]
            places[letter] = torch.arange(start, start + width)
            start += width
        alignment[here] = torch.cat([places["y"], places["m"], places["d"]])
    target = torch.cat([parts["y"], parts["m"] + MONTHS, parts["d"]], 1)
    return Dates(source, target, alignment)


class Memory(nn.Module):
    """One step of attention over encoder states: context and weights.

    Parameters
    ----------
    kind : `"additive"`, `"general"`, `"dot"` or `"local"`.
    width : of queries and memory.
    """

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        if kind not in ("additive", "general", "dot", "local"):
            raise ValueError(f"kind is {kind!r}; expected additive, general, dot or local")
        self.kind = kind
        self.w_q = nn.Linear(width, width, bias=False)
        self.w_k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, 1, bias=False)
        self.position = nn.Linear(width, width)
        self.position_out = nn.Linear(width, 1)

    def forward(self, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """query [batch, width], memory [batch, key_pos, width] -> context [batch, width], weights [batch, key_pos]."""
        q, k = query[:, None, None], memory[:, None]
        if self.kind == "additive":
            scores = additive_scores(q, k, w_q=self.w_q.weight, w_k=self.w_k.weight, v=self.v.weight[0])
        elif self.kind == "dot":
            scores = dot_scores(q, k)
        else:
            scores = general_scores(q, k, self.w_k.weight)
        weights = torch.softmax(scores[:, 0, 0], -1)
        if self.kind == "local":
            length = memory.shape[1]
            centre = length * torch.sigmoid(self.position_out(torch.tanh(self.position(query))))
            distance = torch.arange(length, device=query.device) - centre
            weights = weights * torch.exp(-distance.square() / 2)  # a window of +-2, so that sigma is 1
        return torch.einsum("bk,bkd->bd", weights, memory), weights


class DateTranslator(nn.Module):
    """GRU encoder, GRU decoder that is fed its last target token and a context; one `Memory` a step."""

    def __init__(self, attention: str, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(2 * width, width)
        self.attention = Memory(attention, width)
        self.project = nn.Linear(width, width)
        self.head = nn.Linear(2 * width, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Teacher-forced logits [batch, target_pos, vocabulary]."""
        memory, _ = self.encoder(self.embed(source))
        state = torch.tanh(memory.mean(1))
        previous = torch.zeros_like(state)
        logits = []
        for step in range(target.shape[1]):
            context, _ = self.attention(state, memory)
            read = self.project(context)
            state = self.cell(torch.cat([previous, read], -1), state)
            logits.append(self.head(torch.cat([state, read], -1)))
            previous = self.embed(target[:, step])
        return torch.stack(logits, 1)


def trained_translator(attention: str, seed: int = 0, *, steps: int = 400, batch: int = 64) -> DateTranslator:
    """A translator that knows the task, trained from a seed in a few CPU-seconds; in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DateTranslator(attention)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        rows = dates(batch, seed=1_000 * (seed + 1) + step)
        loss = F.cross_entropy(model(rows.source, rows.target).flatten(0, 1), rows.target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()
