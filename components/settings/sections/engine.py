"""How vLLM is started."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.settings.base import Settings


class EngineSettings(Settings):
    """How every vLLM engine of the recipe is started: plain, drafting and extracting.

    `dtype`, `kv_cache_dtype`, `max_model_len` and those of `extra_args` that change numbers are
    part of the target's fingerprint: a release is bound to them, and changing one is a change of
    the target, after which the drafter is measured again.
    """

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Where engines and trainer run; `auto` takes CUDA where torch sees a GPU, else"
        " the CPU, and `cuda` without a GPU is an error.",
    )
    dtype: Literal["bfloat16", "float16", "float32", "auto", "native"] = Field(
        default="bfloat16",
        description="Format of weights and matrix products. `native` is bfloat16 where this"
        " machine multiplies matrices in it (a GPU, AVX-512, Arm with bf16), else float32, which"
        " is several times faster there; `auto` leaves the choice to vLLM.",
    )
    kv_cache_dtype: str = Field(
        default="auto",
        description="Format of the KV cache, as vLLM's `--kv-cache-dtype` takes it; `auto` is the"
        " format of the model. Change it to hold longer or more requests in the same memory.",
    )
    max_model_len: int = Field(
        default=2048,
        ge=64,
        description="Longest request in tokens, prompt and answer together. It must hold"
        " `curation.max_prompt_tokens` plus `curation.max_answer_tokens`, and the longest"
        " evaluation prompt.",
    )
    max_num_seqs: int = Field(
        default=64,
        ge=1,
        description="Most requests that an engine runs at once; more wait in its queue. Raise it"
        " where KV space is left over.",
    )
    max_num_batched_tokens: int = Field(
        default=4096,
        ge=64,
        description="Most tokens that an engine computes in one step, prompts and answers"
        " together; lower it where prefills take too much memory.",
    )
    kv_cache_gib: float = Field(
        default=1.0,
        gt=0,
        description="Memory for the KV cache of each CPU engine in GiB; engines on a GPU go by"
        " `gpu_memory_utilization`.",
    )
    gpu_memory_utilization: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="Share of a GPU's memory that each engine on it may take; lower it where"
        " several engines, or engine and trainer, share one GPU.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Number of devices that each engine splits the target over; raise it for a"
        " target that does not fit one GPU.",
    )
    enforce_eager: bool = Field(
        default=True,
        description="Run the model without compilation and CUDA graphs: engines start sooner and"
        " serve slower. Set it to false for production on GPUs.",
    )
    startup_timeout_s: float = Field(
        default=300,
        gt=0,
        description="Seconds within which a started engine must answer; one that is late is"
        " stopped and the run fails. Raise it for large targets and slow disks.",
    )
    request_timeout_s: float = Field(
        default=300,
        gt=0,
        description="Seconds that one request of the pipeline may take, queue included: prompts"
        " and answers of curation, the gate's, the canary's replayed ones, and those that probe"
        " the machine's pace. Prefills of training have `stream.request_timeout_s`. Raise it for"
        " long answers on slow machines.",
    )
    extra_args: tuple[str, ...] = Field(
        default=(),
        description="Further arguments of vLLM, one entry per word, appended to every engine's"
        " command line. Lossy speculation is refused, and so is a speculative config of one's own"
        " where a drafter is served.",
    )
