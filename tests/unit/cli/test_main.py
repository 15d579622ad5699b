"""The command line: help, wrong usage, errors, JSON; what it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.cli.main import invoke
from components.errors import ServiceError
from components.services.endpoints import STATE_DIR_VARIABLE

COMMANDS = ("up", "down", "status", "run", "gate", "report", "doctor")


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty state folder."""
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([command, "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"Usage: dspark {command}" in told
    assert "Example: dspark" in told


def test_help_lists_the_commands_and_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(command in told for command in COMMANDS)
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dspark 0.")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["stauts"], 2, "No such command 'stauts'"),
        (["report", "--nothing"], 2, "No such option"),
        (["run", "drafter-livecycle"], 2, "did you mean drafter-lifecycle"),
        (["run", "train-drafter", "demo", "--param", "x"], 2, "KEY=JSON"),
        (["run", "train-drafter", "demo", "--param", "x=y"], 2, "is not JSON"),
        (["gate"], 3, "Missing option '--recipe'"),
        (["gate", "--recipe", "demo"], 3, "either --candidate"),
        (["report"], 1, "no report has been written yet"),
        (["run", "train-drafter", "demo"], 1, "services are not up"),
    ],
)
def test_wrong_usage_and_errors_are_one_message(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(arguments) == code
    told = capsys.readouterr()
    assert words in " ".join(told.err.replace("│", " ").split())
    assert "Traceback" not in told.err
    assert told.out == ""


def test_status_of_nothing_is_told_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["status"]) == 1
    assert "services are not up" in capsys.readouterr().out
    assert invoke(["status", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["up"] is False and told["serving"] is None


def test_doctors_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code = invoke(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert {"what", "level", "found", "to_do"} == set(told[0])
    assert code == int(any(finding["level"] == "missing" for finding in told))


def test_a_run_gets_its_parameters_and_its_end_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    ended = {"id": "1", "name": "demo-1", "state": "FAILED", "message": "no room"}

    def run_to_end(deployment: str, **given: Any) -> dict[str, Any]:
        asked.append((deployment, given))
        print("a line of the run")
        return ended

    monkeypatch.setattr("components.services.follow.run_to_end", run_to_end)
    arguments = ["run", "drafter-lifecycle", "demo", "--size", "full", "--target", "source"]
    arguments += ["--param", 'begun_at="2026-01-01T00:00:00Z"', "--run-name", "demo-1"]
    assert invoke(arguments) == 1
    assert capsys.readouterr().out == "a line of the run\n"
    parameters = {
        "recipe": "demo",
        "size": "full",
        "target": "source",
        "begun_at": "2026-01-01T00:00:00Z",
    }
    given = {"parameters": parameters, "name": "demo-1", "timeout_s": None}
    assert asked == [("drafter-lifecycle/demo", given)]

    assert invoke([*arguments, "--json", "--timeout-s", "60"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) == ended and told.err == "a line of the run\n"
    assert asked[1][1]["timeout_s"] == 60


def test_services_that_are_down_are_one_json_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["down", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"up": False, "num_killed": 0}
    assert "services are not up" in told.err


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (ServiceError("the store is down", fix="Start it."), 1)],
)
def test_what_ends_a_command_gives_its_exit_code(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise raised

    monkeypatch.setattr("components.services.up.bring_up", fail)
    assert invoke(["up"]) == code


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.services.up.bring_up", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        invoke(["up"])


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys, components.cli.main; "
        "print([m for m in ('torch', 'vllm', 'mlflow', 'prefect', 'transformers')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
