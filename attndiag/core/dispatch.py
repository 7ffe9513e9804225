"""What runs where: formulation, block sizes, compiled or eager, and whether it fits into memory.

Every rule here stands on a measurement; the numbers are in `benchmarks.md` and are made by `scripts/bench_kernel.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx.experimental import _config as shape_config

from attndiag.core.blocks import AttentionProblem
from attndiag.errors import InsufficientMemoryError

Formulation = Literal["gram", "direct"]
CompileChoice = bool | Literal["auto"]

# Bytes of scores in one block. CPU: measured, flat from .75 to 1.5 MB on 1 MB of L2; longer rows take what
# `MIN_QUERIES` needs. GPU: not measured; large enough that a launch costs little beside its work.
CPU_BLOCK_BYTES = 3 * 2**19
GPU_BLOCK_BYTES = 2**28
# Queries below which the direct form is faster. Measured crossover: 14 to 18 at 12 heads of 64 (n = 128 and 512), 13 at
# 9 heads of 64 (n = 256), 20 at 32 heads of 128 (n = 256).
DIRECT_BELOW = 16
MIN_QUERIES, MAX_QUERIES = 32, 128
GPU_MIN_QUERIES, GPU_MAX_QUERIES = 64, 2048


class CompilerMissingWarning(UserWarning):
    """torch.compile cannot work here; the eager kernels give the same numbers."""


@dataclass(frozen=True)
class KernelPlan:
    """How one call will be computed.

    Attributes
    ----------
    formulation : `"gram"` (a factor for each key) or `"direct"` (the vectors themselves).
    block : queries in a block.
    compiled : whether the block body goes through torch.compile.
    bytes_needed : estimate of outputs and working memory.
    """

    formulation: Formulation
    block: int
    compiled: bool
    bytes_needed: int


def choose_formulation(problem: AttentionProblem) -> Formulation:
    """Direct for few queries, where the Gram matrices cost more than they save.

    Both build f. Then Gram costs head² * d_model a key, once; direct costs head * d_model a pair. So d_model drops out
    of the comparison, and the small batched products of many heads run as much better as they are more.
    """
    return "direct" if problem.n_queries < DIRECT_BELOW else "gram"


def block_queries(problem: AttentionProblem) -> int:
    """Queries in one block, so that its scores fill about the byte budget of the device."""
    cpu = problem.q.device.type == "cpu"
    budget = CPU_BLOCK_BYTES if cpu else GPU_BLOCK_BYTES
    least, most = (MIN_QUERIES, MAX_QUERIES) if cpu else (GPU_MIN_QUERIES, GPU_MAX_QUERIES)
    size = most
    while size > least and score_bytes(problem, size) > budget:
        size //= 2
    return size


def score_bytes(problem: AttentionProblem, block: int) -> int:
    """Bytes of the scores of one block."""
    queries = min(block, problem.n_queries)
    return problem.n_heads * problem.widest_block(queries) * queries * problem.q.element_size()


def preparation_bytes(problem: AttentionProblem, formulation: Formulation) -> int:
    """Bytes of the cast inputs, of the factors and of what is needed to make them."""
    tensors = (problem.q, problem.k, problem.v, problem.w_o)
    inputs = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if formulation == "direct":
        return inputs
    heads, keys = problem.n_heads, min(problem.n_keys, 128)
    factors = problem.n_keys * (heads + 1) * heads * problem.q.element_size()
    parts = keys * heads * 12 * min(problem.d_model, 256) if problem.q.device.type == "cpu" else 2**29
    return inputs + factors + keys * heads * heads * 8 * 4 + parts


def require_memory(needed: int, limit: int | None, device: torch.device, remedy: str) -> None:
    """Raise `InsufficientMemoryError` when an estimate exceeds `limit`, or 90 % of what the device has free."""
    free = available_bytes(device) if limit is None else limit
    if free is not None and needed > (free if limit is not None else 0.9 * free):
        raise InsufficientMemoryError(
            f"this call needs about {needed / 1e9:.2f} GB on {device}, and {free / 1e9:.2f} GB are available. {remedy}"
        )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    ceiling, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if ceiling.exists() and used.exists() and (text := ceiling.read_text().strip()) != "max":
        limits.append(int(text) - int(used.read_text()))
    return min(limits) if limits else None


def wants_compile(choice: CompileChoice, device: torch.device, n_queries: int) -> bool:
    """`auto` compiles on CUDA for blocks that repeat; on a CPU it measured slower or equal, so eager it is."""
    if choice == "auto":
        return device.type == "cuda" and n_queries >= GPU_MIN_QUERIES
    return bool(choice)


def compiled_or_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` through torch.compile, or itself, with one warning, where no compiler works."""

    def call(*arguments: Any) -> Any:
        if _broken_compiler:
            return function(*arguments)
        try:
            # duck shaping would tie equal sizes together and make a new graph when they part; torch adds `patch` to its
            # configuration modules at run time
            with shape_config.patch(use_duck_shape=False):  # pyright: ignore[reportAttributeAccessIssue]
                return _compiled(function)(*arguments)
        except _compiler_errors() as error:
            _broken_compiler.append(True)
            cause = str(error).strip().splitlines()[0]
            warnings.warn(
                f"torch.compile does not work here ({type(error).__name__}: {cause}); continuing in eager mode with "
                "the same numbers. Install a C++ compiler (CPU) or Triton (GPU), or pass compile=False.",
                CompilerMissingWarning,
                stacklevel=2,
            )
            return function(*arguments)

    return call


# Filled once, by the first failure: the warning comes once a process.
_broken_compiler: list[bool] = []


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _compiler_errors() -> tuple[type[Exception], ...]:
    import torch._dynamo.exc
    import torch._inductor.exc

    found = [torch._dynamo.exc.BackendCompilerFailed, torch._inductor.exc.InvalidCxxCompiler]
    found += [torch._inductor.exc.CppCompileError]
    if hasattr(torch._inductor.exc, "InductorError"):
        found.append(torch._inductor.exc.InductorError)
    return tuple(found)
