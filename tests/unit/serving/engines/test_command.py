"""Exact command lines and environments of engines."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import pytest

from components.contracts import CheckpointRef, ScheduleRow, TargetFingerprint
from components.errors import ConfigError
from components.serving.engines.command import (
    EngineSpec,
    engine_command,
    engine_environment,
    find_preloads,
    resolve_device,
    speculative_config,
)
from components.settings import EngineSettings

FINGERPRINT = TargetFingerprint(
    weights="0" * 64, quantization="1" * 64, tokenizer="2" * 64, serving="3" * 64
)
SETTINGS = EngineSettings(max_model_len=1024, max_num_batched_tokens=2048, kv_cache_gib=0.5)
SPEC = EngineSpec(
    name="plain",
    model_path="/models/target",
    served_model_name="demo",
    settings=SETTINGS,
    port=8100,
    device="cpu",
)
COMMON = shlex.split(
    "--served-model-name demo --host 127.0.0.1 --port 8100 --dtype bfloat16 --kv-cache-dtype "
    "auto --max-model-len 1024"
    " --max-num-seqs 64 --max-num-batched-tokens 2048 --generation-config vllm "
    "--no-enable-log-requests"
    " --disable-uvicorn-access-log --uvicorn-log-level warning --enable-prompt-tokens-details "
    "--enforce-eager"
)


def checkpoint(algorithm: str = "dspark") -> CheckpointRef:
    return CheckpointRef(
        path="/drafters/one",
        digest="d" * 64,
        algorithm=algorithm,
        fingerprint=FINGERPRINT,
        num_draft_tokens=4,
    )


def drafting(**changes: object) -> EngineSpec:
    return dataclasses.replace(SPEC, checkpoint=checkpoint(), **changes)  # type: ignore[arg-type]


def test_plain_cpu_engine() -> None:
    assert engine_command(SPEC) == [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/target",
        *COMMON, "--tensor-parallel-size", "1", "--kv-cache-memory-bytes", str(2**29),
    ]  # fmt: skip


def test_dspark_cpu_engine_goes_through_the_plug_in() -> None:
    command = engine_command(drafting(schedule=(ScheduleRow(1, 2, 4), ScheduleRow(3, 64, 0))))
    assert command[-4:] == [
        "--speculative-config",
        '{"method":"dflash","model":"/drafters/one","num_speculative_tokens":4,"draft_sample_method":"greedy",'
        '"num_speculative_tokens_per_batch_size":[[1,2,4],[3,64,0]]}',
        "--per-request-spec-decode-metrics",
        "summary",
    ]


def test_dspark_cuda_engine() -> None:
    settings = SETTINGS.model_copy(update={"tensor_parallel_size": 2, "enforce_eager": False})
    spec = drafting(device="cuda", settings=settings, draft_sample_method="probabilistic")
    assert engine_command(spec) == [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        "/models/target",
        *COMMON[:-1],
        "--tensor-parallel-size",
        "2",
        "--gpu-memory-utilization",
        "0.85",
        "--speculative-config",
        '{"method":"dspark","model":"/drafters/one","num_speculative_tokens":4,"draft_sample_method":"probabilistic"}',
        "--per-request-spec-decode-metrics",
        "summary",
    ]


@pytest.mark.parametrize("algorithm", ["dflash", "eagle3"])
def test_other_drafters_keep_their_name_on_cpu(algorithm: str) -> None:
    spec = dataclasses.replace(SPEC, checkpoint=checkpoint(algorithm))
    assert speculative_config(spec)["method"] == algorithm


def test_extra_arguments_come_last_and_in_order() -> None:
    settings = SETTINGS.model_copy(update={"extra_args": ("--seed", "1")})
    spec = dataclasses.replace(
        SPEC, settings=settings, extra_args=("--kv-transfer-config", '{"kv_role":"x"}')
    )
    assert engine_command(spec)[-4:] == ["--seed", "1", "--kv-transfer-config", '{"kv_role":"x"}']


def test_extraction_engine_may_bring_its_own_speculative_config() -> None:
    config = json.dumps({"method": "extract_hidden_states", "num_speculative_tokens": 1})
    spec = dataclasses.replace(SPEC, extra_args=("--speculative-config", config))
    assert engine_command(spec)[-1] == config
    with pytest.raises(ConfigError, match="speculative config of its own"):
        engine_command(drafting(extra_args=("--speculative-config", config)))


@pytest.mark.parametrize(
    "arguments",
    [
        (
            "--speculative-config",
            '{"rejection_sample_method":"synthetic","synthetic_acceptance_length":3}',
        ),
        ('--speculative-config={"rejection_sample_method":"relaxed"}',),
        ("--speculative-config", '{"method":"x","posterior_threshold":0.1}'),
        ("--speculative-config.rejection_sample_method", "other"),
        ("--speculative-config.rejection-sample-method=synthetic",),
        ("--typical-acceptance-sampler-posterior-alpha", "1"),
    ],
)  # fmt: skip
def test_lossy_speculation_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="lossy"):
        engine_command(dataclasses.replace(SPEC, extra_args=arguments))


def test_lossless_block_verification_and_innocent_words_pass() -> None:
    arguments = (
        "--speculative-config",
        '{"rejection_sample_method":"block"}',
        "--chat-template",
        "typical.jinja",
    )
    assert engine_command(dataclasses.replace(SPEC, extra_args=arguments))[-1] == "typical.jinja"


def test_argument_that_is_not_json() -> None:
    with pytest.raises(ConfigError, match="not valid JSON"):
        engine_command(dataclasses.replace(SPEC, extra_args=("--kv-transfer-config", "{oops")))


def test_schedule_beyond_the_checkpoint() -> None:
    with pytest.raises(ConfigError, match="K <= 4"):
        engine_command(drafting(schedule=(ScheduleRow(1, 8, 5),)))


def test_cpu_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/lib/mine.so:/lib/tc.so")
    spec = dataclasses.replace(
        SPEC, model_path=str(tmp_path), num_cores=1, extra_env={"KMP_BLOCKTIME": "0", "X": "y"}
    )
    assert engine_environment(spec, preloads=["/lib/tc.so", "/lib/omp.so"]) == {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "LD_PRELOAD": "/lib/tc.so:/lib/omp.so:/lib/mine.so",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "KMP_TPAUSE": "0",
        "X": "y",
    }


def test_cuda_environment_of_a_hub_model_is_online_and_not_preloaded() -> None:
    spec = dataclasses.replace(SPEC, device="cuda", model_path="org/model")
    assert set(engine_environment(spec)) == {
        "VLLM_NO_USAGE_STATS",
        "VLLM_DO_NOT_TRACK",
        "VLLM_LOGGING_COLOR",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
    }


def test_preloads_exist_where_found() -> None:
    assert all(Path(path).is_file() for path in find_preloads())


def test_device() -> None:
    assert resolve_device(SETTINGS.model_copy(update={"device": "cpu"})) == "cpu"
