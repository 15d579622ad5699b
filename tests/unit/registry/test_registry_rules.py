"""What is retried and what is an answer; when a promotions log is broken."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE

from components.contracts import DatasetRef, Promotion, TargetFingerprint
from components.errors import RegistryError
from components.registry.client import Registry, is_connection_error
from components.registry.promotions import verify_chain


def http_error(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (
            MlflowException("API request to http://x failed with exception Max retries exceeded"),
            True,
        ),
        (MlflowException("busy", error_code=TEMPORARILY_UNAVAILABLE), True),
        (MlflowException("no such run", error_code=RESOURCE_DOES_NOT_EXIST), False),
        (requests.ConnectionError("refused"), True),
        (http_error(503), True),
        (http_error(404), False),
        (TimeoutError(), True),
        (FileNotFoundError("x"), False),
    ],
)
def test_only_lost_connections_are_retried(error: Exception, retried: bool) -> None:
    assert is_connection_error(error) is retried


def chain(num_entries: int) -> list[Promotion]:
    entries: list[Promotion] = []
    for index in range(1, num_entries + 1):
        entries.append(
            Promotion(
                index=index,
                model_name="m",
                alias="champion",
                from_version=index - 1 or None,
                to_version=index,
                reason="canary passed",
                decision_digest=str(index) * 64,
                previous_digest=entries[-1].digest if entries else None,
                created_at=datetime(2030, 1, index, tzinfo=UTC),
            )
        )
    return entries


def test_an_intact_chain_verifies() -> None:
    verify_chain([])
    verify_chain(chain(5))


@pytest.mark.parametrize("field", ["reason", "to_version", "decision_digest", "created_at"])
def test_any_edit_breaks_the_next_entry(field: str) -> None:
    entries = chain(3)
    other = {
        "reason": "x",
        "to_version": 9,
        "decision_digest": "0" * 64,
        "created_at": datetime(2031, 1, 1, tzinfo=UTC),
    }
    entries[1] = entries[1].model_copy(update={field: other[field]})
    with pytest.raises(RegistryError, match="broken at entry 3"):
        verify_chain(entries)


def test_a_missing_entry_breaks_the_chain() -> None:
    with pytest.raises(RegistryError, match="broken at entry 2"):
        verify_chain([*chain(3)[:1], chain(3)[2]])


DATASET = DatasetRef(
    path="/data/sets/1",
    digest="0123456789abcdef" * 4,
    fingerprint=TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s"),
    num_conversations={"train": 9, "validation": 1},
    num_tokens={"train": 300, "validation": 20},
    num_loss_tokens={"train": 200, "validation": 10},
    funnel={"read": 20, "rendered": 10},
    docs_path="/data/sets/1/data_docs/index.html",
)


def test_a_database_is_a_registry_too(tmp_path) -> None:
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = registry.start_run("local", name="r", params={"a": 1})
    registry.log_metrics(run_id, {"loss": 2.0}, step=3)
    assert registry.client.get_run(run_id).data.metrics == {"loss": 2.0}
    registry.log_dataset(run_id, DATASET)
    registry.log_dataset(run_id, DATASET)  # a retry after a lost answer
    (logged,) = registry.client.get_run(run_id).inputs.dataset_inputs
    assert logged.dataset.name == "curated_conversations"
    assert DATASET.digest.startswith(logged.dataset.digest) and len(logged.dataset.digest) == 36
    assert json.loads(logged.dataset.source) == {"uri": "/data/sets/1"}
    assert json.loads(logged.dataset.profile)["num_tokens"] == {"train": 300, "validation": 20}
    with pytest.raises(RegistryError, match="does not exist"):
        registry.log_artifact(run_id, tmp_path / "nothing")
