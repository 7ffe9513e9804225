"""Scores made elsewhere: tables, Inseq, Captum, interpreto; tokens named otherwise; what is refused.

The forms were read off the packages' own source: Inseq `inseq/data/attribution.py`, `inseq/utils/serialization.py`
(`__instance_type__` with `attributes`; `__ndarray__` as nested lists or `b64:` / `b64.gz:` text with `dtype`, `shape`,
`Corder`), interpreto `interpreto/attributions/base.py` (`AttributionOutput`: `attributions` [target, element],
`elements`, `model_task`), Captum 0.9 `captum/attr/_core/llm_attr.py`, whose real objects are used.
"""

from __future__ import annotations

import base64
import gzip
import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import attndiag
from attndiag.comparison.own_scores import read_own_scores
from attndiag.comparison.own_tables import OwnScoresError
from attndiag.comparison.side_by_side import Comparison
from attndiag.comparison.token_matching import OwnTokens, TokenisationError, on_own_tokens, plain
from attndiag.models.load import LoadedModel

PROMPTS = [
    attndiag.Prompt("w5 w9 w13 w30", id="one"),
    attndiag.Prompt("w40 w41 w8", id="two"),
]
ONE, TWO = np.array([0.5, -1.0, 2.0, 0.25]), np.array([3.0, 1.0, 2.0])


def compare(*given: object, **more: object) -> Comparison:
    """Methods side by side on tokens alone, by a run in memory."""
    return attndiag.run(*given, edges=None, heads=False, **more).comparison  # type: ignore[arg-type]


def check(found: list[Any]) -> None:
    np.testing.assert_allclose(found[0], ONE)
    np.testing.assert_allclose(found[1], TWO)


# ------------------------------------------------------------------------------------------------------------ tables
def rows() -> list[dict[str, Any]]:
    return [
        {"prompt": name, "position": place, "token": token, "score": float(score)}
        for name, values, text in (("one", ONE, "w5 w9 w13 w30"), ("two", TWO, "w40 w41 w8"))
        for place, (score, token) in enumerate(zip(values, text.split(), strict=True))
    ]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet", "frame"])
def test_tables_by_position(suffix: str, llama_lm: LoadedModel, tmp_path: Path) -> None:
    frame = pd.DataFrame(rows()).sample(frac=1, random_state=0)  # the order of rows says nothing
    path = tmp_path / f"mine{suffix}"
    if suffix == ".csv":
        frame.to_csv(path, index=False)
    elif suffix == ".parquet":
        frame.to_parquet(path)
    elif suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in frame.to_dict("records")) + "\n\n", encoding="utf-8")
    check(read_own_scores(llama_lm, PROMPTS, frame if suffix == "frame" else path))


def test_tables_by_characters(llama_lm: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "words.csv"
    path.write_text(
        "prompt,char_start,char_end,score\none,3,9,4.0\none,0,2,1.5\none,10,13,\ntwo,0,3,1\n", encoding="utf-8"
    )
    first, second = read_own_scores(llama_lm, PROMPTS, path)
    assert first == [(3, 9, 4.0), (0, 2, 1.5)]
    assert second == [(0, 3, 1.0)]
    found = compare(llama_lm, PROMPTS, ["weight"], own={"words": [first, second]}, replacements=[], metrics=[])
    mine = found.scores[found.scores.method == "words"].set_index(["prompt", "position"]).score
    assert mine["one"].tolist() == [1.5, 2.0, 2.0, 0.0]


def test_undefined_scores_stay_undefined_all_the_way(llama_lm: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "holes.csv"
    path.write_text("prompt,position,score\none,0,1\none,1,nan\none,2,\n", encoding="utf-8")
    with pytest.raises(OwnScoresError, match=r"says nothing about prompt 'two'.*missing='undefined'"):
        read_own_scores(llama_lm, PROMPTS, path)
    given = read_own_scores(llama_lm, PROMPTS, path, missing="undefined")
    np.testing.assert_array_equal(given[0], [1.0, np.nan, np.nan, np.nan])
    assert np.isnan(given[1]).all()
    found = compare(
        llama_lm, PROMPTS, ["weight"], own={"mine": given}, replacements=["mean_embedding"], metrics=["effect_tau"]
    )
    mine = found.verdicts[(found.verdicts.method == "mine") & (found.verdicts.prompt == "one")]
    assert mine.position.tolist() == [0]
    assert set(mine.verdict) == {"undefined"}
    assert not (found.verdicts[found.verdicts.prompt == "two"].method == "mine").any()
    pair = found.agreement[(found.agreement["second"] == "mine") & (found.agreement.measure == "tau_b")]
    assert pair.value.isna().all()


def test_one_of_several_methods_in_a_table(llama_lm: LoadedModel) -> None:
    frame = pd.concat([pd.DataFrame(rows()).assign(method="a"), pd.DataFrame(rows()).assign(method="b", score=0.0)])
    check(read_own_scores(llama_lm, PROMPTS, frame, method="a"))
    with pytest.raises(OwnScoresError, match=r"holds the methods \['a', 'b'\]; name one"):
        read_own_scores(llama_lm, PROMPTS, frame)
    with pytest.raises(OwnScoresError, match="has no method 'c'"):
        read_own_scores(llama_lm, PROMPTS, frame, method="c")
    with pytest.raises(OwnScoresError, match="no column method"):
        read_own_scores(llama_lm, PROMPTS, pd.DataFrame(rows()), method="a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,position,score\nonee,0,1\n", r"row 1: there is no prompt 'onee'; did you mean 'one'\?"),
        ("prompt,position,score\none,9,1\n", r"position 9 of prompt 'one', whose 4 tokens are \['w5', ' w9'"),
        ("prompt,position,score\none,-1,1\n", "position -1 of prompt 'one'"),
        ("prompt,position,score\none,1.5,1\n", r"position is '1\.5', not a whole number"),
        ("prompt,position,score\none,0,1\none,0,2\n", "row 2: position 0 of prompt 'one' stands there twice"),
        ("prompt,position,score\none,0,much\n", "row 1: score is 'much', not a number"),
        ("prompt,position,score\none,0,inf\n", "row 1: score is 'inf', which cannot be ranked"),
        ("prompt,position,token,score\none,1,w10,1\n", r"position 1 of prompt 'one' is called 'w10', and there stands"),
        ("prompt,value\none,1\n", r"has the columns \['prompt', 'value'\]; expected prompt, score and either"),
        ("prompt,char_start,char_end,score\none,3,99,1\n", "characters 3 to 99 of prompt 'one', which has 13"),
        ("prompt,char_start,char_end,score\none,3,3,1\n", "characters 3 to 3"),
    ],
)
def test_what_a_table_must_not_hold(text: str, message: str, llama_lm: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((OwnScoresError, TokenisationError), match=message):
        read_own_scores(llama_lm, PROMPTS, path, missing="undefined")


def test_files_that_are_none(llama_lm: LoadedModel, tmp_path: Path) -> None:
    for name, text, message in (
        ("a.json", "{", "is no JSON"),
        ("a.txt", "", r"ends in '\.txt'; expected \.csv, \.parquet"),
        ("a.parquet", "no", "cannot be read as .parquet"),
        ("a.jsonl", "[1]\n", "every line must be an object"),
        ("b.jsonl", "{\n", r"cannot be read as \.jsonl"),
        ("b.json", '{"__ndarray__": "b64:????", "dtype": "float32", "shape": [1]}', "is no JSON"),
        ("c.json", '{"a": 1}', "none of the forms"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(OwnScoresError, match=message):
            read_own_scores(llama_lm, PROMPTS, tmp_path / name)
    with pytest.raises(OwnScoresError, match="does not exist"):
        read_own_scores(llama_lm, PROMPTS, tmp_path / "none.csv")
    with pytest.raises(ValueError, match="aggregate is 'max'"):
        read_own_scores(llama_lm, PROMPTS, np.ones((2, 4)), aggregate="max")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- Inseq
def instance(name: str, **attributes: Any) -> dict[str, Any]:
    return {"__instance_type__": ["inseq.data.attribution", name], "attributes": attributes}


def tokens(names: list[str]) -> list[dict[str, Any]]:
    return [
        {"__instance_type__": ["inseq.utils.typing", "TokenWithId"], "attributes": {"id": 7, "token": name}}
        for name in names
    ]


def packed(array: np.ndarray, how: str) -> Any:
    array = np.ascontiguousarray(array, dtype=np.float32)
    if how == "primitive":
        return array.tolist()
    raw = array.tobytes()
    text = {
        "lists": array.tolist(),
        "b64": "b64:" + base64.b64encode(raw).decode(),
        "gz": "b64.gz:" + base64.b64encode(gzip.compress(raw)).decode(),
    }[how]
    return {"__ndarray__": text, "dtype": "float32", "shape": list(array.shape), "Corder": True}


def inseq(how: str, one: np.ndarray, two: np.ndarray) -> dict[str, Any]:
    """Two decoder-only sequences with two generated tokens each: the prompt is the prefix of the target."""
    sequences = []
    for names, values in ((["w5", "w9", "w13", "w30", "w2", "w3"], one), (["w40", "w41", "w8", "w2", "w3"], two)):
        target: list[Any] = [{"id": 7, "token": name} for name in names] if how == "primitive" else tokens(names)
        given = {
            "source": target[: len(names) - 2],
            "target": target,
            "source_attributions": None,
            "target_attributions": packed(values, how),
            "step_scores": {},
            "sequence_scores": None,
            "attr_pos_start": len(names) - 2,
            "attr_pos_end": len(names),
        }
        sequences.append(given if how == "primitive" else instance("GranularFeatureAttributionSequenceOutput", **given))
    # in another order than the prompts: files name texts, not ids
    whole = {
        "sequence_attributions": sequences[::-1],
        "step_attributions": None,
        "info": {"attribution_method": "saliency", "input_texts": ["w40 w41 w8", "w5 w9 w13 w30"]},
    }
    return whole if how == "primitive" else instance("FeatureAttributionOutput", **whole)


def over_steps(values: np.ndarray) -> np.ndarray:
    """[token, generated]: the scores at step 0, others at step 1; the rows of what was generated are nan."""
    table = np.full((len(values) + 2, 2), np.nan)
    table[: len(values)] = np.stack([values, values[::-1]], 1)
    return table


@pytest.mark.parametrize("how", ["lists", "b64", "gz", "primitive"])
@pytest.mark.parametrize("compressed", [False, True])
def test_inseq_scores_that_are_aggregated(how: str, compressed: bool, llama_lm: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / ("out.json.gz" if compressed else "out.json")
    data = json.dumps(inseq(how, over_steps(ONE), over_steps(TWO)), sort_keys=True).encode()
    path.write_bytes(gzip.compress(data) if compressed else data)
    check(read_own_scores(llama_lm, PROMPTS, path))
    second = read_own_scores(llama_lm, PROMPTS, path, step=1)
    np.testing.assert_allclose(second[0], ONE[::-1])
    np.testing.assert_allclose(read_own_scores(llama_lm, PROMPTS, path, step=-1)[1], TWO[::-1])
    with pytest.raises(OwnScoresError, match="step 2 of prompt 'one', which has 2 steps"):
        read_own_scores(llama_lm, PROMPTS, path, step=2)


def test_inseq_gradients_become_shares_of_their_step(llama_lm: LoadedModel, tmp_path: Path) -> None:
    """[token, generated, dim] -> length over dim, divided by the sum over all tokens of the step: Inseq's `vnorm`."""
    rng = np.random.default_rng(0)
    one, two = (rng.normal(size=(n + 2, 2, 5)).astype(np.float32) for n in (4, 3))
    # at the first step nothing was generated before
    one[4:, 0], two[3:, 0] = np.nan, np.nan
    path = tmp_path / "out.json"
    path.write_text(json.dumps(inseq("b64", one, two)), encoding="utf-8")
    found = read_own_scores(llama_lm, PROMPTS, path)
    lengths = np.sqrt((one[:4, 0].astype(float) ** 2).sum(-1))
    np.testing.assert_allclose(found[0], lengths / lengths.sum(), rtol=1e-6)
    assert np.sum(found[1]) == pytest.approx(1.0)
    signed = read_own_scores(llama_lm, PROMPTS, path, aggregate="sum")
    np.testing.assert_allclose(signed[0], one[:4, 0].astype(float).sum(-1), rtol=1e-5)


def test_inseq_sources_of_encoder_decoders_and_live_objects(llama_lm: LoadedModel) -> None:
    """An encoder-decoder's scores stand on its source, the end token of which is not ours."""
    named = [SimpleNamespace(token=name, id=1) for name in ("▁w40", "▁w41", "▁w8", "</s>")]
    sequence = SimpleNamespace(
        source=named,
        target=[SimpleNamespace(token="▁x", id=2)],
        source_attributions=torch.tensor([[3.0], [1.0], [2.0], [9.0]]),
        target_attributions=None,
        attr_pos_start=0,
    )
    whole = SimpleNamespace(sequence_attributions=[sequence], info={})
    (found,) = read_own_scores(llama_lm, PROMPTS[1:], whole)
    np.testing.assert_allclose(found, TWO)


def test_inseq_files_about_other_prompts(llama_lm: LoadedModel, tmp_path: Path) -> None:
    whole = inseq("lists", over_steps(ONE), over_steps(TWO))
    path = tmp_path / "out.json"
    path.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(OwnScoresError, match="holds scores of 'w40 w41 w8', which is none of the prompts"):
        read_own_scores(llama_lm, PROMPTS[:1], path)
    more = [*PROMPTS, attndiag.Prompt("w7 w8 w9", id="three")]
    with pytest.raises(OwnScoresError, match="says nothing about prompt 'three'"):
        read_own_scores(llama_lm, more, path)
    assert np.isnan(read_own_scores(llama_lm, more, path, missing="undefined")[2]).all()
    del whole["attributes"]["info"]["input_texts"]
    path.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(OwnScoresError, match="2 sequences for 3 prompts"):
        read_own_scores(llama_lm, more, path)
    # by order, then, and the tokens tell that the order is another one
    with pytest.raises(TokenisationError, match=r"\['w40', 'w41', 'w8'\].*its 4 tokens"):
        read_own_scores(llama_lm, PROMPTS, path)
    wrong = inseq("lists", over_steps(ONE)[:-1], over_steps(TWO))
    path.write_text(json.dumps(wrong), encoding="utf-8")
    with pytest.raises(OwnScoresError, match=r"have shape \(5, 2\) for 6 tokens"):
        read_own_scores(llama_lm, PROMPTS, path)


# ------------------------------------------------------------------------------------------------------------ Captum
def test_captum_tensors(llama_lm: LoadedModel) -> None:
    padded = torch.zeros(2, 4)
    padded[0], padded[1, :3] = torch.tensor(ONE), torch.tensor(TWO)
    check(read_own_scores(llama_lm, PROMPTS, padded))
    check(read_own_scores(llama_lm, PROMPTS, padded.bfloat16()))
    check(read_own_scores(llama_lm, PROMPTS, [torch.tensor(ONE)[None], torch.tensor(TWO)]))
    check([read_own_scores(llama_lm, PROMPTS[:1], ONE)[0], TWO])
    by_dim = torch.zeros(2, 4, 2)
    by_dim[..., 0], by_dim[..., 1] = 3 * padded, -2 * padded
    check(read_own_scores(llama_lm, PROMPTS, by_dim, aggregate="sum"))
    norm = read_own_scores(llama_lm, PROMPTS, by_dim, aggregate="norm")
    np.testing.assert_allclose(norm[0], np.sqrt(13) * np.abs(ONE), rtol=1e-6)
    check(read_own_scores(llama_lm, PROMPTS, [by_dim[:1], by_dim[1:]], aggregate="sum"))
    with pytest.raises(OwnScoresError, match=r"say aggregate='sum' or 'norm'"):
        read_own_scores(llama_lm, PROMPTS, by_dim)
    with pytest.raises(OwnScoresError, match="scores of 1 prompts, 2 were given"):
        read_own_scores(llama_lm, PROMPTS, padded[:1])
    with pytest.raises(TokenisationError, match=r"3 scores for prompt 'one', whose 4 tokens are \['w5'"):
        read_own_scores(llama_lm, PROMPTS, [np.ones(3), np.ones(3)])
    with pytest.raises(TokenisationError, match="4 scores for prompt 'two', whose 3 tokens"):
        read_own_scores(llama_lm, PROMPTS, np.ones((2, 4)))
    with pytest.raises(OwnScoresError, match="infinite"):
        read_own_scores(llama_lm, PROMPTS[:1], [np.array([1.0, np.inf, 0, 0])])
    with pytest.raises(OwnScoresError, match="rectangular array"):
        read_own_scores(llama_lm, PROMPTS, [["a"], ["b"]])


def test_what_captum_really_returns(llama_lm: LoadedModel) -> None:
    from captum.attr import FeatureAblation, LLMAttribution, TextTemplateInput, TextTokenInput

    prompt = PROMPTS[0]
    made = LLMAttribution(FeatureAblation(llama_lm.model), llama_lm.tokenizer).attribute(
        TextTokenInput(str(prompt.text), llama_lm.tokenizer), target="w7 w8", use_cached_outputs=False
    )
    (whole,) = read_own_scores(llama_lm, [prompt], made)
    np.testing.assert_allclose(whole, made.seq_attr.numpy(), rtol=1e-6)
    (second,) = read_own_scores(llama_lm, [prompt], [made], step=1)
    np.testing.assert_allclose(second, made.token_attr[1].numpy(), rtol=1e-6)
    with pytest.raises(OwnScoresError, match="step 5 of prompt 'one', which has 2 output tokens"):
        read_own_scores(llama_lm, [prompt], made, step=5)
    # without the first token, as with skip_tokens for BOS: nothing is shifted
    skipped = LLMAttribution(FeatureAblation(llama_lm.model), llama_lm.tokenizer).attribute(
        TextTokenInput(str(prompt.text), llama_lm.tokenizer, skip_tokens=["w9"]), target="w7", use_cached_outputs=False
    )
    (found,) = read_own_scores(llama_lm, [prompt], skipped)
    assert np.isnan(found).tolist() == [False, True, False, False]
    np.testing.assert_allclose(found[[0, 2, 3]], skipped.seq_attr.numpy(), rtol=1e-6)
    # features of a template are words somewhere in the text
    template = TextTemplateInput("{} w9 {} w30", values=["w5", "w13"])
    made = LLMAttribution(FeatureAblation(llama_lm.model), llama_lm.tokenizer).attribute(
        template, target="w7", use_cached_outputs=False
    )
    (found,) = read_own_scores(llama_lm, [prompt], made)
    assert np.isnan(found).tolist() == [False, True, False, True]


def test_captum_layer_attributions_join_the_comparison(llama_lm: LoadedModel) -> None:
    """Captum's own integrated gradients at the embedding, aggregated as said, rank as ours do."""
    from captum.attr import LayerIntegratedGradients

    model = llama_lm.model

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return model(ids).logits[:, -1, 10] - model(ids).logits[:, -1, 20]

    target = attndiag.Target.logit_diff("w10", "w20")
    ids = llama_lm.encode(PROMPTS[0]).input_ids
    made = LayerIntegratedGradients(forward, model.get_input_embeddings()).attribute(
        ids, baselines=torch.full_like(ids, 4), n_steps=16
    )
    assert made.shape == (1, 4, 32)
    given = read_own_scores(llama_lm, PROMPTS[:1], made, aggregate="sum")
    found = compare(
        llama_lm, PROMPTS[:1], ["input_x_gradient"], target=target, own={"captum": given}, replacements=[], metrics=[]
    )
    mine = found.scores[found.scores.method == "captum"]
    np.testing.assert_allclose(mine.score, made[0].sum(-1).detach().numpy(), rtol=1e-5)
    assert mine.signed.all()


# --------------------------------------------------------------------------------------------------------- interpreto
class ModelTask(Enum):
    """As interpreto names its tasks."""

    CLASSIFICATION = "classification"
    GENERATION = "generation"


def test_interpreto_outputs(llama_lm: LoadedModel, tmp_path: Path) -> None:
    """Generation: a row a generated token, the generated ones among the elements; 0 where nothing came before."""
    rows_ = np.zeros((2, 6))
    rows_[0, :4], rows_[1, :5] = ONE, [9, 9, 9, 9, 1]
    generated = SimpleNamespace(
        attributions=torch.tensor(rows_),
        elements=["w5", "w9", "w13", "w30", "w2", "w3"],
        targets=torch.tensor([2, 3]),
        model_task=ModelTask.GENERATION,
    )
    classes = SimpleNamespace(
        attributions=torch.tensor(np.stack([-TWO, TWO])),
        elements=["w40", "w41", "w8"],
        model_task=ModelTask.CLASSIFICATION,
    )
    one = read_own_scores(llama_lm, PROMPTS[:1], [generated])
    two = read_own_scores(llama_lm, PROMPTS[1:], [classes], step=1)
    check([*one, *two])
    np.testing.assert_allclose(read_own_scores(llama_lm, PROMPTS[:1], generated, step=1)[0], [9, 9, 9, 9])
    with pytest.raises(OwnScoresError, match="scores of 2 classes; name one with step="):
        read_own_scores(llama_lm, PROMPTS[1:], [classes])
    path = tmp_path / "saved.json"
    path.write_text(json.dumps([{"attributions": TWO.tolist(), "elements": ["w40", "w41", "w8"]}]), encoding="utf-8")
    np.testing.assert_allclose(read_own_scores(llama_lm, PROMPTS[1:], path)[0], TWO)
    # words over tokens: each score is spread over its tokens
    words = SimpleNamespace(attributions=torch.tensor([[4.0, 1.0]]), elements=["w5 w9", "w13 w30"])
    np.testing.assert_allclose(read_own_scores(llama_lm, PROMPTS[:1], [words])[0], [2.0, 2.0, 0.5, 0.5])
    with pytest.raises(OwnScoresError, match="names no elements"):
        read_own_scores(llama_lm, PROMPTS[:1], [SimpleNamespace(attributions=torch.ones(4), elements=None)])
    with pytest.raises(OwnScoresError, match=r"shape \(3,\) for 2 elements"):
        read_own_scores(llama_lm, PROMPTS[:1], [SimpleNamespace(attributions=torch.ones(3), elements=["a", "b"])])


# ------------------------------------------------------------------------------------------------------- tokenisation
def own(text: str, *spans: tuple[int, int], special: tuple[int, ...] = ()) -> OwnTokens:
    texts = tuple(text[a:b] if a >= 0 else "<s>" for a, b in spans)
    marks = np.array([place in special for place in range(len(spans))])
    return OwnTokens("p", texts, texts, marks, np.array(spans), text, frozenset({"<s>", "[CLS]", "[SEP]"}))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["<s>", "Mary", " was", " here"], [1, 2, 3, 4]),
        (["<s>", "Mary", "Ġwas", "Ġhere"], [1, 2, 3, 4]),
        (["▁Mary", "▁was", "▁here"], [np.nan, 1, 2, 3]),
        (["[CLS]", "mary", "was", "here", "[SEP]"], [np.nan, 2, 3, 4]),
        (["Mar", "##y", "was", "he", "##re"], [np.nan, 3, 3, 9]),
        (["Mary was", "here"], [np.nan, 0.5, 0.5, 2]),
        (["here", "Mary"], [np.nan, 2, np.nan, 1]),
        (["mary</w>", "was</w>", "here</w>"], [np.nan, 1, 2, 3]),
    ],
)
def test_tokens_under_other_names(names: list[str], expected: list[float]) -> None:
    mine = own("Mary was here", (-1, -1), (0, 4), (4, 8), (8, 13), special=(0,))
    found = on_own_tokens(names, np.arange(1.0, len(names) + 1), mine)
    np.testing.assert_allclose(found, expected)


def test_accents_and_case_are_folded_by_character() -> None:
    mine = own("Café Straße ﬁn", (0, 4), (4, 11), (11, 14))
    np.testing.assert_allclose(on_own_tokens(["cafe", "strasse", "fin"], np.array([1.0, 2.0, 4.0]), mine), [1, 2, 4])


@pytest.mark.parametrize(
    "names", [["Jane", "was", "here"], ["Mary", "was"], ["was", "was", "here"], ["", ""], ["[UNK]"]]
)
def test_names_that_tell_no_place(names: list[str]) -> None:
    mine = own("was Mary was here", (0, 3), (3, 8), (8, 12), (12, 17))
    with pytest.raises(TokenisationError, match=r"neither equal nor spell its 4 tokens \['was', ' Mary'"):
        on_own_tokens(names, np.ones(len(names)), mine)


def test_the_same_number_of_other_tokens_is_no_match() -> None:
    """Equal length is what silently shifts scores elsewhere."""
    mine = own("un able", (0, 2), (2, 7))
    with pytest.raises(TokenisationError):
        on_own_tokens(["die", "able"], np.ones(2), mine)
    with pytest.raises(TokenisationError, match="1 scores for 2 named tokens"):
        on_own_tokens(["un", "able"], np.ones(1), mine)
    # same count, other borders: placed by characters, not by number
    np.testing.assert_allclose(on_own_tokens(["una", "ble"], np.array([4.0, 1.0]), mine), [2.0, 3.0])


def test_marks_of_tokenizers() -> None:
    assert [plain(name) for name in ("Ġa", "▁a", "##a", "a</w>", "##", "#", "a b")] == ["a"] * 4 + ["##", "#", "a b"]


@pytest.mark.parametrize("text", ["😀👩‍👩‍👧 ok", "שלום עולם", "\u202eabc\u202c", "a", "e\u0301x", "  two  spaces "])
def test_strange_prompts_come_back_on_their_tokens(text: str, tiny_folder: Path) -> None:
    """Byte-level entries, which spell no text for emoji, are recognised as the tokenizer's own."""
    lm = attndiag.load(str(tiny_folder))
    prompt = attndiag.Prompt(text, id="odd")
    ids = lm.encode(prompt).input_ids[0]
    scores = np.arange(1.0, len(ids) + 1)
    named = SimpleNamespace(
        attributions=torch.tensor(scores), elements=lm.tokenizer.convert_ids_to_tokens(ids.tolist())
    )
    np.testing.assert_allclose(read_own_scores(lm, [prompt], [named])[0], scores)
    # one name for the whole text: spread over all of its tokens
    whole = SimpleNamespace(attributions=torch.tensor([6.0]), elements=[text])
    (found,) = read_own_scores(lm, [prompt], [whole])
    assert np.nansum(found) == pytest.approx(6.0)
    with pytest.raises(TokenisationError, match="odd"):
        read_own_scores(lm, [prompt], [SimpleNamespace(attributions=torch.ones(1), elements=["something else"])])
    table = pd.DataFrame({"prompt": "odd", "position": range(len(ids)), "score": scores})
    np.testing.assert_allclose(read_own_scores(lm, [prompt], table)[0], scores)


def test_prompts_of_one_name_are_refused(llama_lm: LoadedModel) -> None:
    with pytest.raises(OwnScoresError, match="give each an id of its own"):
        read_own_scores(llama_lm, ["w5 w9", "w5 w9"], np.ones((2, 2)))
