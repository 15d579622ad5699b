"""A changed target starts the lifecycle, exactly once per content."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.events import emit_event
from prefect.logging import get_run_logger

from components.contracts import TargetChange, append_line
from components.stages.run import Run
from tasks.retry import transient


@task(name="start lifecycle", cache_policy=NO_CACHE, **transient(retries=2, delay_s=5))
def start_lifecycle(context: Run, change: TargetChange) -> str:
    """Start `drafter-lifecycle` for the new fingerprint and return the run's id.

    The idempotency key is the pair (bound, found): however often the watch looks, one change starts
    one run.
    """
    key = f"target-change/{context.recipe.name}/{context.size}/{change.digest}"
    run = run_deployment(
        f"drafter-lifecycle/{context.recipe.name}",
        parameters={"recipe": context.recipe.name, "size": context.size, "target": "published"},
        idempotency_key=key,
        timeout=0,
        as_subflow=False,
    )

    # A coroutine only inside an event loop, and a task of a sync flow has none.
    assert isinstance(run, FlowRun)
    emit_event(
        "dspark.target.changed",
        resource={"prefect.resource.id": f"dspark.target.{context.recipe.target.name}"},
        payload=change.model_dump(mode="json"),
    )
    append_line(context.state_dir / "changes.jsonl", change.model_dump_json())
    get_run_logger().info("lifecycle run %s handles %s", run.name, "+".join(change.kinds))

    return str(run.id)
