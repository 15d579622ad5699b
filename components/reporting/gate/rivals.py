"""Section of the gate's page: the candidate beside rivals that draft without a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmReport,
    RivalComparison,
    SpeedPoint,
    Standing,
)
from components.reporting.html_table import html_table

NOTE = (
    "Tokens kept per target step, steps without a draft included; the rival's figure is the "
    "most that the engine's"
    " counts allow. In brackets the candidate over the rival with its {confidence:.3g} % interval."
)
BADGES = {Standing.BETTER: "pass", Standing.WORSE: "fail", Standing.NOT_SHOWN: "inconclusive"}


def rivals_section(report: AcceptanceReport, comparisons: Sequence[RivalComparison]) -> str:
    """Slices by rivals: lengths over all steps and how the candidate stands, then speed; empty
    without a rival.

    Args:
        report: with its `rivals`.
        comparisons: what `evaluation.rivals.beaten_by` says of it.
    """
    if not report.rivals or not comparisons:
        return ""
    table = _lengths(comparisons)
    note = NOTE.format(confidence=100 * comparisons[0].confidence)
    body = f"{_words(comparisons)}{table}<p class='note'>{escape(note)}</p>{_speed(report)}"
    return f"<section><h2>Against drafting without a drafter</h2>{body}</section>\n"


def _words(comparisons: Sequence[RivalComparison]) -> str:
    """One line per rival that is not beaten everywhere: the drafter has not shown what it is for
    there.
    """
    lines = []
    for method in dict.fromkeys(one.method for one in comparisons):
        rows = [one for one in comparisons if one.method == method]
        told = [
            (
                standing,
                [one.slice or "all slices together" for one in rows if one.standing is standing],
            )
            for standing in (Standing.WORSE, Standing.NOT_SHOWN)
        ]
        words = "; ".join(f"{standing} on {', '.join(names)}" for standing, names in told if names)
        lines.append(f"Against {method}: {words or 'better on every slice'}.")

    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _lengths(comparisons: Sequence[RivalComparison]) -> str:
    methods = list(dict.fromkeys(one.method for one in comparisons))
    slices = [*dict.fromkeys(one.slice for one in comparisons if one.slice is not None), None]
    by_key = {(one.method, one.slice): one for one in comparisons}
    rows = []

    for name in slices:
        found = [by_key[method, name] for method in methods if (method, name) in by_key]
        cells = [
            escape(name or "all"),
            str(found[0].num_prompts),
            f"{found[0].candidate_length:.2f}",
        ]
        for one in (by_key.get((method, name)) for method in methods):
            cells += [_length(one), _standing(one)] if one is not None else ["-", "-"]
        rows.append(
            [
                f"<strong>{cell}</strong>" if name is None and at < 3 else cell
                for at, cell in enumerate(cells)
            ]
        )

    columns = ["slice", "prompts", "candidate"]
    numbers = [1, 2]
    for method in methods:
        numbers.append(len(columns))
        columns += [method, f"candidate against {method}"]

    return html_table(columns, rows, numbers=numbers)


def _length(one: RivalComparison) -> str:
    return f"{one.rival_length:.2f}"


def _standing(one: RivalComparison) -> str:
    badge = f"<span class='badge small {BADGES[one.standing]}'>{escape(one.standing)}</span>"
    if one.difference is None:
        return badge
    told = f"{100 * one.difference:+.0f} %"
    if one.interval is not None:
        told += f" [{100 * one.interval[0]:+.0f}, {100 * one.interval[1]:+.0f}]"
    return f"{badge} <span class='soft'>{told}</span>"


def _speed(report: AcceptanceReport) -> str:
    """What is behind the lengths, and tok/s over no draft, each arm in turns with it."""
    candidate = report.arms[Arm.CANDIDATE]
    plain = report.arms.get(Arm.NO_DRAFT)
    arms: list[tuple[str, int, ArmReport, Sequence[SpeedPoint]]] = [
        (
            Arm.CANDIDATE,
            len(candidate.acceptance_by_position),
            candidate,
            plain.speed if plain else (),
        )
    ]

    arms += [
        (one.rival.method, one.rival.num_draft_tokens, one.arm, one.no_draft_speed)
        for one in report.rivals
    ]
    loads = sorted({point.requests_in_flight for _, _, arm, _ in arms for point in arm.speed})
    rows = [
        [
            escape(name),
            str(num_drafts),
            f"{arm.draft_coverage:.0%}",
            _drafted_length(arm),
            *_ratios(arm.speed, base, loads),
        ]
        for name, num_drafts, arm, base in arms
    ]

    columns = [
        "",
        "draft tokens",
        "tokens from drafted steps",
        "length over those",
        *(f"{k} in flight" for k in loads),
    ]

    note = (
        "In flight: tok/s over no draft, in turns with it. A length over drafted steps alone "
        "flatters a rival."
    )
    return (
        html_table(columns, rows, numbers=range(1, len(columns)))
        + f"<p class='note'>{escape(note)}</p>"
    )


def _drafted_length(arm: ArmReport) -> str:
    return (
        f"{arm.acceptance_length:.2f}" if any(prompt.num_steps for prompt in arm.prompts) else "-"
    )


def _ratios(
    ours: Sequence[SpeedPoint], theirs: Sequence[SpeedPoint], loads: Sequence[int]
) -> list[str]:
    rates = {point.requests_in_flight: point.output_tokens_per_s for point in ours}
    plain = {point.requests_in_flight: point.output_tokens_per_s for point in theirs}
    return [
        f"{rates[load] / plain[load]:.2f}x" if rates.get(load) and plain.get(load) else "-"
        for load in loads
    ]
