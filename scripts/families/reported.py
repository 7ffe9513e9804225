"""A second opinion on captured weights: what the model itself reports under eager attention.

A certificate proves that A v = z for the tensors of a record; it cannot see axes that were taken apart in a wrong but
consistent way. The weights that transformers returns for `output_attentions=True` come by another path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from families.build import BuiltFamily, run

# Eager and fused kernels differ in the last places, and the difference grows through the layers.
TOLERANCE = 2e-4


def reported_weights(built: BuiltFamily) -> list[Tensor]:
    """Attention weights in the outputs of an eager forward; empty where the model reports none or cannot run eager."""
    config = built.model.config
    before = getattr(config, "_attn_implementation", None)
    try:
        built.model.set_attn_implementation("eager")
        outputs = run(built.model, built.inputs | {"output_attentions": True})
    except Exception:  # many heads do not take the argument, and some families have no eager form
        return []
    finally:
        if before is not None:
            built.model.set_attn_implementation(before)
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
        `reported` (how many tensors the model gave), `confirmed` (captured patterns that equal one of them within
        `TOLERANCE`) and `largest_difference` over the confirmed ones.
    """
    confirmed, largest = 0, 0.0
    for pattern in patterns:
        same_shape = [other for other in reported if other.shape == pattern.shape]
        differences = [float((other.to(pattern.dtype) - pattern).abs().max()) for other in same_shape]
        if differences and min(differences) <= TOLERANCE:
            confirmed += 1
            largest = max(largest, min(differences))
    return {"reported": len(reported), "confirmed": confirmed, "largest_difference": largest}


def shapes(tensors: list[Tensor]) -> list[list[int]]:
    """Distinct shapes, in order of appearance."""
    return [list(shape) for shape in dict.fromkeys(torch.Size(tensor.shape) for tensor in tensors)]
