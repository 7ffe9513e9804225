"""Open a checkpoint with transformers: the class that its config names, the dtype that was asked for, all weights.

Everything that can go wrong comes out as one `ModelLoadError` that says what, where and what to do. Nothing is
replaced on the way: no other class, no other dtype, no freshly initialised weight, no other tokenizer.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attndiag.errors import ModelLoadError
from attndiag.models.info import main_dtype
from attndiag.models.quiet import quiet_bars
from attndiag.models.registry import nearest_short_name

log = logging.getLogger(__name__)

Device = str | torch.device | Mapping[str, Any]

PLACEMENTS = ("balanced", "balanced_low_0", "sequential")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class Checkpoint:
    """Where a checkpoint is and how to read it.

    Parameters
    ----------
    place : folder or hub id, as transformers takes it.
    said : how the caller named it, for error texts.
    local : a folder on this machine.
    gguf_file : name of the GGUF file inside `place`, else None.
    revision : of a hub id.
    offline : ask no hub.
    trust_remote_code : run the checkpoint's own code.
    """

    place: str
    said: str
    local: bool
    gguf_file: str | None = None
    revision: str | None = None
    offline: bool = False
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments shared by config, model and tokenizer."""
        options: dict[str, Any] = {
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": self.local or self.offline,
        }
        if self.revision is not None:
            options["revision"] = self.revision
        if self.gguf_file is not None:
            options["gguf_file"] = self.gguf_file
        return options


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """A torch dtype, or None for "auto"; raises `ModelLoadError` for anything else."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is unknown; give 'auto', a torch.dtype or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def parse_device(device: Device) -> torch.device | str | dict[str, Any]:
    """A torch device, or a device map (a dict, or one of `PLACEMENTS`) for models that take several devices."""
    if isinstance(device, Mapping):
        return dict(device)
    if device in PLACEMENTS:
        return str(device)
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelLoadError(
            f"device {device!r} is unknown; give 'auto', 'cpu', 'cuda', 'cuda:1', 'mps', a dict of modules to devices "
            f"or one of {', '.join(PLACEMENTS)}"
        ) from error
    absent = (wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count()) or (
        wanted.type == "mps" and not torch.backends.mps.is_available()
    )
    if absent:
        raise ModelLoadError(f"device {str(wanted)!r} is not on this machine; give device='cpu' or device='auto'")
    return wanted


def find_checkpoint(
    source: str | Path, *, revision: str | None = None, offline: bool = False, trust_remote_code: bool = False
) -> Checkpoint:
    """Decide whether a string is a GGUF file, a folder or a hub id; raises `ModelLoadError` for a path to nothing."""
    said = str(source)
    path = Path(said).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{said} is a file; give its folder (or a .gguf file)")
        return Checkpoint(str(path.parent), said, True, path.name, trust_remote_code=trust_remote_code)
    if path.is_dir():
        check_folder(path, said)
        return Checkpoint(str(path), said, True, trust_remote_code=trust_remote_code)
    hint = f"; did you mean {near!r}?" if (near := nearest_short_name(said)) else ""
    looks_like_path = isinstance(source, Path) or said.startswith((".", "/", "~")) or said.count("/") > 1
    if looks_like_path or path.suffix.lower() == ".gguf":
        raise ModelLoadError(f"there is no folder or file {said} here; check the path{hint}")
    return Checkpoint(said, said, False, None, revision, offline, trust_remote_code)


def check_folder(path: Path, said: str) -> None:
    """Raise `ModelLoadError` unless a folder holds a config and weights."""
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise ModelLoadError(f"{said} holds an adapter only; merge it into its base model, save that and load it")
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{said} holds no config.json; give a folder that save_pretrained wrote")
    if not any(any(path.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ModelLoadError(
            f"{said} holds a config but no weights (*.safetensors); complete the download, or save the model there "
            "with save_pretrained"
        )


def open_model(
    checkpoint: Checkpoint, *, dtype: str | torch.dtype, device: Device, attn_implementation: str | None
) -> tuple[nn.Module, tuple[str, ...]]:
    """Model in eval mode, and remarks about weights that the class had no use for.

    Raises
    ------
    ModelLoadError
        The checkpoint cannot be found, fetched or read; its class is unknown; weights are missing; the dtype or the
        device cannot be had.
    """
    from transformers import AutoConfig, GgufConfig

    wanted = parse_dtype(dtype)
    place = parse_device(device)
    options: dict[str, Any] = {**checkpoint.options, "dtype": "auto" if wanted is None else wanted}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if checkpoint.gguf_file is not None:
        # packed blocks hide the weights that are to be measured
        options["quantization_config"] = GgufConfig(dequantize=True)
    if not isinstance(place, torch.device):
        options["device_map"] = place
    with _Explained(checkpoint), quiet_bars():
        config = AutoConfig.from_pretrained(checkpoint.place, **checkpoint.options)
        model, report = model_class(config, checkpoint).from_pretrained(
            checkpoint.place, output_loading_info=True, **options
        )
        if isinstance(place, torch.device):
            model = model.to(place)
    missing = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])})
    if missing:
        raise ModelLoadError(
            f"{checkpoint.said} lacks {len(missing)} weights of {type(model).__name__} ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}); random ones are not put in their place. Use the complete "
            "checkpoint, or name the class that was saved in `architectures` of its config.json"
        )
    if wanted is not None and main_dtype(model) != wanted:
        raise ModelLoadError(
            f"{checkpoint.said} came back as {main_dtype(model)}, not the {wanted} that was asked for; "
            "give dtype='auto' to take the checkpoint as it is"
        )
    unused = sorted(report["unexpected_keys"])
    remarks = (f"{len(unused)} weights of the checkpoint have no place in {type(model).__name__}",) if unused else ()
    return model.eval(), remarks


def model_class(config: Any, checkpoint: Checkpoint) -> Any:
    """The transformers class that the config names; an Auto class for remote code and GGUF files."""
    import transformers

    if checkpoint.gguf_file is not None:
        return transformers.AutoModelForCausalLM
    if not config.architectures:
        raise ModelLoadError(
            f"the config of {checkpoint.said} names no class; add the class that was saved as `architectures`, or load "
            "the model yourself and give the object"
        )
    name = config.architectures[0]
    remote = getattr(config, "auto_map", None) or {}
    for auto, target in remote.items():
        if auto.startswith("AutoModel") and checkpoint.trust_remote_code and target.split(".")[-1] == name:
            return getattr(transformers, auto)
    if hasattr(transformers, name):
        return getattr(transformers, name)
    remedy = "give trust_remote_code=True to run its own code" if remote else "install a transformers that knows it"
    raise ModelLoadError(
        f"{checkpoint.said} is a {name}, which transformers {transformers.__version__} lacks; {remedy}"
    )


def open_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer; raises `ModelLoadError` where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.place, **checkpoint.options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ModelLoadError(
            f"{checkpoint.said} has no tokenizer that can be read ({_first_line(error)}); give tokenizer=, a folder, "
            "hub id or object. A model that reads no text is given as an object, without tokenizer"
        ) from error


class _Explained:
    """Turn what transformers, the hub client and safetensors raise into one `ModelLoadError`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        import safetensors

        expected = (
            OSError,
            ValueError,
            RuntimeError,
            ImportError,
            LookupError,
            TypeError,
            AttributeError,
            struct.error,
        )
        if isinstance(error, (*expected, safetensors.SafetensorError)):
            raise ModelLoadError(explain(error, self.checkpoint)) from error


def explain(error: BaseException, checkpoint: Checkpoint) -> str:
    """One line: what failed, where, and what to do."""
    said, reason = checkpoint.said, _first_line(error)
    if "trust_remote_code" in str(error) and not checkpoint.trust_remote_code:
        return (
            f"{said} comes with code of its own, which is not run unasked; read it, then give trust_remote_code=True, "
            "or load the model yourself and give the object"
        )
    if checkpoint.local:
        return (
            f"{said} cannot be read: {reason}; the folder is incomplete or damaged, or made for another version of "
            "transformers: save or download it again"
        )
    names = {type(link).__name__ for link in _chain(error)}
    hint = f" Did you mean {near!r}?" if (near := nearest_short_name(said)) else ""
    elsewhere = "give a local folder, or 'default', which comes from the package index"
    if "GatedRepoError" in names:
        return (
            f"hub model {said!r} is gated; ask for access on its page and log in with `hf auth login`, or {elsewhere}"
        )
    if "RevisionNotFoundError" in names:
        return f"hub model {said!r} has no revision {checkpoint.revision!r}; give a branch, tag or commit that exists"
    if names & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"there is no folder and no hub model {said!r} (or it is private); check the name.{hint}"
    if checkpoint.offline:
        return f"hub model {said!r} is not in the hub's cache and the hub is off (offline); {elsewhere}.{hint}"
    if names & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout", "NetworkError"}:
        return (
            f"hub model {said!r} is not cached and the hub cannot be reached; check the network, or {elsewhere}.{hint}"
        )
    return f"hub model {said!r} cannot be loaded: {reason}; check the id and revision, or {elsewhere}.{hint}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
