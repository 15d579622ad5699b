"""The table of requests: what each check accepts and refuses, what is lost to drafting, and when it
is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.contracts import (
    FEATURES,
    ArmEndpoint,
    CompatibilityTable,
    RequestFeature,
    Served,
    Verdict,
)
from components.errors import EvaluationError
from components.evaluation.requests.compatibility import (
    compatibility_of,
    compatibility_rule,
    measure_compatibility,
    read_stream,
)
from components.evaluation.requests.probes import (
    FILLER_TOKEN,
    NUM_TOKENS,
    Probe,
    ProbedEngine,
    baseline,
    probes,
    stop_string,
)
from components.reporting.gate.compatibility import compatibility_section
from components.settings import GateSettings

ANSWER = "The sea is wide. The moon is far."
MAX_MODEL_LEN = 256
ENGINE = ProbedEngine("m", MAX_MODEL_LEN, ANSWER)
PROBES = {probe.feature: probe for probe in (baseline("m"), *probes(ENGINE))}

Body = dict[str, Any]


def entry(logprob: float, best: tuple[float, ...] = (-0.1, -2.0, -3.0)) -> Body:
    return {"logprob": logprob, "top_logprobs": [{"logprob": one} for one in best]}


def body(
    text: str = ANSWER,
    *,
    tokens: int = 3,
    reason: str = "length",
    entries: tuple[Body, ...] = (),
    **further: Any,
) -> Body:
    choice = {
        "index": 0,
        "message": {"content": text},
        "finish_reason": reason,
        "logprobs": {"content": list(entries)},
    }
    return {"choices": [choice | further], "usage": {"completion_tokens": tokens}}


RIGHT: dict[RequestFeature, Body] = {
    "chat": body(),
    "stream": body() | {"is_done": True},
    "max_tokens_1": body(tokens=1),
    "empty_message": body(""),
    "n": {
        "choices": [{"index": k, "message": {"content": "x"}} for k in range(2)],
        "usage": {"completion_tokens": 2},
    },
    "logprobs": body(entries=(entry(-0.1),) * 3),
    "stop": body("The ", reason="stop"),
    "json_schema": body('{"colour": "red", "is_big": true}'),
    "tool_choice_none": body(),
    "top_k": body(entries=(entry(-0.1), entry(-2.0))),
    "top_p": body(entries=(entry(-0.1),)),
    "min_p": body(entries=(entry(-0.1),)),
    "repetition_penalty": body(token_ids=[1, 2, 3]),
    "presence_penalty": body(),
    "frequency_penalty": body(),
    "logit_bias": body(token_ids=[FILLER_TOKEN] * 3),
    "seed": body(),
    "end_of_context": body(tokens=NUM_TOKENS),
}
WRONG: dict[RequestFeature, tuple[Body, str]] = {
    "chat": (body(""), "no text"),
    "stream": (body() | {"is_done": False}, "did not end"),
    "max_tokens_1": (body(tokens=2), "2 tokens"),
    "empty_message": (body("", tokens=0), "no token"),
    "n": (body(), "1 choices; asked for 2"),
    "logprobs": (body(entries=(entry(-0.1),)), "of 1 of 3 tokens"),
    "stop": (body(ANSWER, reason="length"), "is in the answer"),
    "json_schema": (body('{"colour": "green", "is_big": true}'), "not of the schema"),
    "tool_choice_none": (
        {
            "choices": [{"message": {"content": "x", "tool_calls": [{}]}}],
            "usage": {"completion_tokens": 3},
        },
        "a tool was called",
    ),
    "top_k": (body(entries=(entry(-0.1), entry(-3.0))), "the 2. likeliest"),
    "top_p": (body(entries=(entry(-2.0),)), "the 1. likeliest"),
    "min_p": (body(entries=(entry(-2.0),)), "the 1. likeliest"),
    "repetition_penalty": (body(token_ids=[1, 2, 1]), "1 of 3 tokens came before"),
    "presence_penalty": (body(""), "no text"),
    "frequency_penalty": (body(""), "no text"),
    "logit_bias": (body(token_ids=[FILLER_TOKEN, 1]), "1 of 2 tokens are others"),
    "seed": (body(""), "no text"),
    "end_of_context": (body(tokens=NUM_TOKENS - 1), f"asked for {NUM_TOKENS}"),
}


def check_of(feature: RequestFeature) -> Callable[[Body], str | None]:
    check = PROBES[feature].check
    assert check is not None
    return check


def test_every_kind_of_request_has_one_probe() -> None:
    assert set(PROBES) == set(FEATURES)
    assert set(RIGHT) == set(WRONG) == set(FEATURES) - {"past_the_context"}


@pytest.mark.parametrize("feature", sorted(RIGHT))
def test_a_check_accepts_what_was_asked_for(feature: RequestFeature) -> None:
    assert check_of(feature)(RIGHT[feature]) is None


@pytest.mark.parametrize("feature", sorted(WRONG))
def test_a_check_says_what_is_wrong(feature: RequestFeature) -> None:
    answer, words = WRONG[feature]
    assert words in (check_of(feature)(answer) or "")


def test_the_ends_of_the_context_are_asked_for_by_their_tokens() -> None:
    fits, too_long = PROBES["end_of_context"].payload, PROBES["past_the_context"].payload
    assert len(fits["prompt"]) + fits["max_tokens"] == MAX_MODEL_LEN
    assert len(too_long["prompt"]) + too_long["max_tokens"] == MAX_MODEL_LEN + 1


@pytest.mark.parametrize("answer", [ANSWER, "ab", "x", "日本語の文", ""])
def test_a_stop_string_is_of_the_answer_itself(answer: str) -> None:
    stop = stop_string(answer)
    assert stop
    assert not answer or stop in answer


@dataclass
class FakeEngine:
    """Answers every probe rightly, but those of `faults`: a status, or an answer."""

    faults: dict[RequestFeature, int | Body] = field(default_factory=dict)
    version: str = "0.32.0"
    max_model_len: int = MAX_MODEL_LEN
    ends_at: RequestFeature | None = None
    asked: list[RequestFeature] = field(default_factory=list)
    is_over: bool = False

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_over:
            return httpx.Response(503)
        known = {
            "/version": {"version": self.version},
            "/health": {},
            "/v1/models": {"data": [{"id": "m", "max_model_len": self.max_model_len}]},
        }
        if request.url.path in known:
            return httpx.Response(200, json=known[request.url.path])
        return self._probed(self._feature(request))

    def _feature(self, request: httpx.Request) -> RequestFeature:
        sent = json.loads(request.content)
        engine = ProbedEngine("m", self.max_model_len, ANSWER)
        known: list[Probe] = [baseline("m"), *probes(engine)]
        return next(one.feature for one in known if dict(one.payload) == sent)

    def _probed(self, feature: RequestFeature) -> httpx.Response:
        self.asked.append(feature)
        if feature == self.ends_at:
            self.is_over = True
            return httpx.Response(500, json={"error": {"message": "EngineCore died"}})
        told = self.faults.get(
            feature, 400 if feature == "past_the_context" else RIGHT.get(feature, {})
        )
        if isinstance(told, int):
            return httpx.Response(
                told, json={"error": {"message": f"{feature} is not yet supported"}}
            )
        return (
            httpx.Response(200, text=streamed(told))
            if feature == "stream"
            else httpx.Response(200, json=told)
        )


def streamed(told: Body) -> str:
    text = told["choices"][0]["message"]["content"]
    usage = told["usage"]
    chunks = [{"choices": [{"delta": {"content": text}}]}, {"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@dataclass
class Pair:
    """Two engines behind one transport, told apart by their hosts."""

    plain: FakeEngine = field(default_factory=FakeEngine)
    drafting: FakeEngine = field(default_factory=FakeEngine)

    def measure(self, *, device: str = "cpu") -> CompatibilityTable:
        return measure_compatibility(
            PLAIN, DRAFTING, method="dspark", device=device, transport=self.transport
        )

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(lambda request: getattr(self, request.url.host).answer(request))


PLAIN = ArmEndpoint(arm="no_draft", url="http://plain", model="m")
DRAFTING = ArmEndpoint(arm="candidate", url="http://drafting", model="m")


def gate(*required: RequestFeature) -> GateSettings:
    return GateSettings(required_requests=required)


def test_what_both_serve_is_not_lost() -> None:
    table = Pair().measure()
    assert tuple(row.feature for row in table.rows) == FEATURES
    assert not [row.feature for row in table.rows if row.is_lost]
    rule = compatibility_rule(table, gate("chat", "n"))
    assert rule is not None and rule.verdict is Verdict.PASS


def test_a_refused_request_is_lost_and_fails_the_gate_only_where_it_is_required() -> None:
    pair = Pair(drafting=FakeEngine(faults={"min_p": 400, "logit_bias": 400}))
    table = pair.measure()
    assert {row.feature for row in table.rows if row.drafting is Served.REFUSED} == {
        "min_p",
        "logit_bias",
    }
    rule = compatibility_rule(table, gate("chat"))
    assert (
        rule is not None
        and rule.verdict is Verdict.PASS
        and "also lost, not required: min_p, logit_bias" in rule.detail
    )
    rule = compatibility_rule(table, gate("min_p"))
    assert (
        rule is not None
        and rule.verdict is Verdict.FAIL
        and "min_p is not yet supported" in rule.detail
    )


def test_what_the_plain_engine_refuses_too_is_no_loss() -> None:
    both = {"json_schema": 400}
    table = Pair(FakeEngine(faults=dict(both)), FakeEngine(faults=dict(both))).measure()
    rule = compatibility_rule(table, gate("json_schema"))
    assert rule is not None and rule.verdict is Verdict.PASS


def test_an_answer_other_than_asked_for_is_lost_as_well() -> None:
    table = Pair(
        drafting=FakeEngine(
            faults={"n": RIGHT["chat"], "past_the_context": RIGHT["end_of_context"]}
        )
    ).measure()
    lost = {row.feature: row.drafting for row in table.rows if row.is_lost}
    assert lost["n"] is Served.WRONG
    assert lost["past_the_context"] is Served.WRONG


def test_a_request_that_ends_an_engine_is_named() -> None:
    with pytest.raises(
        EvaluationError, match="arm 'candidate': the engine ended at a request with top_k"
    ):
        Pair(drafting=FakeEngine(ends_at="top_k")).measure()


def test_engines_that_differ_in_more_than_drafting_are_refused() -> None:
    with pytest.raises(EvaluationError, match="differ in more than drafting"):
        Pair(drafting=FakeEngine(version="0.33.0")).measure()
    with pytest.raises(EvaluationError, match="differ in more than drafting"):
        Pair(drafting=FakeEngine(max_model_len=512)).measure()


def test_the_rule_says_that_nothing_was_measured() -> None:
    assert compatibility_rule(None, gate()) is None
    rule = compatibility_rule(None, gate("n"))
    assert rule is not None and rule.verdict is Verdict.INCONCLUSIVE


def test_a_table_is_measured_once_per_version_method_and_device(tmp_path: Path) -> None:
    pair = Pair()

    def table(method: str = "dspark", device: str = "cpu") -> CompatibilityTable:
        return compatibility_of(
            PLAIN, DRAFTING, method=method, device=device, folder=tmp_path, transport=pair.transport
        )

    first = table()
    sent = len(pair.plain.asked)
    assert table() == first
    assert len(pair.plain.asked) == sent
    table(method="eagle3")
    assert len(pair.plain.asked) == 2 * sent
    pair.plain.version = pair.drafting.version = "0.33.0"
    assert table().engine_version == "0.33.0"


def test_a_table_of_another_program_is_measured_anew(tmp_path: Path) -> None:
    pair = Pair()
    kept = compatibility_of(
        PLAIN, DRAFTING, method="dspark", device="cpu", folder=tmp_path, transport=pair.transport
    )
    (path,) = tmp_path.iterdir()
    for old in (kept.model_copy(update={"rows": kept.rows[:-1]}).model_dump_json(), '{"rows": 3}'):
        path.write_text(old)
        anew = compatibility_of(
            PLAIN,
            DRAFTING,
            method="dspark",
            device="cpu",
            folder=tmp_path,
            transport=pair.transport,
        )
        assert anew.rows == kept.rows


def test_chunks_of_a_stream_become_one_answer() -> None:
    told = read_stream(streamed(RIGHT["stream"]))
    assert told["choices"][0]["message"]["content"] == ANSWER
    assert told["is_done"]
    assert not read_stream("data: " + json.dumps({"choices": []}) + "\n\n")["is_done"]


def test_the_page_shows_what_is_lost_and_why() -> None:
    table = Pair(drafting=FakeEngine(faults={"min_p": 400})).measure()
    page = compatibility_section(table, required=("chat",))
    assert "Served without a drafter and not with it: min-p." in page
    assert "min_p is not yet supported" in page
    assert compatibility_section(None) == ""
    assert "Nothing is lost to drafting." in compatibility_section(Pair().measure(device="cuda"))
