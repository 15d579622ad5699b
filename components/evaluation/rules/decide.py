"""From an `AcceptanceReport` to one written `GateDecision`. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmReport,
    GateDecision,
    RuleResult,
    TargetFingerprint,
    Verdict,
)
from components.errors import ConfigError, EvaluationError
from components.evaluation.draft_schedule import choose_schedule, load_limit, reported_ratios
from components.evaluation.outputs.losslessness import losslessness, sampled_losslessness
from components.evaluation.requests.compatibility import compatibility_rule
from components.evaluation.rules import alone as rules
from components.evaluation.rules.against_champion import (
    SUPERIOR,
    non_inferior_when_sampled,
    non_inferiority,
    superiority,
)
from components.evaluation.rules.asked import Asked, as_asked, figures_hold
from components.evaluation.rules.looks import at_look
from components.evaluation.rules.positions import position_collapse
from components.evaluation.rules.rivals import beaten_by, rival_rules
from components.settings import GateSettings


def decide(
    report: AcceptanceReport,
    *,
    settings: GateSettings,
    asked: Asked | None = None,
    expected_fingerprint: TargetFingerprint | None = None,
    signing_key: bytes | None = None,
) -> GateDecision:
    """Apply every rule of `settings` to `report`.

    Levels are those of the report's look: all looks at a candidate together err no more often than
    the recipe's say. The verdict is fail if any binding rule fails, else inconclusive if any is,
    else pass. `created_at` is the report's, so a decision made again from the file equals the first
    one to the byte.

    Args:
        report: served measurement with the arm 'candidate'; 'champion' and 'no_draft' where there
            are any.
        settings: thresholds and margins.
        asked: what the recipe asks of the report; None judges the rules alone, which releases
            nothing: a decision without its recipe is refused by `check_decision`.
        expected_fingerprint: of the target the decision is wanted for; None skips that rule.
        signing_key: signs the decision.

    Raises:
        EvaluationError: the report has no candidate, or a candidate without a checkpoint or without
            prompts, or arms that answered different prompts.
    """
    candidate, candidate_digest = _candidate(report)
    champion = report.arms.get(Arm.CHAMPION)
    results = _results(
        report, candidate, champion, at_look(settings, report.look), expected_fingerprint
    )
    if asked is not None:
        results = (as_asked(report, asked), *results)

    verdict = overall_verdict(result.verdict for result in results if result.binding)
    speed = {arm: one.speed for arm, one in report.arms.items()}
    ratios = reported_ratios(report)
    schedule = choose_schedule(ratios)
    is_above = any(result.rule == SUPERIOR and result.verdict is Verdict.PASS for result in results)

    return GateDecision(
        candidate_digest=candidate_digest,
        champion_digest=champion.checkpoint_digest if champion is not None else None,
        target_fingerprint=report.target.fingerprint,
        report_digest=report.digest,
        rules=results,
        verdict=verdict,
        speculative_schedule=schedule,
        drafter_out_above=load_limit(speed, ratios, schedule),
        superior=is_above and verdict is Verdict.PASS,
        settings=settings.model_dump(mode="json"),
        recipe=asked.recipe.name if asked is not None else "",
        size=asked.size if asked is not None else None,
        look=report.look,
        created_at=report.created_at,
    ).sealed(signing_key)


def check_decision(
    decision: GateDecision,
    report: AcceptanceReport,
    *,
    asked: Asked,
    signing_key: bytes | None = None,
) -> None:
    """Check that `report`, decided again under the recipe as it is now, bears `decision`.

    Raises:
        ConfigError: it was made of another report, is not signed where a key is configured, or the
            report gives another decision.
        EvaluationError: as `decide`.
    """
    decision.check_signature(signing_key)
    if decision.report_digest != report.digest:
        raise ConfigError(
            "the decision was made of another report",
            got=report.digest,
            expected=decision.report_digest,
        )

    again = decide(
        report,
        settings=asked.recipe.gate,
        asked=asked,
        expected_fingerprint=decision.target_fingerprint,
    )

    if again.content_digest != decision.content_digest:
        raise ConfigError(
            "the report does not give this decision under the recipe",
            got=f"{decision.verdict} in the decision, content {decision.content_digest[:16]}",
            expected=f"{again.verdict}, content "
            f"{again.content_digest[:16]}{_first_difference(decision, again)}",
            fix="Gate the drafter again: the recipe, the champion or the rules changed, or it "
            "was not made by them.",
        )


def _first_difference(decision: GateDecision, again: GateDecision) -> str:
    """The first rule that says another thing, in words; empty where all rules agree."""
    told = {rule.rule: rule for rule in decision.rules}
    for rule in again.rules:
        before = told.get(rule.rule)
        if before is None or (before.verdict, before.value, before.threshold) != (
            rule.verdict,
            rule.value,
            rule.threshold,
        ):
            return f" ({rule.rule}: {rule.verdict}, {rule.detail})"
    return ""


def _candidate(report: AcceptanceReport) -> tuple[ArmReport, str]:
    candidate = report.arms.get(Arm.CANDIDATE)
    if candidate is None or candidate.checkpoint_digest is None or not candidate.prompts:
        raise EvaluationError(
            "the report measures no candidate drafter",
            got=f"arms {', '.join(report.arms) or 'none'}",
            expected="an arm 'candidate' with a checkpoint digest and at least one prompt",
        )
    return candidate, candidate.checkpoint_digest


def overall_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Fail if any fails, else inconclusive if any is, else pass; inconclusive for no rules at
    all.
    """
    found = set(verdicts)
    if Verdict.FAIL in found:
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE if Verdict.INCONCLUSIVE in found or not found else Verdict.PASS


def _results(
    report: AcceptanceReport,
    candidate: ArmReport,
    champion: ArmReport | None,
    settings: GateSettings,
    expected: TargetFingerprint | None,
) -> tuple[RuleResult, ...]:
    """The rules in the order in which they are shown; those about a champion are left out where
    there is none.
    """
    results: list[RuleResult | None] = [
        rules.finite_figures(report),
        figures_hold(report),
        rules.same_target(report, expected) if expected is not None else None,
        rules.min_acceptance(
            candidate, settings.min_acceptance_length, settings, name="acceptance length"
        ),
        position_collapse(candidate, champion, settings),
        rules.coverage(candidate, settings),
    ]

    if champion is not None:
        results += [
            *non_inferiority(candidate, champion, settings),
            superiority(candidate, champion, settings),
        ]

    results += [
        *_sampled(report, settings),
        rules.speedup_at_serving(report, settings),
        losslessness(report, settings),
        *(sampled_losslessness(one, settings) for one in report.sampled_outputs),
        rules.train_served(report.train_served_gap, settings),
        rules.memory(report, settings),
        compatibility_rule(report.compatibility, settings),
        *rival_rules(beaten_by(report, settings)),
    ]

    return tuple(result for result in results if result is not None)


def _sampled(report: AcceptanceReport, settings: GateSettings) -> list[RuleResult]:
    results = []
    for further in report.further_temperatures:
        candidate, champion = further.arms.get(Arm.CANDIDATE), further.arms.get(Arm.CHAMPION)
        if candidate is None:
            raise EvaluationError(
                f"no candidate was measured at temperature {further.temperature:g}"
            )
        if settings.min_sampled_acceptance_length is not None:
            name = f"acceptance length at temperature {further.temperature:g}"
            results.append(
                rules.min_acceptance(
                    candidate, settings.min_sampled_acceptance_length, settings, name=name
                )
            )
        if champion is not None:
            results.append(
                non_inferior_when_sampled(
                    candidate, champion, temperature=further.temperature, settings=settings
                )
            )

    return results
