"""Regeneration against a small OpenAI endpoint on loopback that misbehaves on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from components.contracts import TargetFingerprint
from components.curation.answers import client as engine_client
from components.curation.answers.regenerate import Regeneration, regenerate, temperature_of
from components.curation.answers.shards import AnswerShards
from components.curation.conversation import Answer, Conversation, Message
from components.curation.sources.rows import read_row
from components.errors import CurationError, EngineError
from components.settings import CurationSettings

FINGERPRINT = TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s")
SETTINGS = CurationSettings.model_validate(
    {
        "sources": [{"name": "chitchat"}],
        "num_conversations": 8,
        "max_turns": 3,
        "requests_in_flight": 4,
    }
)
Reply = tuple[int, dict[str, Any], dict[str, str]]


class Endpoint:
    """A server whose `reply` decides each answer from the request and its number; keeps what it was
    asked.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.reply: Callable[[dict[str, Any], int], Reply] = lambda request, number: ok(request)
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0

        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"version": "9.9"}, {})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with endpoint.lock:
                    endpoint.requests.append(request)
                    number = len(endpoint.requests)
                    endpoint.in_flight += 1
                    endpoint.most_in_flight = max(endpoint.most_in_flight, endpoint.in_flight)
                self._send(*endpoint.reply(request, number))
                with endpoint.lock:
                    endpoint.in_flight -= 1

            def _send(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def ok(
    request: dict[str, Any], *, text: str | None = None, finish: str = "stop", ids: bool = True
) -> Reply:
    answer = text if text is not None else f"answer to {request['messages'][-1]['content']}"
    choice = {
        "message": {"content": answer},
        "finish_reason": finish,
        "token_ids": [7, 8, 2] if ids else None,
    }
    body = {
        "choices": [choice],
        "usage": {"completion_tokens": 3},
        "prompt_token_ids": [1, 5] if ids else None,
    }
    return 200, body, {}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    running = Endpoint()
    yield running
    running.server.shutdown()
    running.server.server_close()


@pytest.fixture(autouse=True)
def quick_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "_BACKOFF", lambda state: 0.01)


def chats(num: int, *, turns: int = 1) -> list[Conversation]:
    return [
        Conversation.of(
            tuple(Message("user", f"question {n}.{turn}") for turn in range(turns)), source="test"
        )
        for n in range(num)
    ]


def run(
    endpoint: Endpoint, conversations: list[Conversation], folder: Path, **values: Any
) -> Regeneration:
    return regenerate(
        conversations,
        engine_url=endpoint.url,
        model="target",
        settings=SETTINGS.model_copy(update=values),
        fingerprint=FINGERPRINT,
        shard_dir=folder,
        spool_path=folder / "answered.spool",
        progress=lambda what, done, total: None,
    )


def test_every_conversation_is_answered_in_order(endpoint: Endpoint, tmp_path: Path) -> None:
    conversations = chats(20)
    result = run(endpoint, conversations, tmp_path)
    assert [item.conversation for item in result.answered] == conversations
    assert [item.answers[0].text for item in result.answered] == [
        f"answer to question {n}.0" for n in range(20)
    ]
    assert (result.num_requested, result.num_reused, result.num_tokens) == (20, 0, 60)
    assert result.exact_tokens and result.engine_version == "9.9"
    asked = {
        (item.answers[0].max_tokens, item.answers[0].engine_version) for item in result.answered
    }
    assert asked == {(SETTINGS.max_answer_tokens, "9.9")}
    assert endpoint.most_in_flight <= 4


def test_as_many_requests_are_in_flight_as_asked_for(endpoint: Endpoint, tmp_path: Path) -> None:
    # No answer is given before four requests are there: with fewer in flight the barrier breaks,
    # and the run fails.
    together = threading.Barrier(4)

    def reply(request: dict[str, Any], number: int) -> Reply:
        together.wait(timeout=300)
        return ok(request)

    endpoint.reply = reply
    run(endpoint, chats(8), tmp_path)
    assert endpoint.most_in_flight == 4


def test_requests_ask_for_token_ids_and_never_send_a_seed(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    run(endpoint, chats(12), tmp_path)
    assert all(
        request["return_token_ids"] is True and "seed" not in request
        for request in endpoint.requests
    )
    assert {request["temperature"] for request in endpoint.requests} == {0.0, 0.7}
    assert {request["max_tokens"] for request in endpoint.requests} == {SETTINGS.max_answer_tokens}


def test_later_turns_see_the_targets_own_earlier_answers(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    result = run(endpoint, chats(1, turns=2), tmp_path)
    assert [message["content"] for message in endpoint.requests[1]["messages"]] == [
        "question 0.0", "answer to question 0.0", "question 0.1",
    ]  # fmt: skip
    assert [message.role for message in result.answered[0].messages] == ["user", "assistant"] * 2


def test_tools_and_their_calls_reach_the_engine(endpoint: Endpoint, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
    }
    conversation = read_row(row, column="messages", source="test", max_turns=1)
    (item,) = run(endpoint, [conversation], tmp_path).answered
    (request,) = endpoint.requests
    assert request["tools"] == row["tools"] and request["tool_choice"] == "none"
    assert request["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert [message.role for message in item.messages] == ["user", "assistant", "tool", "assistant"]
    assert item.answers[0].text == "answer to sunny"


def test_a_truncated_answer_is_kept_and_ends_the_conversation(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.reply = lambda request, number: ok(request, finish="length")
    (item,) = run(endpoint, chats(1, turns=3), tmp_path).answered
    assert len(item.answers) == 1 and item.answers[0].truncated
    assert len(endpoint.requests) == 1


def test_busy_and_failing_engines_are_asked_again(endpoint: Endpoint, tmp_path: Path) -> None:
    faults: dict[int, Reply] = {
        1: (429, {}, {"retry-after": "0.05"}),
        2: (503, {}, {}),
        3: (500, {}, {}),
    }
    endpoint.reply = lambda request, number: faults.get(number) or ok(request)
    result = run(endpoint, chats(6), tmp_path)
    assert len(result.answered) == 6
    assert len(endpoint.requests) == 9


def test_refused_and_empty_answers_are_quarantined(endpoint: Endpoint, tmp_path: Path) -> None:
    def reply(request: dict[str, Any], number: int) -> Reply:
        text = request["messages"][-1]["content"]
        if text.startswith("question 0"):
            return 400, {"error": {"message": "maximum context length is 1024 tokens"}}, {}
        return ok(request, text="  " if text.startswith("question 1.") else None)

    endpoint.reply = reply
    result = run(endpoint, chats(6), tmp_path)
    assert len(result.answered) == 4
    assert result.quarantine.by_source() == {
        "test": {
            "empty answer": 1,
            "engine refused: HTTP 400: maximum context length is N tokens": 1,
        }
    }


def test_truncated_answers_and_refusals_are_dropped_where_asked(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    def reply(request: dict[str, Any], number: int) -> Reply:
        question = request["messages"][-1]["content"]
        if question == "question 1.0":
            return ok(request, text="I'm sorry, but I can't help with that.")
        return ok(request, finish="length" if question == "question 2.0" else "stop")

    endpoint.reply = reply
    conversations = chats(6)
    assert len(run(endpoint, conversations, tmp_path).answered) == 6
    strict = run(
        endpoint, conversations, tmp_path, keep_truncated_answers=False, keep_refusals=False
    )
    assert strict.num_reused == 6  # the answers are the same ones; only what is kept of them is not
    assert [item.conversation for item in strict.answered] == [
        conversations[n] for n in (0, 3, 4, 5)
    ]
    assert strict.quarantine.by_source() == {"test": {"refusal": 1, "truncated answer": 1}}


def test_mostly_refused_is_an_error(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.reply = lambda request, number: (400, {"error": {"message": "no"}}, {})
    with pytest.raises(CurationError, match="6 of 6 conversations have no answer"):
        run(endpoint, chats(6), tmp_path)


def test_a_dead_engine_and_a_wrong_model_are_named(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.reply = lambda request, number: (
        404,
        {"error": {"message": "The model `target` does not exist"}},
        {},
    )
    with pytest.raises(EngineError, match="does not serve that model"):
        run(endpoint, chats(3), tmp_path)
    endpoint.reply = lambda request, number: (500, {}, {})
    with pytest.raises(EngineError, match="did not answer in 6 attempts"):
        run(endpoint, chats(3), tmp_path)
    endpoint.server.shutdown()
    endpoint.server.server_close()
    with pytest.raises(EngineError, match="no engine answers"):
        run(endpoint, chats(3), tmp_path)


def test_a_rerun_pays_only_for_what_is_missing(endpoint: Endpoint, tmp_path: Path) -> None:
    conversations = chats(10, turns=2)
    endpoint.reply = lambda request, number: ok(request) if number <= 9 else (500, {}, {})
    with pytest.raises(EngineError):
        run(endpoint, conversations, tmp_path)
    (shard,) = tmp_path.glob("answers-*.jsonl")
    kept = len(shard.read_text().splitlines())
    assert kept == 9
    with shard.open("a") as file:
        file.write('{"key": "torn by a kill')
    endpoint.reply = lambda request, number: ok(request)
    endpoint.requests.clear()
    result = run(endpoint, conversations, tmp_path)
    assert (result.num_requested, result.num_reused) == (11, 9)
    assert len(endpoint.requests) == 11
    assert run(endpoint, conversations, tmp_path).num_requested == 0


def test_answers_of_another_target_or_setting_are_not_reused(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    run(endpoint, chats(4), tmp_path)
    assert run(endpoint, chats(4), tmp_path, max_answer_tokens=9).num_reused == 0
    other = FINGERPRINT.model_copy(update={"weights": "other"})
    result = regenerate(
        chats(4),
        engine_url=endpoint.url,
        model="target",
        settings=SETTINGS,
        fingerprint=other,
        shard_dir=tmp_path,
        spool_path=tmp_path / "answered.spool",
        progress=lambda what, done, total: None,
    )
    assert result.num_reused == 0


def test_an_endpoint_without_token_ids_is_reported(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.reply = lambda request, number: ok(request, ids=False)
    result = run(endpoint, chats(2), tmp_path)
    assert not result.exact_tokens
    assert result.answered[0].answers[0].prompt_token_ids == ()


def test_shards_keep_answers_and_skip_torn_lines(tmp_path: Path) -> None:
    answer = Answer("text \u2028 ü", (1, 2), (3,), 2, True, 0.7)
    with AnswerShards(tmp_path) as shards:
        shards.append("aa", answer)
    path = tmp_path / "answers-00000.jsonl"
    path.write_text(path.read_text() + '{"key":"bb","text":"to')
    with AnswerShards(tmp_path) as again:
        assert again.get("aa") == answer
        assert again.get("bb") is None and again.num_torn == 1
        again.append("bb", answer)
        again.append("cc", replace(answer, text="third"))
        assert (
            again.get("cc").text == "third"
            and again.get("bb") == answer
            and again.get("aa") == answer
        )
    assert sorted(shard.name for shard in tmp_path.iterdir()) == [
        "answers-00000.jsonl",
        "answers-00001.jsonl",
    ]


def test_temperatures_are_mixed_and_fixed_by_the_id() -> None:
    ids = [conversation.id for conversation in chats(300)]
    drawn = [temperature_of(name, (0.0, 0.7, 1.0)) for name in ids]
    assert drawn == [temperature_of(name, (0.0, 0.7, 1.0)) for name in ids]
    assert all(drawn.count(value) == pytest.approx(100, abs=35) for value in (0.0, 0.7, 1.0))
