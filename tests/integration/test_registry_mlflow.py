"""Runs, releases and promotions against a real MLflow server on SQLite."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from components.contracts import (
    FINGERPRINT_FILE,
    AcceptanceReport,
    ArmReport,
    CheckpointRef,
    GateDecision,
    TargetFingerprint,
    TargetRef,
    Verdict,
    digest_checkpoint,
    now_utc,
)
from components.errors import FingerprintMismatchError, RegistryError
from components.registry import promotions as log
from components.registry import releases
from components.registry.client import Registry
from tests.support.running_services import START_TIMEOUT_S, Services

pytestmark = pytest.mark.integration
FINGERPRINT = TargetFingerprint(
    weights="w" * 64, quantization="q" * 64, tokenizer="t" * 64, serving="s" * 64
)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    log_file = (folder / "server.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *arguments, *stores],
        stdout=log_file,
        stderr=log_file,
        cwd=folder,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return process
        except httpx.HTTPError:
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
        time.sleep(0.3)
    stop_server(process)
    raise AssertionError(f"MLflow did not come up in {START_TIMEOUT_S} s")


def stop_server(process: subprocess.Popen[bytes]) -> None:
    import psutil

    children = (
        psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    )
    process.terminate()
    for child in children:
        if child.is_running():
            child.terminate()
    process.wait(timeout=120)


@pytest.fixture
def registry(services: Services) -> Registry:
    return Registry(services.state.endpoints.mlflow_url)


def make_checkpoint(
    folder: Path, *, content: bytes = b"weights", fingerprint: TargetFingerprint = FINGERPRINT
) -> CheckpointRef:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Drafter"]}))
    (folder / "model.safetensors").write_bytes(content)
    (folder / "optimizer.pt").write_bytes(b"state")
    fingerprint.write(folder / FINGERPRINT_FILE)
    return CheckpointRef(
        path=str(folder),
        digest=digest_checkpoint(folder),
        algorithm="dspark",
        fingerprint=fingerprint,
        num_draft_tokens=4,
    )


def make_target(fingerprint: TargetFingerprint = FINGERPRINT) -> TargetRef:
    return TargetRef(
        name="tiny",
        path="target",
        source="folder tiny",
        fingerprint=fingerprint,
        quantization="none",
    )


def make_report(checkpoint: CheckpointRef) -> AcceptanceReport:
    arm = ArmReport(
        arm="candidate",
        checkpoint_digest=checkpoint.digest,
        acceptance_length=1.5,
        acceptance_by_slice={"chat": 1.5},
        acceptance_by_position=(0.4, 0.1),
        draft_coverage=1.0,
        prompts=(),
        speed=(),
        engine_counters={},
    )
    return AcceptanceReport(
        target=make_target(),
        temperature=0.0,
        max_tokens=8,
        prompt_digest="p" * 64,
        arms={"candidate": arm},
        num_equal_outputs=0,
        num_compared_outputs=0,
        engine_version="0",
        created_at=now_utc(),
    )


def make_gate(
    checkpoint: CheckpointRef, report: AcceptanceReport, *, verdict: Verdict = Verdict.PASS
) -> GateDecision:
    return GateDecision(
        candidate_digest=checkpoint.digest,
        champion_digest=None,
        target_fingerprint=FINGERPRINT,
        report_digest=report.digest,
        rules=(),
        verdict=verdict,
        speculative_schedule=((1, 2, 4), (3, 64, 0)),
        created_at=now_utc(),
    )


def release_one(
    registry: Registry, folder: Path, model_name: str, *, content: bytes = b"weights"
) -> releases.Release:
    checkpoint = make_checkpoint(folder, content=content)
    report = make_report(checkpoint)
    plot = folder.parent / "plot.png"
    plot.write_bytes(b"png")
    return releases.register_release(
        registry,
        model_name=model_name,
        checkpoint=checkpoint,
        target=make_target(),
        gate=make_gate(checkpoint, report),
        report=report,
        run_id=registry.start_run("training", name="run", params={"lr": 0.1}),
        extra_artifacts=[plot],
    )


def test_metrics_of_two_threads_go_to_their_own_runs(registry: Registry) -> None:
    run_ids = [
        registry.start_run("threads", name=f"r{i}", params={"i": i}, tags={"a": "b"})
        for i in range(2)
    ]

    def write(index: int) -> None:
        for step in range(10):
            registry.log_metrics(
                run_ids[index], {"loss": index + step / 10, "acceptance": 1.0}, step=step
            )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    for index, run_id in enumerate(run_ids):
        registry.finish_run(run_id, failed=index == 1)
        history = registry.client.get_metric_history(run_id, "loss")
        assert sorted((m.step, m.value) for m in history) == [
            (s, index + s / 10) for s in range(10)
        ]
        run = registry.client.get_run(run_id)
        assert run.info.status == ("FAILED" if index else "FINISHED")
        assert run.data.params == {"i": str(index)}
        assert run.data.tags["a"] == "b"
    assert run_ids[0] in registry.run_url(run_ids[0])


def test_more_metrics_than_one_batch_holds(registry: Registry) -> None:
    run_id = registry.start_run("batches", name="many", params={f"p{i}": i for i in range(150)})
    registry.log_metric_rows(run_id, [(step, {"x": step, "y": 1.0}) for step in range(700)])
    assert len(registry.client.get_metric_history(run_id, "x")) == 700
    assert len(registry.client.get_run(run_id).data.params) == 150


def test_a_release_round_trip(registry: Registry, tmp_path: Path) -> None:
    assert releases.champion(registry, "round-trip-drafter") is None
    release = release_one(registry, tmp_path / "checkpoint", "round-trip-drafter")
    assert release.version == 1
    assert release.acceptance_length == 1.5
    assert releases.get_release(registry, "round-trip-drafter", version=1) == release
    assert releases.get_release(registry, "round-trip-drafter", alias="challenger") == release
    assert releases.get_release(registry, "round-trip-drafter", version=2) is None
    assert releases.champion(registry, "round-trip-drafter") is None
    releases.set_alias(
        registry, release, "champion", reason="canary passed", decision_digest="c" * 64
    )
    assert releases.champion(registry, "round-trip-drafter") == release
    assert releases.list_releases(registry, "round-trip-drafter") == [release]

    downloaded = releases.download_checkpoint(registry, release, tmp_path / "download")
    assert digest_checkpoint(Path(downloaded.path)) == release.checkpoint.digest
    assert not (tmp_path / "download" / "optimizer.pt").exists()
    assert releases.download_checkpoint(registry, release, tmp_path / "download") == downloaded
    names = {
        a.path.rpartition("/")[2]
        for a in registry.client.list_artifacts(
            release.run_id, f"release-{release.gate_digest[:16]}"
        )
    }
    assert names == {
        "checkpoint",
        "gate_decision.json",
        "acceptance_report.json",
        "extra",
        "release.json",
    }
    assert (
        releases.acceptance_report_of(registry, release).arms
        == make_report(release.checkpoint).arms
    )


def test_registering_again_completes_the_same_version(registry: Registry, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    report = make_report(checkpoint)
    gate = make_gate(checkpoint, report)
    run_id = registry.start_run("training", name="twice", params={})

    def register() -> releases.Release:
        return releases.register_release(
            registry,
            model_name="twice-drafter",
            checkpoint=checkpoint,
            target=make_target(),
            gate=gate,
            report=report,
            run_id=run_id,
        )

    first = register()
    # As after a crash between the version and its completion:
    registry.client.delete_model_version_tag("twice-drafter", "1", "dspark.release")
    with pytest.raises(RegistryError, match="never completed"):
        releases.get_release(registry, "twice-drafter", version=1)
    assert releases.list_releases(registry, "twice-drafter") == []
    assert register() == first
    assert releases.get_release(registry, "twice-drafter", version=1) == first
    assert len(log.promotions(registry, "twice-drafter")) == 1


def test_a_gate_that_does_not_fit_is_refused(registry: Registry, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    report = make_report(checkpoint)
    common = {"checkpoint": checkpoint, "target": make_target(), "report": report}
    gate = make_gate(checkpoint, report)
    with pytest.raises(RegistryError, match="passed its gate"):
        releases.check_releasable(
            **common, gate=make_gate(checkpoint, report, verdict=Verdict.INCONCLUSIVE)
        )
    with pytest.raises(RegistryError, match="another checkpoint"):
        releases.check_releasable(
            **common, gate=gate.model_copy(update={"candidate_digest": "0" * 64})
        )
    with pytest.raises(RegistryError, match="another report"):
        releases.check_releasable(
            **common, gate=gate.model_copy(update={"report_digest": "0" * 64})
        )
    other = FINGERPRINT.model_copy(update={"weights": "0" * 64})
    with pytest.raises(FingerprintMismatchError, match="another target"):
        releases.check_releasable(**{**common, "target": make_target(other)}, gate=gate)
    bound_elsewhere = checkpoint.model_copy(update={"fingerprint": other})
    with pytest.raises(FingerprintMismatchError, match="bound to another target"):
        releases.check_releasable(**{**common, "checkpoint": bound_elsewhere}, gate=gate)
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(RegistryError, match="changed since"):
        releases.check_releasable(**common, gate=gate)


def test_a_damaged_artifact_is_not_handed_out(registry: Registry, tmp_path: Path) -> None:
    release = release_one(registry, tmp_path / "checkpoint", "damaged-drafter")
    evil = tmp_path / "model.safetensors"
    evil.write_bytes(b"evil")
    registry.log_artifact(
        release.run_id, evil, folder=f"release-{release.gate_digest[:16]}/checkpoint"
    )
    with pytest.raises(RegistryError, match="damaged"):
        releases.download_checkpoint(registry, release, tmp_path / "download")
    assert not (tmp_path / "download").exists()


def test_promotions_are_a_chain_that_survives_a_race(registry: Registry, tmp_path: Path) -> None:
    one = release_one(registry, tmp_path / "a" / "checkpoint", "race-drafter", content=b"1")
    two = release_one(registry, tmp_path / "b" / "checkpoint", "race-drafter", content=b"2")
    barrier = threading.Barrier(4)

    def promote(index: int) -> None:
        barrier.wait()
        release = (one, two)[index % 2]
        releases.set_alias(
            registry, release, f"arm{index}", reason=f"r{index}", decision_digest=str(index) * 64
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(promote, range(4)))
    releases.set_alias(registry, one, "champion", reason="canary passed", decision_digest="c" * 64)
    releases.set_alias(registry, two, "champion", reason="better", decision_digest="d" * 64)
    releases.remove_alias(
        registry, "race-drafter", "champion", reason="rolled back", decision_digest="e" * 64
    )
    entries = log.promotions(registry, "race-drafter")
    assert [entry.index for entry in entries] == list(range(1, 10))
    assert [(e.from_version, e.to_version) for e in entries if e.alias == "champion"] == [
        (None, 1),
        (1, 2),
        (2, None),
    ]
    assert {e.alias for e in entries} == {"challenger", "champion", "arm0", "arm1", "arm2", "arm3"}
    assert log.verify_aliases(registry, "race-drafter") == []
    assert releases.champion(registry, "race-drafter") is None
    registry.client.set_registered_model_alias("race-drafter", "champion", "1")
    assert log.verify_aliases(registry, "race-drafter") == [
        "champion: the log says None, MLflow says 1"
    ]


def test_the_log_cannot_be_overwritten_or_altered_unseen(
    registry: Registry, tmp_path: Path
) -> None:
    release = release_one(registry, tmp_path / "checkpoint", "log-drafter")
    releases.set_alias(
        registry, release, "champion", reason="canary passed", decision_digest="c" * 64
    )
    run_id = registry.client.get_registered_model("log-drafter").tags["dspark.promotions_run_id"]
    with pytest.raises(RegistryError):
        registry.log_params(run_id, {"000001": "{}"})
    entries = log.promotions(registry, "log-drafter")
    forged = [entries[0].model_copy(update={"reason": "forged"}), *entries[1:]]
    with pytest.raises(RegistryError, match="broken at entry 2"):
        log.verify_chain(forged)
    with pytest.raises(RegistryError, match="broken at entry 1"):
        log.verify_chain(entries[1:])
    with pytest.raises(RegistryError, match="too long"):
        releases.set_alias(
            registry, release, "champion", reason="x" * 7000, decision_digest="c" * 64
        )


def test_no_server_is_one_clear_message() -> None:
    started = time.monotonic()
    with pytest.raises(RegistryError, match=r"no answer in 1 s; got http.*make up"):
        Registry(f"http://127.0.0.1:{free_port()}", timeout_s=1)
    assert time.monotonic() - started < 60  # MLflow's own retries take minutes


@pytest.mark.long
def test_a_server_that_restarts_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    process = start_server(tmp_path, port)
    try:
        registry = Registry(f"http://127.0.0.1:{port}", timeout_s=START_TIMEOUT_S)
        run_id = registry.start_run("restart", name="r", params={})
        stop_server(process)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(registry.log_metrics, run_id, {"loss": 1.0}, step=1)
            time.sleep(1)
            process = start_server(tmp_path, port)
            pending.result(timeout=START_TIMEOUT_S)
        assert [m.value for m in registry.client.get_metric_history(run_id, "loss")] == [1.0]
        registry.timeout_s = 1
        stop_server(process)
        with pytest.raises(RegistryError, match="MLflow could not log metrics: no answer"):
            registry.log_metrics(run_id, {"loss": 1.0}, step=2)
    finally:
        if process.poll() is None:
            stop_server(process)
