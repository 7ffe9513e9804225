"""Every error that attndiag raises on purpose.

A message says what was given, what was expected and what to do about it. Catch `AttnDiagError` to catch
them all; the children exist where a caller can react differently.
"""

from __future__ import annotations


class AttnDiagError(Exception):
    """Base class. Its text is one that a person can act on."""


class ShapeError(AttnDiagError, ValueError):
    """Tensors do not fit together; the text names both shapes."""


class PromptError(AttnDiagError, ValueError):
    """A prompt or a prompt file cannot be used; the text gives file and line where there is one."""


class TargetError(AttnDiagError, ValueError):
    """A target or foil cannot be measured on this prompt (collision on the first token, out of vocabulary, ...)."""


class ModelLoadError(AttnDiagError):
    """A checkpoint could not be found, fetched, read or converted."""


class UnsupportedModelError(AttnDiagError):
    """The model or layer does something that this measurement is not defined for. Never a plausible number instead."""


class NothingCapturedError(UnsupportedModelError):
    """The forward ran, but no attention call reached the capture."""


class UnverifiedCaptureError(AttnDiagError):
    """What was captured does not reproduce what the model computed; the text says by how much."""


class NotApplicableError(AttnDiagError):
    """The quantity does not exist for this layer (for example a norm after attention in a pre-norm model)."""


class InsufficientMemoryError(AttnDiagError):
    """The estimate made before the work exceeds what is available; the text names a cheaper way."""


class RunFolderError(AttnDiagError):
    """An output folder cannot be written, is full, or holds something else."""


class WorkerError(AttnDiagError):
    """A process that measured prompts for a run ended by itself; what was done is kept."""


class UndefinedScoreWarning(UserWarning):
    """A number is undefined for this input and was returned as nan."""
