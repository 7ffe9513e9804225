"""Tables of scores: a column an axis, token texts beside the positions where they are known or given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attndiag
from attndiag.errors import ShapeError
from attndiag.scores import Scores

TEXTS = ["When", " Mary", " went"]


def made(shape: tuple[int, ...], axes: tuple[str, ...], **more: object) -> Scores:
    values = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    return Scores(values, axes, "weight", "mass", "non-negative", **more)  # type: ignore[arg-type]


def test_texts_that_are_known_stand_beside_their_positions() -> None:
    frame = made((2, 3), ("query_pos", "key_pos"), labels={"query_pos": TEXTS[1:], "key_pos": TEXTS}).to_frame()
    assert list(frame) == ["query_pos", "query_pos_label", "key_pos", "key_pos_label", "value", "method", "unit"]
    assert frame["key_pos_label"].tolist() == TEXTS * 2
    assert frame["query_pos_label"].tolist() == [" Mary"] * 3 + [" went"] * 3


def test_texts_can_be_given_for_what_knows_none() -> None:
    scores = made((1, 2, 3, 3), ("batch", "head", "query_pos", "key_pos"))
    assert not any(name.endswith("_label") for name in scores.to_frame())
    for tokens in (TEXTS, [TEXTS]):
        frame = scores.to_frame(tokens=tokens)
        assert [TEXTS[i] for i in frame["key_pos"]] == frame["key_pos_label"].tolist()
        assert [TEXTS[i] for i in frame["query_pos"]] == frame["query_pos_label"].tolist()
        assert "head_label" not in frame and "batch_label" not in frame
    # a newer query than the keys: only the axis that the texts fit is labelled
    assert "query_pos_label" not in made((1, 3), ("query_pos", "key_pos")).to_frame(tokens=TEXTS)
    # labels that are there stay
    kept = made((3,), ("position",), labels={"position": ["a", "b", "c"]})
    with pytest.raises(ShapeError, match="there is none"):
        kept.to_frame(tokens=TEXTS)


def test_each_prompt_of_a_batch_has_its_own_texts() -> None:
    rows = [["a", "b"], ["c", "d"]]
    frame = made((2, 2), ("batch", "key_pos")).to_frame(tokens=rows)
    assert frame["key_pos_label"].tolist() == ["a", "b", "c", "d"]


@pytest.mark.parametrize("tokens", [TEXTS[:2], [TEXTS, TEXTS], [TEXTS, TEXTS[:1]], []])
def test_texts_that_do_not_fit_are_refused(tokens: list[object]) -> None:
    with pytest.raises(
        ShapeError, match=r"expected rows: 1 \(prompts\), texts: as many as an axis .* \(\{'key_pos': 3\}\)"
    ):
        made((1, 3), ("batch", "key_pos")).to_frame(tokens=tokens)  # type: ignore[arg-type]


def test_a_captured_call_takes_the_texts_of_its_prompt(tiny_folder: Path) -> None:
    tiny_lm = attndiag.load(tiny_folder, device="cpu")
    encoded = tiny_lm.encode([attndiag.Prompt("When Mary went")])
    with attndiag.capture(tiny_lm) as captured:
        tiny_lm.run(encoded.inputs)
    frame = attndiag.contributions(captured.calls[0]).to_frame(tokens=encoded.tokens)
    assert [encoded.tokens[0][i] for i in frame["key_pos"]] == frame["key_pos_label"].tolist()
    # what is made from a prompt knows its texts
    effects = attndiag.explain(tiny_lm, attndiag.Prompt("When Mary went"), method="input_x_gradient").to_frame()
    assert effects["position_label"].tolist() == list(encoded.tokens[0])
    edges = attndiag.edge_effects(tiny_lm, attndiag.Prompt("When Mary"), layers=[0]).to_frame()
    assert {"query_pos_label", "key_pos_label"} <= set(edges)
