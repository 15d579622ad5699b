"""The last lines of a run and its exit code, for every way it can end."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from components.contracts import (
    Amounts,
    CanaryReport,
    GateDecision,
    MachineProbe,
    PacePlan,
    RuleResult,
    TargetFingerprint,
    TargetRef,
    Verdict,
)
from components.reporting.closing import closing_lines, exit_code
from components.reporting.pace_words import plan_lines, probe_line
from components.reporting.render import markdown
from components.reporting.report import LifecycleReport
from components.reporting.show import main, show

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FINGERPRINT = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")
TARGET = TargetRef(
    name="tiny", path="p", source="test", fingerprint=FINGERPRINT, quantization="none"
)
NOTHING = "nothing serves, http://here/v1 answers HTTP 503"


def rule(
    name: str, verdict: Verdict, *, more: int | None = None, binding: bool = True
) -> RuleResult:
    return RuleResult(
        rule=name,
        verdict=verdict,
        value=1.1,
        threshold=1.2,
        detail="told",
        num_further_prompts=more,
        binding=binding,
    )


def gate(*rules: RuleResult, champion: str | None = None) -> GateDecision:
    verdicts = [one.verdict for one in rules if one.binding]
    order = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
    return GateDecision(
        candidate_digest="c",
        champion_digest=champion,
        target_fingerprint=FINGERPRINT,
        report_digest="r",
        rules=rules,
        verdict=next(v for v in order if v in verdicts),
        created_at=NOW,
    )


def canary(*, promoted: bool) -> CanaryReport:
    return CanaryReport(
        candidate_digest="c",
        baseline="no_draft",
        steps=(),
        promoted=promoted,
        rolled_back_to=None if promoted else "no_draft",
        reason="all steps healthy" if promoted else "errors at 5 %",
        created_at=NOW,
    )


def report(**parts: object) -> LifecycleReport:
    base = {
        "recipe": "demo", "target": TARGET, "stages": (), "total_s": 60, "orchestration_share": 0.0,
        "serving": NOTHING, "outcome": "told above",
    }  # fmt: skip
    return LifecycleReport.model_validate({**base, **parts})


PASSED = rule("finite figures", Verdict.PASS)
SHORT = rule("acceptance length", Verdict.FAIL)


def test_a_promotion_is_code_0_and_needs_no_words() -> None:
    run = report(gate=gate(PASSED), canary=canary(promoted=True))
    assert exit_code(run) == 0
    assert closing_lines(run) == []


def test_a_fail_says_the_rule_what_serves_and_what_to_do() -> None:
    run = report(gate=gate(PASSED, SHORT, rule("told only", Verdict.FAIL, binding=False)))
    assert exit_code(run) == 4
    lines = closing_lines(run)
    assert lines[0] == "the gate said fail: nothing was promoted"
    assert lines[1] == "  acceptance length: 1.100, limit 1.200 (told)"
    assert lines[2] == f"what serves now: {NOTHING}"
    assert lines[3].startswith("what to do: train on more: make demo SIZE=full")
    assert not any("told only" in line or "finite" in line for line in lines)


def test_an_inconclusive_gate_says_how_many_prompts_it_needs() -> None:
    run = report(
        gate=gate(
            PASSED, rule("non-inferior on maths", Verdict.INCONCLUSIVE, more=24), champion="old"
        )
    )
    assert exit_code(run) == 5
    assert any(
        "'non-inferior on maths' needs about 24 more prompts" in line for line in closing_lines(run)
    )


def test_a_better_champion_stays_for_a_stated_reason() -> None:
    run = report(
        gate=gate(PASSED, rule("non-inferior on maths", Verdict.FAIL), champion="old"),
        serving="version 3 of tiny-drafter serves at http://here/v1",
    )
    assert exit_code(run) == 0
    lines = closing_lines(run)
    assert lines[0] == "the gate said fail: the champion is the better drafter, and stays"
    assert "what serves now: version 3 of tiny-drafter serves at http://here/v1" in lines
    assert any("nothing has to be done" in line for line in lines)


def test_a_worse_drafter_that_fails_another_rule_too_is_a_fail() -> None:
    worse = rule("non-inferior on maths", Verdict.FAIL)
    assert (
        exit_code(report(gate=gate(worse, rule("losslessness", Verdict.FAIL), champion="old"))) == 4
    )
    assert exit_code(report(gate=gate(worse))) == 4  # no champion that could stay


def test_a_rolled_back_canary_and_a_run_without_a_gate() -> None:
    rolled = report(gate=gate(PASSED), canary=canary(promoted=False))
    assert exit_code(rolled) == 6
    assert closing_lines(rolled)[0] == "the gate passed, nothing was promoted: errors at 5 %"
    assert exit_code(report()) == 1


def test_training_that_time_cut_short_is_said_and_so_is_the_way_out() -> None:
    ended = "cut short at step 120 of about 400 by training.max_trainer_s"
    run = report(gate=gate(SHORT), training_ended=ended)
    assert any(
        f"training was {ended}" in line and "pace.ends_within_s" in line
        for line in closing_lines(run)
    )
    assert ended in markdown(run)


def written(folder: Path, run: LifecycleReport, *, name: str = "demo-1") -> Path:
    path = run.write(folder / "runs" / f"20260101-000000-{name}" / "report" / "report.json")
    page = path.parent.parent / "plots" / "gate.html"
    page.parent.mkdir()
    page.write_text("page")
    return path


def test_the_path_is_the_last_line_of_a_promotion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, report(gate=gate(PASSED), canary=canary(promoted=True)))
    assert show(path, width=100, colour=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(path)


def test_the_last_lines_of_a_fail_name_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, report(gate=gate(SHORT)))
    assert main([str(tmp_path), "--run", "demo-1"]) == 4
    last = capsys.readouterr().out.splitlines()[-6:]
    assert last[0] == f"report: {path}"
    assert (
        last[4]
        == f"the gate's page, with every figure: {path.parent.parent / 'plots' / 'gate.html'}"
    )
    assert last[5].startswith("what to do: ")


def test_a_run_that_failed_never_shows_another_runs_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, report(gate=gate(PASSED), canary=canary(promoted=True)), name="demo-1")
    assert main([str(tmp_path), "--run", "demo-2", "--followed", "1"]) == 1
    out = capsys.readouterr().out
    assert "run demo-2 failed before it wrote a report" in out
    assert "demo-1" not in out


def test_a_run_that_fails_after_its_report_is_not_a_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, report(gate=gate(PASSED), canary=canary(promoted=True)))
    assert main([str(tmp_path), "--run", "demo-1", "--followed", "1"]) == 1
    assert "failed after it had written its report" in capsys.readouterr().out.splitlines()[-1]


def plan(*, fits: bool) -> PacePlan:
    probe = MachineProbe(
        engine_up_s=40,
        tokens_per_s={4: 50, 64: 210},
        prompt_tokens_per_s=900,
        training_step_s=0.61,
        trainer_up_s=30,
        duration_s=55,
    )
    full = Amounts(
        num_conversations=900,
        slices={"maths": 16},
        speed_requests_in_flight=(1, 4),
        num_untrained_prompts=8,
        canary_step_s=12,
    )
    return PacePlan(
        probe=probe,
        full=full,
        chosen=full.model_copy(update={"num_conversations": 250}),
        available_s=800,
        full_s=2400,
        stages={"train": 300.0, "gate": 450.0 if fits else 650.0},
        training_steps=310,
        given_up=("conversations, and training with them: 250 of 900",),
        fits=fits,
    )


def test_probe_and_plan_are_said_with_their_figures() -> None:
    assert probe_line(plan(fits=True).probe) == (
        "pace: this machine starts an engine in 40 s, answers 50 tok/s at 4 in flight, 210 "
        "tok/s at 64 in flight,"
        " reads 900 tok/s, takes 610 ms for a training step (probe 55 s)"
    )
    first, second = plan_lines(plan(fits=True))
    assert (
        "250 conversations, 310 training steps, 16 evaluation prompts; about 12 min 30 s more"
        in first
    )
    assert "of 13 min 20 s left (train 5 min 00 s, gate 7 min 30 s)" in first
    assert "the whole recipe would take 40 min 00 s" in second and "250 of 900" in second


def test_a_minimum_that_does_not_fit_is_said_before_it_starts() -> None:
    assert plan_lines(plan(fits=False))[-1] == (
        "pace: even the least that the recipe allows takes about 15 min 50 s, 2 min 30 s more "
        "than there are left;"
        " it is run all the same"
    )


def test_the_report_holds_the_amounts_beside_the_recipes() -> None:
    text = markdown(report(pace=plan(fits=True)))
    assert "| conversations | 900 | 250 |" in text
    assert "takes 610 ms for a training step" in text
