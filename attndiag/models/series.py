"""A training run that ships with the package: checkpoints before, while and after induction heads form.

`load_series("induction")` is a two-layer attention-only model, `load_series("control")` a one-layer model trained on
the same rows, in which induction heads cannot form. Made by `scripts/train_induction.py`; a series is one
safetensors file with a leading checkpoint axis, weights in float16, and everything known about the run in its header.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attndiag.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

DATA_FOLDER = Path(__file__).parent.parent / "data" / "induction_series"
HEADER = "attndiag_series"


@dataclass(frozen=True, eq=False)
class CheckpointSeries:
    """Checkpoints of one run, loaded one at a time. Iterating yields (step, model).

    Parameters
    ----------
    path : the safetensors file.
    config : model configuration, as transformers writes it.
    steps : training step of each checkpoint.
    measured : name -> one number a checkpoint, as measured in float32 while training (`train_loss`, ...).
    notes : seed and versions.
    """

    path: Path
    config: Mapping[str, Any]
    steps: tuple[int, ...]
    measured: Mapping[str, tuple[float, ...]]
    notes: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, LlamaForCausalLM]]:
        for step in self.steps:
            yield step, self.at(step)

    def at(self, step: int) -> LlamaForCausalLM:
        """The model at one step, float32, in evaluation mode, on the CPU. Each call makes a new one.

        Raises
        ------
        ModelLoadError : there is no checkpoint at that step; the text lists the steps.
        """
        from transformers import LlamaConfig, LlamaForCausalLM

        if step not in self.steps:
            raise ModelLoadError(f"{self.path.name} has no checkpoint at step {step}; there are {list(self.steps)}")
        index = self.steps.index(step)
        with safe_open(self.path, framework="pt") as file:
            state = {name: file.get_slice(name)[index : index + 1][0].float() for name in file.keys()}  # noqa: SIM118
        model = LlamaForCausalLM(LlamaConfig.from_dict(dict(self.config)))
        model.load_state_dict(state)
        return model.eval().requires_grad_(False)


def load_series(name: Literal["induction", "control"] | Path = "induction") -> CheckpointSeries:
    """Open a shipped series by name, or any file that `save_series` wrote by path. Weights are read when asked for.

    Raises
    ------
    ModelLoadError : no such series, or not a file of this form.
    """
    path = name if isinstance(name, Path) else DATA_FOLDER / f"{name}.safetensors"
    if not path.is_file():
        shipped = sorted(file.stem for file in DATA_FOLDER.glob("*.safetensors"))
        raise ModelLoadError(f"there is no checkpoint series {str(name)!r}; shipped are {shipped}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[HEADER])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} is not a checkpoint series; write one with save_series") from error
    return CheckpointSeries(
        path=path,
        config=header["config"],
        steps=tuple(header["steps"]),
        measured={key: tuple(torch.nan if x is None else x for x in row) for key, row in header["measured"].items()},
        notes=header["notes"],
    )


def save_series(
    path: Path,
    *,
    config: LlamaConfig,
    steps: Sequence[int],
    states: Sequence[Mapping[str, Tensor]],
    measured: Mapping[str, Sequence[float]],
    notes: Mapping[str, Any],
) -> None:
    """Write checkpoints of one model as float16, stacked along a leading axis, with a header that describes them.

    Raises
    ------
    ModelLoadError : lists of different lengths, or a weight that float16 cannot hold.
    """
    lengths = {"steps": len(steps), "states": len(states), **{name: len(row) for name, row in measured.items()}}
    if len(set(lengths.values())) != 1:
        raise ModelLoadError(f"a series needs one entry a checkpoint everywhere; got lengths {lengths}")
    stacked = {name: torch.stack([state[name] for state in states]).half() for name in states[0]}
    overflowing = [name for name, tensor in stacked.items() if not tensor.isfinite().all()]
    if overflowing:
        raise ModelLoadError(f"float16 cannot hold the weights {overflowing}; they are too large or not finite")
    header = {
        "config": config.to_diff_dict(),
        "steps": list(steps),
        # JSON has no nan: a number that does not exist (the training loss before the first step) is null
        "measured": {name: [None if x != x else x for x in row] for name, row in measured.items()},
        "notes": dict(notes),
    }
    save_file(stacked, path, metadata={HEADER: json.dumps(header)})
