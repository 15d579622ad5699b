"""Run a deployment and show its logs while it runs:
`python -m components.services.follow 'flow-name/deployment'`.

Speaks Prefect's REST API, for components never import Prefect. Exit status 0 when the run ends in
COMPLETED, 1 otherwise. Ctrl-C cancels the run and waits until it has ended, so that nothing goes on
unwatched.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from types import FrameType
from typing import Any

import httpx

from components.errors import ConfigError, ServiceError, run_main
from components.services.endpoints import load_endpoints

POLL_S = 1.0
FINISHED = "Finished in state"
RETRY_EVERY_S = 0.5
BUSY = frozenset({408, 429, 502, 503, 504})
PROGRESS_EVERY_S = 10.0
CANCEL_TIMEOUT_S = 120.0
LOG_PAGE = 200
"""Records per request; the server's limit."""
COMPLETED = "COMPLETED"
TERMINAL = frozenset({COMPLETED, "FAILED", "CANCELLED", "CRASHED"})
LEVELS = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}


class PrefectApi:
    """The few calls of Prefect's REST API that following a run takes.

    Args:
        url: ends in /api.
        patience_s: how long a server that is away or busy is asked again. On SQLite, Prefect
            answers 503 when two writers meet, and its own client asks again as well; a server that
            died is back within half a minute.
        transport: for tests; None uses the network.
    """

    def __init__(
        self, url: str, *, patience_s: float = 45.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._patience_s = patience_s
        self._client = httpx.Client(base_url=url, timeout=30, transport=transport)
        self._flow_names: dict[str, str] = {}
        self._task_names: dict[str, str] = {}

    def create_run(
        self, deployment: str, *, parameters: dict[str, Any], name: str | None = None
    ) -> dict[str, Any]:
        """Schedule a run of 'flow-name/deployment-name' now; returns the flow run.

        Args:
            deployment: see above.
            parameters: merged over the deployment's own.
            name: of the run; None: the server makes one up.

        Raises:
            ConfigError: a parameter the flow does not have.
            ServiceError: no such deployment, a value its schema refuses, or no server.
        """
        found = self._call(
            "GET", f"/deployments/name/{deployment}", missing=f"no deployment '{deployment}'"
        )
        # The server checks types only; an unknown name would crash the run after it has been
        # started.
        known = found["parameter_openapi_schema"].get("properties", {})

        if unknown := sorted(parameters.keys() - known.keys()):
            raise ConfigError(
                f"{deployment} has no such parameter", got=unknown[0], expected=", ".join(known)
            )

        body = {
            "parameters": {**found["parameters"], **parameters},
            "state": {"type": "SCHEDULED"},
            # a call that is tried again must not start a second run
            "idempotency_key": uuid.uuid4().hex,
        }
        if name is not None:
            body["name"] = name

        run: dict[str, Any] = self._call(
            "POST", f"/deployments/{found['id']}/create_flow_run", body=body
        )
        return run

    def read_run(self, run_id: str) -> dict[str, Any]:
        """The flow run as it is now."""
        run: dict[str, Any] = self._call("GET", f"/flow_runs/{run_id}")
        return run

    def read_family(self, run_id: str) -> dict[str, str]:
        """Flow name by run id, of the run and all its subflow runs at any depth."""
        generation = [self.read_run(run_id)]
        family: dict[str, str] = {}
        while generation:
            family.update({run["id"]: self._flow_name(run["flow_id"]) for run in generation})
            body = {
                "flow_runs": {"parent_flow_run_id": {"any_": [run["id"] for run in generation]}}
            }
            children = self._call("POST", "/flow_runs/filter", body=body)
            generation = [child for child in children if child["id"] not in family]
        return family

    def _flow_name(self, flow_id: str) -> str:
        if flow_id not in self._flow_names:
            self._flow_names[flow_id] = str(self._call("GET", f"/flows/{flow_id}")["name"])
        return self._flow_names[flow_id]

    def task_name(self, task_run_id: str) -> str:
        """Name of a task run, without the ending that Prefect gives it."""
        if task_run_id not in self._task_names:
            told = str(self._call("GET", f"/task_runs/{task_run_id}")["name"])
            self._task_names[task_run_id] = told.rpartition("-")[0] or told
        return self._task_names[task_run_id]

    def read_logs(self, run_ids: list[str], *, after: str | None) -> list[dict[str, Any]]:
        """Log records of the runs from time `after` (ISO 8601) on, oldest first."""
        wanted: dict[str, Any] = {"flow_run_id": {"any_": run_ids}}
        if after is not None:
            wanted["timestamp"] = {"after_": after}

        records: list[dict[str, Any]] = []
        while True:
            body = {
                "logs": wanted,
                "sort": "TIMESTAMP_ASC",
                "offset": len(records),
                "limit": LOG_PAGE,
            }
            page = self._call("POST", "/logs/filter", body=body)
            records.extend(page)
            if len(page) < LOG_PAGE:
                return records

    def cancel(self, run_id: str) -> None:
        """Ask the worker to end the run."""
        self._call("POST", f"/flow_runs/{run_id}/set_state", body={"state": {"type": "CANCELLING"}})

    def _call(
        self, method: str, path: str, *, body: object = None, missing: str | None = None
    ) -> Any:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            response = self._request(
                method, path, body=body, last_try=time.monotonic() >= deadline_s
            )
            if response is not None:
                break
            time.sleep(RETRY_EVERY_S)

        if response.status_code == httpx.codes.NOT_FOUND and missing is not None:
            raise ServiceError(missing, fix="prefect deployment ls shows the known ones.")
        if not response.is_success:
            raise ServiceError(
                "the Prefect server refused a call",
                got=f"{response.status_code} for {path}: {response.text[:300]}",
            )

        return response.json()

    def _request(
        self, method: str, path: str, *, body: object, last_try: bool
    ) -> httpx.Response | None:
        """The answer, or None where trying again is worth it: no connection, or a server that is
        busy just now.
        """
        try:
            response = self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            if not last_try:
                return None
            raise ServiceError(
                "the Prefect server does not answer", got=error, fix="Run make up."
            ) from None
        return None if response.status_code in BUSY and not last_try else response


@dataclass
class LogFollower:
    """Prints each log record of a run and its subflows once."""

    api: PrefectApi
    run_id: str
    started_s: float = field(default_factory=time.monotonic)
    _seen: set[str] = field(default_factory=set)
    _newest: str | None = None
    _last_line_s: float = field(default_factory=time.monotonic)

    def poll(self, state: str) -> None:
        """Print what is new; with nothing new for `PROGRESS_EVERY_S`, print one line with the
        state.
        """
        names = self.api.read_family(self.run_id)
        # Batches of several processes arrive out of order: look back some seconds and skip what was
        # printed.
        for record in self.api.read_logs(list(names), after=_earlier(self._newest, seconds=15)):
            if record["id"] not in self._seen:
                self._seen.add(record["id"])
                self._newest = max(self._newest or "", record["timestamp"])
                self._print(_format(self._with_task(record), names))
        if time.monotonic() - self._last_line_s >= PROGRESS_EVERY_S:
            self._print(f"  ... {state.lower()}, {time.monotonic() - self.started_s:.0f} s")

    def _with_task(self, record: dict[str, Any]) -> dict[str, Any]:
        """The end of a task says whose end it is; every other line of a task names its work."""
        if record.get("task_run_id") is None or not record["message"].startswith(FINISHED):
            return record
        task = self.api.task_name(record["task_run_id"])
        return record | {"message": f"{task}: {record['message']}"}

    def _print(self, line: str) -> None:
        print(line, flush=True)
        self._last_line_s = time.monotonic()


def _earlier(timestamp: str | None, *, seconds: float) -> str | None:
    if timestamp is None:
        return None
    moment = datetime.fromisoformat(timestamp).timestamp() - seconds
    return datetime.fromtimestamp(moment, tz=datetime.fromisoformat(timestamp).tzinfo).isoformat()


def _format(record: dict[str, Any], names: dict[str, str]) -> str:
    clock = datetime.fromisoformat(record["timestamp"]).astimezone().strftime("%H:%M:%S")
    level = LEVELS.get(record["level"], str(record["level"]))
    # A traceback belongs in the UI, where the record is whole; its first line already names the
    # exception.
    message = record["message"].partition("\nTraceback (most recent call last):")[0]
    return f"{clock} {level:<7} {names[record['flow_run_id']]:<17} {message}"


def follow(api: PrefectApi, run_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
    """Print the run's logs until it has ended; returns its final state (`type`, `message`, ...).

    Without `timeout_s` it waits as long as the run takes.

    Raises:
        ServiceError: the run took longer than `timeout_s` (it is cancelled first), or outlived a
            cancellation.
        KeyboardInterrupt: Ctrl-C, after the run has been cancelled and has ended.
    """
    follower = LogFollower(api, run_id)
    try:
        limit_s = math.inf if timeout_s is None else timeout_s
        return _wait(api, follower, deadline_s=time.monotonic() + limit_s)
    except (KeyboardInterrupt, TimeoutError) as interruption:
        print("cancelling the run; waiting until it has ended", flush=True)
        _cancel(api, follower)
        if isinstance(interruption, KeyboardInterrupt):
            raise
        raise ServiceError(
            "the run took too long", got=f"over {limit_s:.0f} s", fix="It was cancelled."
        ) from None


def _wait(api: PrefectApi, follower: LogFollower, *, deadline_s: float) -> dict[str, Any]:
    while True:
        state: dict[str, Any] = api.read_run(follower.run_id)["state"]
        follower.poll(state["type"])
        if state["type"] in TERMINAL:
            # the run's process sends its last batch of log records after its last state
            time.sleep(POLL_S * 2)
            follower.poll(state["type"])
            return state
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(POLL_S)


def _cancel(api: PrefectApi, follower: LogFollower) -> None:
    api.cancel(follower.run_id)
    try:
        state = _wait(api, follower, deadline_s=time.monotonic() + CANCEL_TIMEOUT_S)
    except TimeoutError:
        raise ServiceError(
            "the run has not ended after it was cancelled",
            got=f"{CANCEL_TIMEOUT_S:.0f} s",
            fix="Run make down.",
        ) from None
    print(f"the run ended: {state['type']}", flush=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse_parameters(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError("--parameters is not JSON", got=f"{text!r} ({error})") from None
    if not isinstance(parameters, dict):
        raise ConfigError("--parameters must be a JSON object", got=text)
    return parameters


def run_to_end(
    deployment: str,
    *,
    parameters: dict[str, Any],
    name: str | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Create a run of a deployment and follow it: `id`, `name`, `state` and `message` of its end.

    Raises:
        ConfigError, ServiceError, KeyboardInterrupt: see `PrefectApi.create_run` and `follow`.
    """
    # make sends SIGTERM to its child when it is interrupted itself
    signal.signal(signal.SIGTERM, _interrupt)
    api = PrefectApi(load_endpoints().prefect_api_url)
    run = api.create_run(deployment, parameters=parameters, name=name)
    print(f"run {run['name']} of {deployment}", flush=True)

    state = follow(api, run["id"], timeout_s=timeout_s)
    message = "" if state["type"] == COMPLETED else state["message"]
    print(f"run {run['name']}: {state['type']}" + (f": {message}" if message else ""), flush=True)
    return {"id": run["id"], "name": run["name"], "state": state["type"], "message": message}


def main(arguments: list[str] | None = None) -> int:
    """Create a run, follow it, and turn its final state into an exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("deployment", help="'flow-name/deployment-name'")
    parser.add_argument(
        "--parameters", default="{}", help="JSON object, merged over the deployment's own"
    )
    parser.add_argument("--run-name", help="of the run; without it the server makes one up")
    parser.add_argument(
        "--timeout-s", type=float, help="the run is cancelled after that long; none: never"
    )

    options = parser.parse_args(arguments)
    ended = run_to_end(
        options.deployment,
        parameters=_parse_parameters(options.parameters),
        name=options.run_name,
        timeout_s=options.timeout_s,
    )

    return 0 if ended["state"] == COMPLETED else 1


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
