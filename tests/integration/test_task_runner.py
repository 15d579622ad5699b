"""Filters and rendering on a local Dask cluster, under a real Prefect server: the same results as
in one process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prefect import flow
from prefect.testing.utilities import prefect_test_harness

from components.contracts import TargetFingerprint, TargetRef
from components.curation.chunks import Apply, apply_here
from components.curation.conversation import Answer, AnsweredConversation
from components.curation.curate import RowRenderer, collect
from components.errors import ConfigError, CurationError
from components.settings import CurationSettings
from flows.flow_run.task_runner import applied

pytestmark = [pytest.mark.integration, pytest.mark.long]

NUM = 600


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Its first write locks the harness's database.
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        with prefect_test_harness(server_startup_timeout=600):
            yield


@pytest.fixture
def target(tiny_target: Path) -> TargetRef:
    fingerprint = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")
    return TargetRef(
        name="tiny",
        path=str(tiny_target),
        source="test",
        fingerprint=fingerprint,
        quantization="none",
    )


@pytest.fixture
def settings(tmp_path: Path) -> CurationSettings:
    path = tmp_path / "prompts.jsonl"
    texts = [
        f"Tell me about the number {n} and why {n * 7} follows it in no list" for n in range(NUM)
    ]
    path.write_text(
        "".join(
            json.dumps({"prompt": text if n % 5 else "short"}) + "\n"
            for n, text in enumerate(texts)
        )
    )
    values = {
        "sources": [{"name": "p", "kind": "file", "path": str(path)}],
        "num_conversations": NUM // 2,
    }
    return CurationSettings.model_validate(
        {**values, "task_runner": "dask", "near_duplicate_threshold": 0.99}
    )


def work_of(
    folder: Path, target: TargetRef, settings: CurationSettings, apply: Apply
) -> tuple[object, ...]:
    folder.mkdir()
    collected = collect(
        settings,
        target=target,
        spool_path=folder / "c",
        progress=lambda what, done, total: None,
        apply=apply,
    )
    answer = Answer("That is so.", (), (), 4, False, 0.0)
    answered = [AnsweredConversation(item, (answer,)) for item in collected.conversations]
    halves: list[Sequence[AnsweredConversation]] = [answered[: NUM // 4], answered[NUM // 4 :]]
    rows = [row for _, rows in apply(RowRenderer(target.path, target.name), halves) for row in rows]
    return [item.id for item in collected.conversations], collected.funnel, rows


def process_of(_chunk: int) -> int:
    return os.getpid()


def refuse(_chunk: int) -> int:
    raise CurationError("this chunk is bad")


def test_a_cluster_gives_what_one_process_gives(
    target: TargetRef, settings: CurationSettings, tmp_path: Path
) -> None:
    @flow
    def on_a_cluster() -> tuple[set[int], tuple[object, ...]]:
        with applied(settings) as apply:
            with pytest.raises(CurationError, match="this chunk is bad"):
                list(apply(refuse, [1]))
            return set(apply(process_of, range(8))), work_of(
                tmp_path / "cluster", target, settings, apply
            )

    processes, there = on_a_cluster()
    here = work_of(tmp_path / "here", target, settings, apply_here)
    assert os.getpid() not in processes
    assert there == here
    assert len(here[0]) == NUM // 2 and len(here[2]) == NUM // 2


def test_threads_mean_this_process(settings: CurationSettings) -> None:
    with applied(settings.model_copy(update={"task_runner": "threads"})) as apply:
        assert set(apply(process_of, range(3))) == {os.getpid()}


def test_a_scheduler_that_is_not_there_is_named(
    settings: CurationSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.flow_run.task_runner.CONNECT_TIMEOUT_S", 2)
    nowhere = settings.model_copy(update={"dask_address": "tcp://127.0.0.1:9"})
    with (
        pytest.raises(ConfigError, match=r"no Dask cluster answers.*tcp://127.0.0.1:9"),
        applied(nowhere),
    ):
        pass
