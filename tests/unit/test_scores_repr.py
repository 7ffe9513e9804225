"""What a `Scores` says of itself: two lines, its axes and shape, its largest values with their places."""

from __future__ import annotations

import torch

from attndiag.scores import Scores


def test_axes_shape_and_the_largest_values_stand_in_two_lines() -> None:
    values = torch.zeros(2, 1, 3)
    values[1, 0, 2], values[0, 0, 1], values[1, 0, 0] = -0.75, 0.5, 0.25
    scores = Scores(
        values,
        ("layer", "batch", "key_pos"),
        "projection",
        "residual norm",
        "signed",
        labels={"layer": [3, 20], "key_pos": ["<s>", " a\n", " b"]},
    )
    assert repr(scores).splitlines() == [
        "Scores(projection [layer=2, batch=1, key_pos=3] signed, residual norm; verified)",
        "  largest: -0.75 at layer 20, key_pos 2 ' b'; 0.5 at layer 3, key_pos 1 ' a\\n'; "
        "0.25 at layer 20, key_pos 0 '<s>'",
    ]


def test_undefined_values_are_counted_and_never_the_largest() -> None:
    scores = Scores(torch.tensor([torch.nan, 2.0]), ("position",), "replacement", "nats", "signed")
    assert repr(scores).endswith("\n  largest: 2 at position 1 (1 undefined)")
    nothing = Scores(torch.full((2,), torch.nan), ("position",), "replacement", "nats", "signed", failures=("gap",))
    assert repr(nothing).splitlines()[0].endswith("NOT VERIFIED: gap)")
    assert repr(nothing).endswith("\n  no defined value (2 undefined)")
    empty = Scores(torch.zeros(0), ("position",), "weight", "mass", "non-negative")
    assert repr(empty).endswith("\n  no defined value")


def test_half_precision_and_a_single_number() -> None:
    one = Scores(torch.tensor(1.5, dtype=torch.bfloat16), (), "score", "logits", "signed")
    assert repr(one) == "Scores(score [] signed, logits; verified)\n  largest: 1.5"
