"""Every rule of the gate on both sides of its limit; what was not measured is never a pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contracts import AcceptanceReport, GateDecision, PromptMeasurement, Verdict
from components.errors import ConfigError, EvaluationError
from components.evaluation.decide import decide, overall_verdict
from components.evaluation.gate import main
from components.settings import GateSettings

SETTINGS = GateSettings(min_acceptance_length=1.2, min_speedup=None)
GOOD = (10, 6, 4)  # acceptance length 1.7, first position 0.5


@pytest.fixture
def prompts(measurement: Callable[..., PromptMeasurement]) -> Callable[..., list[PromptMeasurement]]:
    def make(histogram: tuple[int, ...] = GOOD, *, num: int = 10, slice_name: str = "a") -> list[PromptMeasurement]:
        # Two kinds of prompts, so that intervals have a width.
        more = (histogram[0] + 2, *histogram[1:])
        return [
            measurement(f"{slice_name}/{n}", slice_name=slice_name, histogram=histogram if n % 2 else more)
            for n in range(num)
        ]

    return make


@pytest.fixture
def served(report: Any, arm: Any, prompts: Any) -> Callable[..., AcceptanceReport]:
    """A report of these prompts of the candidate, half again as fast as no draft, as the demo's recipe asks for."""

    def make(candidate: Any = None, *others: Any, **told: Any) -> AcceptanceReport:
        answered = prompts() if candidate is None else candidate
        arms = (
            arm("candidate", answered, num_draft_tokens=2, rates={1: 60.0}),
            arm("no_draft", answered, rates={1: 40.0}),
        )
        return report(*arms, *others, **told)

    return make


def rules(decision: GateDecision) -> dict[str, Verdict]:
    return {rule.rule: rule.verdict for rule in decision.rules}


def test_a_good_candidate_passes(report: Any, arm: Any, prompts: Any) -> None:
    decision = decide(report(arm("candidate", prompts(), num_draft_tokens=2)), settings=SETTINGS)
    assert decision.verdict is Verdict.PASS
    assert set(rules(decision)) == {
        "finite figures",
        "acceptance length",
        "position collapse",
        "draft coverage",
        "losslessness",
    }
    assert decision.settings == SETTINGS.model_dump(mode="json")
    assert decision.champion_digest is None


@pytest.mark.parametrize(("limit", "verdict"), [(1.1, "pass"), (1.65, "inconclusive"), (2.1, "fail")])
def test_acceptance_length_against_its_interval(
    limit: float, verdict: str, report: Any, arm: Any, prompts: Any
) -> None:
    settings = GateSettings(min_acceptance_length=limit, min_speedup=None)
    decision = decide(report(arm("candidate", prompts(), num_draft_tokens=2)), settings=settings)
    assert rules(decision)["acceptance length"] == decision.verdict == verdict


def test_position_collapse_fails(report: Any, arm: Any, prompts: Any) -> None:
    settings = GateSettings(min_acceptance_length=1.0, min_position_acceptance=0.1)
    decision = decide(report(arm("candidate", prompts((40, 1, 0)), num_draft_tokens=2)), settings=settings)
    assert rules(decision)["position collapse"] is Verdict.FAIL
    assert decision.verdict is Verdict.FAIL


def test_zero_drafts_fail(report: Any, arm: Any, measurement: Any) -> None:
    silent = [measurement(f"a/{n}", histogram=(0, 0, 0), num_output_tokens=20) for n in range(10)]
    decision = decide(
        report(arm("candidate", silent, num_draft_tokens=2)), settings=GateSettings(min_acceptance_length=1)
    )
    assert decision.verdict is Verdict.FAIL
    assert rules(decision)["acceptance length"] is Verdict.FAIL
    assert rules(decision)["draft coverage"] is Verdict.FAIL


def test_one_prompt_is_inconclusive(report: Any, arm: Any, prompts: Any) -> None:
    decision = decide(report(arm("candidate", prompts(num=1), num_draft_tokens=2)), settings=SETTINGS)
    assert decision.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("histogram", "verdict"), [((10, 6, 5), "pass"), (GOOD, "pass"), ((14, 6, 2), "fail"), ((11, 6, 4), "inconclusive")]
)
def test_non_inferiority_per_slice(
    histogram: tuple[int, ...], verdict: str, report: Any, arm: Any, prompts: Any, measurement: Any
) -> None:
    # On slice b the candidate equals the champion; slice a decides.
    same = prompts(slice_name="b")
    ours = [measurement(p.prompt_id, histogram=histogram if n % 2 else GOOD) for n, p in enumerate(prompts())]
    if verdict == "fail":
        ours = prompts(histogram)
    champion = arm("champion", prompts(GOOD) + same, num_draft_tokens=2)
    decision = decide(report(arm("candidate", ours + same, num_draft_tokens=2), champion), settings=SETTINGS)
    told = rules(decision)
    assert told["non-inferior on b"] is Verdict.PASS
    if verdict != "inconclusive":
        assert told["non-inferior on a"] == verdict
    assert decision.champion_digest == champion.checkpoint_digest


def test_a_slice_with_one_prompt_is_inconclusive_against_a_champion(report: Any, arm: Any, prompts: Any) -> None:
    both = prompts() + prompts(num=1, slice_name="b")
    arms = (arm("candidate", both, num_draft_tokens=2), arm("champion", both, num_draft_tokens=2))
    decision = decide(report(*arms), settings=SETTINGS)
    assert rules(decision)["non-inferior on b"] is Verdict.INCONCLUSIVE
    assert decision.verdict is Verdict.INCONCLUSIVE


def test_champion_on_other_prompts_cannot_be_compared(report: Any, arm: Any, prompts: Any) -> None:
    arms = (arm("candidate", prompts(), num_draft_tokens=2), arm("champion", prompts(num=9), num_draft_tokens=2))
    with pytest.raises(EvaluationError, match="same prompts"):
        decide(report(*arms), settings=SETTINGS)


@pytest.mark.parametrize(
    ("rates", "verdict"), [({1: 60.0}, "pass"), ({1: 41.0}, "fail"), ({4: 60.0}, "inconclusive"), ({}, "inconclusive")]
)
def test_speed_up_at_one(rates: dict[int, float], verdict: str, report: Any, arm: Any, prompts: Any) -> None:
    plain = arm("no_draft", prompts(), rates={1: 40.0, 4: 100.0})
    settings = GateSettings(min_acceptance_length=1.2, min_speedup=1.1)
    decision = decide(report(arm("candidate", prompts(), num_draft_tokens=2, rates=rates), plain), settings=settings)
    assert rules(decision)["speed-up at 1 in flight"] == decision.verdict == verdict


def test_a_drafter_slower_than_none_is_no_pass_unless_the_recipe_says_so(report: Any, arm: Any, prompts: Any) -> None:
    plain = arm("no_draft", prompts(), rates={1: 40.0})
    slow = report(arm("candidate", prompts(), num_draft_tokens=2, rates={1: 38.0}), plain)
    assert decide(slow, settings=GateSettings(min_acceptance_length=1.2)).verdict is Verdict.FAIL
    assert decide(slow, settings=SETTINGS).verdict is Verdict.PASS
    unmeasured = report(arm("candidate", prompts(), num_draft_tokens=2))
    assert decide(unmeasured, settings=GateSettings(min_acceptance_length=1.2)).verdict is Verdict.INCONCLUSIVE


def test_losslessness(report: Any, arm: Any, prompts: Any) -> None:
    candidate = arm("candidate", prompts(), num_draft_tokens=2)

    def verdict_of(**outputs: Any) -> Verdict | None:
        return rules(decide(report(candidate, **outputs), settings=SETTINGS)).get("losslessness")

    assert verdict_of(num_equal=9) is Verdict.PASS
    assert verdict_of(num_equal=8) is Verdict.FAIL
    assert verdict_of(num_equal=0, num_compared=0) is Verdict.INCONCLUSIVE
    assert verdict_of(num_equal=0, num_compared=0, temperature=1.0) is None


def test_nan_fails(report: Any, arm: Any, prompts: Any) -> None:
    broken = arm("candidate", prompts(), num_draft_tokens=2).model_copy(update={"acceptance_length": float("nan")})
    decision = decide(report(broken), settings=SETTINGS)
    assert decision.verdict is Verdict.FAIL
    assert "candidate.acceptance_length" in decision.rules[0].detail


def test_report_about_another_target_fails(report: Any, arm: Any, prompts: Any) -> None:
    about = report(arm("candidate", prompts(), num_draft_tokens=2))
    ours = about.target.fingerprint
    assert decide(about, settings=SETTINGS, expected_fingerprint=ours).verdict is Verdict.PASS
    other = ours.model_copy(update={"weights": "f" * 64})
    decision = decide(about, settings=SETTINGS, expected_fingerprint=other)
    assert decision.verdict is Verdict.FAIL
    assert "weights differ" in decision.rules[1].detail


def test_no_candidate_is_not_measured(report: Any, arm: Any, prompts: Any) -> None:
    with pytest.raises(EvaluationError, match="no candidate"):
        decide(report(arm("no_draft", prompts())), settings=SETTINGS)


def test_same_decision_from_the_file(report: Any, arm: Any, prompts: Any, tmp_path: Path) -> None:
    champion = arm("champion", prompts(), num_draft_tokens=2)
    first = report(arm("candidate", prompts((10, 6, 5)), num_draft_tokens=2, rates={1: 5.0}), champion)
    again = AcceptanceReport.read(first.write(tmp_path / "report.json"))
    assert decide(again, settings=SETTINGS).digest == decide(first, settings=SETTINGS).digest


def test_a_decision_is_checked_against_its_report_to_the_byte(
    served: Any, arm: Any, prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = (prompts((10, 6, 5)), arm("champion", prompts(), num_draft_tokens=2))
    measured = served(*arms).write(tmp_path / "report.json")
    first, again = tmp_path / "decision.json", tmp_path / "again.json"
    code = main(["--report", str(measured), "--recipe", "demo", "--out", str(first)])
    assert main(["--report", str(measured), "--decision", str(first), "--out", str(again)]) == code
    assert first.read_bytes() == again.read_bytes()
    other = served(*arms, num_equal=9).write(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="made of another report"):
        main(["--report", str(other), "--decision", str(first)])


@pytest.mark.parametrize(
    ("what", "changed"), [("verdict", "pass"), ("candidate_digest", "0" * 64), ("settings", {"alpha": 0.4})]
)
def test_a_tampered_decision_is_refused(
    what: str, changed: Any, report: Any, arm: Any, prompts: Any, tmp_path: Path
) -> None:
    measured = report(arm("candidate", prompts((50, 1, 0)), num_draft_tokens=2)).write(tmp_path / "report.json")
    path = tmp_path / "decision.json"
    assert main(["--report", str(measured), "--recipe", "demo", "--out", str(path)]) == 1
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {what: changed}))
    with pytest.raises(ConfigError, match="changed after it was signed"):
        main(["--report", str(measured), "--decision", str(path)])
    # Signed anew by whoever changed it, it still is not what the report gives.
    forged = GateDecision.model_validate(told | {what: changed}).signed()
    forged.write(path)
    with pytest.raises(ConfigError, match="does not give this decision"):
        main(["--report", str(measured), "--decision", str(path)])


def test_measuring_is_asked_of_the_task_and_its_failure_is_not_a_verdict(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if "broken" in command:
            return subprocess.CompletedProcess(command, 1)
        served().write(tmp_path / "acceptance_report.json")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("components.evaluation.gate.subprocess.run", run)
    options = ["--recipe", "demo", "--out-dir", str(tmp_path), "--champion", "old"]
    assert main(["--candidate", "new", *options]) == 0
    assert commands[0][2:8] == ["tasks.measure_for_gate", "--candidate", "new", "--recipe", "demo", "--out-dir"]
    assert commands[0][-2:] == ["--champion", "old"]
    assert GateDecision.read(tmp_path / "gate_decision.json").verdict is Verdict.PASS
    with pytest.raises(EvaluationError, match="could not be measured"):
        main(["--candidate", "broken", *options])


def test_overall_verdict() -> None:
    assert overall_verdict([Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL]) is Verdict.FAIL
    assert overall_verdict([Verdict.PASS, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert overall_verdict([]) is Verdict.INCONCLUSIVE


def test_exit_codes(served: Any, prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = served().write(tmp_path / "report.json")
    out = tmp_path / "decision.json"
    assert main(["--report", str(path), "--recipe", "demo", "--out", str(out)]) == 0
    assert GateDecision.read(out).verdict is Verdict.PASS
    assert "verdict: pass" in capsys.readouterr().out
    poor = served(prompts((50, 1, 0))).write(tmp_path / "poor.json")
    assert main(["--report", str(poor), "--recipe", "demo"]) == 1
    alone = served(prompts(num=1)).write(tmp_path / "one.json")
    assert main(["--report", str(alone), "--recipe", "demo"]) == 2


@pytest.mark.parametrize("arguments", [["--report", "nowhere.json", "--recipe", "demo"], ["--recipe", "demo"]])
def test_command_line_exits_with_three_when_nothing_was_measured(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "components.evaluation.gate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 3
    assert "error: " in done.stderr and "Traceback" not in done.stderr


def test_nan_in_a_file_is_not_readable(report: Any, arm: Any, prompts: Any, tmp_path: Path) -> None:
    path = report(arm("candidate", prompts(), num_draft_tokens=2)).write(tmp_path / "report.json")
    broken = json.loads(path.read_text())
    broken["arms"]["candidate"]["acceptance_length"] = None
    path.write_text(json.dumps(broken))
    command = [sys.executable, "-m", "components.evaluation.gate", "--report", str(path), "--recipe", "demo"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).returncode == 3
