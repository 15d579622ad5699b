"""The gate's command line: measure and decide, decide on a report, or check a decision.

    python -m components.evaluation.gate --candidate DIR [--champion DIR] --recipe demo --out-dir DIR
    python -m components.evaluation.gate --report report.json --recipe demo
    python -m components.evaluation.gate --report report.json --decision gate_decision.json

exits with 0 for pass, 1 for fail, 2 for inconclusive, 3 when nothing could be measured or decided, so that a rollout
controller or a CI job can call it. The first form starts the engines itself, in a process of its own
(`python -m tasks.measure_for_gate`): this component knows of no other one. The third decides again by the settings
inside the decision; a decision that was changed, or that the report does not give, is refused.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from components.contracts import AcceptanceReport, GateDecision, TargetFingerprint, Verdict
from components.errors import ConfigError, EvaluationError, run_main
from components.evaluation.decide import decide, decide_again
from components.settings import load_recipe

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 2}
EXIT_NOT_MEASURED = 3
MEASURE_MODULE = "tasks.measure_for_gate"


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
    if options.decision is not None:
        decision = _checked(options.decision, options.report)
    else:
        if options.recipe is None:
            raise ConfigError("the gate needs --recipe: its gate section rules")
        report = options.report or _measure(options)
        decision = decide(
            AcceptanceReport.read(report),
            settings=load_recipe(options.recipe, budget=options.budget).gate,
            expected_fingerprint=TargetFingerprint.read(options.fingerprint) if options.fingerprint else None,
        )
    if options.out:
        decision.write(options.out)
    elif options.out_dir:
        decision.write(options.out_dir / "gate_decision.json")
    _show(decision)
    return EXIT_CODES[decision.verdict]


def _parser() -> _Parser:
    parser = _Parser(prog="python -m components.evaluation.gate", description="Measure a drafter and decide on it.")
    parser.add_argument("--candidate", type=Path, help="checkpoint folder to measure on vLLM")
    parser.add_argument("--champion", type=Path, help="checkpoint folder it is compared with, on the same prompts")
    parser.add_argument("--target", type=Path, help="folder of the target; none: the recipe's own")
    parser.add_argument("--out-dir", type=Path, help="folder for report, decision, page, plots and engine logs")
    parser.add_argument("--report", type=Path, help="AcceptanceReport as JSON, measured before")
    parser.add_argument("--decision", type=Path, help="GateDecision as JSON to check against --report")
    parser.add_argument("--recipe", help="name in configs/ or path of a YAML file")
    parser.add_argument("--budget", help="overlay of the recipe")
    parser.add_argument("--fingerprint", type=Path, help="TargetFingerprint as JSON that the report must be about")
    parser.add_argument("--out", type=Path, help="write the GateDecision here")
    return parser


def _measure(options: argparse.Namespace) -> Path:
    """Measure in a process of its own; it writes the report and everything a person wants to see. Returns its path."""
    if options.out_dir is None:
        raise ConfigError("measuring needs --out-dir, where report and logs go")
    command = [sys.executable, "-m", MEASURE_MODULE, "--candidate", str(options.candidate), "--recipe", options.recipe]
    command += ["--out-dir", str(options.out_dir)]
    for name in ("champion", "target", "budget"):
        value = getattr(options, name)
        command += [f"--{name}", str(value)] if value is not None else []
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise EvaluationError("the candidate could not be measured", got=f"exit code {code} of {MEASURE_MODULE}")
    return Path(options.out_dir) / "acceptance_report.json"


def _checked(path: Path, report_path: Path | None) -> GateDecision:
    if report_path is None:
        raise ConfigError("checking a decision needs --report, the measurement it was made of")
    decision = GateDecision.read(path)
    again = decide_again(decision, AcceptanceReport.read(report_path))
    if again != decision:
        raise ConfigError(
            "the report does not give this decision",
            got=f"{decision.verdict} in the file, signature {decision.signature[:16]}",
            expected=f"{again.verdict}, signature {again.signature[:16]}",
            fix="It was made by another version of the rules, or not by them.",
        )
    return decision


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
