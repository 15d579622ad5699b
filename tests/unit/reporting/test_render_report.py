"""Terminal, Markdown, JSON and plots of one report show the same figures; missing stages leave no
holes.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from components.contracts import (
    AcceptanceReport,
    ArmReport,
    Calibration,
    CanaryReport,
    CanaryStep,
    ChangeAction,
    ChangeKind,
    Divergence,
    GateDecision,
    PromptMeasurement,
    RuleResult,
    SelfComparison,
    SpeedPoint,
    StageTiming,
    TargetFingerprint,
    TargetRef,
    Verdict,
)
from components.drafter.confidence.calibration import fit_calibration
from components.reporting.render import PLOT_CAPTIONS, markdown, render_terminal, write_report
from components.reporting.report import (
    ArmFigures,
    LifecycleReport,
    ReportedPoint,
    TargetChangeReport,
)
from components.reporting.tables import tables

START = datetime(2026, 1, 1, tzinfo=UTC)
FINGERPRINT = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")
TARGET = TargetRef(
    name="tiny", path="p", source="test", fingerprint=FINGERPRINT, quantization="none"
)


def arm(name: str, length: float, *, num_positions: int, rates: dict[int, float]) -> ArmReport:
    points = tuple(
        SpeedPoint(
            requests_in_flight=level, num_requests=8, output_tokens_per_s=rate,
            ttft_p50_ms=61, ttft_p99_ms=92, itl_p50_ms=7, itl_p99_ms=9,
        )
        for level, rate in rates.items()
    )  # fmt: skip
    drafts = num_positions > 0
    return ArmReport(
        arm=name,
        checkpoint_digest=name if drafts else None,
        acceptance_length=length,
        acceptance_interval=(length - 0.1, length + 0.1) if drafts else None,
        acceptance_by_slice={"maths": length, "code": length},
        interval_by_slice={"maths": (length - 0.2, length + 0.2)} if drafts else {},
        acceptance_by_position=tuple(0.5**k for k in range(1, num_positions + 1)),
        draft_coverage=0.98 if drafts else 0.0,
        prompts=(),
        speed=points,
        engine_counters={},
        acceptance_histogram=(1,) * (num_positions + 1) if drafts else (),
    )


def answering(one: ArmReport, last: str) -> ArmReport:
    """The arm with three prompts, of which the last has another output."""
    prompts = tuple(
        PromptMeasurement(
            prompt_id=f"maths/{n}",
            slice="maths",
            num_prompt_tokens=9,
            num_output_tokens=9,
            num_steps=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            accepted_by_position=(),
            latency_s=1,
            output_digest=digest,
        )
        for n, digest in enumerate(("same", "same", last))
    )
    return one.model_copy(update={"prompts": prompts})


def calibration() -> Calibration:
    """Of an overconfident head with four draft positions."""
    draws = np.random.default_rng(0)
    logits_NK = draws.normal(-0.5, 1.2, (3000, 4))
    accepted_NK = draws.random(logits_NK.shape) < expit(logits_NK)
    return fit_calibration(2 * logits_NK, accepted_NK, np.arange(3000) // 30)


@pytest.fixture
def bare() -> LifecycleReport:
    return LifecycleReport(
        recipe="demo",
        target=TARGET,
        stages=(),
        total_s=12,
        orchestration_share=0.0,
        outcome="stopped at the gate",
    )


@pytest.fixture
def full(bare: LifecycleReport) -> LifecycleReport:
    arms = [
        arm("candidate", 1.731, num_positions=4, rates={1: 61, 8: 165}),
        arm("untrained", 1.002, num_positions=4, rates={}),
        arm("no_draft", 1.0, num_positions=0, rates={1: 43, 8: 237}),
    ]
    arms[0], arms[2] = answering(arms[0], "different"), answering(arms[2], "same")
    acceptance = AcceptanceReport(
        target=TARGET,
        temperature=0,
        max_tokens=64,
        prompt_digest="p",
        arms={a.arm: a for a in arms},
        num_equal_outputs=2,
        num_compared_outputs=3,
        engine_version="1",
        created_at=START,
        divergences={"maths/2": Divergence(position=4, margin_nats=0.1)},
        self_comparisons=(
            SelfComparison(
                num_in_flight=20,
                digests={"maths/0": "same", "maths/1": "same"},
                divergences={},
                num_gaps=300,
                max_gap_change_nats=0.1,
            ),
        ),
    )
    rule = RuleResult(
        rule="acceptance length", verdict=Verdict.PASS, value=1.731, threshold=1.2, detail="a | b"
    )
    paired = RuleResult(
        rule="non-inferior on code", verdict=Verdict.PASS, value=0.01, threshold=-0.05, detail="",
        interval=(-0.02, 0.04), confidence=0.98, num_prompts=9,
    )  # fmt: skip
    rules = (rule, paired)
    gate = GateDecision(
        candidate_digest="c",
        champion_digest=None,
        target_fingerprint=FINGERPRINT,
        report_digest="r",
        rules=rules,
        verdict=Verdict.PASS,
        speculative_schedule=((1, 4, 4), (5, 64, 0)),
        created_at=START,
    )
    step = CanaryStep(
        weight_percent=25,
        started_at=START,
        duration_s=12,
        num_requests={"candidate": 12, "baseline": 36},
        num_errors={"candidate": 0, "baseline": 0},
        acceptance_length=1.69,
        draft_coverage=0.98,
        latency_p50_s={"candidate": 1.1, "baseline": None},
        latency_p95_s={"candidate": 1.9, "baseline": 2.0},
        healthy=False,
        reason="too slow",
    )
    canary = CanaryReport(
        candidate_digest="c",
        baseline="no_draft",
        steps=(step,),
        promoted=False,
        rolled_back_to="no_draft",
        reason="p95 above its limit",
        created_at=START,
    )
    figures = ArmFigures.of(arms[0])
    change = TargetChangeReport(
        name="INT8",
        kinds=(ChangeKind.QUANTIZATION,),
        action=ChangeAction.REBIND,
        reason="acceptance holds",
        released_acceptance_length=1.75,
        old_drafter=figures,
        new_drafter=None,
        no_draft=ArmFigures.of(arms[2]),
        detected_s=3.2,
        total_s=300,
        outcome="promoted",
    )
    stages = (
        StageTiming(stage="train", started_at=START, duration_s=100, num_tokens=20_000),
        StageTiming(stage="gate", started_at=START + timedelta(seconds=110), duration_s=90),
    )
    return bare.model_copy(
        update={
            "stages": stages,
            "total_s": 200.0,
            "orchestration_share": 0.05,
            "acceptance": acceptance,
            "gate": gate,
            "canary": canary,
            "calibration": calibration(),
            "target_changes": (change,),
            "peak_memory_mib": 8192.0,
            "training_curve": tuple(
                ReportedPoint(step=10 * n, loss=3.0 / n, acceptance_length=1 + n / 50)
                for n in range(1, 31)
            ),
        }
    )


def test_an_arm_of_which_only_speed_was_measured_has_no_acceptance(full: LifecycleReport) -> None:
    assert full.acceptance is not None
    scheduled = arm("scheduled", 1.0, num_positions=0, rates={1: 60}).model_copy(
        update={"acceptance_by_slice": {}}
    )
    arms = full.acceptance.arms | {"scheduled": scheduled}
    report = full.model_copy(
        update={"acceptance": full.acceptance.model_copy(update={"arms": arms})}
    )
    columns = {table.title: table.columns for table in tables(report)}
    assert "shipped schedule" not in columns["Served acceptance length"]
    assert "shipped schedule" in columns["Output tokens per second by requests in flight"]


FIGURES = [
    "1.731 [1.63, 1.83]",
    "1.731 [1.53, 1.93]",
    "1.002",
    "98.0%",
    "2 of 3",
    "1.42x",
    "0.70x",
    "61 (92), 7 (9)",
    "1-4: 4, 5-64: 0",
    "3 min 20 s",
    "5.0%",
    "8.0 GiB",
    "rolled back to no draft",
    "1.750",
    "0.062",
    "200",
    "drafts 1 to 4",
    "3,000 blocks of 100 validation conversations",
    f"{calibration().after.ece:.4f}",
]


@pytest.mark.parametrize("figure", FIGURES)
def test_terminal_and_markdown_show_the_same_figures(figure: str, full: LifecycleReport) -> None:
    assert figure in render_terminal(full, colour=False, width=160)
    assert figure in markdown(full)


def test_markdown_tables_are_well_formed(full: LifecycleReport) -> None:
    text = markdown(full, plots={name: f"{name}.png" for name in PLOT_CAPTIONS})
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(blocks) >= 8
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block
    assert all(f"]({name}.png)" in text for name in PLOT_CAPTIONS)


def test_terminal_keeps_to_its_width(full: LifecycleReport) -> None:
    plain = render_terminal(full, colour=False, width=110)
    assert max(map(len, plain.splitlines())) <= 110
    assert "\x1b[" not in plain
    assert "\x1b[" in render_terminal(full)


def test_files_are_complete_and_read_back(full: LifecycleReport, tmp_path: Path) -> None:
    files = write_report(full, tmp_path / "report")
    assert set(files.plots) == set(PLOT_CAPTIONS)
    assert all(
        path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
        for path in files.plots.values()
    )
    assert LifecycleReport.read(files.json) == full
    linked = re.findall(r"!\[[^]]*\]\(([^)]*)\)", files.markdown.read_text())
    assert {(files.markdown.parent / name).is_file() for name in linked} == {True}


def test_a_run_that_stopped_early_has_a_report_too(bare: LifecycleReport, tmp_path: Path) -> None:
    files = write_report(bare, tmp_path)
    assert files.plots == {}
    assert "stopped at the gate" in files.markdown.read_text()
    assert "stopped at the gate" in render_terminal(bare)
