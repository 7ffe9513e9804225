"""The model classes of a family, the most telling one first."""

from __future__ import annotations

import importlib
import inspect
import re

from transformers import PreTrainedConfig, PreTrainedModel

from families.source import FamilySource

# Whole models with a head first (their outputs depend on every part), then bare models, then parts of models.
_PREFERENCE = (
    r"ForConditionalGeneration|ForImageTextToText|ForSpeechSeq2Seq|ForVision2Seq|ForMultimodalLM",
    r"ForMaskedLM|ForPreTraining",
    r"ForCausalLM|LMHeadModel|WithLMHead",
    r"ForCTC|ForObjectDetection|ForUniversalSegmentation|ForInstanceSegmentation|ForSemanticSegmentation|"
    r"ForImageClassification|ForVideoClassification|ForDepthEstimation|ForKeypoint|ForPrediction|ForZeroShot",
    r"(?<!PreTrained)Model$",
    r"For[A-Z]\w+$",
    r"",
)


def model_classes(source: FamilySource) -> list[type[PreTrainedModel]]:
    """Classes of the family that have a forward and a configuration, in the order in which to try them.

    Raises
    ------
    ImportError
        A modeling file needs a package that is not installed.
    """
    found: list[type[PreTrainedModel]] = []
    for name in source.modules:
        module = importlib.import_module(name)
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == name:
                found.append(cls)
    usable = [cls for cls in found if _usable(cls)]
    order = {cls: position for position, cls in enumerate(usable)}
    return sorted(usable, key=lambda cls: (_rank(cls, source), order[cls]))


def _usable(cls: type[PreTrainedModel]) -> bool:
    config = getattr(cls, "config_class", None)
    forward = cls.forward is not PreTrainedModel.forward and "forward" in {k for c in cls.__mro__[:-2] for k in vars(c)}
    return isinstance(config, type) and issubclass(config, PreTrainedConfig) and forward


def _rank(cls: type[PreTrainedModel], source: FamilySource) -> tuple[int, int]:
    # The configuration that bears the family's name describes the whole, the others describe towers.
    squeezed = source.name.replace("_", "")
    whole = cls.config_class.model_type.replace("-", "").replace("_", "") == squeezed
    preference = next(i for i, pattern in enumerate(_PREFERENCE) if re.search(pattern, cls.__name__))
    return (0 if whole else 1, preference)
