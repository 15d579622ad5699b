"""The canary: two engines behind HAProxy, weights by its runtime API, a judge on
the gate's prompts, replayed beside the clients' requests.
"""

from __future__ import annotations

from pathlib import Path

from components.contracts import Arm, ArmEndpoint, CanaryReport, CanaryStep, Release, Slot
from components.reporting.markdown_table import markdown_table
from components.reporting.plots import canary_weights
from components.serving.rollout.production import ProductionEngine, put_into_production
from components.serving.rollout.rollout import BaselineKind, run_canary
from components.serving.rollout.splitter import Splitter
from components.stages.engines import plain_engine, plain_key, released_engine, released_key
from components.stages.gate.watch_outputs import output_check, replayed_prompts
from components.stages.registry import registry_of
from components.stages.run import Run


def roll_out(run: Run, release: Release, champion: Release | None) -> CanaryReport:
    """Shift traffic to the challenger step by step, or back at the first bad sign; never retried by
    itself.
    """
    # The gate's other engines are done.
    run.engines.keep_only({released_key(release), plain_key(release.target)})
    candidate = released_engine(run, release)
    kind, baseline = _baseline(run, release, champion)
    with run.stage("engine start"):
        candidate.wait_ready(progress=run.reporter.progress("engine start"))
    prompts = replayed_prompts(registry_of(run), release, run.recipe)

    def on_step(step: CanaryStep) -> None:
        run.reporter.info(
            "canary %d %%: %s, acceptance length %s, requests %s: %s",
            step.weight_percent,
            "healthy" if step.healthy else "NOT healthy",
            "-" if step.acceptance_length is None else f"{step.acceptance_length:.3f}",
            step.num_requests,
            step.reason,
        )

    splitter = Splitter(Path(run.endpoints.haproxy_socket), frontend_url=run.endpoints.haproxy_url)
    # Ctrl-C included: where the baseline holds traffic already, it must not end with this run.
    try:
        with run.stage("canary"):
            canary = run_canary(
                splitter=splitter,
                candidate=candidate.endpoint(Arm.CANDIDATE),
                baseline=baseline,
                baseline_kind=kind,
                candidate_digest=release.checkpoint.digest,
                prompts=[
                    {"messages": list(prompt.messages), **prompt.request_options}
                    for prompt in prompts
                ],
                settings=run.recipe.canary,
                request_timeout_s=run.recipe.engine.request_timeout_s,
                gate_acceptance_length=release.acceptance_length,
                model=release.target.name,
                schedule=release.speculative_schedule,
                check_outputs=output_check(registry_of(run), release, run.recipe, prompts),
                on_step=on_step,
                progress=run.reporter.progress("canary"),
            )
    except BaseException:
        if splitter.state()[Slot.BASELINE].url == baseline.url:
            _keep_baseline(run, release, champion)
        raise
    canary.write(run.run_dir / "canary_report.json")
    _publish(run, canary)
    return canary


def keep_serving(
    run: Run, release: Release, champion: Release | None, canary: CanaryReport
) -> None:
    """What won keeps answering when this run has ended, owned by the services; `make down` ends
    it.
    """
    if canary.promoted:
        _into_production(run, released_key(release), release)
    else:
        _keep_baseline(run, release, champion)
    run.reporter.info("in production at %s: %s", run.urls["chat completions"], canary.reason)


def baseline_release(release: Release, champion: Release | None) -> Release | None:
    """The champion where it is bound to this target, else None: no draft, the last rung."""
    return (
        champion
        if champion is not None and champion.target.fingerprint == release.target.fingerprint
        else None
    )


def _keep_baseline(run: Run, release: Release, champion: Release | None) -> None:
    """The engine that traffic fell back to outlives this run, unless it is the one in production
    already.
    """
    base = baseline_release(release, champion)
    production = ProductionEngine.find(_production_dir(run))
    digest = base.checkpoint.digest if base else None
    if production is None or not production.serves(
        fingerprint=release.target.fingerprint, checkpoint_digest=digest
    ):
        _into_production(run, released_key(base) if base else plain_key(release.target), release)


def _into_production(run: Run, key: str, release: Release) -> None:
    put_into_production(
        run.engines.hand_over(key),
        fingerprint=release.target.fingerprint,
        folder=_production_dir(run),
        owner_pid=run.supervisor_pid,
    )


def _baseline(
    run: Run, release: Release, champion: Release | None
) -> tuple[BaselineKind, ArmEndpoint]:
    """The champion where it is bound to this target, else no draft: speculation off is always the
    last rung.
    """
    base = baseline_release(release, champion)
    digest = base.checkpoint.digest if base else None
    kind: BaselineKind = Arm.CHAMPION if base else Arm.NO_DRAFT
    production = ProductionEngine.find(_production_dir(run))
    if production is not None and production.serves(
        fingerprint=release.target.fingerprint, checkpoint_digest=digest
    ):
        return kind, production.endpoint
    engine = released_engine(run, base) if base else plain_engine(run, release.target)
    with run.stage("engine start"):
        engine.wait_ready(progress=run.reporter.progress("engine start"))
    return kind, engine.endpoint(kind)


def _production_dir(run: Run) -> Path:
    return run.state_dir / "run"


def _publish(run: Run, canary: CanaryReport) -> None:
    rows = [
        (
            f"{step.weight_percent} %",
            step.num_requests.get(Slot.CANDIDATE, 0),
            step.num_requests.get(Slot.BASELINE, 0),
            "" if step.acceptance_length is None else f"{step.acceptance_length:.3f}",
            "ok" if step.healthy else "bad",
            step.reason,
        )
        for step in canary.steps
    ]

    table = markdown_table(
        ("weight", "candidate", "baseline", "acceptance length", "healthy", "why"), rows
    )
    verdict = "promoted" if canary.promoted else f"rolled back to {canary.rolled_back_to}"
    run.reporter.markdown(
        "canary",
        f"## Canary: **{verdict}**\n\n{canary.reason}\n\n{table}",
        description="Canary steps",
    )

    png = canary_weights(canary, run.run_dir / "plots" / "canary.png")
    run.reporter.image("canary", png, description="Canary weights")
