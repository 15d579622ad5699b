"""Put a challenger before real traffic, step by step; promote it or go back."""

from __future__ import annotations

from prefect import flow

from components.contracts import CanaryReport
from tasks.loop import open_loop
from tasks.registry import conclude_canary, find_champion, find_release
from tasks.serving import keep_serving, roll_out


@flow(name="deploy-canary", log_prints=True)
def deploy_canary(
    recipe: str = "demo", budget: str | None = None, version: int | None = None
) -> CanaryReport:
    """Shift traffic 1-5-25-50-100 % while a judge looks; verdict -> alias champion, or back.

    Args:
        recipe, budget: as in `curate_data`.
        version: registered version to roll out; None takes the alias challenger.
    """
    with open_loop(recipe, budget=budget) as loop:
        champion = find_champion(loop)
        release = find_release(loop, version, champion)
        canary = roll_out(loop, release, champion)
        conclude_canary(loop, release, champion, canary)
        keep_serving(loop, release, champion, canary)
        return canary
