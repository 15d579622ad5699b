"""The second act: the target is quantized, then fine-tuned, and the drafter follows."""

from __future__ import annotations

from prefect import flow

from components.reporting.report import LifecycleReport
from components.stages.targets import SOURCE
from flows.flow_run.run import run_of
from flows.watch_target import watch_target
from tasks.target_change import (
    LIFECYCLE_TIMEOUT_S,
    change_report,
    finetune,
    publish,
    quantize,
    second_act_report,
    wait_for_run,
)
from tasks.targets import find_target


@flow(name="demo-target-change", log_prints=True)
def demo_target_change(recipe: str = "demo", size: str | None = "change") -> LifecycleReport:
    """Publish two real changes where the watch looks, one after the other, and report what the loop
    made of them.

    Args:
        recipe: name in `configs/` or path of a recipe; its target must come from a package.
        size: overlay the lifecycles run with.
    """
    with run_of(recipe, size=size) as run:
        source = find_target(run, SOURCE, publish=False)
        changes = []
        for name, make in (
            ("INT8 W8A8 quantization", quantize),
            ("fine-tune on human chats", finetune),
        ):
            published_at = publish(run, make(run, source))
            seen = watch_target(recipe, size)
            wait_for_run(seen.lifecycle_run_id, timeout_s=LIFECYCLE_TIMEOUT_S)
            changes.append(change_report(run, name, seen, published_at))
        return second_act_report(run, source, changes)
