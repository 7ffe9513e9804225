"""Run folders: nothing half-written, nothing lost, nothing foreign removed, and errors that say what to do."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from attndiag.errors import RunFolderError, ShapeError
from attndiag.runs import folder as folder_module
from attndiag.runs.folder import RunFolder, write_atomically
from attndiag.runs.schemas import HEADS, PROMPTS, RUNS, TABLES, TIMINGS


def prompt_rows(name: str) -> dict:
    return {
        "prompts": PROMPTS.table({"run": "r", "prompt": [name], "index": [int(name)], "status": "ok", "n_tokens": [3]}),
        "timings": TIMINGS.table({"run": "r", "prompt": name, "work": ["forward", "ranks"], "seconds": [0.1, 0.2]}),
    }


def started(path: Path, n: int = 2) -> RunFolder:
    run = RunFolder.create(path, "r", about={"n_prompts": 3})
    for index in range(n):
        run.write_shard(f"{index:06d}", prompt_rows(str(index)))
    return run


def test_an_unfinished_run_reads_like_a_finished_one(tmp_path: Path) -> None:
    started(tmp_path / "out")
    run = RunFolder.open(tmp_path / "out")
    assert (run.run_id, run.finished, run.about["n_prompts"]) == ("r", False, 3)
    assert run.done() == ["000000", "000001"]
    before = run.read("prompts")
    assert before.prompt.tolist() == ["0", "1"]
    assert run.read("heads").empty

    run.finish({"runs": RUNS.table({"run": "r", "n_prompts": [3], "status": ["complete"]})})
    assert RunFolder.open(tmp_path / "out").finished
    pd.testing.assert_frame_equal(run.read("prompts"), before)
    assert run.read("timings").seconds.tolist() == [0.1, 0.2, 0.1, 0.2]
    # the table of the whole run is in the CSV too, and the marker does not contradict it
    exported = pd.read_csv(tmp_path / "out" / "tables" / "runs.csv")
    assert (exported.n_prompts.tolist(), exported.status.tolist()) == ([3], ["complete"])
    assert RunFolder.open(tmp_path / "out").about["runs"]["status"] == "complete"
    assert not (tmp_path / "out" / "shards").exists()
    names = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert names >= {f"{table}{end}" for table in TABLES for end in (".parquet", ".csv")}


def test_merging_an_unfinished_run_keeps_its_shards_as_the_source(tmp_path: Path) -> None:
    run = started(tmp_path / "out", 1)
    run.merge_shards()
    run.write_shard("000001", prompt_rows("1"))
    assert run.read("prompts").prompt.tolist() == ["0", "1"]


def test_a_prompt_counts_only_when_its_last_shard_is_there(tmp_path: Path) -> None:
    run = started(tmp_path / "out", 1)
    # what a kill in the middle of a prompt leaves behind
    run.write_table(tmp_path / "out" / "shards" / "timings" / "000001.parquet", prompt_rows("1")["timings"])
    assert run.done() == ["000000"]
    assert len(run.read("timings")) == 2


def test_files_have_units_meanings_and_zstd(tmp_path: Path) -> None:
    run = started(tmp_path / "out")
    run.finish({})
    file = pq.ParquetFile(tmp_path / "out" / "tables" / "timings.parquet")
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    field = file.schema_arrow.field("seconds")
    assert field.metadata[b"unit"] == b"s"
    columns = pd.read_csv(tmp_path / "out" / "tables" / "columns.csv")
    assert {tuple(row) for row in columns[["table", "name"]].to_numpy()} == {
        (schema.name, column.name) for schema in TABLES.values() for column in schema.columns
    }
    assert set(pd.read_csv(tmp_path / "out" / "tables" / "measures.csv").columns) >= {"name", "unit", "direction"}
    assert pd.read_csv(tmp_path / "out" / "tables" / "timings.csv").work.tolist() == ["forward", "ranks"] * 2


def test_every_table_has_the_run_in_each_row() -> None:
    for schema in TABLES.values():
        assert schema.columns[0].name == "run"
        assert all(column.meaning for column in schema.columns)
        numbers = [column for column in schema.columns if column.type == "float64"]
        own_unit = any(column.name == "unit" for column in schema.columns)
        assert all(column.unit or (own_unit and column.name == "value") for column in numbers), schema.name


def test_large_tables_are_gzipped_and_equal_tables_give_equal_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "PLAIN_CSV_ROWS", 2)
    for name in ("one", "two"):
        started(tmp_path / name).finish({})
    packed = tmp_path / "one" / "tables" / "timings.csv.gz"
    assert len(pd.read_csv(packed)) == 4
    assert gzip.decompress(packed.read_bytes()).count(b"\n") == 5
    for path in (tmp_path / "one" / "tables").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / "tables" / path.name).read_bytes()
    # the plain file of an earlier export does not stay behind
    monkeypatch.setattr(folder_module, "PLAIN_CSV_ROWS", 100)
    run = RunFolder.open(tmp_path / "one")
    run.export_csv({name: run.arrow(name) for name in TABLES})
    assert not packed.exists() and packed.with_suffix("").exists()


def test_nan_becomes_null_and_wrong_columns_are_refused() -> None:
    table = HEADS.table({"run": "r", "value": np.array([1.0, np.nan]), "head": [0, None]})
    assert table.column("value").to_pylist() == [1.0, None]
    assert table.column("head").to_pylist() == [0, None]
    assert table.column("layer").to_pylist() == [None, None]
    with pytest.raises(ShapeError, match="table 'heads' has no column 'heat'; its columns are run, prompt"):
        HEADS.table({"heat": [1]})
    with pytest.raises(ShapeError, match="column 'head' of table 'heads' has 1 rows; expected 2"):
        HEADS.table({"value": [1.0, 2.0], "head": [1]})
    with pytest.raises(ShapeError, match="there is no table 'tabel'; known tables are runs"):
        RunFolder(Path(), "r").read("tabel")


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_atomically(path, lambda file: file.write(b"old"))

    def fails(file: object) -> None:
        file.write(b"half of the n")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_atomically(path, fails)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_a_full_disk_says_so_and_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(tmp_path / "out", 2)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunFolderError, match=r"000002\.parquet cannot be written: the disk is full; free"):
            run.write_shard("000002", prompt_rows("2"))
        with pytest.raises(RunFolderError, match="the disk is full"):
            run.finish({})
    again = RunFolder.open(tmp_path / "out")
    assert not again.finished
    assert again.read("prompts").prompt.tolist() == ["0", "1"]
    assert not list((tmp_path / "out").rglob("*.tmp"))
    again.finish({})
    assert again.read("prompts").prompt.tolist() == ["0", "1"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "you may not write there; give another folder"),
        (errno.EROFS, "that file system is read-only; give another folder"),
        (errno.EDQUOT, "your disk quota is used up; free some space"),
    ],
)
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refused(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    # root may write anywhere, so the system's answer is put in by hand
    monkeypatch.setattr(folder_module.tempfile, "TemporaryFile", refused)
    with pytest.raises(RunFolderError, match=f"out cannot be written: {remedy}"):
        RunFolder.create(tmp_path / "out", "r", about={})


def test_places_where_no_run_can_go(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="is a file; give a folder"):
        RunFolder.create(tmp_path / "file", "r", about={})
    with pytest.raises(RunFolderError, match="part of that path is a file"):
        RunFolder.create(tmp_path / "file" / "out", "r", about={})
    with pytest.raises(RunFolderError, match="is not empty and holds no run"):
        RunFolder.create(tmp_path, "r", about={}, overwrite=True)
    assert (tmp_path / "file").read_text() == "x"


def test_a_run_is_replaced_only_on_demand_and_only_itself(tmp_path: Path) -> None:
    started(tmp_path / "out").finish({})
    (tmp_path / "out" / "my_notes.txt").write_text("keep me")
    with pytest.raises(RunFolderError, match=r"already holds a run; render it with `attndiag report .*--overwrite"):
        RunFolder.create(tmp_path / "out", "r2", about={})
    run = RunFolder.create(tmp_path / "out", "r2", about={}, overwrite=True)
    assert run.read("prompts").empty
    assert (tmp_path / "out" / "my_notes.txt").read_text() == "keep me"


def test_folders_that_hold_no_readable_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no folder .*nowhere; make a run first"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"holds no run \(run\.json is missing\)"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"run\.json cannot be read"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"run": "r", "schema": 99}))
    with pytest.raises(RunFolderError, match="has table schema 99, this version reads 1"):
        RunFolder.open(tmp_path)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    run = started(tmp_path / "out")
    run.finish({})
    path = tmp_path / "out" / "tables" / "prompts.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RunFolderError, match=r"prompts\.parquet is damaged or cannot be read"):
        run.read("prompts")
