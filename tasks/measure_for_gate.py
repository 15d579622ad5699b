"""Measures a candidate for the gate's command line: engines, acceptance, speed, report, plots and page. No Prefect.

    python -m tasks.measure_for_gate --candidate DIR --recipe demo --out-dir DIR [--champion DIR] [--target DIR]

`python -m components.evaluation.gate --candidate ...` runs this in a process of its own and decides on its report.
What was measured stays in `<out-dir>/measurements`: run again after a failure, it goes on from there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from components.contracts import AcceptanceReport, ArmEndpoint, CheckpointRef, SpeedPoint, TargetRef
from components.drafter.checkpoint import load_checkpoint_ref
from components.errors import run_main
from components.evaluation.acceptance import Measured
from components.evaluation.decide import decide
from components.evaluation.measure import MeasuredLength, build_report
from components.evaluation.prompts import Prompt, load_prompts
from components.evaluation.schedule import Schedule, choose_schedule
from components.evaluation.speed import SCHEDULED, measure_speed
from components.reporting.acceptance_plots import plot_acceptance
from components.reporting.gate_page import write_gate_page
from components.services.endpoints import resolve_state_dir
from components.serving.command import DraftSampleMethod, EngineSpec, resolve_device
from components.serving.engine import Engine, free_port
from components.serving.pool import EnginePool
from components.settings import Recipe, load_recipe
from components.targets.fingerprint import make_target_ref
from components.targets.resolve import resolve_target
from tasks.measuring import (
    CANDIDATE,
    CHAMPION,
    NO_DRAFT,
    at_temperature,
    measure_gap,
    measure_length,
    measure_scheduled,
    measure_surviving,
    measured_ratios,
    peak_memory,
    sampled_prompts,
    shorter_drafts,
)

PROGRESS_EVERY_S = 4.0


@dataclass(frozen=True)
class Gate:
    """One measurement: what is served, on which engines, and where its files go."""

    recipe: Recipe
    target: TargetRef
    candidate: CheckpointRef
    champion: CheckpointRef | None
    prompts: tuple[Prompt, ...]
    engines: EnginePool
    out_dir: Path

    def start(self, arm: str, checkpoint: CheckpointRef | None, schedule: Schedule = ()) -> Engine:
        """Start an arm's engine without waiting for it. A champion may be bound to the target's last version."""
        is_sampled = bool(schedule) or max(self.recipe.evaluation.temperatures) > 0
        method: DraftSampleMethod = "probabilistic" if is_sampled else "greedy"

        def make_spec(port: int) -> EngineSpec:
            return EngineSpec(
                name=arm,
                model_path=self.target.path,
                served_model_name=self.target.name,
                settings=self.recipe.engine,
                port=port,
                device=resolve_device(self.recipe.engine),
                checkpoint=checkpoint,
                schedule=schedule,
                draft_sample_method=method,
            )

        return self.engines.start(arm, make_spec, fingerprint=self.target.fingerprint, allow_unbound=arm == CHAMPION)

    def measure(self, endpoint: ArmEndpoint, *, temperature: float) -> Measured:
        """One arm at one temperature; further ones on a few prompts."""
        settings = self.recipe.evaluation
        is_first = temperature == settings.temperature
        return measure_surviving(
            endpoint,
            self.prompts if is_first else sampled_prompts(self.prompts, settings),
            settings=at_temperature(settings, temperature),
            engines=self.engines,
            journals=self.out_dir / "measurements",
            request_timeout_s=self.recipe.engine.request_timeout_s,
            progress=progress_lines(),
        )

    def lengths(self, plain: ArmEndpoint) -> list[MeasuredLength]:
        """The candidate with each of the recipe's fewer draft tokens, one more engine at a time."""
        measured = []
        for shorter in shorter_drafts(self.candidate, self.recipe.evaluation):
            arm = f"draft_{shorter.num_draft_tokens}"
            engine = self.start(arm, shorter).wait_ready(progress=progress_lines())
            try:
                one = measure_length(
                    engine.endpoint(arm),
                    plain,
                    self.prompts,
                    settings=self.recipe.evaluation,
                    engines=self.engines,
                    journals=self.out_dir / "measurements",
                    request_timeout_s=self.recipe.engine.request_timeout_s,
                    progress=progress_lines(),
                )
            finally:
                self.engines.stop(arm)
            measured.append(one)
        return measured

    def schedule_speed(self, schedule: Schedule, plain: ArmEndpoint) -> dict[str, tuple[SpeedPoint, ...]]:
        """Speed of the schedule that would be shipped; nothing where it drafts alike at every load."""
        if len({row[2] for row in schedule}) < 2:
            return {}
        engine = self.start(SCHEDULED, self.candidate, schedule).wait_ready(progress=progress_lines())
        settings, scheduled = self.recipe.evaluation, engine.endpoint(SCHEDULED)
        return dict(measure_scheduled(scheduled, plain, self.prompts, settings=settings, progress=progress_lines()))


def measure(gate: Gate) -> AcceptanceReport:
    """Serve the arms, measure them and build the report."""
    settings = gate.recipe.evaluation
    engines = {NO_DRAFT: gate.start(NO_DRAFT, None), CANDIDATE: gate.start(CANDIDATE, gate.candidate)}
    if gate.champion is not None:
        engines[CHAMPION] = gate.start(CHAMPION, gate.champion)
    endpoints = [engine.wait_ready(progress=progress_lines()).endpoint(arm) for arm, engine in engines.items()]
    measured = {one.arm: gate.measure(one, temperature=settings.temperature) for one in endpoints}
    drafting = [one for one in endpoints if one.num_draft_tokens]
    further = {
        temperature: {one.arm: gate.measure(one, temperature=temperature) for one in drafting}
        for temperature in settings.temperatures[1:]
    }
    gap = None
    if gate.recipe.gate.max_train_served_gap is not None:
        gap = measure_gap(
            next(one for one in endpoints if one.arm == CANDIDATE),
            gate.prompts,
            target=gate.target,
            checkpoint=gate.candidate,
            recipe=gate.recipe,
            out_dir=gate.out_dir / "train_served",
            progress=progress_lines(),
            on_line=lambda line: print(line, file=sys.stderr, flush=True),
        )
    lengths = gate.lengths(endpoints[0])
    speed = measure_speed(endpoints, gate.prompts, settings=settings, progress=progress_lines())
    if settings.measure_schedule:
        schedule = choose_schedule(measured_ratios(speed, gate.candidate, lengths))
        speed |= gate.schedule_speed(schedule, endpoints[0])
    return build_report(
        gate.target,
        measured=measured,
        speed=speed,
        prompts=gate.prompts,
        settings=settings,
        further=further,
        draft_lengths=lengths,
        train_served_gap=gap,
        peak_memory_bytes=peak_memory(endpoints, gate.engines),
    )


def progress_lines() -> Callable[[str, int, int], None]:
    """Progress on stderr, a line every few seconds."""
    last_s = time.monotonic()

    def show(what: str, num_done: int, num_total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= PROGRESS_EVERY_S:
            last_s = time.monotonic()
            print(f"{what} ({num_done}/{num_total})", file=sys.stderr, flush=True)

    return show


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tasks.measure_for_gate", description="Measure a drafter.")
    parser.add_argument("--candidate", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--champion", type=Path, help="checkpoint folder to compare with")
    parser.add_argument("--target", type=Path, help="folder of the target; none: the recipe's own")
    parser.add_argument("--recipe", required=True, help="name in configs/ or path of a YAML file")
    parser.add_argument("--budget", help="overlay of the recipe")
    parser.add_argument("--out-dir", type=Path, required=True, help="folder for report, page, plots and engine logs")
    options = parser.parse_args(arguments)
    recipe = load_recipe(options.recipe, budget=options.budget)
    candidate = load_checkpoint_ref(options.candidate)
    champion = load_checkpoint_ref(options.champion) if options.champion is not None else None
    if champion is not None and champion.digest == candidate.digest:
        champion = None  # a drafter is no better or worse than itself
    with EnginePool(logs_dir=options.out_dir / "logs", port_base=free_port()) as engines:
        gate = Gate(
            recipe=recipe,
            target=_target(recipe, options.target),
            candidate=candidate,
            champion=champion,
            prompts=load_prompts(recipe.evaluation),
            engines=engines,
            out_dir=options.out_dir,
        )
        report = measure(gate)
    decision = decide(report, settings=recipe.gate)
    plot_acceptance(report, options.out_dir / "plots", decision=decision)
    texts = {prompt.prompt_id: prompt.messages[0]["content"] for prompt in gate.prompts}
    page = write_gate_page(report, decision, options.out_dir / "gate.html", prompts=texts)
    # The report comes last: where it is, the rest is complete.
    report.write(options.out_dir / "acceptance_report.json")
    print(f"measured; page: {page}", file=sys.stderr)


def _target(recipe: Recipe, folder: Path | None) -> TargetRef:
    if folder is None:
        return resolve_target(recipe.target, cache_dir=resolve_state_dir(), engine=recipe.engine)
    return make_target_ref(recipe.target.name, path=folder, source=f"folder {folder.name}", engine=recipe.engine)


if __name__ == "__main__":
    run_main(main)
