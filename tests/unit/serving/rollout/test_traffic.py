"""Replayed traffic against a real HTTP server on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from components.errors import RolloutError, SplitterError
from components.serving.rollout.traffic import RequestRecord, read_response, replay

PROMPTS = [[{"role": "user", "content": word}] for word in ("one", "two", "three")]
ANSWER = {
    "choices": [{"token_ids": [5, 6], "finish_reason": "length"}],
    "usage": {"completion_tokens": 9},
    "metrics": {"speculative_decoding": {"num_spec_steps": 4, "num_accepted_draft_tokens": 4}},
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        time.sleep(0.01)
        is_bad = body["messages"][0]["content"] == "bad"
        payload = b"no server" if is_bad else json.dumps(ANSWER).encode()
        self.send_response(503 if is_bad else 200)
        self.send_header("X-Arm", "candidate")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.bodies = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_a_number_of_requests_in_order_with_their_figures(server: ThreadingHTTPServer) -> None:
    records = replay(
        url_of(server), "m", PROMPTS, requests_in_flight=1, max_tokens=9, num_requests=5
    )
    assert [body["messages"][0]["content"] for body in Handler.bodies] == [
        "one",
        "two",
        "three",
        "one",
        "two",
    ]
    assert Handler.bodies[0] | {"messages": []} == {
        "model": "m", "max_tokens": 9, "temperature": 0.0, "return_token_ids": True, "messages": [],
    }  # fmt: skip
    assert [record.prompt for record in records] == [0, 1, 2, 0, 1]
    assert {(record.token_ids, record.was_cut) for record in records} == {((5, 6), True)}
    assert {(r.slot, r.ok, r.num_tokens, r.num_steps, r.num_accepted) for r in records} == {
        ("candidate", True, 9, 4, 4)
    }


def test_a_request_may_carry_more_than_messages(server: ThreadingHTTPServer) -> None:
    asked = {"messages": PROMPTS[0], "chat_template_kwargs": {"enable_thinking": False}}
    replay(url_of(server), "m", [asked], requests_in_flight=1, max_tokens=9, num_requests=1)
    assert Handler.bodies == [
        {"model": "m", "max_tokens": 9, "temperature": 0.0, "return_token_ids": True, **asked}
    ]


def test_more_senders_than_requests(server: ThreadingHTTPServer) -> None:
    assert (
        len(
            replay(url_of(server), "m", PROMPTS, requests_in_flight=8, max_tokens=9, num_requests=3)
        )
        == 3
    )


def test_duration(server: ThreadingHTTPServer) -> None:
    begin = time.monotonic()
    records = replay(
        url_of(server), "m", PROMPTS, requests_in_flight=2, max_tokens=9, duration_s=1.0
    )
    assert 1.0 <= time.monotonic() - begin < 30
    assert len(records) == len(Handler.bodies) > 2


def test_watch_ends_the_replay_and_nothing_is_lost(server: ThreadingHTTPServer) -> None:
    seen: list[int] = []

    def watch(records: Any, elapsed_s: float) -> bool:
        seen.append(len(records))
        return len(records) >= 6

    records = replay(url_of(server), "m", PROMPTS, requests_in_flight=3, max_tokens=9, watch=watch)
    assert max(seen) == 6 <= len(records) == len(Handler.bodies) <= 8


def test_watch_that_raises_is_heard(server: ThreadingHTTPServer) -> None:
    def watch(records: Any, elapsed_s: float) -> bool:
        raise SplitterError("gone")

    with pytest.raises(SplitterError, match="gone"):
        replay(url_of(server), "m", PROMPTS, requests_in_flight=3, max_tokens=9, watch=watch)


def test_errors_are_records(server: ThreadingHTTPServer) -> None:
    bad = [[{"role": "user", "content": "bad"}]]
    [record] = replay(url_of(server), "m", bad, requests_in_flight=1, max_tokens=9, num_requests=1)
    assert (record.slot, record.ok, record.error) == ("candidate", False, "HTTP 503: no server")
    [record] = replay(
        "http://127.0.0.1:1", "m", bad, requests_in_flight=1, max_tokens=9, num_requests=1
    )
    assert (
        record.slot is None and record.error is not None and record.error.startswith("ConnectError")
    )


def test_watch_is_asked_even_when_nothing_answers() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as silent:  # accepts, never serves
        records = replay(
            url_of(silent), "m", PROMPTS, requests_in_flight=1, max_tokens=9,
            watch=lambda records, elapsed_s: elapsed_s > 0.4, request_timeout_s=1.0,
        )  # fmt: skip
    assert [record.error for record in records] == ["ReadTimeout: "]


def test_bounds_are_required() -> None:
    with pytest.raises(RolloutError, match="needs a bound"):
        replay("http://x", "m", PROMPTS, requests_in_flight=1, max_tokens=1)
    with pytest.raises(RolloutError, match="no prompts"):
        replay("http://x", "m", [], requests_in_flight=1, max_tokens=1, num_requests=1)


@pytest.mark.parametrize("payload", [b"not json", b"[]", b"{}"])
def test_what_is_not_a_completion(payload: bytes) -> None:
    record = read_response(httpx.Response(200, content=payload), latency_s=1.0)
    assert isinstance(record, RequestRecord) and not record.ok
    assert record.error is not None and record.error.startswith("not a completion")


def test_engine_without_drafter_has_no_steps() -> None:
    record = read_response(
        httpx.Response(
            200, json={"choices": [{"token_ids": [7, 8, 9]}], "usage": {"completion_tokens": 3}}
        ),
        latency_s=1,
    )
    assert record.ok and (record.num_tokens, record.num_steps) == (3, 0)
