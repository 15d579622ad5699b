"""A fine-tune in a process of its own: model, gradients and optimizer state are several times the
target's size, and a process that goes on to other work would keep that memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from components.contracts import Progress
from components.errors import TargetError, run_main
from components.targets.finetune import finetune_target


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
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+") as errors:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            losses = _follow(process, progress)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code != 0 or losses is None:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
            raise TargetError("the fine-tune failed", got=last.removeprefix("error: "))
    return losses


def _follow(process: subprocess.Popen[str], progress: Progress | None) -> list[float] | None:
    losses: list[float] | None = None
    assert process.stdout is not None
    for line in process.stdout:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a library that prints
        if isinstance(record, dict) and "losses" in record:
            losses = record["losses"]
        elif isinstance(record, dict) and progress is not None:
            progress(record["what"], record["num_done"], record["num_total"])
    return losses


def _main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())

    def tell(what: str, num_done: int, num_total: int) -> None:
        print(json.dumps({"what": what, "num_done": num_done, "num_total": num_total}), flush=True)

    source, destination = Path(job.pop("source")), Path(job.pop("destination"))
    losses = finetune_target(source, destination, **job, progress=tell)
    print(json.dumps({"losses": losses}), flush=True)


if __name__ == "__main__":
    run_main(_main)
