"""Following a run: each record once, subflows by their flow's name, a clear error for wrong
parameters.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from components.errors import ConfigError, ServiceError
from components.services import follow
from components.services.follow import LogFollower, PrefectApi, _parse_parameters

FLOWS = {"f1": "drafter-lifecycle", "f2": "curate-data"}
PARENT = {"id": "run1", "flow_id": "f1", "name": "x"}
CHILD = {"id": "run2", "flow_id": "f2", "name": "y"}


class Server:
    """Answers the calls of `PrefectApi` from a list of log records."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.created: dict[str, Any] | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api")
        body = json.loads(request.content) if request.content else {}
        if path.startswith("/deployments/name/drafter-lifecycle/demo"):
            schema = {"properties": {"recipe": {}, "size": {}}}
            found = {
                "id": "d",
                "parameters": {"recipe": "demo", "size": None},
                "parameter_openapi_schema": schema,
            }
            return httpx.Response(200, json=found)
        if path.startswith("/deployments/name/"):
            return httpx.Response(404, json={})
        if path == "/deployments/d/create_flow_run":
            self.created = body
            return httpx.Response(201, json=PARENT)
        if path == "/task_runs/t1":
            return httpx.Response(200, json={"name": "find target-70c"})
        if path == "/flow_runs/run1":
            return httpx.Response(200, json=PARENT)
        if path == "/flow_runs/filter":
            parents = body["flow_runs"]["parent_flow_run_id"]["any_"]
            return httpx.Response(200, json=[CHILD] if parents == ["run1"] else [])
        if path.startswith("/flows/"):
            return httpx.Response(200, json={"name": FLOWS[path.removeprefix("/flows/")]})
        after = body["logs"].get("timestamp", {}).get("after_", "")
        found_logs = [record for record in self.logs if record["timestamp"] >= after]
        return httpx.Response(200, json=found_logs[body["offset"] : body["offset"] + body["limit"]])


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def api(server: Server) -> PrefectApi:
    return PrefectApi("http://prefect/api", transport=httpx.MockTransport(server))


def _record(number: int, run_id: str = "run1", message: str | None = None) -> dict[str, Any]:
    text = message or f"line {number}"
    stamp = f"2026-01-01T00:{number // 60:02}:{number % 60:02}.000000Z"
    return {
        "id": str(number),
        "flow_run_id": run_id,
        "level": 20,
        "timestamp": stamp,
        "message": text,
    }


def test_parameters_are_merged_over_the_deployment_s(api: PrefectApi, server: Server) -> None:
    api.create_run("drafter-lifecycle/demo", parameters={"size": "full"})
    assert server.created is not None
    assert server.created["parameters"] == {"recipe": "demo", "size": "full"}


def test_a_run_can_be_named_so_that_its_report_is_found(api: PrefectApi, server: Server) -> None:
    api.create_run("drafter-lifecycle/demo", parameters={}, name="demo-01")
    assert server.created is not None and server.created["name"] == "demo-01"
    api.create_run("drafter-lifecycle/demo", parameters={})
    assert "name" not in server.created


def test_an_unknown_parameter_or_deployment_is_refused(api: PrefectApi, server: Server) -> None:
    with pytest.raises(ConfigError, match="no such parameter; got buget; expected recipe, size"):
        api.create_run("drafter-lifecycle/demo", parameters={"buget": "full"})
    assert server.created is None
    with pytest.raises(ServiceError, match="no deployment 'nope/demo'"):
        api.create_run("nope/demo", parameters={})


def test_each_record_is_printed_once_also_when_it_arrives_late(
    api: PrefectApi, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = LogFollower(api, "run1")
    server.logs = [_record(20), _record(30, "run2")]
    follower.poll("RUNNING")
    server.logs = [_record(20), _record(25), _record(30, "run2"), _record(31)]
    follower.poll("RUNNING")
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["20", "30", "25", "31"]
    assert "drafter-lifecycle" in lines[0] and "curate-data" in lines[1]


def test_all_pages_of_a_long_log_are_read(
    api: PrefectApi, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.logs = [_record(number) for number in range(450)]
    LogFollower(api, "run1").poll("RUNNING")
    assert len(capsys.readouterr().out.splitlines()) == 450


def test_a_traceback_stays_in_the_ui(
    api: PrefectApi, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.logs = [
        _record(1, message="failed: E('x')\nTraceback (most recent call last):\n  File ...")
    ]
    LogFollower(api, "run1").poll("RUNNING")
    assert capsys.readouterr().out.rstrip().endswith("failed: E('x')")


def test_a_server_that_does_not_answer_is_a_service_error() -> None:
    def refuse(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    api = PrefectApi("http://prefect/api", patience_s=0, transport=httpx.MockTransport(refuse))
    with pytest.raises(ServiceError, match=r"does not answer.*Run make up"):
        api.read_run("run1")


def test_a_busy_server_is_asked_again_and_starts_one_run_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "RETRY_EVERY_S", 0.01)
    keys: list[str] = []

    def busy_twice(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/create_flow_run"):
            keys.append(json.loads(request.content)["idempotency_key"])
            if len(keys) < 3:
                return httpx.Response(503, json={"exception_message": "Service Unavailable"})
        return server(request)

    api = PrefectApi("http://prefect/api", transport=httpx.MockTransport(busy_twice))
    assert api.create_run("drafter-lifecycle/demo", parameters={})["id"] == "run1"
    assert len(keys) == 3 and len(set(keys)) == 1


def test_a_server_that_stays_busy_is_a_service_error() -> None:
    transport = httpx.MockTransport(
        lambda _request: httpx.Response(503, text="Service Unavailable")
    )
    with pytest.raises(ServiceError, match="refused a call; got 503"):
        PrefectApi("http://prefect/api", patience_s=0, transport=transport).read_run("run1")


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_parameters_that_are_no_json_object_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--parameters"):
        _parse_parameters(text)


def test_the_end_of_a_task_names_the_task(
    api: PrefectApi, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _record(1, message="Finished in state Completed()") | {"task_run_id": "t1"}
    server.logs = [told, _record(2) | {"task_run_id": "t1"}]
    LogFollower(api, "run1").poll("RUNNING")
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("drafter-lifecycle find target: Finished in state Completed()")
    assert second.endswith("drafter-lifecycle line 2")
