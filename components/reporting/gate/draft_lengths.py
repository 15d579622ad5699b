"""Fewer draft tokens per step set beside the drafter's own number: what they accept, and what they
are worth.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.contracts import AcceptanceReport, Arm, PromptMeasurement, SpeedPoint


def length_table(report: AcceptanceReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows by number of draft tokens, most first; no rows where only the drafter's own
    was measured.

    Acceptance lengths are over the same prompts in every row. Speed is over no draft in turns with
    each.
    """
    if not report.draft_lengths or Arm.CANDIDATE not in report.arms:
        return (), []
    candidate = report.arms[Arm.CANDIDATE]
    plain = report.arms.get(Arm.NO_DRAFT)
    ids = set.intersection(
        *({prompt.prompt_id for prompt in one.arm.prompts} for one in report.draft_lengths)
    )

    own = (
        len(candidate.acceptance_by_position),
        candidate.prompts,
        candidate.speed,
        plain.speed if plain else (),
    )
    measured = [
        own,
        *(
            (o.num_draft_tokens, o.arm.prompts, o.arm.speed, o.no_draft_speed)
            for o in report.draft_lengths
        ),
    ]

    loads = sorted({point.requests_in_flight for _, _, speed, _ in measured for point in speed})
    rows = [
        (str(length), _length_over(prompts, ids), *_ratios(speed, base, loads))
        for length, prompts, speed, base in sorted(measured, key=lambda one: -one[0])
    ]

    return (
        "draft tokens",
        f"acceptance length ({len(ids)} prompts)",
        *(f"{load} in flight" for load in loads),
    ), rows


LENGTH_NOTE = (
    "tok/s over no draft by requests in flight; each number of draft tokens in turns with no draft."
)


def _length_over(prompts: Sequence[PromptMeasurement], ids: set[str]) -> str:
    chosen = [prompt for prompt in prompts if prompt.prompt_id in ids]
    num_steps = sum(prompt.num_steps for prompt in chosen)
    if not num_steps:
        return "-"
    return f"{(num_steps + sum(prompt.num_accepted_tokens for prompt in chosen)) / num_steps:.3f}"


def _ratios(
    speed: Sequence[SpeedPoint], base: Sequence[SpeedPoint], loads: Sequence[int]
) -> list[str]:
    ours = {point.requests_in_flight: point.output_tokens_per_s for point in speed}
    plain = {point.requests_in_flight: point.output_tokens_per_s for point in base}
    return [
        f"{ours[load] / plain[load]:.2f}x" if ours.get(load) and plain.get(load) else "-"
        for load in loads
    ]
