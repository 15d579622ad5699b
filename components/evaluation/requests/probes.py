"""Requests that a plain engine serves, each with a check that the answer is what was asked for.

All but two are chat completions of one short question; the ends of the context are completions of
token ids, whose number is then known. A check returns what is wrong in words, or None. It looks at
what the answer itself proves: with top-k 2, each token is among the two likeliest by the engine's
own log-probabilities; with a repetition penalty of 1e6, no token comes twice. Presence and
frequency penalties prove nothing in a short answer: it must be there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from components.contracts import RequestFeature

Body = Mapping[str, Any]
Check = Callable[[Body], str | None]

QUESTION = "Write one sentence about the sea and one about the moon."
NUM_TOKENS = 12
FILLER_TOKEN = 40
"""A plain token of any vocabulary: byte-level ones begin with the printable characters of ASCII."""
LOGPROB_SLACK = 1e-3
"""Nats: the log-probabilities of a step are told as float32 sums, and a tie may be told in either
order.
"""
MIN_P, TOP_P, REPETITION_PENALTY = 0.999, 0.01, 1e6

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class ProbedEngine:
    """What the probes must know of an engine: its limits, and its own greedy answer to
    `QUESTION`.
    """

    model: str
    max_model_len: int
    answer: str


@dataclass(frozen=True)
class Probe:
    """One request and its check.

    `check` is None where the engine must refuse the request with HTTP 400.
    """

    feature: RequestFeature
    path: str
    payload: Mapping[str, Any]
    check: Check | None


def baseline(model: str) -> Probe:
    """The plain greedy request that every engine must serve, and that others are compared with."""
    return _chat(model, "chat", {}, _has_answer)


def probes(engine: ProbedEngine) -> list[Probe]:
    """Every request but `baseline`, in the order of `FEATURES`."""
    chat = _chat
    model = engine.model
    sampled = {"temperature": 1.0}
    told = {"logprobs": True, "top_logprobs": 3}
    stop = stop_string(engine.answer)

    return [
        chat(
            model, "stream", {"stream": True, "stream_options": {"include_usage": True}}, _streamed
        ),
        chat(model, "max_tokens_1", {"max_tokens": 1}, _ends_at(1)),
        chat(model, "empty_message", {"messages": [{"role": "user", "content": ""}]}, _has_tokens),
        chat(model, "n", sampled | {"n": 2}, _has_two_choices),
        chat(model, "logprobs", told, _has_logprobs),
        chat(model, "stop", {"stop": [stop]}, _stops_before(stop)),
        chat(
            model,
            "json_schema",
            {"response_format": _RESPONSE_FORMAT, "max_tokens": 96},
            _follows_schema,
        ),
        chat(model, "tool_choice_none", {"tools": [_TOOL], "tool_choice": "none"}, _calls_no_tool),
        chat(model, "top_k", sampled | told | {"top_k": 2}, _among_likeliest(2)),
        chat(model, "top_p", sampled | told | {"top_p": TOP_P}, _among_likeliest(1)),
        chat(
            model,
            "min_p",
            sampled | told | {"min_p": MIN_P},
            _among_likeliest(1, slack=-math.log(MIN_P)),
        ),
        chat(
            model,
            "repetition_penalty",
            {"repetition_penalty": REPETITION_PENALTY, "return_token_ids": True},
            _repeats_nothing,
        ),
        chat(model, "presence_penalty", {"presence_penalty": 1.5}, _has_answer),
        chat(model, "frequency_penalty", {"frequency_penalty": 1.5}, _has_answer),
        chat(
            model,
            "logit_bias",
            {"logit_bias": {str(FILLER_TOKEN): 100}, "return_token_ids": True},
            _is_all_filler,
        ),
        chat(model, "seed", {"temperature": 1.0, "seed": 7}, _has_answer),
        _at_the_end(engine, "end_of_context", 0, _ends_at(NUM_TOKENS)),
        _at_the_end(engine, "past_the_context", 1, None),
    ]


def stop_string(answer: str) -> str:
    """Three characters from within an engine's own answer, so that asking again must come upon
    them.
    """
    middle = len(answer) // 2
    for start in (*range(middle, len(answer) - 2), *range(1, middle)):
        piece = answer[start : start + 3]
        if piece.isascii() and piece.isprintable() and not piece.isspace():
            return piece
    return answer[:1] or "e"


def _chat(model: str, feature: RequestFeature, changes: Mapping[str, Any], check: Check) -> Probe:
    payload = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0.0,
        "max_tokens": NUM_TOKENS,
    }
    return Probe(feature, CHAT, payload | dict(changes), check)


def _at_the_end(
    engine: ProbedEngine, feature: RequestFeature, num_too_many: int, check: Check | None
) -> Probe:
    """A prompt that leaves room for `NUM_TOKENS` less `num_too_many`."""
    prompt = [FILLER_TOKEN] * (engine.max_model_len - NUM_TOKENS + num_too_many)
    payload = {
        "model": engine.model,
        "prompt": prompt,
        "temperature": 0.0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    return Probe(feature, COMPLETIONS, payload, check)


_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}, "is_big": {"type": "boolean"}},
            "required": ["colour", "is_big"],
            "additionalProperties": False,
        },
    },
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "The tide at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}


def text_of(body: Body) -> str:
    """Text of the first choice of a chat completion."""
    return body["choices"][0]["message"]["content"] or ""


def _has_tokens(body: Body) -> str | None:
    return None if body["usage"]["completion_tokens"] >= 1 else "no token"


def _has_answer(body: Body) -> str | None:
    return None if text_of(body) else "no text"


def _ends_at(num_tokens: int) -> Check:
    def check(body: Body) -> str | None:
        got = body["usage"]["completion_tokens"]
        reason = body["choices"][0]["finish_reason"]
        if got == num_tokens and reason == "length":
            return None
        return f"{got} tokens, finish_reason {reason}; asked for {num_tokens}"

    return check


def _has_two_choices(body: Body) -> str | None:
    choices = body["choices"]
    if len(choices) != 2 or sorted(choice["index"] for choice in choices) != [0, 1]:
        return f"{len(choices)} choices; asked for 2"
    return (
        None if all(choice["message"]["content"] for choice in choices) else "a choice without text"
    )


def _has_logprobs(body: Body) -> str | None:
    entries = _entries(body)
    if len(entries) != body["usage"]["completion_tokens"]:
        return f"log-probabilities of {len(entries)} of {body['usage']['completion_tokens']} tokens"
    if any(len(entry["top_logprobs"]) < 3 for entry in entries):
        return "fewer than 3 alternatives at a token"
    return (
        None
        if all(math.isfinite(e["logprob"]) and e["logprob"] <= 0 for e in entries)
        else "not a log-probability"
    )


def _stops_before(stop: str) -> Check:
    def check(body: Body) -> str | None:
        if stop in text_of(body):
            return f"the stop string {stop!r} is in the answer"
        reason = body["choices"][0]["finish_reason"]
        return None if reason == "stop" else f"not stopped at {stop!r}: finish_reason {reason}"

    return check


def _follows_schema(body: Body) -> str | None:
    try:
        told = json.loads(text_of(body))
    except ValueError:
        return f"not JSON: {text_of(body)[:60]!r}"
    is_right = isinstance(told, dict) and set(told) == {"colour", "is_big"}
    is_right = is_right and told["colour"] in ("red", "blue") and isinstance(told["is_big"], bool)
    return None if is_right else f"not of the schema: {text_of(body)[:60]!r}"


def _calls_no_tool(body: Body) -> str | None:
    return (
        "a tool was called"
        if body["choices"][0]["message"].get("tool_calls")
        else _has_answer(body)
    )


def _among_likeliest(num: int, *, slack: float = 0.0) -> Check:
    """Each token is at least as likely as the `num`-th likeliest, within `slack` nats."""

    def check(body: Body) -> str | None:
        for place, entry in enumerate(_entries(body)):
            best = sorted((top["logprob"] for top in entry["top_logprobs"]), reverse=True)
            if entry["logprob"] < best[num - 1] - slack - LOGPROB_SLACK:
                return (
                    f"token {place} at {entry['logprob']:.3f} nats, the {num}. likeliest at "
                    f"{best[num - 1]:.3f}"
                )
        return _has_answer(body)

    return check


def _repeats_nothing(body: Body) -> str | None:
    ids = body["choices"][0]["token_ids"]
    repeated = len(ids) - len(set(ids))
    return f"{repeated} of {len(ids)} tokens came before" if repeated else _has_tokens(body)


def _is_all_filler(body: Body) -> str | None:
    ids = body["choices"][0]["token_ids"]
    others = sum(one != FILLER_TOKEN for one in ids)
    return f"{others} of {len(ids)} tokens are others" if others or not ids else None


def _streamed(body: Body) -> str | None:
    """Of the chunks put together by `compatibility.read_stream`."""
    if not body["is_done"]:
        return "the stream did not end with [DONE]"
    if not body["usage"]:
        return "no usage at the end"
    return (
        None
        if body["choices"][0]["message"]["content"] and body["usage"]["completion_tokens"]
        else "no text"
    )


def _entries(body: Body) -> list[dict[str, Any]]:
    return list((body["choices"][0].get("logprobs") or {}).get("content") or [])
