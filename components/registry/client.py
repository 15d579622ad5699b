"""A thread-safe client of MLflow: explicit run ids, bounded retries, one clear error when the
server is away.

MLflow's fluent API keeps a thread-local stack of active runs, so it is not used: every call names
its run. Every call may be repeated: runs carry a request id that is looked up before a second try,
metrics keep the timestamp of their first try (MLflow drops an equal row), artifacts of the same
name are overwritten with the same bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import requests
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from components.contracts import DatasetRef
from components.errors import RegistryError

_ResultT = TypeVar("_ResultT")
_MAX_METRICS, _MAX_PARAMS, _MAX_TAGS = 1000, 100, 100  # per batch, MLflow's own limits
_MAX_DATASET_DIGEST = 36  # characters
_REQUEST_ID = "dspark.request_id"
_CONNECTION_WORDS = (
    "failed with exception",
    "failed with timeout",
    "Max retries exceeded",
    "Connection refused",
)
_TRANSIENT_STATUS = {429, 502, 503, 504}
MISSING_CODES = {"RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"}


class Registry:
    """Runs, models and artifacts of one MLflow server.

    Args:
        tracking_uri: `http://host:port` of the server, or a database URI (`sqlite:///...`) for
            single-process use.
        timeout_s: longest time one call may spend on retries before it raises.
        request_timeout_s: longest time one HTTP request may take.

    Raises:
        RegistryError: the server does not answer in `timeout_s`.
    """

    def __init__(
        self, tracking_uri: str, *, timeout_s: float = 20.0, request_timeout_s: int = 60
    ) -> None:
        self.tracking_uri = (
            tracking_uri.rstrip("/") if tracking_uri.startswith("http") else tracking_uri
        )
        self.timeout_s = timeout_s
        # MLflow's own retries back off for minutes and cannot be handed in per client; ours are
        # bounded and typed.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(request_timeout_s))
        self._client = MlflowClient(tracking_uri=self.tracking_uri, registry_uri=self.tracking_uri)
        self._check_up()

    @property
    def client(self) -> Any:
        """The `MlflowClient` underneath; hand its calls to `call`."""
        return self._client

    def call(self, what: str, function: Callable[[], _ResultT]) -> _ResultT:
        """Run `function`, retrying lost connections with back-off for up to `timeout_s`.

        `what` completes "MLflow could not ...". `function` must be safe to repeat.

        Raises:
            RegistryError: the server stayed away, or refused the call.
        """
        try:
            return Retrying(
                stop=stop_after_delay(self.timeout_s),
                wait=wait_exponential(multiplier=0.2, max=3.0),
                retry=retry_if_exception(is_connection_error),
                reraise=True,
            )(function)
        except (MlflowException, OSError) as error:
            if is_connection_error(error):
                raise self._down(what) from error
            raise RegistryError(f"MLflow could not {what}", got=first_line(error)) from error

    def start_run(
        self,
        experiment: str,
        *,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Start a run in `experiment` (made if missing) and return its id.

        Raises:
            RegistryError: as `call`; also when a parameter is refused.
        """
        experiment_id = self.call(
            f"open the experiment {experiment}", lambda: self._experiment_id(experiment)
        )
        request_id = secrets.token_hex(16)
        all_tags = {**(tags or {}), _REQUEST_ID: request_id}
        tried = False

        def create() -> str:
            nonlocal tried  # a try whose answer was lost may have made the run
            found = self._run_of_request(experiment_id, request_id) if tried else None
            tried = True
            return found or str(
                self._client.create_run(experiment_id, tags=all_tags, run_name=name).info.run_id
            )

        run_id = self.call(f"start the run {name}", create)
        self.log_params(run_id, params)
        return run_id

    def log_params(self, run_id: str, params: Mapping[str, object]) -> None:
        """Log parameters; MLflow refuses to change one that is set."""
        rows = [Param(key, str(value)) for key, value in params.items()]
        for batch in _batches(rows, _MAX_PARAMS):
            self.call("log parameters", partial(self._client.log_batch, run_id, params=batch))

    def log_dataset(self, run_id: str, dataset: DatasetRef) -> None:
        """Log the dataset as an input of the run: digest, place, size; shown under the run's
        datasets in the UI.
        """
        profile = {
            "num_conversations": dataset.num_conversations,
            "num_tokens": dataset.num_tokens,
            "num_loss_tokens": dataset.num_loss_tokens,
            "target_fingerprint": dataset.fingerprint.digest,
        }
        entity = Dataset(
            name="curated_conversations",
            digest=dataset.digest[:_MAX_DATASET_DIGEST],
            source_type="local",
            source=json.dumps({"uri": dataset.path}),
            profile=json.dumps(profile),
        )

        inputs = [DatasetInput(entity, tags=[InputTag("mlflow.data.context", "training")])]
        self.call("log the dataset", lambda: self._client.log_inputs(run_id, inputs))

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of a run."""
        rows = [RunTag(key, value) for key, value in tags.items()]
        for batch in _batches(rows, _MAX_TAGS):
            self.call("set tags", partial(self._client.log_batch, run_id, tags=batch))

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], *, step: int) -> None:
        """Log all `metrics` of one `step` in one request."""
        self.log_metric_rows(run_id, [(step, metrics)])

    def log_metric_rows(self, run_id: str, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Log many (step, metrics) rows in as few requests as MLflow's batch limit allows."""
        timestamp_ms = int(time.time() * 1000)
        entries = [
            Metric(key, float(value), timestamp_ms, step)
            for step, row in rows
            for key, value in row.items()
        ]
        for batch in _batches(entries, _MAX_METRICS):
            self.call("log metrics", partial(self._client.log_batch, run_id, metrics=batch))

    def log_artifact(self, run_id: str, path: Path, *, folder: str | None = None) -> None:
        """Upload a file, or a folder with all it holds, under `folder` of the run's artifacts.

        Raises:
            RegistryError: `path` does not exist, or as `call`.
        """
        path = Path(path)
        if not path.exists():
            raise RegistryError("an artifact to upload does not exist", got=path)
        upload = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        self.call(f"upload {path.name}", lambda: upload(run_id, str(path), folder))

    def log_text(self, run_id: str, text: str, *, name: str) -> None:
        """Store `text` as the artifact `name` (a path inside the run)."""
        self.call(f"upload {name}", lambda: self._client.log_text(run_id, text, name))

    def log_json(self, run_id: str, value: Mapping[str, Any] | list[Any], *, name: str) -> None:
        """Store `value` as the JSON artifact `name`."""
        self.call(f"upload {name}", lambda: self._client.log_dict(run_id, value, name))

    def download_artifact(self, run_id: str, name: str, *, destination: Path) -> Path:
        """Download the artifact file or folder `name` into the folder `destination`; returns where
        it lies.
        """
        Path(destination).mkdir(parents=True, exist_ok=True)
        return Path(
            self.call(
                f"download {name} of run {run_id}",
                lambda: self._client.download_artifacts(run_id, name, str(destination)),
            )
        )

    def finish_run(self, run_id: str, *, failed: bool = False) -> None:
        """End a run as FINISHED or FAILED."""
        status = "FAILED" if failed else "FINISHED"
        self.call(
            f"finish the run {run_id}", lambda: self._client.set_terminated(run_id, status=status)
        )

    def run_url(self, run_id: str) -> str:
        """Address of the run in MLflow's UI."""
        run = self.call(f"find the run {run_id}", lambda: self._client.get_run(run_id))
        return f"{self.tracking_uri}/#/experiments/{run.info.experiment_id}/runs/{run_id}"

    def _check_up(self) -> None:
        if not self.tracking_uri.startswith("http"):
            return
        try:
            Retrying(
                stop=stop_after_delay(self.timeout_s),
                wait=wait_exponential(multiplier=0.2, max=3.0),
                retry=retry_if_exception(lambda error: isinstance(error, httpx.HTTPError)),
                reraise=True,
            )(lambda: httpx.get(f"{self.tracking_uri}/health", timeout=5.0).raise_for_status())
        except httpx.HTTPError as error:
            raise self._down("be reached") from error

    def _down(self, what: str) -> RegistryError:
        return RegistryError(
            f"MLflow could not {what}: no answer in {self.timeout_s:g} s",
            got=self.tracking_uri,
            expected="a running MLflow server",
            fix="Start the services (make up) and try again.",
        )

    def _experiment_id(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage == "deleted":
            raise RegistryError(
                "the experiment was deleted",
                got=name,
                fix="Restore it, or purge it with mlflow gc.",
            )
        if found is not None:
            return str(found.experiment_id)

        try:
            return str(self._client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was quicker
                raise
            return str(self._client.get_experiment_by_name(name).experiment_id)

    def _run_of_request(self, experiment_id: str, request_id: str) -> str | None:
        runs = self._client.search_runs(
            [experiment_id], f"tags.`{_REQUEST_ID}` = '{request_id}'", max_results=1
        )
        return str(runs[0].info.run_id) if runs else None


def is_connection_error(error: BaseException) -> bool:
    """Whether `error` is the network or a server that is starting or going away, not an answer."""
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
        return status in _TRANSIENT_STATUS or any(word in str(error) for word in _CONNECTION_WORDS)
    if isinstance(error, requests.RequestException):  # artifact transfers raise these as they are
        return error.response is None or error.response.status_code in _TRANSIENT_STATUS
    return isinstance(error, ConnectionError | TimeoutError)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _batches(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
