"""The loop on the real target at a small size: interrupted, run again, promoted, and taken
through target changes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from components.registry.client import Registry
from components.registry.promotions import promotions
from components.registry.releases import champion
from components.reporting.report import LifecycleReport
from components.services.endpoints import REPO_DIR
from components.settings import load_recipe
from tests.support.running_services import Services

# A safety net against a flow that hangs: slow machines need half an hour.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]
FLOW_TIMEOUT_S = 4800

MODEL = "smollm2-135m-drafter"
SIZE_TEST = {"recipe": "demo", "size": "test"}
GIB = 1024.0  # MiB


@pytest.fixture(scope="module", autouse=True)
def converted_target(services: Services, real_target: Path) -> None:
    """The loop finds the demo's target converted: that takes a slow machine minutes, and is done
    once for all tests.
    """
    (services.state_dir / "targets").symlink_to(real_target.parent)


def start_flow(
    services: Services, deployment: str, parameters: dict[str, str]
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "components.services.follow",
        deployment,
        "--parameters",
        json.dumps(parameters),
    ]
    return subprocess.Popen(
        [*command, "--timeout-s", str(FLOW_TIMEOUT_S)],
        cwd=REPO_DIR,
        env=services.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_flow(services: Services, deployment: str, parameters: dict[str, str]) -> None:
    with start_flow(services, deployment, parameters) as flow:
        assert flow.stdout is not None
        lines = []
        for line in flow.stdout:  # shown live under `pytest -s`, and whole when the run fails
            print(line, end="")
            lines.append(line)
        assert flow.wait() == 0, "".join(lines)[-6000:]


def newest_report(services: Services) -> LifecycleReport:
    paths = sorted(
        services.state_dir.glob("runs/*/report/report.json"), key=lambda path: path.stat().st_mtime
    )
    return LifecycleReport.read(paths[-1])


def processes_of(services: Services, word: str) -> list[int]:
    """Processes of this `up` whose command line holds `word`."""
    run_id = services.state.run_id
    found = []
    for process in psutil.process_iter():
        try:
            if run_id in process.environ().get("DSPARK_SERVICES_RUN", "") and word in " ".join(
                process.cmdline()
            ):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def registry(services: Services) -> Registry:
    return Registry(services.state.endpoints.mlflow_url)


@pytest.mark.long
def test_ctrl_c_ends_every_child_and_changes_nothing(services: Services) -> None:
    flow = start_flow(services, "drafter-lifecycle/demo", SIZE_TEST)
    deadline = time.monotonic() + 600
    while not processes_of(services, "vllm.entrypoints") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert processes_of(services, "vllm.entrypoints")
    flow.send_signal(signal.SIGINT)
    flow.communicate(timeout=600)
    assert flow.returncode == 130
    deadline = time.monotonic() + 120
    while processes_of(services, "vllm.entrypoints") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert processes_of(services, "vllm.entrypoints") == []
    assert processes_of(services, "components.training.main") == []
    assert champion(registry(services), MODEL) is None


def test_loop_promotes_a_drafter_and_keeps_serving_it(services: Services) -> None:
    run_flow(services, "drafter-lifecycle/demo", SIZE_TEST)
    report = newest_report(services)
    assert report.acceptance is not None and report.stream is not None and report.canary is not None
    arms = report.acceptance.arms
    assert arms["candidate"].acceptance_length > arms["untrained"].acceptance_length
    assert arms["untrained"].acceptance_length == pytest.approx(1.0, abs=0.05)
    assert report.gate is not None
    rules = {rule.rule: rule for rule in report.gate.rules}
    assert rules["losslessness"].verdict == rules["measured as the recipe asks"].verdict == "pass"
    assert (report.stream.bytes_on_disk, report.stream.keys_left) == (0, 0)
    assert 0 < report.stream.peak_bytes_held <= report.stream.budget_bytes
    assert report.stream.peak_bytes_held < report.stream.bytes_streamed
    assert report.canary.promoted
    steps = load_recipe("demo", size="test").canary.weights_percent
    assert tuple(step.weight_percent for step in report.canary.steps) == steps
    assert report.peak_memory_mib is not None and report.peak_memory_mib <= 12 * GIB
    release = champion(registry(services), MODEL)
    assert release is not None and release.checkpoint.digest == arms["candidate"].checkpoint_digest
    assert [entry.alias for entry in promotions(registry(services), MODEL)][:2] == [
        "challenger",
        "champion",
    ]
    endpoints = services.state.endpoints
    answer = httpx.post(
        f"{endpoints.haproxy_url}/v1/chat/completions",
        json={
            "model": report.target.name,
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 16,
        },
        timeout=300,
    )
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
    assert httpx.get(endpoints.store.metrics_url, timeout=60).text.find("master_key_count 0") >= 0
    assert not list(Path(services.state_dir).rglob("*.hidden*"))


@pytest.mark.long
def test_target_changes_are_followed(services: Services) -> None:
    before = champion(registry(services), MODEL)
    assert before is not None
    run_flow(services, "demo-target-change/demo", SIZE_TEST)
    quantized, finetuned = newest_report(services).target_changes
    assert quantized.kinds == ("quantization",)
    assert finetuned.kinds != ()
    for change in (quantized, finetuned):
        assert change.action in ("rebind", "retrain")
        assert (
            change.old_drafter is not None
            and change.no_draft is not None
            and change.new_drafter is not None
        )
    after = champion(registry(services), MODEL)
    assert after is not None and after.version > before.version
    if quantized.action == "rebind" and quantized.release is not None:
        assert quantized.release.checkpoint.parent_digest == before.checkpoint.digest
        assert quantized.release.target.fingerprint != before.target.fingerprint
