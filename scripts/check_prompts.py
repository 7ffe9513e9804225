"""Check a prompt set against a model: does the model get every prompt right, and does every counterfactual bite?

    python scripts/check_prompts.py                           # the shipped set on the default model
    python scripts/check_prompts.py --model gpt2 --prompts my_prompts.jsonl

A prompt is right when the first token of its target is the model's top-1 and its logit beats that of the foil's first
token by more than the margin. A `pair` is right when it has the same length in tokens and lowers that difference by
more than the margin; a negative pair difference means that the foil (or whatever else) has overtaken the target.
Texts are read as they stand: no chat template, special tokens only where the tokenizer adds them by itself.

Exit status: 0 all right, 1 at least one prompt failed, 2 the file or the model cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attndiag.errors import AttnDiagError, PromptError
from attndiag.prompts import Prompt

SHIPPED = Path(str(files("attndiag"))) / "data" / "prompts.jsonl"
MARGIN = 0.5  # logits: well above what a change of dtype or kernel moves
MIN_TOKENS, MAX_TOKENS = 8, 60
FIELDS = {"id", "prompt", "target", "foil", "pair", "spans", "cluster", "meta"}
REQUIRED = {"id", "prompt", "target", "foil", "cluster"}


@dataclass(frozen=True)
class Check:
    """What the model makes of one prompt. Differences are logits, target minus foil, at the last position."""

    id: str
    cluster: str
    n_tokens: int
    top1: str
    probability: float
    logit_diff: float
    pair_diff: float | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def read_prompt_set(path: Path) -> list[Prompt]:
    """One prompt a line; anything that is not the documented form raises `PromptError` with file and line."""
    try:
        # not splitlines(): JSON strings may hold other line separators as they stand
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read ({error}); give a JSONL file in UTF-8") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{where} is not JSON ({error}); expected one object a line") from error
        if not isinstance(row, dict) or not set(row) >= REQUIRED or not set(row) <= FIELDS:
            got = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise PromptError(f"{where} has {got}; expected {sorted(REQUIRED)} and at most {sorted(FIELDS)}")
        for name in (REQUIRED | {"pair"}) & set(row):
            if not isinstance(row[name], str) or not row[name]:
                raise PromptError(f"{where}: {name!r} is {row[name]!r}; expected a string that is not empty")
        prompts.append(_prompt(row, where))
    return prompts


def _prompt(row: dict[str, Any], where: str) -> Prompt:
    spans, meta = row.get("spans", {}), row.get("meta", {})
    if not isinstance(spans, dict) or not isinstance(meta, dict):
        raise PromptError(f"{where}: 'spans' and 'meta' must be objects")
    for name, span in spans.items():
        if not isinstance(span, list) or [type(end) for end in span] != [int, int]:
            raise PromptError(f"{where}: span {name!r} is {span!r}; expected [start, end] in characters")
    try:
        return Prompt(
            row["prompt"],
            id=row["id"],
            target=row["target"],
            foil=row["foil"],
            pair=row.get("pair"),
            spans={name: (start, end) for name, (start, end) in spans.items()},
            cluster=row["cluster"],
            meta=meta,
        )
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from error


def check_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], *, margin: float = MARGIN, batch_size: int = 8
) -> list[Check]:
    """Run every prompt and every pair once and say what is wrong with each.

    Parameters
    ----------
    model, tokenizer : a causal language model and its tokenizer, as transformers makes them.
    margin : logits by which the target must beat the foil, and by which a pair must lower that difference.
    batch_size : texts in one forward; only texts of equal length share one, so nothing is ever padded.
    """
    texts = [text for prompt in prompts for text in (prompt.text, prompt.pair) if text is not None]
    ids = {text: tuple(tokenizer(text)["input_ids"]) for text in texts}
    logits = _last_logits(model, list(ids.values()), batch_size)
    return [_check(prompt, ids, logits, tokenizer, margin) for prompt in prompts]


def _check(
    prompt: Prompt,
    ids: dict[str, tuple[int, ...]],
    logits: dict[tuple[int, ...], Tensor],
    tokenizer: Any,
    margin: float,
) -> Check:
    text, target, foil = prompt.text, prompt.target, prompt.foil
    if text is None or target is None or foil is None:
        raise PromptError(f"prompt {prompt.id!r} lacks text, target or foil; a checked set needs all three")
    here = ids[text]
    last = logits[here]
    right, wrong = (tokenizer(answer, add_special_tokens=False)["input_ids"][0] for answer in (target, foil))
    top1 = int(last.argmax())
    logit_diff = float(last[right] - last[wrong])
    problems = []
    if not MIN_TOKENS <= len(here) <= MAX_TOKENS:
        problems.append(f"{len(here)} tokens, expected {MIN_TOKENS} to {MAX_TOKENS}")
    if right == wrong:
        problems.append("target and foil share their first token")
    # where text and answer merge into another token, the model is asked for a token that it would never have to say
    for name, answer, first in (("target", target, right), ("foil", foil, wrong)):
        if tuple(tokenizer(text + answer)["input_ids"][: len(here) + 1]) != (*here, first):
            problems.append(f"the {name} does not begin with a token of its own after this text")
    if top1 != right:
        problems.append(f"top-1 is {tokenizer.decode([top1])!r}, not the target")
    if not logit_diff > margin:
        problems.append(f"margin over the foil is {logit_diff:.2f}, needed {margin:g}")
    pair_diff = None
    if prompt.pair is not None:
        there = ids[prompt.pair]
        pair_diff = float(logits[there][right] - logits[there][wrong])
        if len(there) != len(here):
            problems.append(f"pair has {len(there)} tokens, not {len(here)}")
        if not pair_diff < logit_diff - margin:
            problems.append(f"pair leaves the difference at {pair_diff:.2f}")
    return Check(
        id=str(prompt.id),
        cluster=str(prompt.cluster),
        n_tokens=len(here),
        top1=tokenizer.decode([top1]),
        probability=float(last.softmax(-1)[right]),
        logit_diff=logit_diff,
        pair_diff=pair_diff,
        problems=tuple(problems),
    )


@torch.inference_mode()
def _last_logits(model: Any, rows: Sequence[tuple[int, ...]], batch_size: int) -> dict[tuple[int, ...], Tensor]:
    """Logits [vocabulary] after the last token of each row, on the CPU in fp32."""
    device = next(model.parameters()).device
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for row in dict.fromkeys(rows):
        by_length[len(row)].append(row)
    found: dict[tuple[int, ...], Tensor] = {}
    for same in by_length.values():
        for start in range(0, len(same), batch_size):
            batch = same[start : start + batch_size]
            out = model(input_ids=torch.tensor(batch, device=device), use_cache=False).logits[:, -1]
            found.update(zip(batch, out.float().cpu(), strict=True))
    return found


def table(checks: Sequence[Check]) -> str:
    """One line a prompt, then the smallest margin of each cluster."""
    wide = max(len("id"), *(len(check.id) for check in checks))
    lines = [f"{'id':<{wide}}  tokens  top-1 prob  logit diff  pair diff  ok"]
    for check in checks:
        pair = "-" if check.pair_diff is None else f"{check.pair_diff:.3f}"
        verdict = "ok" if check.ok else "; ".join(check.problems)
        lines.append(
            f"{check.id:<{wide}}  {check.n_tokens:>6}  {check.probability:>10.3f}  {check.logit_diff:>10.3f}"
            f"  {pair:>9}  {verdict}"
        )
    clusters: dict[str, list[Check]] = defaultdict(list)
    for check in checks:
        clusters[check.cluster].append(check)
    wide = max(len("cluster"), *map(len, clusters))
    lines += ["", f"{'cluster':<{wide}}  prompts  pairs  flipped  min diff  min prob"]
    for name, members in clusters.items():
        pairs = [member.pair_diff for member in members if member.pair_diff is not None]
        lines.append(
            f"{name:<{wide}}  {len(members):>7}  {len(pairs):>5}  {sum(pair < 0 for pair in pairs):>7}"
            f"  {min(member.logit_diff for member in members):>8.3f}"
            f"  {min(member.probability for member in members):>8.3f}"
        )
    failed = sum(not check.ok for check in checks)
    lines += ["", f"{len(checks)} prompts in {len(clusters)} clusters, {failed} failed"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check that a model gets every prompt of a set right.")
    parser.add_argument("--model", default="default", help="name, hub id or local folder (default: the default model)")
    parser.add_argument("--prompts", type=Path, default=SHIPPED, help="JSONL file (default: the shipped set)")
    args = parser.parse_args(argv)
    try:
        prompts = read_prompt_set(args.prompts)
        import attndiag  # only here: `--help` and a bad file need no model code

        lm = attndiag.load(args.model)
        checks = check_prompts(lm.model, lm.tokenizer, prompts)
    except AttnDiagError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(checks))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
