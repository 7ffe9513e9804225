"""Prompt sets from files: what is read, and what each kind of bad entry is told."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from attndiag.errors import PromptError
from attndiag.runs.prompt_files import read_prompts, scan_prompts, shipped_prompts

GOOD = {"id": "a", "prompt": "The capital of France is", "target": " Paris", "foil": " Rome", "cluster": "facts"}


def jsonl(folder: Path, *lines: object) -> Path:
    path = folder / "set.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def reason(folder: Path, *lines: object) -> str:
    """What is said about the only bad entry."""
    (bad,) = scan_prompts(jsonl(folder, *lines)).bad
    return bad.reason


def test_every_key_arrives(tmp_path: Path) -> None:
    full = GOOD | {
        "pair": "The capital of Italy is",
        "spans": {"country": [15, 21]},
        "meta": {"source": "atlas", "year": 1999},
        "decoder_text": "Answer:",
        "continuation": " Paris.",
    }
    (prompt,) = read_prompts(jsonl(tmp_path, full))
    assert (prompt.text, prompt.id, prompt.target, prompt.foil) == (GOOD["prompt"], "a", " Paris", " Rome")
    assert prompt.spans == {"country": (15, 21)} and prompt.text[15:21] == "France"
    assert prompt.meta == {"source": "atlas", "year": 1999}
    assert (prompt.pair, prompt.decoder_text, prompt.continuation) == (full["pair"], "Answer:", " Paris.")


def test_messages_arrive(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (prompt,) = read_prompts(jsonl(tmp_path, {"messages": turns}))
    assert prompt.text is None
    assert [dict(turn) for turn in prompt.messages or ()] == turns
    assert prompt.id == "line-1"


def test_white_space_blank_lines_line_ends_and_marks(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    first, second = {"prompt": "  two before, one after "}, {"prompt": "line\u2028separator\nand feed"}
    body = f"{json.dumps(first)}\r\n\r\n   \n{json.dumps(second, ensure_ascii=False)}"
    path.write_bytes(b"\xef\xbb\xbf" + body.encode())
    prompts = read_prompts(path)
    assert [prompt.text for prompt in prompts] == [first["prompt"], second["prompt"]]
    assert [prompt.id for prompt in prompts] == ["line-1", "line-4"]


def test_text_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text(" leading space\n\nsecond, with a comma\n", encoding="utf-8")
    assert [(p.id, p.text) for p in read_prompts(path)] == [
        ("line-1", " leading space"),
        ("line-3", "second, with a comma"),
    ]


def test_csv_and_parquet_give_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    rows = [
        GOOD | {"spans": {"country": [15, 21]}, "meta": {"k": [1, 2]}},
        {"id": "b", "prompt": 'quoted "word",\nand a line break'},
    ]
    from_jsonl = read_prompts(jsonl(tmp_path, *rows))
    frame = pd.DataFrame(rows)
    for key in ("spans", "meta"):
        frame[key] = [json.dumps(value) if isinstance(value, dict) else None for value in frame[key]]
    frame.to_csv(tmp_path / "set.csv", index=False)
    frame.to_parquet(tmp_path / "set.parquet")
    assert read_prompts(tmp_path / "set.csv") == from_jsonl
    assert read_prompts(tmp_path / "set.parquet") == from_jsonl


def test_parquet_with_nested_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "one two", "spans": {"first": [0, 3], "second": None}}, {"prompt": "three", "spans": None}]
    pd.DataFrame(rows).to_parquet(tmp_path / "set.parquet")
    first, second = read_prompts(tmp_path / "set.parquet")
    assert first.spans == {"first": (0, 3)}
    assert second.spans == {}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{'id': 1}", r"not JSON \(.* at column 2\): \"\{'id': 1\}\"; expected \{\"id\": \"paris\""),
        ("[1, 2]", r"holds a list \(\[1, 2\]\); expected an object"),
        ("null", "holds null; expected an object"),
        ({"promt": "x"}, "key 'promt' is unknown; did you mean 'prompt'?"),
        ({"text": "x"}, "key 'text' is unknown; did you mean 'prompt'?"),
        ({"prompt": "x", "answer": "y"}, "key 'answer' is unknown; did you mean 'target'?"),
        ({"prompt": "x", "colour": "red"}, "key 'colour' is unknown; put anything else into `meta`. Known keys: id"),
        ({"target": " y"}, r"neither `prompt` nor `messages` \(it has target\); expected exactly one"),
        ({}, r"neither `prompt` nor `messages` \(it has nothing\)"),
        ({"prompt": ""}, "'prompt' is empty; expected some text"),
        ({"prompt": " \n "}, "'prompt' is only white space; expected some text"),
        ({"prompt": 3}, r"'prompt' is a number \(3\); expected a string"),
        ({"prompt": "x", "target": None}, "'target' is null; expected a string"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "exactly one of them"),
        ({"messages": []}, "'messages' is a list .*; expected a list of .* that is not empty"),
        ({"messages": [{"role": "user"}]}, "turn 1 of 'messages' is .*; expected texts under 'role' and 'content'"),
        ({"prompt": "x", "foil": " z"}, "a foil needs a target"),
        ({"prompt": "x", "spans": {"s": [0, 9]}}, r"span 's' = \(0, 9\) does not lie inside the text"),
        ({"prompt": "x", "spans": {"s": "0-1"}}, r"span 's' is '0-1'; expected \[start, end\] in characters"),
        ({"prompt": "x", "spans": [0, 1]}, "'spans' is a list .*; expected an object"),
        ({"prompt": "x", "meta": "note"}, r"'meta' is a string \(\"note\"\); expected an object"),
        ({"prompt": "x", "id": ""}, "'id' is empty; expected a name"),
        ({"prompt": "x", "id": True}, "'id' is a boolean"),
        ('{"prompt": "x", "prompt": "y"}', "key 'prompt' appears twice"),
    ],
)
def test_a_bad_entry_is_told_what_is_wrong_and_what_was_expected(tmp_path: Path, entry: object, expected: str) -> None:
    path = jsonl(tmp_path, GOOD, entry, {"prompt": "fine"})
    with pytest.raises(PromptError, match=rf"set\.jsonl:2: .*{expected}"):
        read_prompts(path)
    assert [prompt.text for prompt in read_prompts(path, skip_bad=True)] == [GOOD["prompt"], "fine"]


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    assert reason(tmp_path, GOOD, "", GOOD) == "id 'a' is already that of line 1; ids must differ within a file"
    # a number and its text would be one name in every table
    assert "id '7' is already that of line 1" in reason(tmp_path, {"id": 7, "prompt": "x"}, {"id": "7", "prompt": "y"})


def test_the_number_of_further_problems_is_told(tmp_path: Path) -> None:
    path = jsonl(tmp_path, "x", GOOD, "y", "z")
    with pytest.raises(PromptError, match=r":1: .*\(2 more such entries in this file\).*skip_bad=True \(--skip-bad"):
        read_prompts(path)
    assert [entry.line for entry in scan_prompts(path).bad] == [1, 3, 4]


def test_nothing_left_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="not one of its 2 entries can be used; line 1: not JSON"):
        read_prompts(jsonl(tmp_path, "x", "y"), skip_bad=True)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n\n")
    with pytest.raises(PromptError, match=r"prompts\.jsonl holds no prompts; expected one a line"):
        read_prompts(tmp_path / "prompts.jsonl")
    with pytest.raises(PromptError, match=r"no prompt file .*promts\.jsonl; did you mean .*prompts\.jsonl"):
        read_prompts(tmp_path / "promts.jsonl")
    with pytest.raises(PromptError, match=r"is a folder; expected a prompt file \(\.jsonl"):
        read_prompts(tmp_path)
    (tmp_path / "set.yaml").write_text("a: 1")
    with pytest.raises(PromptError, match=r"has the suffix '\.yaml'; expected one of \.jsonl"):
        read_prompts(tmp_path / "set.yaml")
    (tmp_path / "set.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(PromptError, match="cannot be read as Parquet"):
        read_prompts(tmp_path / "set.parquet")


def test_bytes_that_are_not_utf8_are_found_in_their_line(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(PromptError, match=r":2: byte 16 of the line is not UTF-8"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("promt,target\nx,y\n", r"column 'promt' is unknown; did you mean 'prompt'\?"),
        ("target\ny\n", "has the columns target; expected `prompt` or `messages`"),
        ("prompt,prompt\nx,y\n", "two columns bear the same name"),
        ("prompt,target\nx,y,z\n", ":2: 3 cells under 2 columns; quote cells with a comma"),
        ('prompt,meta\nx,"{"\n', ":2: column 'meta' holds '{', which is not JSON"),
        ('prompt\n"open\n', "cannot be read as CSV"),
        ("prompt\n", "holds no prompts"),
    ],
)
def test_csv_problems(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "set.csv"
    path.write_text(content)
    with pytest.raises(PromptError, match=expected):
        read_prompts(path)


def test_csv_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "set.csv"
    path.write_text('id,prompt\na,"two\nlines"\nb,\n')
    (bad,) = scan_prompts(path).bad
    assert bad.line == 4
    assert "neither `prompt`" in bad.reason


def test_the_shipped_set_is_clean_and_large_enough() -> None:
    prompts = shipped_prompts()
    assert len(prompts) >= 60
    assert len({prompt.cluster for prompt in prompts}) >= 12
    assert all(prompt.target and prompt.foil for prompt in prompts)
    assert prompts[0].id == "ioi-1"
