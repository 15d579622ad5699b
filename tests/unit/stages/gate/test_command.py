"""The gate's command line on reports measured before: exit codes, decisions checked, nothing talked
round.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.contracts import (
    FEATURES,
    AcceptanceReport,
    CompatibilityRow,
    CompatibilityTable,
    GateDecision,
    SelfComparison,
    Served,
    TargetFingerprint,
    TargetRef,
    Verdict,
    digest_json,
    now_utc,
)
from components.errors import ConfigError
from components.evaluation.acceptance import PromptMeasurement
from components.evaluation.prompts import prompt_digest
from components.evaluation.report import arm_report
from components.settings import CONFIGS_DIR, load_recipe
from components.stages.gate.command import main
from components.stages.prompts import prompts_of

FINGERPRINT = TargetFingerprint(
    **{part: digest_json(part) for part in TargetFingerprint.model_fields}
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's, with few prompts and no rule on speed, memory or the gap."""
    told = yaml.safe_load((CONFIGS_DIR / "demo.yaml").read_text())
    told["evaluation"] |= {
        "slices": {"conversations": 8},
        "max_tokens": 32,
        "speed_requests_in_flight": [1],
    }
    told["gate"] |= {"min_speedup": None, "max_train_served_gap": None}
    told.pop("sizes")
    path = tmp_path_factory.mktemp("recipe") / "demo.yaml"
    path.write_text(yaml.safe_dump(told))
    return path


def speed(rate: float) -> Any:
    from components.contracts import SpeedPoint

    return (
        SpeedPoint(
            requests_in_flight=1, num_requests=8, output_tokens_per_s=rate,
            ttft_p50_ms=1, ttft_p99_ms=1, itl_p50_ms=1, itl_p99_ms=1,
        ),
    )  # fmt: skip


@pytest.fixture
def measured(recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """A report of the recipe's prompts whose drafter accepts as `histogram` says, as a file."""

    def make(
        *, histogram: tuple[int, ...] = (10, 6, 4), max_tokens: int = 32, name: str = "report.json"
    ) -> Path:
        prompts = prompts_of(load_recipe(recipe))

        def answers(*, drafted: bool) -> tuple[PromptMeasurement, ...]:
            told = []
            for n, prompt in enumerate(prompts):
                counts = (histogram[0] + 2 * (n % 2), *histogram[1:]) if drafted else ()
                steps = sum(counts)
                accepted = sum(j * count for j, count in enumerate(counts))
                told.append(
                    PromptMeasurement(
                        prompt_id=prompt.prompt_id,
                        slice=prompt.slice,
                        num_prompt_tokens=9,
                        num_output_tokens=1 + steps + accepted,
                        num_steps=steps,
                        num_draft_tokens=2 * steps,
                        num_accepted_tokens=accepted,
                        accepted_by_position=tuple(sum(counts[k:]) for k in range(1, len(counts))),
                        latency_s=1,
                        output_digest=digest_json(prompt.prompt_id),
                    )
                )
            return tuple(told)

        plain = answers(drafted=False)
        digests = {p.prompt_id: p.output_digest for p in plain}
        arms = {
            "candidate": arm_report(
                "candidate",
                prompts=answers(drafted=True),
                speed=speed(60),
                checkpoint_digest="c" * 64,
                num_draft_tokens=2,
                engine_counters={},
            ),
            "no_draft": arm_report(
                "no_draft",
                prompts=plain,
                speed=speed(50),
                checkpoint_digest=None,
                num_draft_tokens=0,
                engine_counters={},
            ),
        }
        return AcceptanceReport(
            target=TargetRef(
                name="t", path="p", source="s", fingerprint=FINGERPRINT, quantization="none"
            ),
            recipe="demo",
            dtype=load_recipe(recipe).engine.dtype,
            temperature=0,
            max_tokens=max_tokens,
            prompt_digest=prompt_digest(prompts),
            arms=arms,
            num_equal_outputs=len(prompts),
            num_compared_outputs=len(prompts),
            self_comparisons=tuple(
                SelfComparison(
                    num_in_flight=load,
                    digests=digests,
                    divergences={},
                    num_gaps=500,
                    max_gap_change_nats=0.1,
                )
                for load in (4, 12)
            ),
            compatibility=CompatibilityTable(
                engine_version="0",
                method="dspark",
                device="cpu",
                model="m",
                created_at=now_utc(),
                rows=tuple(
                    CompatibilityRow(feature=one, plain=Served.OK, drafting=Served.OK)
                    for one in FEATURES
                ),
            ),
            engine_version="0",
            created_at=now_utc(),
        ).write(tmp_path / name)

    return make


def about(recipe: Path, report: Path) -> list[str]:
    return ["--recipe", str(recipe), "--report", str(report)]


def test_exit_codes(
    recipe: Path, measured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "decision.json"
    assert main([*about(recipe, measured()), "--out", str(out)]) == 0
    assert GateDecision.read(out).verdict is Verdict.PASS
    assert "verdict: pass" in capsys.readouterr().out
    assert main(about(recipe, measured(histogram=(50, 1, 0)))) == 1
    assert main(about(recipe, measured(max_tokens=64))) == 2
    assert "answers' length 64 for 32" in capsys.readouterr().out


def test_a_champion_that_was_not_measured_is_no_pass(
    recipe: Path, measured: Any, tmp_path: Path
) -> None:
    champion = tmp_path / "champion"
    champion.mkdir()
    with pytest.raises(Exception, match="champion"):  # no checkpoint at all: an error, never a pass
        main([*about(recipe, measured()), "--champion", str(champion)])


def test_a_decision_is_checked_against_its_report_to_the_byte(
    recipe: Path, measured: Any, tmp_path: Path
) -> None:
    report = measured()
    first = tmp_path / "decision.json"
    again = tmp_path / "again.json"
    assert main([*about(recipe, report), "--out", str(first)]) == 0
    assert main([*about(recipe, report), "--decision", str(first), "--out", str(again)]) == 0
    assert first.read_bytes() == again.read_bytes()
    other = measured(histogram=(10, 7, 4), name="other.json")
    with pytest.raises(ConfigError, match="made of another report"):
        main([*about(recipe, other), "--decision", str(first)])


@pytest.mark.parametrize(
    ("what", "changed"),
    [("verdict", "pass"), ("candidate_digest", "0" * 64), ("settings", {"alpha": 0.4})],
)
def test_a_changed_decision_is_refused(
    what: str, changed: Any, recipe: Path, measured: Any, tmp_path: Path
) -> None:
    report = measured(histogram=(50, 1, 0))
    path = tmp_path / "decision.json"
    assert main([*about(recipe, report), "--out", str(path)]) == 1
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {what: changed}))
    with pytest.raises(ConfigError, match="changed after it was written"):
        main([*about(recipe, report), "--decision", str(path)])
    # With a digest made anew by whoever changed it, it still is not what the report gives.
    GateDecision.model_validate(told | {what: changed}).sealed(None).write(path)
    with pytest.raises(ConfigError, match="does not give this decision"):
        main([*about(recipe, report), "--decision", str(path)])


def test_a_configured_key_signs_and_is_asked_for(
    recipe: Path, measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = measured()
    path = tmp_path / "decision.json"
    key = tmp_path / "key"
    assert main([*about(recipe, report), "--out", str(path)]) == 0
    key.write_text("0123456789abcdef0123456789abcdef\n")
    monkeypatch.setenv("DSPARK_SIGNING_KEY_FILE", str(key))
    with pytest.raises(ConfigError, match="is not signed"):
        main([*about(recipe, report), "--decision", str(path)])
    assert main([*about(recipe, report), "--out", str(path)]) == 0
    assert GateDecision.read(path).signature is not None
    assert main([*about(recipe, report), "--decision", str(path)]) == 0


@pytest.mark.parametrize(
    "arguments", [["--report", "nowhere.json", "--recipe", "demo"], ["--recipe", "demo"], []]
)
def test_exits_with_three_when_nothing_was_measured(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "components.stages.gate.command", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 3
    assert "error: " in done.stderr and "Traceback" not in done.stderr


def test_nan_in_a_file_is_not_readable(recipe: Path, measured: Any) -> None:
    path = measured()
    broken = json.loads(path.read_text())
    broken["arms"]["candidate"]["acceptance_length"] = None
    path.write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match="is not a AcceptanceReport"):
        main(about(recipe, path))
