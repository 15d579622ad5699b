"""Curation against a real vLLM engine on a tiny random target: prompts in, a validated on-policy
dataset out.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from components.contracts import TargetFingerprint, TargetRef
from components.curation.answers.regenerate import Regeneration, regenerate
from components.curation.answers.shards import AnswerShards
from components.curation.curate import Collected, collect, finish
from components.curation.sources.mixture import describe_source, open_rows
from components.curation.sources.self_prompts import SURPLUS, with_written_prompts
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import Engine
from components.settings import CurationSettings, EngineSettings
from components.system.ports import free_port

pytestmark = pytest.mark.integration

FINGERPRINT = TargetFingerprint(
    weights="0" * 64, quantization="1" * 64, tokenizer="2" * 64, serving="3" * 64
)
ENGINE = EngineSettings(
    device="cpu",
    dtype="float32",
    max_model_len=512,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    kv_cache_gib=0.2,
    startup_timeout_s=900,
)
NOUNS = (
    "lighthouse",
    "robot",
    "queue",
    "drafter",
    "river",
    "season",
    "program",
    "apple",
    "window",
    "token",
)
VERBS = (
    "paint",
    "describe",
    "compare",
    "explain",
    "count",
    "draw",
    "find",
    "imagine",
    "sell",
    "repair",
)

# Regenerates in a process of its own, which the test kills at an awkward moment.
REGENERATE = """
import pickle, sys
from pathlib import Path
from components.contracts import TargetFingerprint
from components.curation.answers.regenerate import regenerate
job = pickle.loads(Path(sys.argv[1]).read_bytes())
regenerate(**job, progress=lambda what, done, total: None)
"""


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> TargetRef:
    return TargetRef(
        name="tiny",
        path=str(tiny_target),
        source="test",
        fingerprint=FINGERPRINT,
        quantization="none",
    )


@pytest.fixture(scope="module")
def engine_url(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    spec = EngineSpec(
        name="tiny",
        model_path=str(tiny_target),
        served_model_name="tiny",
        settings=ENGINE,
        port=free_port(),
        device="cpu",
        num_cores=1,
    )
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with Engine.start(spec, log_path=log, fingerprint=None).wait_ready() as engine:
        yield engine.url


def recipe(folder: Path, *, num: int, **values: object) -> CurationSettings:
    rng = random.Random(7)
    rows = [
        {
            "turns": [
                f"Please {rng.choice(VERBS)} the {rng.choice(NOUNS)} and number {n}.",
                "ignored",
                "Now once more.",
            ]
        }
        for n in range(2 * num)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "prompts", "kind": "file", "path": str(path), "column": "turns"}
    return CurationSettings.model_validate(
        {
            "sources": [source],
            "num_conversations": num,
            "validation_share": 0.25,
            "max_prompt_tokens": 64,
            "max_answer_tokens": 24,
            "requests_in_flight": 8,
            "min_mask_share": 0.0,
            **values,
        }
    )


def quiet(what: str, num_done: int, num_total: int) -> None:
    pass


def ask(
    engine_url: str,
    settings: CurationSettings,
    collected: Collected,
    folder: Path,
    reports: list[str] | None = None,
) -> Regeneration:
    return regenerate(
        collected.conversations,
        engine_url=engine_url,
        model="tiny",
        settings=settings,
        fingerprint=FINGERPRINT,
        shard_dir=folder,
        spool_path=folder.with_suffix(".spool"),
        progress=lambda what, done, total: (reports if reports is not None else []).append(what),
    )


def generated_tokens(engine_url: str) -> float:
    text = httpx.get(f"{engine_url}/metrics", timeout=60).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:generation_tokens_total")
    )


def settled_tokens(engine_url: str) -> float:
    """Generated tokens so far: vLLM counts a request's last ones a moment after it has answered."""
    seen = -1.0
    while (now := generated_tokens(engine_url)) != seen:
        seen = now
        time.sleep(1)
    return seen


def test_the_rows_hold_exactly_what_the_target_produced(
    engine_url: str, target: TargetRef, tmp_path: Path
) -> None:
    settings = recipe(tmp_path, num=24, max_turns=2, temperatures=(0.0, 1.0))
    collected = collect(
        settings, target=target, spool_path=tmp_path / "collected.spool", progress=quiet
    )
    before = settled_tokens(engine_url)
    answers = ask(engine_url, settings, collected, tmp_path / "answers")
    assert answers.exact_tokens
    assert answers.num_tokens == settled_tokens(engine_url) - before
    assert {answer.temperature for item in answers.answered for answer in item.answers} == {
        0.0,
        1.0,
    }

    done = finish(
        collected,
        answers,
        settings=settings,
        target=target,
        max_model_len=512,
        output_dir=tmp_path / "datasets",
        progress=quiet,
    )
    rows = {}
    for split in ("train", "validation"):
        with pa.memory_map(str(Path(done.dataset.path) / f"{split}-00000.arrow")) as file:
            rows |= {
                row["conversation_id"]: row for row in pa.ipc.open_file(file).read_all().to_pylist()
            }
    assert len(rows) == len(answers.answered)
    for item in answers.answered:
        row = rows[item.conversation.id]
        last = item.answers[-1]
        assert row["token_ids"] == [*last.prompt_token_ids, *last.token_ids]
        assert row["loss_mask"][-len(last.token_ids) :] == [True] * len(last.token_ids)
        ended = row["token_ids"][-1] == 2  # <|im_end|> of the tiny tokenizer
        assert ended is not last.truncated
    assert Path(done.dataset.docs_path).is_file()

    again = finish(
        collected,
        ask(engine_url, settings, collected, tmp_path / "answers"),
        settings=settings,
        target=target,
        max_model_len=512,
        output_dir=tmp_path / "again",
        progress=quiet,
    )
    assert again.dataset.digest == done.dataset.digest


def test_a_kill_costs_no_answer_and_none_is_generated_twice(
    engine_url: str, target: TargetRef, tmp_path: Path
) -> None:
    settings = recipe(tmp_path, num=120, temperatures=(0.0,), max_answer_tokens=64)
    collected = collect(
        settings, target=target, spool_path=tmp_path / "collected.spool", progress=quiet
    )
    shards = tmp_path / "answers"
    job = {
        "conversations": collected.conversations,
        "engine_url": engine_url,
        "model": "tiny",
        "settings": settings,
        "fingerprint": FINGERPRINT,
        "shard_dir": shards,
        "spool_path": tmp_path / "answered.spool",
    }
    (tmp_path / "job.pickle").write_bytes(pickle.dumps(job))
    process = subprocess.Popen([sys.executable, "-c", REGENERATE, str(tmp_path / "job.pickle")])
    deadline = time.monotonic() + 600
    while num_lines(shards) < 20 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = num_lines(shards)
    assert 20 <= kept < len(collected.conversations)
    with AnswerShards(shards) as found:
        num_torn = found.num_torn

    answers = ask(engine_url, settings, collected, shards)
    assert answers.num_reused == kept - num_torn
    assert answers.num_reused + answers.num_requested == len(collected.conversations)
    assert len(answers.answered) + answers.quarantine.total == len(collected.conversations)
    lines = [
        line
        for path in shards.iterdir()
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    keys = [json.loads(line)["key"] for line in lines]
    assert len(keys) == len(set(keys))


def test_the_target_writes_prompts_and_a_rerun_adds_what_is_missing(
    engine_url: str, target: TargetRef, tmp_path: Path
) -> None:
    """A random target ends a turn about once in 512 tokens: of 69 prompts of at most 96 tokens
    about a dozen end.
    """

    def write(num_conversations: int) -> CurationSettings:
        settings = recipe(tmp_path, num=num_conversations, max_prompt_tokens=200)
        written = settings.sources[0].model_copy(
            update={"name": "self", "kind": "target", "path": None, "column": None}
        )
        return with_written_prompts(
            settings.model_copy(update={"sources": (*settings.sources, written)}),
            engine_url=engine_url,
            model="tiny",
            target=target,
            folder=tmp_path / "written",
            progress=quiet,
        )

    before = settled_tokens(engine_url)
    settings = write(80)
    path = Path(str(settings.sources[1].path))
    first = path.read_text().splitlines()
    assert len(first) == int(SURPLUS * 80 / 2) + 1
    assert settled_tokens(engine_url) > before
    prompts = [row["messages"][0]["content"] for row in map(json.loads, first) if row is not None]
    assert prompts and all(prompt == prompt.strip() and "<|im_" not in prompt for prompt in prompts)

    path.write_text(path.read_text() + '{"messages": [{"ro')  # torn by a kill
    write(90)
    second = path.read_text().splitlines()
    assert second[: len(first)] == first and len(second) == int(SURPLUS * 90 / 2) + 1
    assert all(json.loads(line) is None or line for line in second)
    after = settled_tokens(engine_url)
    write(90)
    assert settled_tokens(engine_url) == after

    rows = [row for _, row in open_rows(settings.sources[1], seed=0)]
    assert len(rows) == sum(json.loads(line) is not None for line in second)
    assert describe_source(settings.sources[1])["licence"] == "written by the target"


def test_progress_tells_rate_and_time_left(
    engine_url: str, target: TargetRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.curation.answers import client as engine_client

    monkeypatch.setattr(engine_client, "REPORT_INTERVAL_S", 0.3)
    settings = recipe(tmp_path, num=60, requests_in_flight=4, max_answer_tokens=64)
    reports: list[str] = []
    ask(
        engine_url,
        settings,
        collect(settings, target=target, spool_path=tmp_path / "collected.spool", progress=quiet),
        tmp_path / "answers",
        reports,
    )
    assert any("tok/s" in report and "s left" in report for report in reports)


def num_lines(folder: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("answers-*.jsonl"))
