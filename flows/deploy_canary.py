"""Give a challenger its share of the traffic, step by step; promote it or go back."""

from __future__ import annotations

from prefect import flow

from components.contracts import CanaryReport
from flows.flow_run.run import run_of
from tasks.canary import keep_serving, roll_out
from tasks.registry import conclude_canary, find_champion, find_release


@flow(name="deploy-canary", log_prints=True)
def deploy_canary(
    recipe: str = "demo", size: str | None = None, version: int | None = None
) -> CanaryReport:
    """Shift traffic 1-5-25-50-100 % while a judge looks; verdict -> alias champion, or back.

    Args:
        recipe, size: as in `curate_data`.
        version: registered version to roll out; None takes the alias challenger.
    """
    with run_of(recipe, size=size) as run:
        champion = find_champion(run)
        release = find_release(run, version, champion)
        canary = roll_out(run, release, champion)
        conclude_canary(run, release, champion, canary)
        keep_serving(run, release, champion, canary)
        return canary
