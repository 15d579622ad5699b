"""The gate's page: one self-contained HTML file with tables and plots, light or dark as the
reader's system is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmGroups,
    ArmReport,
    GateDecision,
    PromptMeasurement,
    RivalComparison,
    RuleResult,
    Verdict,
    write_atomic,
)
from components.reporting.gate.acceptance_plots import acceptance_figures, break_even, ordered_arms
from components.reporting.gate.compatibility import compatibility_section
from components.reporting.gate.draft_lengths import LENGTH_NOTE, length_table
from components.reporting.gate.groups import groups_section, warm_prefix_section
from components.reporting.gate.rivals import rivals_section
from components.reporting.gate.style import STYLE
from components.reporting.html_table import html_table as _table
from components.reporting.report import speedup
from components.reporting.style import label, to_svg

NUM_LOST = 8
MAX_PROMPT_CHARS = 220


@dataclass(frozen=True)
class LostPrompt:
    """A prompt on which the candidate did worse than what it is compared with; lengths are per
    target step.
    """

    prompt_id: str
    slice: str
    ours: float
    theirs: float
    num_steps: int

    @property
    def loss(self) -> float:
        """Tokens of the answer that the candidate would have committed more, at the other's
        length.
        """
        return (self.theirs - self.ours) * self.num_steps


def write_gate_page(
    report: AcceptanceReport,
    decision: GateDecision,
    path: Path,
    *,
    prompts: Mapping[str, str] | None = None,
    groups: Sequence[ArmGroups] = (),
    rivals: Sequence[RivalComparison] = (),
) -> Path:
    """Write the page to `path`.

    Args:
        report, decision: what it shows.
        path: of the HTML file.
        prompts: text by prompt id, for the sample of lost ones.
        groups: acceptance by length of the prompt and by language, of each arm.
        rivals: how the candidate stands to drafting without a drafter.
    """
    return write_atomic(
        path, gate_page(report, decision, prompts=prompts, groups=groups, rivals=rivals)
    )


def gate_page(
    report: AcceptanceReport,
    decision: GateDecision,
    *,
    prompts: Mapping[str, str] | None = None,
    groups: Sequence[ArmGroups] = (),
    rivals: Sequence[RivalComparison] = (),
) -> str:
    """The page as HTML. It loads nothing: style and plots are inside."""
    figures = {
        name: to_svg(figure, name=name)
        for name, figure in acceptance_figures(report, decision=decision).items()
    }
    body = [
        _head(report, decision),
        _section("Acceptance length by slice", _lengths(report), figures, "acceptance_by_slice"),
        groups_section(groups),
        _section("Candidate against champion", "", figures, "paired_differences"),
        _section("Speed", _speed(report, decision), figures, "speed_by_requests_in_flight"),
        _section("Fewer draft tokens", _draft_lengths(report), figures),
        rivals_section(report, rivals),
        warm_prefix_section(report.warm_prefix),
        _section("Draft positions", "", figures, "acceptance_by_position", "accepted_per_step"),
        _section("Rules", _rules(decision.rules), figures),
        compatibility_section(
            report.compatibility, required=decision.settings.get("required_requests", ())
        ),
        _section("Where the candidate lost most", _lost(report, prompts or {}), figures),
        _section("What was measured", _inputs(report, decision), figures),
    ]

    title = escape(f"Gate: {decision.verdict}, {report.target.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><main>\n{''.join(body)}\n</main></body></html>\n"
    )


def lost_prompts(report: AcceptanceReport, *, num: int = NUM_LOST) -> tuple[str, list[LostPrompt]]:
    """What the candidate is compared with, and the prompts on which it committed fewest tokens
    against that.

    The champion on the same prompt where one was measured, else the candidate's own length on the
    prompt's slice.
    """
    candidate = report.arms[Arm.CANDIDATE]
    champion = report.arms.get(Arm.CHAMPION)
    theirs = (
        {prompt.prompt_id: prompt for prompt in champion.prompts} if champion is not None else {}
    )
    lost = []

    for prompt in candidate.prompts:
        if not prompt.num_steps:
            continue
        if champion is None:
            other = candidate.acceptance_by_slice.get(prompt.slice, 1.0)
        elif prompt.prompt_id in theirs and theirs[prompt.prompt_id].num_steps:
            other = _length(theirs[prompt.prompt_id])
        else:
            continue
        lost.append(
            LostPrompt(prompt.prompt_id, prompt.slice, _length(prompt), other, prompt.num_steps)
        )

    ordered = sorted((one for one in lost if one.loss > 0), key=lambda one: -one.loss)
    return ("champion" if champion is not None else "its slice"), ordered[:num]


def _length(prompt: PromptMeasurement) -> float:
    return (prompt.num_accepted_tokens + prompt.num_steps) / prompt.num_steps


def _head(report: AcceptanceReport, decision: GateDecision) -> str:
    candidate = report.arms[Arm.CANDIDATE]
    ratios = speedup(report)
    claim = "superior to the champion" if decision.superior else ""
    ends = candidate.acceptance_interval
    spread = f", {ends[0]:.2f} to {ends[1]:.2f}" if ends else ""
    facts = [
        ("acceptance length", f"{candidate.acceptance_length:.2f}", f"tokens per step{spread}")
    ]

    overall = next((rule for rule in decision.rules if rule.rule == "superior overall"), None)
    if overall is not None and overall.value is not None:
        facts.append(
            (
                "against champion",
                f"{100 * overall.value:+.1f} %",
                claim or "difference, same prompts",
            )
        )

    facts += [
        (f"{level} in flight", f"{ratio:.2f}x", "tok/s over no draft")
        for level, ratio in sorted(ratios.items())[:3]
    ]
    cards = "".join(
        f'<div class="card"><div class="what">{escape(what)}</div><div '
        f'class="number">{escape(number)}</div>'
        f'<div class="unit">{escape(unit)}</div></div>'
        for what, number, unit in facts
    )

    deciding = [
        rule.rule for rule in decision.rules if rule.binding and rule.verdict == decision.verdict
    ]
    words = {
        Verdict.PASS: "every rule holds",
        Verdict.FAIL: "failed: ",
        Verdict.INCONCLUSIVE: "undecided: ",
    }

    why = words[decision.verdict] + (
        "" if decision.verdict is Verdict.PASS else ", ".join(deciding)
    )
    return (
        f"<header><p class='kind'>Gate of a drafter for {escape(report.target.name)}</p>"
        f"<h1><span class='badge {decision.verdict}'>{decision.verdict}</span>{escape(why)}</h1>"
        f"<div class='cards'>{cards}</div></header>\n"
    )


def _section(title: str, content: str, figures: Mapping[str, str], *names: str) -> str:
    plots = "".join(f"<figure>{figures[name]}</figure>" for name in names if name in figures)
    return (
        f"<section><h2>{escape(title)}</h2>{content}{plots}</section>\n" if content or plots else ""
    )


def _lengths(report: AcceptanceReport) -> str:
    """Arms by slices, as papers print it."""
    arms = [arm for arm in ordered_arms(report) if arm.acceptance_by_position]
    slices = sorted({name for arm in arms for name in arm.acceptance_by_slice})
    count = {
        name: sum(prompt.slice == name for prompt in report.arms[Arm.CANDIDATE].prompts)
        for name in slices
    }
    columns = ["", *(f"{name} ({count[name]})" for name in slices), "all"]

    best = {
        name: max(arm.acceptance_by_slice.get(name, 0.0) for arm in arms) if len(arms) > 1 else None
        for name in slices
    }
    rows = [[_arm_name(arm), *_cells(arm, slices, best)] for arm in arms]

    for further in report.further_temperatures:
        for arm in further.arms.values():
            if arm.acceptance_by_position:
                name = (
                    f"{_arm_name(arm)}, temperature {further.temperature:g}, "
                    f"{len(arm.prompts)} prompts"
                )
                rows.append([name, *_cells(arm, slices, {})])

    note = (
        f"Tokens per target step at temperature {report.temperature:g}, bonus token "
        "included; prompts in brackets."
    )
    return (
        _table(columns, rows, numbers=range(1, len(columns)))
        + f"<p class='note'>{escape(note)}</p>"
    )


def _cells(arm: ArmReport, slices: Sequence[str], best: Mapping[str, float | None]) -> list[str]:
    cells = []
    for name in slices:
        value = arm.acceptance_by_slice.get(name)
        cell = _html_value(value, arm.interval_by_slice.get(name))
        cells.append(
            f"<strong>{cell}</strong>" if value is not None and value == best.get(name) else cell
        )
    return [*cells, _html_value(arm.acceptance_length, arm.acceptance_interval)]


def _speed(report: AcceptanceReport, decision: GateDecision) -> str:
    arms = [arm for arm in ordered_arms(report) if arm.speed]
    if not arms:
        return ""

    ratios = {arm.arm: speedup(report, arm=arm.arm) for arm in arms}
    levels = sorted({point.requests_in_flight for arm in arms for point in arm.speed})
    rows = []
    for level in levels:
        row = [str(level)]
        for arm in arms:
            point = next((point for point in arm.speed if point.requests_in_flight == level), None)
            ratio = ratios[arm.arm].get(level) if arm.arm != Arm.NO_DRAFT else None
            told = f" <span class='soft'>{ratio:.2f}x</span>" if ratio is not None else ""
            row.append(f"{point.output_tokens_per_s:.0f}{told}" if point else "-")
            row.append(f"{point.ttft_p50_ms:.0f} / {point.itl_p50_ms:.1f}" if point else "-")
        rows.append(row)

    columns = [
        "in flight",
        *(text for arm in arms for text in (f"{label(arm.arm)}, tok/s", "TTFT / ITL, ms")),
    ]
    even = break_even(ratios.get(Arm.CANDIDATE, {}))
    words = [f"Break-even with no draft at about {even:.1f} requests in flight." if even else ""]
    rule = ", ".join(
        f"{low} to {high} in flight: {k}" for low, high, k in decision.speculative_schedule
    )

    words += [f"Draft tokens by load: {rule}." if rule else ""]
    if decision.drafter_out_above is not None:
        words.append(f"Take the drafter out above {decision.drafter_out_above} requests in flight.")

    note = " ".join(word for word in words if word)
    return (
        _table(columns, rows, numbers=range(len(columns))) + f"<p class='note'>{escape(note)}</p>"
    )


def _draft_lengths(report: AcceptanceReport) -> str:
    columns, rows = length_table(report)
    if not rows:
        return ""
    return (
        _table(columns, rows, numbers=range(len(columns)))
        + f"<p class='note'>{escape(LENGTH_NOTE)}</p>"
    )


def _rules(rules: Sequence[RuleResult]) -> str:
    rows = [
        [
            f"<span class='badge small {rule.verdict if rule.binding else 'info'}'>"
            f"{rule.verdict if rule.binding else 'info'}</span>",
            escape(rule.rule),
            "" if rule.value is None else f"{rule.value:.3f}",
            "" if rule.threshold is None else f"{rule.threshold:.3f}",
            escape(rule.detail),
        ]
        for rule in rules
    ]
    return _table(["", "rule", "value", "limit", "numbers behind it"], rows, numbers=(2, 3))


def _lost(report: AcceptanceReport, prompts: Mapping[str, str]) -> str:
    against, lost = lost_prompts(report)
    if not lost:
        return "<p class='note'>On none.</p>"

    rows = [
        [
            escape(one.slice),
            escape(_shortened(prompts.get(one.prompt_id, one.prompt_id))),
            f"{one.ours:.2f}",
            f"{one.theirs:.2f}",
            f"{one.loss:.0f}",
        ]
        for one in lost
    ]

    note = (
        f"Against {against}; lost: tokens more that the same steps would have committed at "
        "the other length."
    )
    table = _table(["slice", "prompt", "candidate", against, "lost"], rows, numbers=(2, 3, 4))

    return table + f"<p class='note'>{escape(note)}</p>"


def _inputs(report: AcceptanceReport, decision: GateDecision) -> str:
    facts = [
        (
            "target",
            f"{report.target.name}, {report.target.source}, quantization "
            f"{report.target.quantization}",
        ),
        ("target fingerprint", report.target.fingerprint.digest),
        ("candidate", decision.candidate_digest),
        ("champion", decision.champion_digest or "none"),
        ("prompts", f"{len(report.arms['candidate'].prompts)}, digest {report.prompt_digest}"),
        (
            "left out",
            ", ".join(f"{name} ({why})" for name, why in report.excluded.items()) or "none",
        ),
        ("sampling", f"temperature {report.temperature:g}, at most {report.max_tokens} tokens"),
        ("engine", f"vLLM {report.engine_version}"),
        ("measured", f"{report.created_at:%Y-%m-%d %H:%M} UTC"),
        ("report digest", decision.report_digest),
        ("decision, content digest", decision.content_digest),
        ("signature", decision.signature or "none: no signing key was configured"),
    ]

    rows = [[escape(name), f"<code>{escape(value)}</code>"] for name, value in facts]
    return _table(["", ""], rows, numbers=())


def _arm_name(arm: ArmReport) -> str:
    digest = (
        f" <span class='soft'>{escape(arm.checkpoint_digest[:8])}</span>"
        if arm.checkpoint_digest
        else ""
    )
    return f"{escape(label(arm.arm))}{digest}"


def _html_value(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    told = f" <span class='soft'>[{interval[0]:.2f}, {interval[1]:.2f}]</span>" if interval else ""
    return f"{value:.2f}{told}"


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_PROMPT_CHARS else flat[:MAX_PROMPT_CHARS].rstrip() + " ..."
