"""A text whose maps would not fit is refused before anything runs."""

from __future__ import annotations

import pytest

import attndiag
from attndiag.core import dispatch
from attndiag.errors import InsufficientMemoryError
from attndiag.models import known
from attndiag.reports.prompt_view import view_prompt


def test_maps_that_do_not_fit_are_refused_with_another_way(monkeypatch):
    model = known.induction_gpt2()
    lm = attndiag.load(model.model, tokenizer=model.tokenizer())
    assert len(view_prompt(lm, model.text(0)).layers) == 2
    monkeypatch.setattr(dispatch, "available_bytes", lambda _device: 1000)
    with pytest.raises(InsufficientMemoryError, match=r"every map is kept; shorten it, or take attndiag\.top_contrib"):
        view_prompt(lm, model.text(0))
