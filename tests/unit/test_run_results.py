"""Results of single prompts on disk: nothing is lost on the way, nothing broken or foreign is taken for a result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import attndiag
from attndiag.comparison.edges import EdgePlan, judge_edges, measure_edges
from attndiag.comparison.side_by_side import tables
from attndiag.models.known import sink_against_value
from attndiag.models.load import LoadedModel
from attndiag.runs.plan import make_plan
from attndiag.runs.result_files import (
    BrokenResultError,
    Check,
    ForeignResultError,
    from_tree,
    read_result,
    to_tree,
    write_result,
)
from attndiag.runs.work import measure_prompt

KEY, OTHER = "a" * 64, "b" * 64
PROMPTS = [
    attndiag.Prompt("<bos> MARK a b c Q", id="one", target="ANS", foil="FOIL", cluster="x"),
    attndiag.Prompt("<bos> a MARK c Q", id="two", target="ANS", foil="FOIL", cluster="y"),
]
METHODS = ["weight", "contribution", "input_x_gradient"]


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    built = sink_against_value()
    return attndiag.load(built.model, tokenizer=built.tokenizer())


def assert_same(one: object, two: object, where: str = "") -> None:
    """Equal in type and value, nan equal to nan, arrays with dtype and shape."""
    assert type(one) is type(two), where
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        assert one.dtype == two.dtype, where
        np.testing.assert_array_equal(one, two, err_msg=where)
    elif isinstance(one, dict) and isinstance(two, dict):
        assert list(one) == list(two), where
        for name in one:
            assert_same(one[name], two[name], f"{where}[{name}]")
    elif isinstance(one, list | tuple) and isinstance(two, list | tuple):
        assert len(one) == len(two), where
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    elif hasattr(one, "__dataclass_fields__"):
        for name in one.__dataclass_fields__:
            assert_same(getattr(one, name), getattr(two, name), f"{where}.{name}")
    else:
        assert one == two or (one != one and two != two), where


def test_what_one_prompt_gives_comes_back_as_it_was(lm: LoadedModel, tmp_path: Path) -> None:
    plan = make_plan(METHODS, replacements=["uniform:draws=3"], edges=EdgePlan(whole_heads=True))
    work = measure_prompt(lm, PROMPTS[0], plan, own={"mine": np.arange(6.0)})
    assert work.compared is not None and work.edges is not None and work.compared.faithfulness
    path = tmp_path / f"{KEY}.parquet"
    write_result(path, KEY, work)
    assert_same(work, read_result(path, KEY))
    assert pq.ParquetFile(path).metadata.row_group(0).column(3).compression == "ZSTD"


def test_tables_over_results_from_disk_are_those_of_a_run(lm: LoadedModel, tmp_path: Path) -> None:
    plan = make_plan(METHODS, replacements=["uniform:draws=3"])
    read = []
    for prompt in PROMPTS:
        write_result(tmp_path / "one.parquet", KEY, measure_prompt(lm, prompt, plan))
        read.append(read_result(tmp_path / "one.parquet", KEY))
    found = tables([one.compared for one in read], plan.compared)
    straight = attndiag.run(lm, PROMPTS, METHODS, replacements=["uniform:draws=3"], edges=None).comparison
    for name in ("prompts", "scores", "agreement", "agreement_summary", "faithfulness", "differences", "verdicts"):
        one, two = getattr(found, name), getattr(straight, name)
        assert len(one) > 0
        assert_same(one.to_dict("list"), two.to_dict("list"), name)
    edges = judge_edges([one.edges for one in read])
    direct = judge_edges([measure_edges(lm, prompt, None) for prompt in PROMPTS])
    assert_same(edges.edges("weight").to_dict("list"), direct.edges("weight").to_dict("list"))


def test_arrays_and_texts_of_every_kind_survive(tmp_path: Path) -> None:
    record = {
        ("a", 1): [None, True, 1.5, float("nan"), float("-inf"), "é\ud800<script>"],
        "arrays": (
            np.array([[np.nan, -0.0]]),
            np.zeros((0, 3), dtype=np.int64),
            np.array([True]),
            np.array(["agree", ""]),
            np.float32([1e-45]),
            np.array(2.5),
            np.arange(6).reshape(2, 3).T,
        ),
        "check": Check("name", False, "detail"),
    }
    write_result(tmp_path / "x.parquet", KEY, record)
    assert_same(record, read_result(tmp_path / "x.parquet", KEY))
    assert np.signbit(read_result(tmp_path / "x.parquet", KEY)["arrays"][0][0, 1])


@pytest.mark.parametrize("what", [object(), {"a": {1, 2}}, np.array([object()]), Path("x")])
def test_what_is_not_plain_is_refused(what: object) -> None:
    with pytest.raises(TypeError, match=r"cannot be stored|not plain"):
        to_tree(what, [])


def test_a_record_of_another_version_is_broken_and_defaults_fill_what_it_lacks() -> None:
    tree = {"$record": "Check", "fields": {"name": "a", "passed": True, "colour": "red"}}
    with pytest.raises(BrokenResultError, match=r"another version of attndiag \(fields that differ: \['colour'"):
        from_tree(tree, [])
    with pytest.raises(BrokenResultError, match="'passed'"):
        from_tree({"$record": "Check", "fields": {"name": "a"}}, [])
    with pytest.raises(BrokenResultError, match="'Popen'"):
        from_tree({"$record": "Popen", "fields": {}}, [])
    assert from_tree({"$record": "Check", "fields": {"name": "a", "passed": True}}, []) == Check("a", True, "")


def test_cut_off_changed_and_foreign_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_result(path, KEY, {"values": np.arange(1000.0)})
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 3, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(BrokenResultError, match=r"x\.parquet is damaged"):
            read_result(path, KEY)
    refused = 0
    for place in range(8, len(whole) - 8, 61):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            # a byte that no reader looks at may change; a number may not
            np.testing.assert_array_equal(read_result(path, KEY)["values"], np.arange(1000.0))
        except BrokenResultError as error:
            assert "x.parquet" in str(error)
            refused += 1
    assert refused > 0
    path.write_bytes(whole)
    with pytest.raises(ForeignResultError, match=r"another piece of work \(aaaaaaaaaaaa.*It was not touched"):
        read_result(path, OTHER)
    assert path.read_bytes() == whole
    table = pq.read_table(path)
    told = {**table.schema.metadata, b"key": OTHER.encode()}
    pq.write_table(table.replace_schema_metadata(told), path)
    with pytest.raises(BrokenResultError, match="checksum"):
        read_result(path, OTHER)
    pq.write_table(table.replace_schema_metadata({}), path)
    with pytest.raises(BrokenResultError, match="not a result of a run"):
        read_result(path, KEY)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_result(path, KEY, {"a": 1})
    with pytest.raises(TypeError):
        write_result(path, KEY, {"a": object()})
    assert read_result(path, KEY) == {"a": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["x.parquet"]
