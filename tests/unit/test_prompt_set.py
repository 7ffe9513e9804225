"""The shipped prompt set, and the script that checks a set against a model."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attndiag.errors import PromptError
from attndiag.prompts import Prompt, Target

if TYPE_CHECKING:
    from attndiag.models.load import LoadedModel

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_prompts.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_prompts_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


checker = load_script()


@pytest.fixture(scope="module")
def shipped() -> list[Prompt]:
    return checker.read_prompt_set(checker.SHIPPED)


def by_cluster(prompts: list[Prompt]) -> Counter[str]:
    return Counter(str(prompt.cluster) for prompt in prompts)


# ---- the set itself -------------------------------------------------------------------------------------------------


def test_it_is_large_enough_for_verdicts(shipped: list[Prompt]) -> None:
    sizes = by_cluster(shipped)
    assert len(shipped) >= 80
    assert len(sizes) >= 12
    assert min(sizes.values()) >= 5


def test_no_id_and_no_text_comes_twice(shipped: list[Prompt]) -> None:
    assert len({prompt.id for prompt in shipped}) == len(shipped)
    # a pair that is another prompt's text would put one input into two rows
    texts = [text for prompt in shipped for text in (prompt.text, prompt.pair) if text is not None]
    assert [text for text, count in Counter(texts).items() if count > 1] == []


def test_ids_are_the_cluster_and_a_running_number(shipped: list[Prompt]) -> None:
    expected = [f"{name.replace('_', '-')}-{k + 1}" for name, size in by_cluster(shipped).items() for k in range(size)]
    assert [prompt.id for prompt in shipped] == expected


def test_every_prompt_makes_a_logit_difference(shipped: list[Prompt]) -> None:
    for prompt in shipped:
        assert Target.from_prompt(prompt) == Target.logit_diff(str(prompt.target), str(prompt.foil)), prompt.id


def test_spaces_stand_where_the_next_token_needs_them(shipped: list[Prompt]) -> None:
    for prompt in shipped:
        assert prompt.text is not None
        assert prompt.target is not None
        assert prompt.foil is not None
        for text in (prompt.text, prompt.pair or prompt.text):
            assert text == text.strip(), f"{prompt.id} begins or ends with white space"
        for answer in (prompt.target, prompt.foil):
            # a word brings its one space along, a closing mark has none
            assert re.fullmatch(r" \w+|[^\w\s]{1,2}", answer), f"{prompt.id}: {answer!r}"
        assert prompt.target[0].isspace() == prompt.foil[0].isspace(), prompt.id


def test_most_prompts_have_a_counterfactual(shipped: list[Prompt]) -> None:
    with_pair = [prompt for prompt in shipped if prompt.pair is not None]
    assert len(by_cluster(with_pair)) >= 10
    assert len(with_pair) >= 60


@pytest.mark.parametrize(
    ("cluster", "names"),
    [
        ("ioi", {"subject", "subject_again", "indirect_object", "verb"}),
        ("induction", {"first_cue", "answer_source", "foil_source", "cue"}),
        ("agreement", {"subject", "attractor"}),
        ("coreference", {"antecedent", "verb"}),
        ("retrieval", {"answer_source", "foil_source"}),
        ("name_copy", {"first_cue", "answer_source", "foil_source", "cue"}),
        ("quotation", {"opening"}),
        ("brackets", {"opening"}),
    ],
)
def test_clusters_with_relations_name_their_parts(shipped: list[Prompt], cluster: str, names: set[str]) -> None:
    members = [prompt for prompt in shipped if prompt.cluster == cluster]
    assert len(members) >= 5
    for prompt in members:
        assert set(prompt.spans) >= names, prompt.id


def test_spans_hold_whole_words(shipped: list[Prompt]) -> None:
    for prompt in shipped:
        assert prompt.text is not None
        for name, (start, end) in prompt.spans.items():
            part, before, after = prompt.text[start:end], prompt.text[:start][-1:], prompt.text[end:][:1]
            where = f"{prompt.id}: {name} = {part!r}"
            assert part == part.strip(), where
            assert not (before.isalnum() and part[0].isalnum()), where
            assert not (after.isalnum() and part[-1].isalnum()), where


def test_spans_hold_what_their_names_say(shipped: list[Prompt]) -> None:
    for prompt in shipped:
        assert prompt.text is not None
        part = {name: prompt.text[start:end] for name, (start, end) in prompt.spans.items()}
        if "answer_source" in part:
            assert f" {part['answer_source']}" == prompt.target, prompt.id
        if "foil_source" in part:
            assert f" {part['foil_source']}" == prompt.foil, prompt.id
        if "first_cue" in part:
            assert part["first_cue"] == part["cue"], prompt.id
            assert prompt.spans["first_cue"][1] <= prompt.spans["cue"][0], prompt.id
        if "indirect_object" in part:
            assert f" {part['indirect_object']}" == prompt.target, prompt.id
            assert f" {part['subject']}" == f" {part['subject_again']}" == prompt.foil, prompt.id
        if "opening" in part:
            assert part["opening"] in {'"', "("}, prompt.id


@pytest.mark.real_model
def test_the_default_model_gets_every_prompt_right(shipped: list[Prompt], default_lm: LoadedModel) -> None:
    checks = checker.check_prompts(default_lm.model, default_lm.tokenizer, shipped)
    assert [check.id for check in checks] == [prompt.id for prompt in shipped]
    assert {check.id: check.problems for check in checks if not check.ok} == {}
    first = checks[0]
    assert (first.id, first.n_tokens, first.top1) == ("ioi-1", 14, " Mary")
    assert first.probability == pytest.approx(0.923, abs=0.005)
    assert first.logit_diff == pytest.approx(6.13, abs=0.05)


# ---- the checker ----------------------------------------------------------------------------------------------------


class Words:
    """Tokenizer: a word with the space before it is one token, every other character is one of its own."""

    def __init__(self) -> None:
        self.vocabulary: dict[str, int] = {}

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pieces = re.findall(r" ?\w+|[^\w]", text)
        return {"input_ids": [self.vocabulary.setdefault(piece, len(self.vocabulary)) for piece in pieces]}

    def decode(self, ids: list[int]) -> str:
        names = {number: piece for piece, number in self.vocabulary.items()}
        return "".join(names.get(number, "?") for number in ids)


class Oracle(torch.nn.Module):
    """Model that says, after each known text, what it was told to say."""

    def __init__(self, tokenizer: Words, answers: dict[str, dict[str, float]]) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        self.batches: list[tuple[int, ...]] = []
        for text, logits in answers.items():
            row = torch.zeros(64)
            for word, logit in logits.items():
                row[tokenizer(word)["input_ids"][0]] = logit
            self.rows[tuple(tokenizer(text)["input_ids"])] = row

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        self.batches.append(tuple(input_ids.shape))
        last = torch.stack([self.rows[tuple(row.tolist())] for row in input_ids])
        # only the last position may be read
        return SimpleNamespace(logits=torch.stack([torch.full_like(last, torch.nan), last], dim=1))


TEXT = "the cat sat on the mat and then the cat"
PAIR = "the dog sat on the mat and then the dog"


def verdict(
    after_text: dict[str, float],
    after_pair: dict[str, float] | None = None,
    *,
    text: str = TEXT,
    pair: str = PAIR,
    target: str = " purred",
    foil: str = " barked",
) -> Any:
    tokenizer = Words()
    prompt = Prompt(text, id="p", target=target, foil=foil, pair=pair if after_pair else None, cluster="c")
    model = Oracle(tokenizer, {text: after_text, **({pair: after_pair} if after_pair else {})})
    (check,) = checker.check_prompts(model, tokenizer, [prompt])
    return check


def test_a_good_prompt_passes_with_its_numbers() -> None:
    check = verdict({" purred": 3.0, " barked": 1.0}, {" purred": 1.0, " barked": 4.0})
    assert check.ok
    assert check.problems == ()
    assert (check.n_tokens, check.top1, check.logit_diff, check.pair_diff) == (10, " purred", 2.0, -3.0)
    # the oracle gives every other one of its 64 entries the logit 0
    total = torch.tensor(3.0).exp() + torch.tensor(1.0).exp() + 62
    assert check.probability == pytest.approx(float(torch.tensor(3.0).exp() / total), rel=1e-6)


def test_a_prompt_without_a_pair_passes_without_a_pair_difference() -> None:
    check = verdict({" purred": 3.0, " barked": 1.0})
    assert check.ok
    assert check.pair_diff is None


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ("top-1 is ' sat', not the target", {"after_text": {" purred": 3.0, " barked": 1.0, " sat": 5.0}}),
        ("margin over the foil is 0.25", {"after_text": {" purred": 3.0, " barked": 2.75}}),
        (
            "pair leaves the difference at 1.75",
            {"after_text": {" purred": 3.0, " barked": 1.0}, "after_pair": {" purred": 2.0, " barked": 0.25}},
        ),
        (
            "pair has 11 tokens, not 10",
            {"after_text": {" purred": 3.0}, "after_pair": {" barked": 3.0}, "pair": PAIR + " also"},
        ),
        ("5 tokens, expected 8 to 60", {"after_text": {" purred": 3.0}, "text": "one two three four five"}),
        ("share their first token", {"after_text": {" purred": 3.0}, "foil": " purred loudly"}),
        ("the target does not begin with a token of its own", {"after_text": {"purred": 3.0}, "target": "purred"}),
        ("the foil does not begin with a token of its own", {"after_text": {" purred": 3.0}, "foil": "barked"}),
        ("margin over the foil is nan", {"after_text": {" purred": torch.nan}}),
    ],
)
def test_every_fault_is_named(expected: str, arguments: dict[str, Any]) -> None:
    check = verdict(**arguments)
    assert not check.ok
    assert any(expected in problem for problem in check.problems), check.problems


def test_only_texts_of_equal_length_share_a_forward() -> None:
    tokenizer = Words()
    texts = [TEXT, PAIR, TEXT + " again", "a " + TEXT]
    model = Oracle(tokenizer, {text: {" purred": 3.0} for text in texts})
    prompts = [Prompt(text, id=text, target=" purred", foil=" barked", cluster="c") for text in texts]
    assert all(check.ok for check in checker.check_prompts(model, tokenizer, prompts, batch_size=8))
    assert model.batches == [(2, 10), (2, 11)]
    model.batches.clear()
    checker.check_prompts(model, tokenizer, prompts, batch_size=1)
    assert model.batches == [(1, 10), (1, 10), (1, 11), (1, 11)]


def test_a_prompt_without_a_foil_cannot_be_checked() -> None:
    tokenizer = Words()
    model = Oracle(tokenizer, {TEXT: {" purred": 3.0}})
    with pytest.raises(PromptError, match="'p' lacks text, target or foil"):
        checker.check_prompts(model, tokenizer, [Prompt(TEXT, id="p", target=" purred")])


GOOD = {"id": "a", "prompt": TEXT, "target": " purred", "foil": " barked", "cluster": "c"}


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_reading_keeps_every_field(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, GOOD | {"id": "b", "pair": PAIR, "spans": {"cat": [4, 7]}, "meta": {"x": 1}})
    plain, full = checker.read_prompt_set(path)
    assert plain == Prompt(TEXT, id="a", target=" purred", foil=" barked", cluster="c")
    assert (full.pair, full.spans, full.meta) == (PAIR, {"cat": (4, 7)}, {"x": 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ([1], "has list; expected"),
        ({"id": "a", "prompt": TEXT}, "has .'id', 'prompt'.; expected .*'target'"),
        (GOOD | {"foils": " x"}, "'foils'.*at most"),
        (GOOD | {"target": 3}, "'target' is 3; expected a string"),
        (GOOD | {"target": ""}, "'target' is ''; expected a string that is not empty"),
        (GOOD | {"spans": {"cat": [4, 400]}}, "span 'cat' = .4, 400. does not lie inside the text"),
        (GOOD | {"spans": {"cat": [4]}}, "span 'cat' is .4.; expected .start, end."),
        (GOOD | {"spans": {"cat": [4.5, 7]}}, "span 'cat' is .4.5, 7.; expected .start, end."),
        (GOOD | {"spans": [4, 7]}, "must be objects"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(PromptError, match=rf"set\.jsonl:2.*{message}"):
        checker.read_prompt_set(written(tmp_path, GOOD, row))


def test_the_command_exits_by_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import attndiag

    tokenizer = Words()
    model = Oracle(tokenizer, {TEXT: {" purred": 3.0}, PAIR: {" barked": 3.0}})
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(model=model, tokenizer=tokenizer)

    monkeypatch.setitem(vars(attndiag), "load", load)
    path = written(tmp_path, GOOD | {"pair": PAIR})
    assert checker.main(["--model", "some/model", "--prompts", str(path)]) == 0
    assert asked == ["some/model"]
    out = capsys.readouterr().out
    assert re.search(r"^a +10 +0\.\d{3} +3\.000 +-3\.000  ok$", out, re.MULTILINE), out
    assert "1 prompts in 1 clusters, 0 failed" in out

    assert checker.main(["--prompts", str(written(tmp_path, GOOD | {"prompt": PAIR}))]) == 1
    assert asked == ["some/model", "default"]
    assert "top-1 is ' barked', not the target" in capsys.readouterr().out

    assert checker.main(["--prompts", str(tmp_path / "absent.jsonl")]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "absent.jsonl cannot be read" in streams.err
    assert len(asked) == 2
