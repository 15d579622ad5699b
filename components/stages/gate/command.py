"""The gate's command line: measure and decide, decide on a report, or check a decision.

    dspark gate --recipe demo --candidate DIR [--champion DIR] --out-dir DIR
    dspark gate --recipe demo --report report.json [--champion DIR]
    dspark gate --recipe demo --report report.json --decision gate_decision.json

exits with 0 for pass, 1 for fail, 2 for inconclusive, 3 when nothing could be measured or decided,
so that a rollout controller or a CI job can call it. Where a champion serves, name it: a report
without it is then inconclusive. The third form decides again by the recipe; a decision that was
changed, is not signed though a key is configured, or does not follow from the report, is refused.
What was measured stays in `<out-dir>/measurements`: run again after a failure, it goes on from
there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NoReturn

from components.contracts import (
    AcceptanceReport,
    CheckpointRef,
    GateDecision,
    Progress,
    TargetFingerprint,
    TargetRef,
    Verdict,
)
from components.drafter.checkpoint import load_checkpoint_ref
from components.errors import ConfigError, run_main
from components.evaluation.rules.asked import Asked
from components.evaluation.rules.decide import check_decision, decide
from components.services.endpoints import resolve_state_dir
from components.serving.engines.pool import EnginePool
from components.settings import Recipe, load_recipe
from components.settings.signing import signing_key
from components.stages.gate.conduct import decide_gate, measure_gate
from components.stages.gate.looks import next_look, record_look
from components.stages.gate.paced import as_paced
from components.stages.gate.run import Contest, GateRun
from components.stages.gate.same_weights import champion_to_beat
from components.stages.prompts import prompts_of
from components.stages.stage_clock import untimed
from components.system.ports import free_port
from components.targets.fingerprint import make_target_ref
from components.targets.resolve import resolve_target

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}
EXIT_NOT_MEASURED = 3
PROGRESS_EVERY_S = 4.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Wrong usage exits with 3: argparse's own 2 would read as 'inconclusive'."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_NOT_MEASURED, f"error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring. Returns the exit code."""
    options = _parser().parse_args(arguments)
    if (options.report is None) == (options.candidate is None):
        raise ConfigError("the gate needs either --candidate, to measure it, or --report")
    decision = _measured(options) if options.candidate is not None else _decided(options)
    if options.out:
        decision.write(options.out)
    if options.json:
        print(decision.model_dump_json(indent=2))
    else:
        _show(decision)
    return EXIT_CODES[decision.verdict]


def _parser() -> _Parser:
    """The options of all three forms: which of them go together is checked after parsing."""
    parser = _Parser(
        prog="dspark gate",
        description="Measure a drafter and decide on it.",
    )
    parser.add_argument("--recipe", required=True, help="name in configs/ or path of a YAML file")
    parser.add_argument("--size", help="overlay of the recipe")
    parser.add_argument("--candidate", type=Path, help="checkpoint folder to measure on vLLM")
    parser.add_argument(
        "--champion", type=Path, help="checkpoint folder it is compared with, on the same prompts"
    )

    parser.add_argument("--target", type=Path, help="folder of the target; none: the recipe's own")
    parser.add_argument(
        "--out-dir", type=Path, help="folder for report, decision, page, plots and engine logs"
    )
    parser.add_argument("--report", type=Path, help="AcceptanceReport as JSON, measured before")
    parser.add_argument(
        "--decision", type=Path, help="GateDecision as JSON to check against --report"
    )
    parser.add_argument(
        "--fingerprint", type=Path, help="TargetFingerprint as JSON that the report must be about"
    )

    parser.add_argument("--out", type=Path, help="write the GateDecision here")
    parser.add_argument("--json", action="store_true", help="print the GateDecision as JSON")
    return parser


def _measured(options: argparse.Namespace) -> GateDecision:
    """Serve and measure the candidate; report, decision, plots and page go to --out-dir."""
    if options.out_dir is None:
        raise ConfigError("measuring needs --out-dir, where report and logs go")
    recipe = load_recipe(options.recipe, size=options.size)
    candidate, champion = load_checkpoint_ref(options.candidate), _checkpoint(options.champion)
    target = _target(recipe, options.target)
    prompts = prompts_of(recipe)
    state_dir = resolve_state_dir()

    with EnginePool(logs_dir=options.out_dir / "logs", port_base=free_port()) as engines:
        run = GateRun(
            recipe=recipe,
            size=options.size,
            prompts=prompts,
            engines=engines,
            cache_dir=state_dir,
            out_dir=options.out_dir,
            stage=untimed,
            progress_of=lambda _what: progress_lines(),
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
        look = next_look(state_dir, target.fingerprint, candidate)
        report = measure_gate(run, Contest(target, candidate, champion, look=look))
    decision = decide_gate(
        run, report, Asked(recipe, options.size, prompts, champion_to_beat(candidate, champion))
    )
    record_look(state_dir, report, decision)
    print(f"measured; page: {options.out_dir / 'plots' / 'gate.html'}", file=sys.stderr)
    return decision


def _decided(options: argparse.Namespace) -> GateDecision:
    """Decide on a report measured before, or check a decision against it."""
    report = AcceptanceReport.read(options.report)
    recipe = as_paced(load_recipe(options.recipe, size=options.size), report)
    decision = GateDecision.read(options.decision) if options.decision else None
    champion = _checkpoint(options.champion)
    champion_digest = (
        champion.digest if champion is not None else decision.champion_digest if decision else None
    )

    asked = Asked(recipe, options.size, prompts_of(recipe), champion_digest)
    if decision is not None:
        check_decision(decision, report, asked=asked, signing_key=signing_key())
        return decision

    fingerprint = (
        TargetFingerprint.read(options.fingerprint)
        if options.fingerprint
        else report.target.fingerprint
    )

    return decide(
        report,
        settings=recipe.gate,
        asked=asked,
        expected_fingerprint=fingerprint,
        signing_key=signing_key(),
    )


def _checkpoint(folder: Path | None) -> CheckpointRef | None:
    return load_checkpoint_ref(folder) if folder is not None else None


def _target(recipe: Recipe, folder: Path | None) -> TargetRef:
    if folder is None:
        return resolve_target(recipe.target, cache_dir=resolve_state_dir(), engine=recipe.engine)
    return make_target_ref(
        recipe.target.name, path=folder, source=f"folder {folder.name}", engine=recipe.engine
    )


def progress_lines() -> Progress:
    """Progress on stderr, a line every few seconds."""
    last_s = time.monotonic()

    def show(what: str, num_done: int, num_total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= PROGRESS_EVERY_S:
            last_s = time.monotonic()
            print(f"{what} ({num_done}/{num_total})", file=sys.stderr, flush=True)

    return show


def _show(decision: GateDecision) -> None:
    for rule in decision.rules:
        value = "-" if rule.value is None else f"{rule.value:.3f}"
        limit = "-" if rule.threshold is None else f"{rule.threshold:.3f}"
        told = str(rule.verdict) if rule.binding else f"({rule.verdict})"
        print(f"{told:<14} {rule.rule:<32} {value:>8} (limit {limit}) {rule.detail}")
    if decision.drafter_out_above is not None:
        print(f"take the drafter out above {decision.drafter_out_above} requests in flight")
    print(f"verdict: {decision.verdict}{', superior to the champion' if decision.superior else ''}")


if __name__ == "__main__":
    run_main(main, error_code=EXIT_NOT_MEASURED)
