"""The memory estimate says which way the measures go."""

from __future__ import annotations

from pathlib import Path

import pytest

import attndiag
from attndiag.runs import memory
from attndiag.runs.memory import estimate_memory


def test_auto_says_when_it_streams(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = attndiag.load(tiny_folder, device="cpu")
    roomy = estimate_memory(lm, 100)
    assert not roomy.streamed and "streamed" not in str(roomy)
    asked = estimate_memory(lm, 100, backend="streaming")
    assert asked.streamed and "for prompts of up to 100 tokens, streamed, beside" in str(asked)
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 1000)
    turned = estimate_memory(lm, 100)
    assert turned.streamed and turned.measures == asked.measures and ", streamed," in str(turned)
    told = estimate_memory(lm, 100, backend="fused")
    assert not told.streamed and told.measures == roomy.measures
