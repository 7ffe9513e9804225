"""Estimates of edge effects from one gradient, and what a few forwards more make of them.

- `first_order`: <dm/dz_i, z_i - z_i'>. For a removed edge that is A_ij <dm/dz_i, v_j>; for a renormalised one, with
  the real change of the row, A_ij / (1 - A_ij) <dm/dz_i, v_j - z_i>. Costs one forward and one backward.
- `own_position`: for the strongest edges the edited position is run on exactly. What later positions make of its
  changed keys and values is first order in their head outputs, with the softmax solved for the new keys. Costs one
  token through the later blocks for each edge; exact for edges into the last position.
- `with_target`: the same, with the positions that the target is read at (and any others in `along`) run on exactly,
  too. With every later position in `along` it is exact.
- `recomputed`: the strongest edges exactly (`edge_effects`). Costs a restart for each.

The strongest are those of the largest first-order estimates; all other edges keep theirs. An estimate is no effect: it
carries no verdict, and its error is known only where the exact values were computed beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from attndiag.core.gradients import pattern_gradient
from attndiag.errors import UnsupportedModelError
from attndiag.explanations.edge_truth import allowed_edges, edge_effects
from attndiag.explanations.interventions import provenance
from attndiag.explanations.pattern_gradients import differentiated_calls
from attndiag.explanations.resolve import prompt_label, resolve_target
from attndiag.explanations.resolved import ResolvedTarget
from attndiag.hooks.record import AttentionCall
from attndiag.hooks.restart import Restart
from attndiag.hooks.some_positions import Change, run_some_positions
from attndiag.hooks.variants import Mode
from attndiag.models.load import LoadedModel, as_prompts
from attndiag.prompts import Prompt, Target
from attndiag.scores import Scores

Method = Literal["first_order", "own_position", "with_target", "recomputed"]
ROW_TOLERANCE = 1e-4
"""Largest error of unedited rows in keys and values, relative to their largest entry (float32)."""
_MOST_ROWS = 512


def edge_estimates(
    lm: LoadedModel,
    prompt: Prompt | str,
    target: Target | None = None,
    *,
    method: Method = "first_order",
    mode: Mode = "remove",
    top: int = 200,
    along: Sequence[int] = (),
) -> Scores:
    """Estimated effect of every self-attention edge of a decoder (or, first order only, of any model).

    Parameters
    ----------
    target : as in `attndiag.score`.
    method : see the table above.
    mode : as in `edge_effects`.
    top : how many edges are refined; the others keep their first-order estimate.
    along : for `with_target`, further positions to run on exactly, where they come after the edited one.

    Returns
    -------
    Scores
        Signed, [layer, head, query_pos, key_pos], in the unit of the target; `nan` where there is no edge. Checks:
        `refined` (edges), `token_layers` (tokens times blocks that were run beyond forward and backward, in units of
        the prompt's own forward), `row_error` (of unedited rows); provenance: `seconds`.

    Raises
    ------
    UnsupportedModelError : no gradient reaches the patterns; or, for the refined methods, restarts or runs of single
        positions do not reproduce the unedited model.
    """
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; expected one of {', '.join(map(repr, get_args(Method)))}")
    one = as_prompts(prompt)[0]
    began = time.perf_counter()
    run = _differentiated(lm, resolve_target(lm, one, target))
    values = run.first_order(mode)
    checks: dict[str, float] = {"refined": 0, "token_layers": 0.0}
    if method != "first_order":
        strongest = values.abs().nan_to_num(-1.0).flatten().argsort(descending=True, stable=True)
        strongest = strongest[: min(top, int((~values.isnan()).sum()))]
        edges = torch.stack(torch.unravel_index(strongest, values.shape), dim=1)
        numbers = torch.tensor([run.calls[index].layer for index in range(len(run.calls))])
        named = torch.cat([numbers[edges[:, :1]], edges[:, 1:]], dim=1)
        if method == "recomputed":
            exact = edge_effects(lm, one, target, edges=[tuple(edge) for edge in named.tolist()], mode=mode)
            place = {layer: index for index, layer in enumerate(exact.labels["layer"])}
            found = torch.stack([exact.values[(place[e[0]], *e[1:])] for e in named.tolist()])
            checks |= {"token_layers": _restart_cost(run, named), "row_error": exact.checks["restart_error"]}
        else:
            found, spent, error = run.refined(named, mode, list(along) if method == "with_target" else None)
            checks |= {"token_layers": spent, "row_error": error}
        values[tuple(edges.T)] = found.to(values)
        checks["refined"] = len(edges)
    tokens = list(run.resolved.encoded.tokens[0])
    return Scores(
        values=values,
        axes=("layer", "head", "query_pos", "key_pos"),
        method=f"edge_estimate_{method}",
        unit=run.resolved.unit,
        sign="signed",
        labels={"layer": [call.layer for call in run.calls], "query_pos": tokens, "key_pos": tokens},
        target=run.resolved.targets[0],
        params={"mode": mode, "top": 0 if method == "first_order" else top, "along": tuple(along)},
        provenance=provenance(lm) | {"prompt": prompt_label(one), "seconds": time.perf_counter() - began},
        checks=checks,
    )


@dataclass(eq=False)
class _Differentiated:
    """One forward and backward: attention calls in order of layers, dm/dz and patterns."""

    lm: LoadedModel
    resolved: ResolvedTarget
    calls: list[AttentionCall]
    gradients: list[Tensor]
    patterns: list[Tensor]

    @property
    def n(self) -> int:
        """Positions of the prompt."""
        return self.resolved.encoded.input_ids.shape[1]

    # ------------------------------------------------------------------------------------------------- first order
    def first_order(self, mode: Mode) -> Tensor:
        """[layer, head, query_pos, key_pos], nan where there is no edge."""
        found = []
        for call, gradient, pattern in zip(self.calls, self.gradients, self.patterns, strict=True):
            slope = pattern_gradient(gradient, call.v.detach().to(gradient))
            if mode == "remove":
                values = pattern * slope
            else:
                # what is left of the row without the key; the sum itself, since 1 - A has no digits where A is near 1
                rest = _without_each(pattern) + call.sink_mass[..., None].to(pattern)
                through = (pattern * slope).sum(-1, keepdim=True)
                share = pattern / rest.clamp_min(torch.finfo(pattern.dtype).tiny)
                values = torch.where(rest > 0, share * (slope - through), through.expand_as(slope))
            # by the mask, not by the weight: one that fell to 0 belongs to an edge, whose effect is 0
            found.append(values.masked_fill(~allowed_edges(call).expand_as(values), float("nan"))[0])
        return torch.stack(found).cpu()

    # ---------------------------------------------------------------------------------------- runs of some positions
    def refined(self, edges: Tensor, mode: Mode, along: list[int] | None) -> tuple[Tensor, float, float]:
        """Effects of the given edges, the cost in forwards of the prompt by tokens and blocks, the error of the rows.

        `along` None runs on the edited position alone; a list adds the target's positions and the listed ones.
        """
        if any(call.q is None for call in self.calls) or self.resolved.positions is None:
            raise UnsupportedModelError(f"{self.lm.info.architecture} is refined only by method='recomputed'")
        read_at = sorted(set(self.resolved.positions[0].tolist()))
        restart = Restart(self.lm, self.resolved.encoded.input_ids, self.resolved.positions[0].tolist())
        edges = edges.to(self.resolved.encoded.input_ids.device)
        extra = [] if along is None else sorted({*read_at, *(position % self.n for position in along)})
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, query in enumerate(edges[:, 2].tolist()):
            taken = (query, *(position for position in extra if position > query))
            # rows of one batch have equally many tokens, and equally many that the target is read at
            rows.setdefault((len(taken), sum(position in read_at for position in taken)), []).append(row)
        values = torch.zeros(len(edges), dtype=self.gradients[0].dtype, device=edges.device)
        spent, worst = 0.0, 0.0
        for members in rows.values():
            for start in range(0, len(members), _MOST_ROWS):
                chosen = torch.tensor(members[start : start + _MOST_ROWS], device=edges.device)
                part = edges[chosen]
                places = torch.tensor(
                    [[q, *(position for position in extra if position > q)] for q in part[:, 2].tolist()],
                    device=edges.device,
                )
                found, error = self._some(restart, part, places, read_at, mode)
                values[chosen], worst = found, max(worst, error)
                spent += float((restart.n_layers - part[:, 0]).sum()) * places.shape[1]
        limit = ROW_TOLERANCE * (1 if self.lm.info.dtype in ("float32", "float64") else 100)
        if not worst <= limit:
            raise UnsupportedModelError(
                f"{self.lm.info.architecture}: positions run apart are off by {worst:.1e} of the largest key or value; "
                "use method='recomputed'"
            )
        return values, spent / (restart.n_layers * self.n), worst

    def _some(
        self, restart: Restart, edges: Tensor, places: Tensor, read_at: list[int], mode: Mode
    ) -> tuple[Tensor, float]:
        read = torch.isin(places, torch.tensor(read_at, device=edges.device))
        run = run_some_positions(restart, edges, places, mode, read)
        effect = torch.zeros(len(edges), dtype=self.gradients[0].dtype, device=edges.device)
        for change in run.changes:
            if len(change.rows):
                effect[change.rows] += self._through_others(change, places[change.rows])
        if read.shape[1] and bool(read.any()):
            steps = restart.clean_rows.expand(len(edges), -1, -1).clone()
            order = torch.tensor(restart.positions, device=edges.device)
            for token in range(int(read[0].sum())):
                where = places[read].unflatten(0, (len(edges), -1))[:, token]
                steps[torch.arange(len(edges), device=edges.device), (order == where[:, None]).int().argmax(1)] = (
                    run.logits[:, token].to(steps)
                )
            effect = effect + self.resolved.measure(restart.clean_rows) - self.resolved.measure(steps)
        return effect, run.error

    def _through_others(self, change: Change, places: Tensor) -> Tensor:
        """First order in the head outputs of positions that the rows lack, their softmax solved for the new keys."""
        index = next(i for i, call in enumerate(self.calls) if call.layer == change.layer)
        call, gradient, pattern = self.calls[index], self.gradients[index][0].transpose(0, 1), self.patterns[index][0]
        q, k, v = (tensor[0].detach().to(gradient) for tensor in (call.q, call.k, call.v))  # type: ignore[union-attr]
        shared = torch.arange(q.shape[0], device=q.device) // (q.shape[0] // k.shape[0])
        slope = torch.einsum("hpd,hkd->hpk", gradient, v[shared])
        everywhere = torch.arange(self.n, device=q.device)
        taken = (everywhere[None, :, None] == places[:, None, :]).any(-1)
        left = (~taken).to(pattern)
        # what is left of each row without the changed keys, added up: 1 - A has no digits where A is near 1
        total = torch.einsum("hpk,bk->bhp", pattern, left) + call.sink_mass[0].to(pattern)
        gained = torch.einsum("hpk,bk->bhp", pattern * slope, left)
        scale = float(call.scale if call.scale is not None else 1.0)
        for token in range(places.shape[1]):
            position = places[:, token]
            keys, values = change.k[:, token].to(q)[:, shared], change.v[:, token].to(q)[:, shared]
            before = torch.einsum("hpd,hbd->bhp", q, k[shared][:, position]) * scale
            after = torch.einsum("hpd,bhd->bhp", q, keys) * scale
            if call.softcap is not None:
                before, after = (call.softcap * torch.tanh(scores / call.softcap) for scores in (before, after))
            factor = torch.exp((after - before).clamp(max=60.0))
            weight = pattern[:, :, position].permute(2, 0, 1)
            gained = gained + weight * factor * torch.einsum("hpd,bhd->bhp", gradient, values)
            total = total + weight * factor
        renewed = torch.where(
            total > 0, gained / total.clamp_min(torch.finfo(total.dtype).tiny), torch.zeros_like(total)
        )
        lost = (pattern * slope).sum(-1)[None] - renewed
        others = (everywhere > places[:, :1]) & ~taken
        return (lost * others[:, None]).sum((1, 2))


def _differentiated(lm: LoadedModel, resolved: ResolvedTarget) -> _Differentiated:
    calls, gradients = differentiated_calls(lm, resolved)
    if any(call.layer is None for call in calls) or len({call.layer for call in calls}) != len(calls):
        raise UnsupportedModelError(f"{lm.info.architecture} has layers without a number of their own")
    return _Differentiated(lm, resolved, calls, gradients, [call.pattern.detach().to(calls[0].z) for call in calls])


def _without_each(pattern: Tensor) -> Tensor:
    """For every key the sum of the other weights of its row, without subtracting."""
    before = pattern.cumsum(-1).roll(1, -1)
    after = pattern.flip(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = 0
    after[..., 0] = 0
    return before + after.flip(-1)


def _restart_cost(run: _Differentiated, edges: Tensor) -> float:
    """Tokens times blocks of the restarts, in forwards of the prompt."""
    layers = len(run.calls)
    later = (layers - 1 - edges[:, 0]) * (run.n - edges[:, 2]) + 1
    return float(later.sum()) / (layers * run.n)
