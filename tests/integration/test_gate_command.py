"""The gate's own measurement, as its command line runs it: real engines, one of which is killed on
the way.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.contracts import AcceptanceReport, CheckpointRef, GateDecision
from components.drafter.build import build_drafter
from components.drafter.checkpoint import export_checkpoint
from components.evaluation.acceptance import expected_counters
from components.serving.engines.engine import Engine
from components.settings import DrafterSettings, load_recipe
from components.stages.gate import conduct as gate_stage
from components.stages.gate.command import main as gate_main
from components.system import guard
from components.targets.fingerprint import make_target_ref

pytestmark = [pytest.mark.integration, pytest.mark.long]

RECIPE = {
    "name": "tiny",
    "target": {"name": "tiny", "source": "local", "path": "/nowhere"},
    "engine": {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "kv_cache_gib": 0.1,
        "startup_timeout_s": 900,
    },
    "curation": {
        "sources": [{"name": "chitchat"}],
        "num_conversations": 8,
        "max_answer_tokens": 64,
    },
    "stream": {"aux_layer_ids": [1, 2, 3]},
    "evaluation": {
        "slices": {"gsm_symbolic": 6, "conversations": 6},
        "max_tokens": 24,
        "temperatures": [0.0, 1.0],
        "num_sampled_prompts": 4,
        "speed_requests_in_flight": [1],
        "speed_requests": 2,
        "speed_repeats": 1,
        "draft_lengths": [1, 3],
        "prompts_per_checkpoint": 4,
        "max_excluded_share": 0.0,
        "num_draws": 20,
    },
    "gate": {"min_acceptance_length": 1.2, "max_memory_growth": 0.5},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture
def candidate(tiny_target: Path, recipe: Path, tmp_path: Path) -> CheckpointRef:
    settings = DrafterSettings(
        algorithm="dflash", num_layers=1, block_size=4, markov_rank=0, confidence_head=False
    )
    target = make_target_ref(
        "tiny", path=tiny_target, source="test", engine=load_recipe(recipe).engine
    )
    return export_checkpoint(
        build_drafter(
            settings, target_path=tiny_target, aux_layer_ids=(1, 2, 3), draft_vocab=None, seed=0
        ),
        tmp_path / "drafter",
        target=target,
        settings=settings,
        dataset_digest=None,
        step=0,
        num_trained_tokens=0,
        parent_digest=None,
        expected_acceptance_length=None,
        extra={},
    )


def kill_once_measured(
    engines: dict[str, Engine], journals: Path, is_over: threading.Event
) -> None:
    """SIGKILL everything of the candidate's engine once its first group of prompts is kept."""
    while not is_over.wait(0.01):
        files = list(journals.glob("candidate-*-at-0.jsonl"))
        if files and len(files[0].read_text().splitlines()) >= 2:
            pid = engines["candidate"].identity.pid
            guard.kill_all([*guard.session_members(pid), pid], 9)
            return


def test_a_candidate_is_measured_and_decided_on_though_its_engine_dies(
    candidate: CheckpointRef,
    recipe: Path,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines: dict[str, Engine] = {}
    start = gate_stage.drafting_engine

    def noted(*args: Any, name: str, **options: Any) -> Engine:
        engines[name] = start(*args, name=name, **options)
        return engines[name]

    monkeypatch.setattr(gate_stage, "drafting_engine", noted)
    monkeypatch.setenv("DSPARK_STATE_DIR", str(tmp_path / "state"))
    out_dir = tmp_path / "out"
    is_over = threading.Event()
    killer = threading.Thread(
        target=kill_once_measured, args=(engines, out_dir / "measurements", is_over)
    )
    killer.start()
    arguments = [
        "--candidate",
        candidate.path,
        "--target",
        str(tiny_target),
        "--recipe",
        str(recipe),
    ]
    try:
        code = gate_main([*arguments, "--out-dir", str(out_dir)])
    finally:
        is_over.set()
        killer.join()

    assert code == 1  # a random drafter is none

    assert list((out_dir / "logs").glob("candidate-*-restart-*.log")), (
        "the engine was not started again"
    )
    report = AcceptanceReport.read(out_dir / "acceptance_report.json")
    measured = report.arms["candidate"]
    ids = [prompt.prompt_id for prompt in measured.prompts]
    assert len(ids) == len(set(ids)) == 12
    expected = expected_counters(measured.prompts)
    assert {name: measured.engine_counters[name] for name in expected} == expected
    # Float32, greedy: lossless across the kill.
    assert report.num_equal_outputs == report.num_compared_outputs == 12
    assert sum(measured.acceptance_histogram) == sum(
        prompt.num_steps for prompt in measured.prompts
    )
    assert (measured.peak_memory_bytes or 0) > 2**28
    sampled = report.further_temperatures[0]
    assert sampled.temperature == 1.0 and len(sampled.arms["candidate"].prompts) == 4

    # A block of four has three draft tokens: three is no shorter draft.
    (shorter,) = report.draft_lengths
    assert shorter.num_draft_tokens == 1 and len(shorter.arm.prompts) == 4
    assert (
        shorter.arm.speed
        and shorter.no_draft_speed
        and len(shorter.arm.acceptance_by_position) == 1
    )
    assert all(prompt.num_draft_tokens == prompt.num_steps for prompt in shorter.arm.prompts)

    # Deciding on what was measured, and checking the decision, say the same.
    decision = out_dir / "gate_decision.json"
    measured_report = str(out_dir / "acceptance_report.json")
    about = ["--recipe", str(recipe), "--report", measured_report]
    assert gate_main([*about, "--decision", str(decision)]) == 1
    assert gate_main([*about, "--out", str(out_dir / "again.json")]) == 1
    assert decision.read_bytes() == (out_dir / "again.json").read_bytes()
    told = {rule.rule: rule for rule in GateDecision.read(decision).rules}
    assert told["measured as the recipe asks"].verdict == "pass", told[
        "measured as the recipe asks"
    ].detail
    assert told["acceptance length"].verdict == "fail" and "memory" in told
    assert (
        told["losslessness"].verdict == "pass"
        and told["losslessness at temperature 1"].verdict == "pass"
    )
    # 4 x (3 + 1) rows, of 8 at most.
    assert [one.num_in_flight for one in report.self_comparisons] == [
        4,
        8,
    ]
    assert (
        GateDecision.read(decision).content_digest in (out_dir / "plots" / "gate.html").read_text()
    )
