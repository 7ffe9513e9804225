"""A run's configuration: flags win over the file, and whatever is wrong is named with file, line and key."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from attndiag.runs.config import ConfigError, RunConfig, ThresholdsConfig, read_config
from attndiag.stats.verdicts import Thresholds


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_thresholds_have_one_set_of_defaults() -> None:
    assert ThresholdsConfig().model_dump() == asdict(Thresholds())


def test_flags_win_over_the_file_and_defaults_fill_the_rest(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "model: gpt2\nseed: 3\nmethods: [weight, rollout]\nedges: none\nprompts: set.jsonl\noutput: deep/out\n"
        "params:\n  rollout: {}\nthresholds: {margin: 0.05}\n",
    )
    found = read_config(path, {"seed": 7, "edges": None, "limit": 4})
    assert (found.model, found.seed, found.methods, found.edges, found.limit) == (
        "gpt2",
        7,
        ("weight", "rollout"),
        "none",
        4,
    )
    assert found.thresholds.margin == 0.05 and found.thresholds.high == 2.0
    # paths in a file are meant from the file, those of flags from where one stands
    assert found.prompts == tmp_path / "set.jsonl" and found.output == tmp_path / "deep" / "out"
    assert read_config(path, {"output": Path("here")}).output == Path("here")
    assert read_config(None) == RunConfig() == read_config(written(tmp_path, "# nothing\n"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("modle: gpt2\n", r"run\.yaml:1: modle is no key of a run; did you mean 'model'\?"),
        ("seed: 1\nlimit: many\n", r"run\.yaml:2: limit is 'many': input should be a valid integer"),
        ("limit: 0\n", r"run\.yaml:1: limit is 0: input should be greater than 0"),
        ("thresholds:\n  margn: 1\n", r"run\.yaml:2: thresholds\.margn is no key of a run; did you mean 'margin'"),
        ("thresholds:\n  margin: wide\n", r"run\.yaml:2: thresholds\.margin is 'wide'"),
        ("edges: some\n", r"run\.yaml:1: edges is 'some': input should be 'auto', 'all', 'screen' or 'none'"),
        ("primary: [weight]\n", r"run\.yaml:1: primary"),
        ("seed: 1\nseed: 2\n", r"run\.yaml:2: the key 'seed' stands twice; the first is in line 1"),
        ("seed: [1\n", r"run\.yaml:2 is not YAML"),
        ("- a\n- b\n", "holds a list; expected keys with values"),
        ("just text\n", "holds a str; expected keys with values"),
        (
            "a: !!python/object/apply:os.system ['true']\n",
            r"run\.yaml:1 is not YAML: could not determine",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_config(written(tmp_path, text))


def test_files_that_cannot_be_read_and_flags_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read: No such file"):
        read_config(tmp_path / "no.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is not UTF-8"):
        read_config(tmp_path / "bytes.yaml")
    with pytest.raises(ConfigError, match="--edges is 'few'"):
        read_config(written(tmp_path, "seed: 1\n"), {"edges": "few"})


def test_own_scores_are_one_file_or_several(tmp_path: Path) -> None:
    one = read_config(written(tmp_path, "own: one.csv\n"))
    assert one.own == (str(tmp_path / "one.csv"),)
    both = read_config(written(tmp_path, "own: [one.csv, 'two.csv:mine']\n"))
    assert both.own == (str(tmp_path / "one.csv"), str(tmp_path / "two.csv:mine"))
