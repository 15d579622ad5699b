"""The trainer as a child: its command line, its lines, its failures, and that it never outlives its
caller.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.contracts import DatasetRef, StoreEndpoint, TargetFingerprint, TargetRef
from components.errors import TrainingError
from components.settings import DrafterSettings, StreamSettings, TrainingSettings
from components.system.child_lines import ChildLine
from components.training import launch
from components.training.job import TrainingJob
from components.training.launch import launch_command, run_trainer

FINGERPRINT = TargetFingerprint(weights="a", quantization="b", tokenizer="c", serving="d")


def job(output: Path) -> TrainingJob:
    return TrainingJob(
        drafter=DrafterSettings(),
        training=TrainingSettings(),
        stream=StreamSettings(aux_layer_ids=(1,)),
        target=TargetRef(
            name="t", path="p", source="s", fingerprint=FINGERPRINT, quantization="none"
        ),
        dataset=DatasetRef(
            path="p",
            digest="d",
            fingerprint=FINGERPRINT,
            num_conversations={},
            num_tokens={},
            num_loss_tokens={},
            funnel={},
            docs_path="",
        ),
        engine_urls=("http://127.0.0.1:1",),
        model="t",
        store=StoreEndpoint(master_address="127.0.0.1:1", metrics_url="http://127.0.0.1:2/metrics"),
        stream_run_id="r",
        output_dir=str(output),
    )


def test_command_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    tail = ["-m", "components.training.main", str(path)]
    assert launch_command(path, TrainingSettings(), "cpu")[1:] == tail
    gpus = launch_command(path, TrainingSettings(num_processes=8), "cuda")
    # The trainer shards by itself; accelerate's own plug-in must not do it once more.
    assert launch_command(path, TrainingSettings(num_processes=8, parallel="fsdp2"), "cuda") == gpus
    assert not any("fsdp" in word for word in gpus)
    assert gpus[1:5] == ["-m", "accelerate.commands.launch", "--num_processes", "8"]
    assert "--multi_gpu" in gpus and gpus[-3:] == [
        "--module",
        "components.training.main",
        str(path),
    ]
    one = launch_command(path, TrainingSettings(), "cuda")
    assert "accelerate.commands.launch" in one and "--multi_gpu" not in one
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert launch_command(path, TrainingSettings(num_processes=2), "cpu")[1:] == [*ranks, *tail]


def fake_trainer(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(launch, "launch_command", lambda *_: [sys.executable, "-c", code])


def test_a_failed_trainer_raises_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trainer(
        monkeypatch, "print('step 1'); print('error: the store is down'); raise SystemExit(1)"
    )
    lines: list[ChildLine] = []
    with pytest.raises(TrainingError, match="exit code 1: the store is down"):
        run_trainer(job(tmp_path), on_line=lines.append, timeout_s=600)
    assert [line.what for line in lines] == ["step 1", "error: the store is down"]


def test_what_libraries_note_is_kept_from_people_unless_they_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os; print(os.environ['LOGURU_LEVEL'], "
        "os.environ['HF_HUB_DISABLE_PROGRESS_BARS']); raise SystemExit(1)"
    )
    fake_trainer(monkeypatch, code)
    monkeypatch.delenv("LOGURU_LEVEL", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    with pytest.raises(TrainingError, match="ERROR 0"):
        run_trainer(job(tmp_path), on_line=print, timeout_s=600)


CHILD_AND_GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3000)"])
print(child.pid, flush=True)
time.sleep(3000)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_whole_group_ends_when_the_caller_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    fake_trainer(monkeypatch, CHILD_AND_GRANDCHILD)
    pids: list[int] = []

    def fail(line: ChildLine) -> None:
        pids.append(int(line.what))
        raise error

    with pytest.raises(error):
        run_trainer(job(tmp_path), on_line=fail, timeout_s=600)
    deadline = time.monotonic() + 60
    while is_alive(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pids[0])


def test_a_trainer_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trainer(monkeypatch, "import time; time.sleep(3000)")
    started = time.monotonic()
    with pytest.raises(TrainingError, match="did not finish within 1 s"):
        run_trainer(job(tmp_path), on_line=print, timeout_s=1)
    assert time.monotonic() - started < 120


def test_a_job_file_that_is_wrong_is_one_line_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "components.training.main", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    assert "is not a TrainingJob" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
