"""Prompts that the target writes: how many are missing, and that a time limit begins no more of
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from components.contracts import TargetFingerprint, TargetRef
from components.curation.sources.self_prompts import num_missing_prompts, with_written_prompts
from components.settings import CurationSettings, SourceSettings

ANSWER_S = 0.1


@pytest.fixture
def engine() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            time.sleep(ANSWER_S)
            choice = {"text": "What is a tide?", "finish_reason": "stop", "token_ids": [1]}
            body = json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


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


def settings(num_conversations: int) -> CurationSettings:
    sources = (
        SourceSettings(name="own", kind="target", weight=0.5),
        SourceSettings(name="other", weight=0.5),
    )
    return CurationSettings(
        sources=sources, num_conversations=num_conversations, requests_in_flight=2
    )


def write(
    engine: str, target: TargetRef, folder: Path, *, number: int, stop_after_s: float | None = None
) -> None:
    with_written_prompts(
        settings(number), engine_url=engine, model="tiny", target=target, folder=folder,
        progress=lambda *_: None, stop_after_s=stop_after_s,
    )  # fmt: skip


def test_what_is_missing_is_what_is_wanted_less_what_lies_there(
    engine: str, target: TargetRef, tmp_path: Path
) -> None:
    # 1.7 prompts for one wanted, of half the conversations, and one: int(1.7 x 0.5 x 20) + 1.
    assert num_missing_prompts(settings(20), target=target, folder=tmp_path) == 18
    write(engine, target, tmp_path, number=8)
    assert num_missing_prompts(settings(20), target=target, folder=tmp_path) == 18 - 7
    assert num_missing_prompts(settings(8), target=target, folder=tmp_path) == 0
    only_others = settings(20).model_copy(update={"sources": (SourceSettings(name="other"),)})
    assert num_missing_prompts(only_others, target=target, folder=tmp_path) == 0


def test_after_its_time_no_prompt_is_begun_and_what_was_begun_is_kept(
    engine: str, target: TargetRef, tmp_path: Path
) -> None:
    started_s = time.monotonic()
    write(engine, target, tmp_path, number=2000, stop_after_s=0.3)
    written = 1701 - num_missing_prompts(settings(2000), target=target, folder=tmp_path)
    # Two at a time, a tenth of a second each: about six, were the machine idle; never all of them.
    assert 2 <= written < 1701 / 2
    assert time.monotonic() - started_s < 60
    # And there is enough for a small recipe already, or it is added to.
    write(engine, target, tmp_path, number=8)
    assert num_missing_prompts(settings(8), target=target, folder=tmp_path) == 0
