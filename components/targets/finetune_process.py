"""A fine-tune in a process of its own: model, gradients and optimizer state are several times the
target's size, and a process that goes on to other work would keep that memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from components.contracts import Progress
from components.errors import TargetError, run_main
from components.system.child import child_environment, run_process
from components.system.child_lines import ChildLine, OnChildLine, tell_parent
from components.targets.finetune import finetune_target

RESULT_FILE = "losses.json"
TIMEOUT_S = 6 * 3600.0


def finetune_in_process(
    source: Path,
    destination: Path,
    *,
    num_steps: int,
    learning_rate: float,
    texts: Sequence[str],
    progress: Progress | None = None,
) -> list[float]:
    """As `finetune_target`, in a child process, which ends with the caller.

    Raises:
        TargetError: the child failed; its own message is in `got`.
    """
    job = {
        "source": str(source),
        "destination": str(destination),
        "num_steps": num_steps,
        "learning_rate": learning_rate,
        "texts": list(texts),
    }

    with tempfile.TemporaryDirectory() as folder:
        job_path = Path(folder) / "job.json"
        result_path = Path(folder) / RESULT_FILE
        job_path.write_text(json.dumps(job))
        run_process(
            [sys.executable, "-m", __name__, str(job_path)],
            child_environment(),
            what="the fine-tune",
            on_line=_as_progress(progress),
            timeout_s=TIMEOUT_S,
            error=TargetError,
        )
        losses: list[float] = json.loads(result_path.read_text())

    return losses


def _as_progress(progress: Progress | None) -> OnChildLine:
    def on_line(line: ChildLine) -> None:
        if progress is not None and line.num_done is not None and line.num_total is not None:
            progress(line.what, line.num_done, line.num_total)

    return on_line


def main(arguments: list[str] | None = None) -> int:
    """The child: `python -m components.targets.finetune_process JOB.json`; losses go beside it."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    job = json.loads(Path(path).read_text())

    def tell(what: str, num_done: int, num_total: int) -> None:
        tell_parent(ChildLine(what, num_done, num_total))

    source, destination = Path(job.pop("source")), Path(job.pop("destination"))
    losses = finetune_target(source, destination, **job, progress=tell)
    (Path(path).parent / RESULT_FILE).write_text(json.dumps(losses))
    return 0


if __name__ == "__main__":
    run_main(main)
