"""The demo loop with SIZE=full: acceptance as served and speed with one request in flight (about
35 min).
"""

from __future__ import annotations

from components.reporting.report import speedup
from tests.benchmarks.loop_figures import (
    at_least,
    at_most,
    house_figures,
    own_services,
    run_deployment,
)
from tests.benchmarks.run import Figure


def run() -> list[Figure]:
    """Figures of `make demo SIZE=full` (set-up excluded), on services of their own."""
    with own_services() as environment:
        report, loop_s = run_deployment(
            "drafter-lifecycle/demo",
            {"recipe": "demo", "size": "full", "target": "source"},
            environment=environment,
        )
    if report.acceptance is None:
        raise AssertionError("a completed lifecycle has measured its candidate")
    candidate = report.acceptance.arms["candidate"]
    return [
        at_most("full_loop_time", loop_s / 60, 35, "min"),
        at_least("full_served_acceptance_length", candidate.acceptance_length, 1.65, "tokens/step"),
        at_least(
            "full_speedup_1_in_flight", speedup(report.acceptance).get(1, 0.0), 1.3, "x_no_draft"
        ),
        *house_figures(report),
    ]
