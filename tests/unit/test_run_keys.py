"""Keys and plans: the same work has the same key wherever it is done, and anything that decides a number changes it."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import attndiag
from attndiag.catalog import UnknownMethodError
from attndiag.comparison.edges import EdgePlan
from attndiag.explanations.replacement import Replacement
from attndiag.models.known import sink_against_value
from attndiag.models.load import LoadedModel
from attndiag.prompts import Prompt, Target
from attndiag.runs import keys
from attndiag.runs.keys import model_identity, prompt_key, weights_fingerprint
from attndiag.runs.plan import DEEP_METHODS, DEFAULT_METHODS, make_plan, plan_differences, plan_from_plain
from attndiag.stats.verdicts import Thresholds

PROMPT = Prompt("<bos> MARK a b c Q", id="one", target="ANS", foil="FOIL")


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    built = sink_against_value()
    return attndiag.load(built.model, tokenizer=built.tokenizer())


def key(lm: LoadedModel, prompt: Prompt = PROMPT, target=None, own=None, **plan) -> str:
    return prompt_key(prompt, target, own or {}, model_identity(lm), make_plan(**plan).plain())


def test_equal_work_has_equal_keys(lm: LoadedModel) -> None:
    again = attndiag.load(copy.deepcopy(lm.model), tokenizer=lm.tokenizer)
    assert key(lm) == key(again) and len(key(lm)) == 64
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert weights_fingerprint(lm.model) == weights_fingerprint(again.model)
    finally:
        torch.set_num_threads(torch_threads)
    assert key(lm, edges=None) == key(lm, edges=None, thresholds=Thresholds(margin=0.1, level=0.1))
    assert key(lm) == key(lm, thresholds=Thresholds(level=0.1))
    # what judges, stands beside, or is carried along unread is no part of what is measured
    assert key(lm) == key(lm, heads=False) == key(lm, primary=("weight", "contribution"))
    assert key(lm) == key(lm, replace(PROMPT, meta={"a": 1}))
    assert key(lm, own={"mine": [1, 2]}) == key(lm, own={"mine": np.array([1.0, 2.0])})


def test_everything_that_decides_a_number_changes_the_key(lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"plain": key(lm)}
    for name, value in {
        "text": "<bos> a",
        "id": "two",
        "foil": None,
        "cluster": "c",
        "pair": "<bos> a a b c Q",
    }.items():
        found[name] = key(lm, replace(PROMPT, **{name: value}))
    found["given target"] = key(lm, target=Target.logprob("ANS"))
    found["own"] = key(lm, own={"mine": [1.0]})
    signs = {"mine": True}
    found["own with signs elsewhere"] = prompt_key(
        PROMPT, None, {"mine": [1.0]}, model_identity(lm), make_plan().plain(), signed=signs
    )
    found["margin of edges removed together"] = key(lm, thresholds=Thresholds(margin=0.1))
    found["other own"] = key(lm, own={"mine": [2.0]})
    found["methods"] = key(lm, methods=["weight"])
    found["params"] = key(lm, params={"input_x_gradient": {"aggregate": "norm"}})
    found["replacement"] = key(lm, replacements=["mean_embedding"])
    found["draws"] = key(lm, replacements=["sampled:draws=3"])
    found["seed"] = key(lm, seed=1)
    found["metrics"] = key(lm, metrics=[])
    found["no edges"] = key(lm, edges=None)
    found["screen"] = key(lm, edges="screen")
    found["deep"] = key(lm, deep=True)
    half = attndiag.load(copy.deepcopy(lm.model).double(), tokenizer=lm.tokenizer)
    found["dtype"] = key(half)
    changed = copy.deepcopy(lm.model)
    weight = next(iter(changed.parameters()))
    with torch.no_grad():
        # one bit of one weight, and not one of those that are sampled
        weight.view(-1)[3] = torch.nextafter(weight.view(-1)[3], torch.tensor(2.0))
    found["weights"] = key(attndiag.load(changed, tokenizer=lm.tokenizer))
    config = copy.deepcopy(lm.model)
    config.config.layer_norm_epsilon = 1e-3
    found["config"] = key(attndiag.load(config, tokenizer=lm.tokenizer))
    monkeypatch.setattr(keys, "package_versions", lambda: {"attndiag": "99"})
    found["version"] = key(lm)
    assert len(set(found.values())) == len(found), found


def test_params_are_plain_once_and_all_of_an_array_decides() -> None:
    def plan(value: object) -> dict:
        return make_plan(["input_x_gradient"], params={"input_x_gradient": {"given": value}}).plain()["params"]

    assert plan((1, (2, "a"))) == plan([1, [2, "a"]]) == {"input_x_gradient": {"given": [1, [2, "a"]]}}
    long = np.zeros(5000)
    other = long.copy()
    # where the text of a long array is cut
    other[2500] = 1
    assert str(long) == str(other)
    found = [long, other, long.reshape(50, 100), long.astype(np.float32), torch.zeros(5000), long.tolist()]
    assert len({keys.digest(plan(value)) for value in found}) == len(found)
    assert plan(long) == plan(long.copy()) and plan(np.float64(2)) == plan(2.0)
    with pytest.raises(ValueError, match=r"params\.input_x_gradient\.given\[1\] is a object; expected numbers, texts"):
        plan([1, object()])
    with pytest.raises(TypeError):
        keys.digest({"a": object()})


def test_plans_survive_as_plain_values() -> None:
    for plan in (
        make_plan(),
        make_plan(deep=True),
        make_plan(["weight"], replacements=["token: the", Replacement.neighbour(3)], edges=None, metrics=[]),
        make_plan(edges=EdgePlan(("weight",), "screen", layers=(1, 2)), primary=("weight", "contribution")),
    ):
        read = plan_from_plain(plan.plain())
        assert [one.label for one in read.compared.replacements] == [one.label for one in plan.compared.replacements]
        again = read.plain() | {"replacements": plan.plain()["replacements"]}
        assert again == plan.plain()
        assert plan_differences(plan.plain(), again) == []


def test_the_two_plans() -> None:
    plain, deep = make_plan(), make_plan(deep=True)
    assert plain.compared.methods == DEFAULT_METHODS and len(DEFAULT_METHODS) == 8
    assert deep.compared.methods == DEEP_METHODS and set(DEFAULT_METHODS) < set(DEEP_METHODS)
    assert deep.edges is not None and deep.edges.extent == "all" and deep.edges.whole_heads
    assert plain.compared.replacements[0].draws < deep.compared.replacements[0].draws
    # the run's seed is that of a replacement which names none
    seeded = make_plan(replacements=["uniform:draws=2", "sampled:draws=2,seed=5", "mean_embedding"], seed=9)
    assert [one.seed for one in seeded.compared.replacements] == [9, 5, 0]


def test_differences_name_what_differs() -> None:
    one, two = make_plan().plain(), make_plan(["weight"], seed=3, edges=None).plain()
    texts = plan_differences(one, two)
    assert any(
        text.startswith("methods: ['weight', 'value_norm'") and text.endswith("['weight'] now") for text in texts
    )
    assert "seed: 0 there, 3 now" in texts
    assert any(text.startswith("edges: ") for text in texts)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"methods": ["wieght"]}, UnknownMethodError, "did you mean 'weight'"),
        ({"methods": []}, ValueError, "at least one"),
        ({"params": {"nothing": {}}}, ValueError, r"params name \['nothing'\]"),
        ({"replacements": ["nope"]}, ValueError, "unknown replacement"),
        ({"metrics": ["nothing"]}, ValueError, r"metrics names \['nothing'\]; there are aopc_comprehensiveness"),
        ({"primary": ("weight", "x")}, ValueError, r"primary names \['x'\]"),
        ({"primary": ("weight", "weight")}, ValueError, "with itself"),
        ({"own": ["weight"]}, ValueError, "each name once"),
        ({"replacements": ["mean_embedding", "mean_embedding"]}, ValueError, "each name once"),
        ({"edges": "some"}, ValueError, "extent is 'some'; expected one of auto, all, screen"),
        ({"edges": "none"}, ValueError, "expected one of auto, all, screen; edges=None measures no edges"),
    ],
)
def test_bad_plans_are_refused(given: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_plan(**given)
