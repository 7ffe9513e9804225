"""Audits of sound families: no false alarm on small random models of many kinds of attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from families.build import build_family

import attndiag

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about configurations that nobody would train

# plain and grouped decoders, norms of their own, windows, soft-caps, sinks, ALiBi, latent attention, gates, experts,
# encoders, encoder-decoders, pictures
QUICK = ("llama", "gpt2", "bert", "gemma2")
MANY = (
    "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma3", "gpt_oss", "olmo2", "cohere", "cohere2", "granite",
    "stablelm", "starcoder2", "phi", "phi3", "gpt_neox", "gptj", "codegen", "opt", "bloom", "falcon", "mpt",
    "deepseek_v3", "smollm3", "roberta", "electra", "mpnet", "distilbert", "camembert", "modernbert", "t5", "bart",
    "vit", "whisper",
)  # fmt: skip


def findings(family: str) -> list[str]:
    built = build_family(family)
    audit = attndiag.audit(built.model, inputs=None if built.kind == "text" else built.inputs)
    asked = {check.name for check in audit.checks if check.state in ("passed", "limit")}
    assert "mask of every layer" in asked, asked
    return [str(finding) for finding in audit.findings]


@pytest.mark.parametrize("family", QUICK)
def test_no_false_alarm(family: str) -> None:
    assert findings(family) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", MANY)
def test_no_false_alarm_on_more_families(family: str) -> None:
    assert findings(family) == []
