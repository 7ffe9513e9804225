"""Head scores beside TransformerLens: the same patterns, and why its detector gives another number for them."""

from __future__ import annotations

import copy

import pytest
import torch

from attndiag.core.heads import prefix_matching_score
from attndiag.core.probes import repeated_random_tokens
from attndiag.explanations.head_scores import heads
from attndiag.hooks.capture_context import capture
from attndiag.models.known import induction_gpt2
from attndiag.models.series import load_series

pytestmark = [
    pytest.mark.slow,
    # importing the other library loads much that warns on its own account
    pytest.mark.filterwarnings("ignore"),
]


def bridge(model, folder):
    """The same weights in the other library."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    twin = copy.deepcopy(model)
    twin.config._name_or_path = str(folder)
    twin.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    # it wants a tokenizer that remembers where it was loaded from
    words = AutoTokenizer.from_pretrained(folder)
    return TransformerBridge.boot_transformers(str(folder), hf_model=twin, tokenizer=words, device="cpu")


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(vocab={"<bos>": 0, **{f"t{i}": i for i in range(1, 64)}}, unk_token="t63"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<bos>", eos_token="<bos>", pad_token="<bos>", unk_token="t63"
    )


def patterns(lens, tokens):
    cache = lens.run_with_cache(tokens)[1]
    return [cache["pattern", layer] for layer in range(lens.cfg.n_layers)]


def detected(lens, pattern, tokens, **options):
    """What its detector says about one head's pattern, by its own function for one pattern."""
    from transformer_lens.head_detector import (
        compute_head_attention_similarity_score,
        get_induction_head_detection_pattern,
    )

    wanted = get_induction_head_detection_pattern(tokens)
    options = {"exclude_bos": False, "exclude_current_token": False, "error_measure": "mul", **options}
    return compute_head_attention_similarity_score(pattern, detection_pattern=wanted, **options)


@pytest.mark.parametrize("model", [load_series().at(900), induction_gpt2().model], ids=["llama", "gpt2"])
def test_patterns_are_the_same(model, tmp_path):
    probe = repeated_random_tokens(3, 25, admissible=torch.arange(1, 64), bos=0, seed=0)
    theirs = patterns(bridge(model, tmp_path), probe.tokens)
    with torch.no_grad(), capture(model) as captured:
        model(probe.tokens)
    assert len(theirs) == len(captured.calls) == 2
    for mine, other in zip(captured.calls, theirs, strict=True):
        assert (mine.pattern - other).abs().max() < 1e-5
        # the score of their patterns is the score of ours
        score = prefix_matching_score(other, probe.tokens, queries=probe.queries).score
        assert torch.allclose(
            score, prefix_matching_score(mine.pattern, probe.tokens, queries=probe.queries).score, atol=1e-5
        )


def test_its_detector_gives_half_to_a_perfect_head_and_all_to_a_head_on_bos(tmp_path):
    model = induction_gpt2().model
    lens = bridge(model, tmp_path)
    probe = repeated_random_tokens(1, 50, admissible=torch.arange(1, 64), bos=0, seed=0)
    table = heads(model, probes=["induction"], rows=2, length=50)
    perfect = table["prefix_matching_score"]
    assert perfect.values[1, 0].item() == pytest.approx(1.0, abs=1e-6)
    pattern = patterns(lens, probe.tokens)[1][0, 0]
    # 49 of the 101 rows have a follower to attend to; the others count as failures
    assert detected(lens, pattern, probe.tokens) == pytest.approx(49 / 101, abs=0.01)
    # a head with 99.9 % on BOS and .1 % on followers: everything once BOS is set aside, next to nothing here
    sinking = torch.zeros_like(pattern)
    sinking[:, 0] = 1.0
    for query in range(51, 100):
        sinking[query, 0], sinking[query, query - 49] = 0.999, 0.001
    assert detected(lens, sinking, probe.tokens, exclude_bos=True) == pytest.approx(1.0, abs=0.02)
    mine = prefix_matching_score(sinking[None, None], probe.tokens, queries=probe.queries)
    assert mine.score.item() == pytest.approx(0.001, abs=1e-6) and mine.sink_mass.item() == pytest.approx(0.999)
