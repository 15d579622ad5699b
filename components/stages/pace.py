"""Amounts by what this machine does: a probe, a plan, and words about both before the work
begins.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from components.contracts import MachineProbe, PacePlan, TargetRef
from components.curation.sources.self_prompts import num_missing_prompts, with_written_prompts
from components.pace.plan import make_plan
from components.pace.probe import EngineProbe
from components.reporting.markdown_table import markdown_table
from components.reporting.pace_words import plan_lines, plan_rows, probe_line
from components.serving.engines.command import resolve_device
from components.serving.engines.engine import Engine
from components.settings import PaceSettings
from components.stages.engines import plain_engine
from components.stages.run import Run
from components.training.checks.step_job import StepJob, StepTimes, run_step_probe

LOW_LOAD_SHARE = 0.3
"""Of the probe's time, for the load that acceptance is measured at: its steps are short."""
STEP_PROBE_TIMEOUT_S = 300.0


def choose_amounts(run: Run, target: TargetRef) -> PacePlan | None:
    """Probe the machine and choose how much of the recipe is done in this run; None where the
    recipe has no pace.

    A run chooses once: what is chosen counts for all its flows.
    """
    pace = run.full_recipe.pace
    if pace is None or run.plans:
        return run.plan

    engine = plain_engine(run, target)
    with run.stage("engine start"):
        engine.wait_ready(progress=run.reporter.progress("engine start"))

    with run.stage("probe"):
        probe = _probe(run, target, engine, pace)
    run.reporter.info(probe_line(probe))
    plan = make_plan(run.full_recipe, pace, probe, available_s=run.left_s)
    run.plans.append(plan)
    plan.write(run.run_dir / "pace_plan.json")
    tell = run.reporter.info if plan.fits else run.reporter.warning

    for line in plan_lines(plan):
        tell(line)
    columns, rows = plan_rows(plan)
    words = "\n\n".join(
        [f"### {probe_line(probe)}", *plan_lines(plan), markdown_table(columns, rows)]
    )
    run.reporter.markdown("pace", words, description="What this run does on this machine")

    return plan


def _probe(run: Run, target: TargetRef, engine: Engine, pace: PaceSettings) -> MachineProbe:
    """One measurement after the other: together they would slow each other down."""
    started_s = time.monotonic()
    config = json.loads((Path(target.path) / "config.json").read_text())
    answering = EngineProbe(
        engine.url,
        target.name,
        vocab_size=int(config["vocab_size"]),
        timeout_s=run.full_recipe.engine.request_timeout_s,
    )

    answering.warm_up()
    engine_up_s = time.monotonic() - engine.started_at
    curation = run.full_recipe.curation
    low = run.full_recipe.evaluation.acceptance_requests_in_flight
    high = min(curation.requests_in_flight, run.full_recipe.engine.max_num_seqs)
    rates = {high: _rate_of_written_prompts(run, target, engine, answering, pace)}
    rates[high] = rates[high] or answering.answer_rate(high, seconds=pace.probe_s)

    if low != high:
        rates[low] = answering.answer_rate(low, seconds=LOW_LOAD_SHARE * pace.probe_s)
    reading = answering.reading_rate()
    steps = _step_times(run, target, pace)
    return MachineProbe(
        engine_up_s=engine_up_s,
        tokens_per_s={load: rate for load, rate in rates.items() if rate},
        prompt_tokens_per_s=reading,
        training_step_s=steps.median_s,
        trainer_up_s=steps.up_s,
        duration_s=time.monotonic() - started_s,
    )


def _rate_of_written_prompts(
    run: Run, target: TargetRef, engine: Engine, probe: EngineProbe, pace: PaceSettings
) -> float | None:
    """The engine's rate while it writes prompts that the run needs; None where there are too few
    left to write.
    """
    settings = run.full_recipe.curation
    folder = run.state_dir / "prompts"
    if (
        num_missing_prompts(settings, target=target, folder=folder)
        < 2 * settings.requests_in_flight
    ):
        return None

    report = run.reporter.progress("probe")
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts") as pool:
        writing = pool.submit(
            with_written_prompts,
            settings,
            engine_url=engine.url,
            model=target.name,
            target=target,
            folder=folder,
            request_timeout_s=run.full_recipe.engine.request_timeout_s,
            progress=report,
            stop_after_s=pace.probe_s,
        )
        # The second half may be of ever fewer requests.
        rate = probe.watch(seconds=pace.probe_s / 2)
        writing.result()

    return rate


def _step_times(run: Run, target: TargetRef, pace: PaceSettings) -> StepTimes:
    recipe = run.full_recipe
    job = StepJob(
        drafter=recipe.drafter,
        training=recipe.training,
        target_path=target.path,
        aux_layer_ids=recipe.stream.aux_layer_ids,
        num_steps=pace.probe_steps,
        output_dir=str(run.run_dir / "probe"),
    )

    return run_step_probe(
        job,
        on_line=run.reporter.child("probe"),
        timeout_s=STEP_PROBE_TIMEOUT_S,
        device=resolve_device(recipe.engine),
    )
