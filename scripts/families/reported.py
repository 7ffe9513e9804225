"""A second opinion on captured weights: what the model itself reports under eager attention.

A certificate proves that A v = z for the tensors of a record; it cannot see axes that were taken apart in a wrong but
consistent way. The weights that transformers returns for `output_attentions=True` come by another path.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from families.build import BuiltFamily, run

# Eager and fused kernels differ in the last places, and the difference grows through the layers.
TOLERANCE = 2e-4

# Read in the source of each: why its reported weights are not the ones that it used.
OTHERWISE = {
    "colpali": "without a picture, sdpa attends both ways and eager is causal",
    "falcon": "its eager form drops the causal mask when weights are asked for",
    "granite_swa": "it reports the weights before the sink scales them",
    "granitemoe_swa": "it reports the weights before the sink scales them",
    "grounding_dino": "its text mask hides under sdpa and not under eager; captured under eager, all agree",
    "mm_grounding_dino": "its text mask hides under sdpa and not under eager; captured under eager, all agree",
    "nemotron3_5_asr": "its eager form gives nan here",
    "nemotron_asr_streaming": "its eager form gives nan here",
    "prophetnet": "it reports the scores before the softmax",
    "squeezebert": "it reports the scores before the softmax",
    "wavlm": "it reports the mean over heads, once for each head",
}


def reported_weights(built: BuiltFamily) -> list[Tensor]:
    """Attention weights in the outputs of an eager forward; empty where the model reports none or cannot run eager."""
    model = copy.deepcopy(built.model)
    try:
        model.set_attn_implementation("eager")
        outputs = run(model, built.inputs | {"output_attentions": True})
    except Exception:  # many heads do not take the argument, and some families have no eager form
        return []
    return [tensor for tensor in _attentions(outputs) if tensor.ndim == 4]


def _attentions(outputs: Any, wanted: bool = False) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs] if wanted else []
    if isinstance(outputs, ModelOutput):
        return [t for key, value in outputs.items() for t in _attentions(value, wanted or "attention" in key)]
    if isinstance(outputs, list | tuple):
        return [tensor for value in outputs for tensor in _attentions(value, wanted)]
    return []


def compare(patterns: list[Tensor], reported: list[Tensor]) -> dict[str, Any]:
    """How many captured patterns the model reports as well.

    Parameters
    ----------
    patterns : list of [batch, head, query_pos, key_pos]
        Captured weights.
    reported : list of tensors
        What `reported_weights` gave.

    Returns
    -------
    dict
        `reported` (how many tensors the model gave), `comparable` (how many captured patterns could equal one,
        by their shapes; many models report a part of what they compute), `confirmed` (how many do, within `TOLERANCE`)
        and `largest_difference` over these.
    """
    captured_by_shape = Counter(pattern.shape for pattern in patterns)
    reported_by_shape = Counter(tensor.shape for tensor in reported)
    comparable = sum((captured_by_shape & reported_by_shape).values())
    confirmed, largest = 0, 0.0
    for pattern in patterns:
        same_shape = [other for other in reported if other.shape == pattern.shape]
        differences = [float((other.to(pattern.dtype) - pattern).abs().max()) for other in same_shape]
        if differences and min(differences) <= TOLERANCE:
            confirmed += 1
            largest = max(largest, min(differences))
    return {
        "reported": len(reported),
        "comparable": comparable,
        "confirmed": confirmed,
        "largest_difference": largest,
    }


def shapes(tensors: list[Tensor]) -> list[list[int]]:
    """Distinct shapes, in order of appearance."""
    return [list(shape) for shape in dict.fromkeys(torch.Size(tensor.shape) for tensor in tensors)]
