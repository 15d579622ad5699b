"""A probe and a plan in words and rows."""

from __future__ import annotations

from components.contracts import MachineProbe, PacePlan


def probe_line(probe: MachineProbe) -> str:
    """What the machine does, in one line."""
    rates = ", ".join(
        f"{rate:.0f} tok/s at {load} in flight" for load, rate in sorted(probe.tokens_per_s.items())
    )
    return (
        f"pace: this machine starts an engine in {probe.engine_up_s:.0f} s, answers {rates}, reads"
        f" {probe.prompt_tokens_per_s:,.0f} tok/s, takes {1000 * probe.training_step_s:.0f} ms "
        "for a training step"
        f" (probe {probe.duration_s:.0f} s)"
    )


def plan_lines(plan: PacePlan) -> list[str]:
    """What the run does of its recipe, what it leaves, and when it should end."""
    chosen = plan.chosen
    lines = [
        f"pace: {chosen.num_conversations} conversations, {plan.training_steps} training steps,"
        f" {sum(chosen.slices.values())} evaluation prompts; about {_minutes(plan.expected_s)} "
        "more, of"
        f" {_minutes(max(0.0, plan.available_s))} left ("
        + ", ".join(f"{name} {_minutes(seconds)}" for name, seconds in plan.stages.items())
        + ")"
    ]

    if plan.given_up:
        lines.append(
            f"pace: the whole recipe would take {_minutes(plan.full_s)}; less than it asks for: "
            + "; ".join(plan.given_up)
        )

    if not plan.fits:
        lines.append(
            f"pace: even the least that the recipe allows takes about {_minutes(plan.expected_s)},"
            f" {_minutes(plan.expected_s - plan.available_s)} more than there are left; it is "
            "run all the same"
        )

    return lines


def plan_rows(plan: PacePlan) -> tuple[tuple[str, str, str], list[tuple[str, str, str]]]:
    """Columns and rows of the amounts: the recipe's own beside the chosen ones."""
    full, chosen = plan.full, plan.chosen
    rows = [
        ("conversations", f"{full.num_conversations}", f"{chosen.num_conversations}"),
        *(
            (f"evaluation prompts, {name}", f"{number}", f"{chosen.slices[name]}")
            for name, number in full.slices.items()
        ),
        (
            "speed measured at, in flight",
            _listed(full.speed_requests_in_flight),
            _listed(chosen.speed_requests_in_flight),
        ),
        (
            "prompts for the untrained drafter",
            f"{full.num_untrained_prompts}",
            f"{chosen.num_untrained_prompts}",
        ),
        ("least canary step", f"{full.canary_step_s:g} s", f"{chosen.canary_step_s:g} s"),
        ("expected from the probe on", _minutes(plan.full_s), _minutes(plan.expected_s)),
    ]

    return ("amount", "recipe", "this run"), rows


def _listed(levels: tuple[int, ...]) -> str:
    return ", ".join(f"{level}" for level in levels)


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
