"""Which number format matrix products take on this machine, where a recipe leaves it to the
machine.

oneDNN, under torch and vLLM, multiplies bfloat16 matrices on x86 from AVX-512 on (BW, DQ and VL),
and on Arm with the bf16 extension. Elsewhere torch falls back to a loop without any: measured on
AVX2, a quarter to an eighth of float32's rate (docs/lab-notes/whole-loop.md).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from components.settings.recipe import Recipe

CPUINFO = Path("/proc/cpuinfo")
X86_FLAGS = frozenset({"avx512bw", "avx512dq", "avx512vl"})
ARM_FLAG = "bf16"

Dtype = Literal["bfloat16", "float32"]


def cpu_dtype(cpuinfo: str) -> Dtype:
    """bfloat16 where the processor has matrix products in it, else float32.

    Args:
        cpuinfo: text of `/proc/cpuinfo`; empty where the system has none.
    """
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            flags = set(words.split())
            return "bfloat16" if flags >= X86_FLAGS or ARM_FLAG in flags else "float32"
    return "float32"


@cache
def native_dtype(device: Literal["auto", "cpu", "cuda"] = "auto") -> Dtype:
    """The format of matrix products on this machine: bfloat16 on a GPU, on a CPU as `cpu_dtype`."""
    here = cpu_dtype(CPUINFO.read_text() if CPUINFO.is_file() else "")
    if here == "bfloat16" or device == "cuda":
        return "bfloat16"
    if device == "cpu":
        return "float32"
    import torch  # late: it takes seconds, and only a slow CPU has to ask for a GPU

    return "bfloat16" if torch.cuda.is_available() else "float32"


def on_this_machine(recipe: Recipe) -> Recipe:
    """The recipe with what it leaves to the machine (`native`) filled in."""
    if recipe.engine.dtype != "native" and recipe.training.mixed_precision != "native":
        return recipe
    dtype = native_dtype(recipe.engine.device)
    engine, training = recipe.engine, recipe.training
    if engine.dtype == "native":
        engine = engine.model_copy(update={"dtype": dtype})
    if training.mixed_precision == "native":
        training = training.model_copy(
            update={"mixed_precision": "bf16" if dtype == "bfloat16" else "no"}
        )
    return recipe.model_copy(update={"engine": engine, "training": training})
