"""The last lines of a run: what failed, what serves now, what to do; and the exit code that says as
much.

0   a drafter was promoted, or the release in service stays because the new one is not as good
1   the run failed, or wrote no report
4   the gate said fail
5   the gate said inconclusive
6   the canary was rolled back
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from components.contracts import CanaryReport, GateDecision, RuleResult, Verdict
from components.reporting.report import LifecycleReport, TargetChangeReport

OK, FAILED, GATE_FAIL, GATE_INCONCLUSIVE, ROLLED_BACK = 0, 1, 4, 5, 6

Run = LifecycleReport | TargetChangeReport


def exit_code(report: LifecycleReport) -> int:
    """What `make demo` ends with; of several target changes, the first that did not end well."""
    codes = [_code(change) for change in report.target_changes] or [_code(report)]
    return next((code for code in codes if code), OK)


def closing_lines(report: LifecycleReport, *, folder: Path | None = None) -> list[str]:
    """What a reader should know last. Empty where a drafter was promoted: the report's first line
    says it.

    Args:
        report: of the run.
        folder: of the run, with the gate's page in `plots/`; None: not named.
    """
    lines: list[str] = []
    for run in report.target_changes or (report,):
        if _is_promoted(run.canary):
            continue
        name = f"{run.name}: " if isinstance(run, TargetChangeReport) else ""
        lines += [name + line for line in _what_happened(run)]

    if not lines:
        return []
    lines.append(f"what serves now: {report.serving or 'not known; see the report'}")
    page = folder / "plots" / "gate.html" if folder is not None else None
    if page is not None and page.is_file():
        lines.append(f"the gate's page, with every figure: {page}")

    return [*lines, *(f"what to do: {advice}" for advice in _advice(report))]


def training_line(report: LifecycleReport) -> str | None:
    """Where time ended training before its data did; None elsewhere."""
    ended = report.training_ended
    return f"training was {ended}" if ended is not None and ended.startswith("cut short") else None


def _code(run: Run) -> int:
    if _is_promoted(run.canary) or _stays_for_a_reason(run):
        return OK
    if run.gate is None:
        return FAILED
    if run.gate.verdict is Verdict.FAIL:
        return GATE_FAIL
    if run.gate.verdict is Verdict.INCONCLUSIVE:
        return GATE_INCONCLUSIVE
    return ROLLED_BACK if run.canary is not None else FAILED


def _is_promoted(canary: CanaryReport | None) -> bool:
    return canary is not None and canary.promoted


def _stays_for_a_reason(run: Run) -> bool:
    """A champion was beside the candidate, and nothing but the comparison with it failed."""
    gate = run.gate
    if gate is None or gate.verdict is not Verdict.FAIL or gate.champion_digest is None:
        return False
    return all(_is_comparison(rule) for rule in _failed(gate, Verdict.FAIL))


def _is_comparison(rule: RuleResult) -> bool:
    return rule.rule.startswith(("non-inferior", "superior"))


def _failed(gate: GateDecision, verdict: Verdict) -> list[RuleResult]:
    return [rule for rule in gate.rules if rule.binding and rule.verdict is verdict]


def _what_happened(run: Run) -> list[str]:
    if run.gate is None:
        return [f"stopped before the gate: {run.outcome}"]
    if run.gate.verdict is Verdict.PASS:
        why = run.canary.reason if run.canary is not None else "the canary was not reached"
        return [f"the gate passed, nothing was promoted: {why}"]
    rules = _failed(run.gate, run.gate.verdict)
    if _stays_for_a_reason(run):
        first = "the gate said fail: the champion is the better drafter, and stays"
    else:
        first = f"the gate said {run.gate.verdict}: nothing was promoted"
    return [first, *(f"  {_rule_line(rule)}" for rule in rules)]


def _rule_line(rule: RuleResult) -> str:
    value = "not measured" if rule.value is None else f"{rule.value:.3f}"
    limit = "" if rule.threshold is None else f", limit {rule.threshold:.3f}"
    return f"{rule.rule}: {value}{limit} ({rule.detail})"


def _advice(report: LifecycleReport) -> list[str]:
    """What can be done about it, most telling first."""
    gates = [run.gate for run in report.target_changes or (report,) if not _is_promoted(run.canary)]
    rules = [rule for gate in gates if gate is not None for rule in _failed(gate, gate.verdict)]
    return [*dict.fromkeys(_advice_on(rules)), *_advice_on_time(report)] or [
        "see the log of the run and the report above"
    ]


def _advice_on(rules: Sequence[RuleResult]) -> list[str]:
    told = []
    for rule in rules:
        if rule.verdict is Verdict.INCONCLUSIVE and rule.num_further_prompts:
            told.append(
                f"'{rule.rule}' needs about {rule.num_further_prompts} more prompts: raise "
                "evaluation.slices by them,"
                " or make demo SIZE=full, which measures more"
            )
        elif rule.verdict is Verdict.INCONCLUSIVE:
            told.append(
                f"'{rule.rule}' could not be decided ({rule.detail}): measure again, or more of it"
            )
        elif _is_comparison(rule):
            told.append(
                "nothing has to be done: the champion stays; more data or steps may beat it "
                "(SIZE=full)"
            )
        elif "acceptance" in rule.rule or "position" in rule.rule:
            told.append("train on more: make demo SIZE=full, or raise curation.num_conversations")
        elif "speed" in rule.rule:
            told.append(
                "draft less at that load (evaluation.draft_lengths), or train a drafter that "
                "accepts more"
            )
        else:
            told.append(
                f"'{rule.rule}' is not a matter of more training: the gate's page shows where "
                "it fails"
            )

    return told


def _advice_on_time(report: LifecycleReport) -> list[str]:
    told = []
    short = training_line(report)
    if short is not None:
        told.append(f"{short}: a longer pace.ends_within_s leaves it more")
    elif report.pace is not None and report.pace.given_up:
        told.append(
            "this machine had no time for the whole recipe: a longer pace.ends_within_s, or "
            "SIZE=full, does more"
        )
    return told
