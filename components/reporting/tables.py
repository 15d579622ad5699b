"""The report as titled tables: one source for the terminal and the Markdown, so that both show the
same figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmReport,
    Calibration,
    CanaryReport,
    GateDecision,
    PacePlan,
    RuleResult,
    Schedule,
    SpeedPoint,
    StageTiming,
    Verdict,
)
from components.reporting.gate.acceptance_plots import ordered_arms
from components.reporting.gate.draft_lengths import LENGTH_NOTE, length_table
from components.reporting.pace_words import plan_rows, probe_line
from components.reporting.report import ArmFigures, LifecycleReport, TargetChangeReport, speedup
from components.reporting.style import label

MIB = 2**20


@dataclass(frozen=True)
class Table:
    """A titled table; columns after the first are numbers unless named in `text_columns`. `plots`
    illustrate it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    text_columns: tuple[str, ...] = ()
    plots: tuple[str, ...] = ()


def tables(report: LifecycleReport) -> Iterator[Table]:
    """All tables that the report has figures for, in reading order."""
    yield _summary(report)
    if report.acceptance is not None:
        yield _by_slice(report.acceptance)
        yield from _by_position(report.acceptance)
        yield from _speed(report.acceptance)
        yield from _draft_lengths(report.acceptance)

    if report.gate is not None:
        yield _gate(report.gate)
    if report.canary is not None:
        yield _canary(report.canary)

    if report.pace is not None:
        yield _pace(report.pace)
    if report.stages:
        yield _stages(report.stages, report.total_s, report.orchestration_share)

    yield from _data(report)
    yield from _training(report)
    yield from _changes(report.target_changes)


def headline(report: LifecycleReport) -> str:
    """One sentence: what came out, for which target, and the two figures that matter."""
    said = f"{report.target.name}: {report.outcome}"
    if report.acceptance is None or Arm.CANDIDATE not in report.acceptance.arms:
        return said
    said += f"; acceptance length {report.acceptance.arms['candidate'].acceptance_length:.2f}"
    ratio = speedup(report.acceptance).get(1)
    return (
        said
        if ratio is None
        else f"{said}, {ratio:.2f}x the tok/s of no draft with one request in flight"
    )


def _summary(report: LifecycleReport) -> Table:
    rows = [
        ("outcome", report.outcome),
        ("recipe", report.recipe + (f" ({report.size})" if report.size else "")),
    ]
    rows += [
        (
            "target",
            f"{report.target.name}, {report.target.source}, quantization "
            f"{report.target.quantization}",
        )
    ]

    if report.change is not None:
        changed = ", ".join(report.change.kinds) or "nothing"
        rows += [("changed since the champion" if report.change.old else "changed", changed)]
        rows += [("why", report.policy_reason or report.change.reason)]

    if report.acceptance is not None:
        rows += [
            (f"acceptance length, {label(arm.arm)}", _value_in(arm))
            for arm in _drafting(report.acceptance)
        ]

    if report.gate is not None:
        rows += [("gate", str(report.gate.verdict))]
        rows += [("draft tokens by load", schedule_text(report.gate.speculative_schedule))]

    if report.release is not None:
        rows += [("release", f"{report.release.model_name} version {report.release.version}")]
    if report.serving is not None:
        rows += [("serves now", report.serving)]

    rows += [
        ("total time", duration(report.total_s)),
        ("orchestration", f"{report.orchestration_share:.1%} of it"),
    ]
    if report.peak_memory_mib is not None:
        rows += [("peak memory", f"{report.peak_memory_mib / 1024:.1f} GiB")]

    rows += list(report.urls.items())
    return Table("Summary", ("", "value"), tuple(rows), text_columns=("value",))


def _by_slice(report: AcceptanceReport) -> Table:
    # Of some, only speed was measured.
    arms = [arm for arm in ordered_arms(report) if arm.acceptance_by_slice]
    slices = sorted({name for arm in arms for name in arm.acceptance_by_slice})
    first = arms[0]
    rows = [
        (
            name,
            str(sum(prompt.slice == name for prompt in first.prompts)),
            *(
                _with_interval(arm.acceptance_by_slice.get(name), arm.interval_by_slice.get(name))
                for arm in arms
            ),
        )
        for name in slices
    ]

    rows.append(("all", str(len(first.prompts)), *(_value_in(arm) for arm in arms)))
    rows.append(("draft coverage", "", *(f"{arm.draft_coverage:.1%}" for arm in arms)))
    note = (
        "Tokens per target step, bonus token included; in brackets the 95 % interval over prompts."
    )
    note += _equal_outputs(report)
    if report.excluded:
        note += f" Left out because too long: {len(report.excluded)}."

    columns = ("slice", "prompts", *(label(arm.arm) for arm in arms))
    return Table(
        "Served acceptance length", columns, tuple(rows), note=note, plots=("acceptance_by_slice",)
    )


def _equal_outputs(report: AcceptanceReport) -> str:
    """Greedy outputs equal to no draft's, beside how many no draft itself answers alike."""
    if not report.num_compared_outputs:
        return ""
    words = (
        f" Outputs equal to no draft: {report.num_equal_outputs} of {report.num_compared_outputs}"
    )
    own = [
        f"{one.num_compared - len(one.divergences)} of {one.num_compared} at "
        f"{one.num_in_flight} in flight"
        for one in report.self_comparisons
    ]
    return f"{words}; no draft's own, answered again: {', '.join(own)}." if own else f"{words}."


def _by_position(report: AcceptanceReport) -> Iterator[Table]:
    arms = _drafting(report)
    if not arms:
        return

    num_positions = max(len(arm.acceptance_by_position) for arm in arms)
    rows = [
        (label(arm.arm), *(f"{value:.3f}" for value in arm.acceptance_by_position), *[""] * missing)
        for arm in arms
        for missing in [num_positions - len(arm.acceptance_by_position)]
    ]
    yield Table(
        "Acceptance by draft position",
        ("arm", *(str(k) for k in range(1, num_positions + 1))),
        tuple(rows),
        note="Share of target steps that accepted the draft token at this position.",
        plots=("acceptance_by_position", "accepted_per_step"),
    )


def _speed(report: AcceptanceReport) -> Iterator[Table]:
    arms = [arm for arm in ordered_arms(report) if arm.speed]
    if not arms:
        return

    points = {(arm.arm, point.requests_in_flight): point for arm in arms for point in arm.speed}
    levels = sorted({level for _, level in points})
    ratios = speedup(report)
    rates, waits = [], []

    for level in levels:
        cells = [points.get((arm.arm, level)) for arm in arms]
        told = [f"{cell.output_tokens_per_s:.0f}" if cell else "-" for cell in cells]
        rates.append((str(level), *told, f"{ratios[level]:.2f}x" if level in ratios else "-"))
        waits.append((str(level), *(_latency(cell) for cell in cells)))

    names = [label(arm.arm) for arm in arms]
    yield Table(
        "Output tokens per second by requests in flight",
        ("in flight", *names, "candidate / no draft"),
        tuple(rates),
        note="Medians over interleaved rounds.",
        plots=("speed_by_requests_in_flight",),
    )
    yield Table(
        "Latency by requests in flight",
        ("in flight", *names),
        tuple(waits),
        note="Time to first token, then time per further token: p50 (p99) in ms.",
    )


def _draft_lengths(report: AcceptanceReport) -> Iterator[Table]:
    columns, rows = length_table(report)
    if rows:
        yield Table("Fewer draft tokens", columns, tuple(rows), note=LENGTH_NOTE)


def _latency(point: SpeedPoint | None) -> str:
    if point is None:
        return "-"
    first = f"{point.ttft_p50_ms:.0f} ({point.ttft_p99_ms:.0f})"
    return f"{first}, {point.itl_p50_ms:.0f} ({point.itl_p99_ms:.0f})"


def _gate(gate: GateDecision) -> Table:
    rows = tuple(
        (rule.rule, _number(rule.value), _number(rule.threshold), _verdict(rule), rule.detail)
        for rule in gate.rules
    )
    note = f"Draft tokens by requests in flight: {schedule_text(gate.speculative_schedule)}."
    if gate.drafter_out_above is not None:
        note += f" Take the drafter out above {gate.drafter_out_above} in flight."
    return Table(
        f"Gate: {gate.verdict}", ("rule", "value", "limit", "verdict", "detail"), rows,
        note=note, text_columns=("verdict", "detail"), plots=("paired_differences",),
    )  # fmt: skip


def _verdict(rule: RuleResult) -> str:
    """A rule that does not count says nothing that reads as if it did."""
    return str(rule.verdict) if rule.binding else "info"


def _canary(canary: CanaryReport) -> Table:
    arms = sorted(
        {arm for step in canary.steps for arm in step.num_requests},
        key=lambda arm: arm != Arm.CANDIDATE,
    )
    rows = tuple(
        (
            f"{step.weight_percent} %",
            f"{step.duration_s:.0f} s",
            " / ".join(str(step.num_requests.get(arm, 0)) for arm in arms),
            " / ".join(str(step.num_errors.get(arm, 0)) for arm in arms),
            _number(step.acceptance_length, 2),
            " / ".join(_number(step.latency_p50_s.get(arm), 2) for arm in arms),
            " / ".join(_number(step.latency_p95_s.get(arm), 2) for arm in arms),
            "healthy" if step.healthy else "unhealthy",
            step.reason,
        )
        for step in canary.steps
    )

    ended = (
        "promoted"
        if canary.promoted
        else f"rolled back to {(canary.rolled_back_to or '-').replace('_', ' ')}"
    )
    columns = ("weight", "time", "requests", "errors", "AL", "p50 s", "p95 s", "judge", "reason")

    return Table(
        f"Canary: {ended}",
        columns,
        rows,
        text_columns=("judge", "reason"),
        plots=("canary_weights",),
        note=f"Pairs are {' / '.join(arms)} ({canary.baseline.replace('_', ' ')}). {canary.reason}",
    )


def _stages(stages: tuple[StageTiming, ...], total_s: float, outside_share: float) -> Table:
    rows = [
        (
            stage.stage,
            duration(stage.duration_s),
            f"{stage.duration_s / total_s:.0%}" if total_s else "-",
            f"{stage.num_tokens:,}" if stage.num_tokens is not None else "",
            f"{stage.num_tokens / stage.duration_s:,.0f}"
            if stage.num_tokens and stage.duration_s
            else "",
        )
        for stage in stages
    ]

    rows.append(("total", duration(total_s), "", "", ""))
    note = f"Outside the stages: {outside_share:.1%} of the total. Stages may overlap."
    return Table(
        "Stages",
        ("stage", "time", "share", "tokens", "tok/s"),
        tuple(rows),
        note=note,
        plots=("stage_times",),
    )


def _pace(plan: PacePlan) -> Table:
    columns, rows = plan_rows(plan)
    note = (
        f"{probe_line(plan.probe)}. Left when this was chosen: "
        f"{duration(max(0.0, plan.available_s))}."
    )
    if not plan.fits:
        note += " Not even the least that the recipe allows was expected to end in time."
    return Table("Amounts by the machine's pace", columns, tuple(rows), note=note)


def _data(report: LifecycleReport) -> Iterator[Table]:
    if report.dataset is not None:
        data = report.dataset
        rows = [
            (f"after {step}", f"{rows_left:,}", "", "") for step, rows_left in data.funnel.items()
        ]
        rows += [
            (
                f"split {name}",
                f"{count:,}",
                f"{data.num_tokens.get(name, 0):,}",
                f"{data.num_loss_tokens.get(name, 0):,}",
            )
            for name, count in data.num_conversations.items()
        ]
        yield Table(
            "Data",
            ("", "conversations", "tokens", "supervised"),
            tuple(rows),
            note=f"Digest {data.digest[:16]}.",
        )


def _training(report: LifecycleReport) -> Iterator[Table]:
    rows: list[tuple[str, str]] = []
    if report.checkpoint is not None:
        best = report.checkpoint
        rows += [("checkpoint", f"{best.algorithm}, step {best.step}, digest {best.digest[:16]}")]
        rows += [("tokens trained on", f"{best.num_trained_tokens:,}")]

    if report.training_ended is not None:
        rows += [("training", report.training_ended)]
    if report.checkpoint is not None:
        rows += [
            (
                "acceptance length, teacher-forced",
                _number(report.checkpoint.expected_acceptance_length),
            )
        ]

    if report.training_curve:
        first, last = report.training_curve[0], report.training_curve[-1]
        rows += [
            ("loss", f"{first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}")
        ]

    if report.stream is not None:
        stream = report.stream
        rows += [
            (
                "hidden states streamed",
                f"{stream.bytes_streamed / MIB:,.0f} MiB of {stream.num_samples:,} samples",
            ),
            ("stream rate", f"{stream.tokens_per_s:,.0f} tok/s"),
            (
                "peak held",
                f"{stream.peak_bytes_held / MIB:,.0f} MiB of a budget of "
                f"{stream.budget_bytes / MIB:,.0f}",
            ),
            ("hidden-state bytes on disk", f"{stream.bytes_on_disk:,}"),
            ("keys left in the store", f"{stream.keys_left:,}"),
            ("trainer waited", f"{stream.trainer_wait_share:.1%} of its time"),
            ("engine without a request", f"{stream.engine_idle_share:.1%} of that time"),
            ("retried, quarantined", f"{stream.num_retried}, {stream.num_quarantined}"),
        ]

    if rows:
        yield Table(
            "Training",
            ("", "value"),
            tuple(rows),
            text_columns=("value",),
            plots=("training_curve",),
        )

    if report.calibration is not None:
        yield _calibration(report.calibration)


def _calibration(calibration: Calibration) -> Table:
    pairs = zip(calibration.before_by_position, calibration.after_by_position, strict=True)
    named = [("all positions", calibration.before, calibration.after, "-", "-")]
    named += [
        (
            f"drafts 1 to {k}" if k > 1 else "draft 1",
            before,
            after,
            f"{calibration.temperatures[k - 1]:.2f}"
            if calibration.is_fitted[k - 1]
            else "not fitted",
            f"{calibration.biases[k - 1]:+.2f}" if calibration.is_fitted[k - 1] else "not fitted",
        )
        for k, (before, after) in enumerate(pairs, 1)
    ]

    rows = tuple(
        (
            name,
            temperature,
            bias,
            f"{before.ece:.4f}",
            f"{after.ece:.4f}",
            f"{after.ece_floor:.4f}",
            f"{before.brier:.4f}",
            f"{after.brier:.4f}",
            _number(before.auc),
            _number(after.auc),
        )
        for name, before, after, temperature, bias in named
    )

    folds = calibration.num_folds
    told = (
        f"each scored by a fit on other conversations ({folds} folds)"
        if folds
        else "too few to fit anything"
    )
    note = (
        f"{calibration.num_blocks:,} blocks of {calibration.num_conversations} validation "
        f"conversations, {told}. Event:"
        f" {calibration.event}. Noise alone is the ECE to expect of right scores on as many blocks."
    )

    columns = (
        "survival of",
        "temperature",
        "bias",
        "ECE",
        "after",
        "noise alone",
        "Brier",
        "after",
        "AUC",
        "after",
    )

    return Table("Confidence head", columns, rows, note=note, plots=("reliability",))


def _changes(changes: tuple[TargetChangeReport, ...]) -> Iterator[Table]:
    for index, change in enumerate(changes):
        arms = (
            ("old drafter", change.old_drafter),
            ("new drafter", change.new_drafter),
            ("no draft", change.no_draft),
        )
        levels = sorted(
            {level for _, arm in arms if arm is not None for level in arm.output_tokens_per_s}
        )
        rows = tuple((name, *_change_cells(arm, levels)) for name, arm in arms)
        note = f"{', '.join(change.kinds)} changed, {change.outcome}, in {duration(change.total_s)}"
        note += (
            f" (detected after {duration(change.detected_s)}). "
            if change.detected_s is not None
            else ". "
        )
        if change.released_acceptance_length is not None:
            note += (
                "The champion's acceptance length on the old target: "
                f"{change.released_acceptance_length:.3f}. "
            )
        yield Table(
            f"Target change: {change.name}: {change.action}",
            ("on the new target", "acceptance length", *(f"tok/s at {level}" for level in levels)),
            rows,
            note=note + change.reason,
            plots=("target_changes",) if index == len(changes) - 1 else (),
        )


def _change_cells(arm: ArmFigures | None, levels: list[int]) -> list[str]:
    if arm is None:
        return ["-"] * (1 + len(levels))
    rates = [arm.output_tokens_per_s.get(level) for level in levels]
    return [
        _with_interval(arm.acceptance_length, arm.acceptance_interval),
        *(_number(rate, 0) for rate in rates),
    ]


def schedule_text(schedule: Schedule) -> str:
    """A schedule for people: '1-4: 4, 5-64: 0'."""
    return (
        ", ".join(f"{row.first}-{row.last}: {row.num_draft_tokens}" for row in schedule)
        or "always the same"
    )


def duration(seconds: float) -> str:
    """'3 min 05 s', or '4.2 s' below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def verdict_style(text: str) -> str | None:
    """Rich style of a cell that holds a verdict, None for other cells."""
    styles: dict[str, str] = {
        Verdict.PASS: "bold green",
        Verdict.FAIL: "bold red",
        Verdict.INCONCLUSIVE: "bold yellow",
        "healthy": "green",
        "unhealthy": "bold red",
    }
    return styles.get(text)


def _drafting(report: AcceptanceReport) -> list[ArmReport]:
    return [arm for arm in ordered_arms(report) if arm.acceptance_by_position]


def _value_in(arm: ArmReport) -> str:
    return _with_interval(arm.acceptance_length, arm.acceptance_interval)


def _with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _number(value: float | None, num_digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{num_digits}f}"
