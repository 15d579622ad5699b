"""The gate: rules over an `AcceptanceReport`, and one written decision.

    python -m components.evaluation.gate --report report.json --recipe demo

exits with 0 for pass, 1 for fail, 2 for inconclusive, 3 when nothing could be decided, so that a rollout controller
or a CI job can call it. `decide` is pure: the same report and settings give the same decision, digest included.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import numpy as np

from components.contracts import (
    AcceptanceReport,
    ArmReport,
    GateDecision,
    PromptMeasurement,
    RuleResult,
    TargetFingerprint,
    Verdict,
)
from components.errors import EvaluationError, run_main
from components.evaluation.measure import acceptance_length, acceptance_sums, draft_coverage
from components.evaluation.speed import choose_schedule, speedups
from components.evaluation.statistics import (
    Array,
    Interval,
    non_inferiority_verdict,
    paired_difference_interval,
    ratio_interval,
    relative_difference,
    threshold_verdict,
)
from components.settings import GateSettings, load_recipe

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}
EXIT_NOT_MEASURED = 3


def decide(
    report: AcceptanceReport, *, settings: GateSettings, expected_fingerprint: TargetFingerprint | None = None
) -> GateDecision:
    """Apply every rule of `settings` to `report`.

    The verdict is fail if any rule fails, else inconclusive if any is, else pass. `created_at` is the report's, so a
    decision made again from the file equals the first one to the byte.

    Args:
        report: served measurement with the arm 'candidate'; 'champion' and 'no_draft' where there are any.
        settings: thresholds and margins.
        expected_fingerprint: of the target the decision is wanted for; None skips that rule.

    Raises:
        EvaluationError: the report has no candidate, or a candidate without a checkpoint or without prompts.
    """
    candidate = report.arms.get("candidate")
    if candidate is None or candidate.checkpoint_digest is None or not candidate.prompts:
        raise EvaluationError(
            "the report measures no candidate drafter",
            got=f"arms {', '.join(report.arms) or 'none'}",
            expected="an arm 'candidate' with a checkpoint digest and at least one prompt",
        )
    champion = report.arms.get("champion")
    rules = [_finite(report), _fingerprint(report, expected_fingerprint)]
    rules += [
        _min_acceptance(candidate, settings),
        _first_position(candidate, settings),
        _coverage(candidate, settings),
    ]
    rules += _non_inferiority(candidate, champion, settings) if champion is not None else []
    rules += [_speedup(report, settings), _losslessness(report, settings)]
    kept = tuple(rule for rule in rules if rule is not None)
    speed = {arm: one.speed for arm, one in report.arms.items()}
    return GateDecision(
        candidate_digest=candidate.checkpoint_digest,
        champion_digest=champion.checkpoint_digest if champion is not None else None,
        target_fingerprint=report.target.fingerprint,
        report_digest=report.digest,
        rules=kept,
        verdict=overall_verdict(rule.verdict for rule in kept),
        speculative_schedule=choose_schedule(speed, len(candidate.acceptance_by_position)),
        created_at=report.created_at,
    )


def overall_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Fail if any fails, else inconclusive if any is, else pass; inconclusive for no rules at all."""
    found = set(verdicts)
    if Verdict.FAIL in found:
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE if Verdict.INCONCLUSIVE in found or not found else Verdict.PASS


def _finite(report: AcceptanceReport) -> RuleResult:
    """Every figure of every arm is a finite number: a comparison with NaN is false and must not look like a verdict."""
    broken = [f"{arm}.{name}" for arm, one in report.arms.items() for name, x in _figures(one) if not math.isfinite(x)]
    return RuleResult(
        rule="finite figures",
        verdict=Verdict.FAIL if broken else Verdict.PASS,
        value=len(broken),
        threshold=0,
        detail=f"not finite: {', '.join(broken)}" if broken else "all figures of all arms are finite",
    )


def _figures(arm: ArmReport) -> list[tuple[str, float]]:
    figures = [("acceptance_length", arm.acceptance_length), ("draft_coverage", arm.draft_coverage)]
    figures += [("acceptance_interval", end) for end in arm.acceptance_interval or ()]
    figures += [(f"acceptance_by_slice.{name}", value) for name, value in arm.acceptance_by_slice.items()]
    figures += [(f"acceptance_by_position.{k}", value) for k, value in enumerate(arm.acceptance_by_position, start=1)]
    figures += [(f"latency of {prompt.prompt_id}", prompt.latency_s) for prompt in arm.prompts]
    return figures + [(f"tok/s at {point.concurrency}", point.output_tokens_per_s) for point in arm.speed]


def _fingerprint(report: AcceptanceReport, expected: TargetFingerprint | None) -> RuleResult | None:
    if expected is None:
        return None
    ours, theirs = report.target.fingerprint.model_dump(), expected.model_dump()
    different = [part for part in ours if ours[part] != theirs[part]]
    return RuleResult(
        rule="target fingerprint",
        verdict=Verdict.FAIL if different else Verdict.PASS,
        value=len(different),
        threshold=0,
        detail=f"measured on another target: {', '.join(different)} differ" if different else "measured on this target",
    )


def _min_acceptance(candidate: ArmReport, settings: GateSettings) -> RuleResult:
    """The whole 95 % interval of the acceptance length, recomputed from the prompts, is at or above the threshold."""
    num, den = acceptance_sums(candidate.prompts)
    interval = ratio_interval(num, den, num_samples=settings.bootstrap_samples, seed=settings.seed)
    return RuleResult(
        rule="acceptance length",
        # No step with a draft: there is a drafter and it did nothing, which is a failure, not a lack of data.
        verdict=threshold_verdict(interval, settings.min_acceptance_length) if den.sum() else Verdict.FAIL,
        value=acceptance_length(candidate.prompts),
        threshold=settings.min_acceptance_length,
        detail=_interval_text(interval, len(candidate.prompts)) if den.sum() else "no target step had a draft",
    )


def _first_position(candidate: ArmReport, settings: GateSettings) -> RuleResult:
    """Share of steps that accepted the first draft token: near zero means a collapsed drafter."""
    accepted = _array(
        prompt.accepted_by_position[0] if prompt.accepted_by_position else 0 for prompt in candidate.prompts
    )
    steps = _array(prompt.num_steps for prompt in candidate.prompts)
    interval = ratio_interval(accepted, steps, num_samples=settings.bootstrap_samples, seed=settings.seed)
    return RuleResult(
        rule="first position",
        verdict=threshold_verdict(interval, settings.min_first_position_acceptance) if steps.sum() else Verdict.FAIL,
        value=float(accepted.sum() / steps.sum()) if steps.sum() else 0.0,
        threshold=settings.min_first_position_acceptance,
        detail=_interval_text(interval, len(candidate.prompts)),
    )


def _coverage(candidate: ArmReport, settings: GateSettings) -> RuleResult:
    value = draft_coverage(candidate.prompts)
    return RuleResult(
        rule="draft coverage",
        verdict=Verdict.PASS if value >= settings.min_draft_coverage else Verdict.FAIL,
        value=value,
        threshold=settings.min_draft_coverage,
        detail="share of output tokens from target steps with a draft",
    )


def _non_inferiority(candidate: ArmReport, champion: ArmReport, settings: GateSettings) -> list[RuleResult]:
    """One rule per slice: candidate's acceptance length is at most the margin below the champion's, same prompts."""
    ours, theirs = _by_slice(candidate), _by_slice(champion)
    if _ids(candidate) != _ids(champion):
        raise EvaluationError("candidate and champion did not answer the same prompts; they cannot be compared")
    return [_slice_rule(name, ours[name], theirs[name], settings) for name in sorted(ours)]


def _slice_rule(
    name: str, ours: list[PromptMeasurement], theirs: list[PromptMeasurement], settings: GateSettings
) -> RuleResult:
    sums = (*acceptance_sums(ours), *acceptance_sums(theirs))
    interval = paired_difference_interval(*sums, num_samples=settings.bootstrap_samples, seed=settings.seed)
    drafted = bool(sums[1].sum() and sums[3].sum())
    return RuleResult(
        rule=f"non-inferior on {name}",
        verdict=non_inferiority_verdict(interval, settings.non_inferiority_margin),
        value=relative_difference(*sums) if drafted else None,
        threshold=-settings.non_inferiority_margin,
        detail=_interval_text(interval, len(ours)),
    )


def _speedup(report: AcceptanceReport, settings: GateSettings) -> RuleResult | None:
    if settings.min_speedup is None:
        return None
    value = speedups({arm: one.speed for arm, one in report.arms.items()}).get(1)
    verdict = Verdict.INCONCLUSIVE
    if value is not None:
        verdict = Verdict.PASS if value >= settings.min_speedup else Verdict.FAIL
    return RuleResult(
        rule="speed-up at 1 in flight",
        verdict=verdict,
        value=value,
        threshold=settings.min_speedup,
        detail="tok/s over no draft" if value is not None else "speed of candidate and no_draft at 1 was not measured",
    )


def _losslessness(report: AcceptanceReport, settings: GateSettings) -> RuleResult | None:
    """Greedy outputs with the drafter equal those without it. Sampled ones differ anyway, so no rule above 0."""
    if report.temperature > 0:
        return None
    equal, compared = report.num_equal_outputs, report.num_compared_outputs
    verdict = Verdict.INCONCLUSIVE
    if compared:
        verdict = Verdict.PASS if equal / compared >= settings.min_equal_output_share else Verdict.FAIL
    return RuleResult(
        rule="losslessness",
        verdict=verdict,
        value=equal / compared if compared else None,
        threshold=settings.min_equal_output_share,
        detail=f"{equal} of {compared} outputs equal those without a drafter" if compared else "no_draft not measured",
    )


def _by_slice(arm: ArmReport) -> dict[str, list[PromptMeasurement]]:
    """Prompts of each slice in order of id, so that two arms pair up by position."""
    slices: dict[str, list[PromptMeasurement]] = {}
    for prompt in sorted(arm.prompts, key=lambda prompt: prompt.prompt_id):
        slices.setdefault(prompt.slice, []).append(prompt)
    return slices


def _ids(arm: ArmReport) -> list[tuple[str, str]]:
    return sorted((prompt.slice, prompt.prompt_id) for prompt in arm.prompts)


def _array(values: Iterable[float]) -> Array:
    return np.array(list(values), dtype=float)


def _interval_text(interval: Interval | None, num_prompts: int) -> str:
    if interval is None:
        return f"no interval from {num_prompts} prompt{'s' if num_prompts != 1 else ''}"
    return f"95 % interval {interval[0]:.3f} to {interval[1]:.3f} over {num_prompts} prompts"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Wrong usage exits with 3: argparse's own 2 would read as 'inconclusive'."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_NOT_MEASURED, f"error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring. Returns the exit code."""
    parser = _Parser(prog="python -m components.evaluation.gate", description="Decide on a drafter from a report.")
    parser.add_argument("--report", type=Path, required=True, help="AcceptanceReport as JSON")
    parser.add_argument(
        "--recipe", required=True, help="name in configs/ or path of a YAML file; its gate section rules"
    )
    parser.add_argument("--budget", help="overlay of the recipe")
    parser.add_argument("--fingerprint", type=Path, help="TargetFingerprint as JSON that the report must be about")
    parser.add_argument("--out", type=Path, help="write the GateDecision here")
    options = parser.parse_args(arguments)
    decision = decide(
        AcceptanceReport.read(options.report),
        settings=load_recipe(options.recipe, budget=options.budget).gate,
        expected_fingerprint=TargetFingerprint.read(options.fingerprint) if options.fingerprint else None,
    )
    if options.out:
        decision.write(options.out)
    for rule in decision.rules:
        value = "-" if rule.value is None else f"{rule.value:.3f}"
        limit = "-" if rule.threshold is None else f"{rule.threshold:.3f}"
        print(f"{rule.verdict:<12} {rule.rule:<28} {value:>8} (limit {limit}) {rule.detail}")
    print(f"verdict: {decision.verdict}")
    return EXIT_CODES[decision.verdict]


if __name__ == "__main__":
    run_main(main, error_code=EXIT_NOT_MEASURED)
