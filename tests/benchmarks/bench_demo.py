"""The demo loop, then its two target changes: acceptance as served, time, orchestration, memory
(about 30 min).
"""

from __future__ import annotations

from tests.benchmarks.loop_figures import (
    at_least,
    at_most,
    house_figures,
    own_services,
    run_deployment,
)
from tests.benchmarks.run import Figure


def run() -> list[Figure]:
    """Figures of `make demo` (set-up excluded) and `make demo-target-change`, on services of their
    own.
    """
    with own_services() as environment:
        report, loop_s = run_deployment(
            "drafter-lifecycle/demo",
            {"recipe": "demo", "size": None, "target": "source"},
            environment=environment,
        )
        arms = report.acceptance.arms if report.acceptance else {}
        figures = [
            at_most("loop_time", loop_s / 60, 15, "min"),
            at_least(
                "served_acceptance_length", arms["candidate"].acceptance_length, 1.40, "tokens/step"
            ),
            at_most(
                "untrained_acceptance_length",
                arms["untrained"].acceptance_length,
                1.05,
                "tokens/step",
            ),
            *house_figures(report),
        ]
        changes, changes_s = run_deployment("demo-target-change/demo", {}, environment=environment)
        figures.append(at_most("target_change_time", changes_s / 60, 15, "min"))
        figures.append(
            at_most("target_change_peak_memory", (changes.peak_memory_mib or 0) / 1024, 12, "GiB")
        )
    return figures
