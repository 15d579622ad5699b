"""Progress lines and live metrics."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from components.system.child_lines import ChildLine, as_child_line
from components.training import telemetry
from components.training.telemetry import MetricsLog, ProgressTicker


def test_lines_are_spaced_and_silence_is_filled(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressTicker(every_s=0.4) as ticker:
        for step in range(5):
            ticker.update(f"step {step}", percent=step)
        ticker.update("validation", percent=5, now=True)
        time.sleep(1.5)
    lines = [as_child_line(printed) for printed in capsys.readouterr().out.splitlines()]
    assert lines[0] == ChildLine("validation", 5, 100)
    assert lines[1].what.startswith("validation (for ") and len(lines) < 6
    assert lines[1].percent == 5


def test_metrics_reach_the_run_in_order(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    run_id = client.create_run(client.create_experiment("e")).info.run_id
    with MetricsLog(tracking_uri=uri, run_id=run_id) as metrics:
        for step in range(7):
            metrics.log({"loss": 1.0 / (step + 1), "rate": 0.1}, step=step)
    history = client.get_metric_history(run_id, "loss")
    assert [(point.step, point.value) for point in history] == [
        (step, 1.0 / (step + 1)) for step in range(7)
    ]


def test_a_tracking_server_that_is_away_costs_points_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(telemetry, "FLUSH_EVERY_S", 0.1)
    started = time.monotonic()
    with MetricsLog(tracking_uri="http://127.0.0.1:9", run_id="none") as metrics:
        metrics.log({"loss": 1.0}, step=1)
        assert time.monotonic() - started < 20  # MLflow's own retries take minutes
    assert "1 metric points did not reach MLflow" in capsys.readouterr().out


def test_without_a_run_nothing_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLog(tracking_uri=None, run_id=None) as metrics:
        metrics.log({"loss": 1.0}, step=1)
    assert "did not reach MLflow" not in capsys.readouterr().out
