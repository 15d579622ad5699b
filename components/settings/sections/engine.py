"""How vLLM is started."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.settings.base import Settings


class EngineSettings(Settings):
    """How vLLM is started. The fields that change numerics or limits enter the fingerprint's
    `serving` part.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["bfloat16", "float16", "float32", "auto", "native"] = Field(
        default="bfloat16",
        description="Format of weights and matrix products; native is bfloat16 where this "
        "machine multiplies"
        " matrices in it (a GPU, AVX-512), else float32, which is several times faster there.",
    )
    kv_cache_dtype: str = "auto"
    max_model_len: int = Field(default=2048, ge=64, description="tokens")
    max_num_seqs: int = Field(default=64, ge=1, description="requests in one batch")
    max_num_batched_tokens: int = Field(
        default=4096, ge=64, description="tokens in one engine step"
    )
    kv_cache_gib: float = Field(default=1.0, gt=0, description="KV space of a CPU engine, GiB")
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    enforce_eager: bool = True
    startup_timeout_s: float = Field(default=300, gt=0)
    request_timeout_s: float = Field(default=300, gt=0)
    extra_args: tuple[str, ...] = ()
