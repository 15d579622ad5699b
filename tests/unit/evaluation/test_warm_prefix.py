"""The warm-prefix measurement against an engine in this process that keeps a prefix cache per
salt.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from components.contracts import ArmEndpoint, WarmPrefixPoint
from components.errors import EvaluationError
from components.evaluation.warm_prefix import measure_warm_prefix, warm_prefix_prompts
from components.settings import EvaluationSettings, WarmPrefixSettings

COLD_S = 0.03
SETTINGS = EvaluationSettings.model_validate(
    {"slices": {"a": 2}, "warm_prefix": {"num_questions": 3, "prefix_tokens": 600}}
)


@dataclass
class PrefixCache:
    """Before the in-process engine: a prompt whose salt and system message were seen is answered at
    once; another takes `COLD_S` longer.
    """

    engine: Any
    tells_cached: bool = True
    heeds_salt: bool = True
    seen: set[str] = field(default_factory=set)

    def answer(self, request: httpx.Request) -> httpx.Response:
        payload = json.loads(request.content) if request.content else {}
        answer = self.engine.answer(request)
        if not payload.get("stream"):
            return answer
        salt = payload["cache_salt"] if self.heeds_salt else ""
        key = salt + payload["messages"][0]["content"]
        is_warm = key in self.seen
        self.seen.add(key)
        if not is_warm:
            time.sleep(COLD_S)
        if not self.tells_cached:
            return answer
        told = json.dumps({"cached_tokens": 2 if is_warm else 0})
        text = answer.text.replace(
            '"prompt_tokens": 3', f'"prompt_tokens": 3, "prompt_tokens_details": {told}'
        )
        return httpx.Response(200, text=text)


def measure(cache: PrefixCache, *, num_draft_tokens: int = 2) -> WarmPrefixPoint:
    endpoint = ArmEndpoint(
        arm="candidate",
        url="http://engine",
        model="m",
        checkpoint_digest="d" * 64,
        num_draft_tokens=num_draft_tokens,
    )
    return measure_warm_prefix(
        endpoint, settings=SETTINGS, transport=httpx.MockTransport(cache.answer)
    )


def test_questions_share_one_long_prefix_of_real_text() -> None:
    prompts = warm_prefix_prompts(WarmPrefixSettings(num_questions=24, prefix_tokens=600))
    assert len({prompt.prompt_id for prompt in prompts}) == 25
    (prefix,) = {prompt.messages[0]["content"] for prompt in prompts}
    assert 2200 < len(prefix) < 2600 and "statement" in prefix
    with pytest.raises(EvaluationError, match="more than Python's manual holds"):
        warm_prefix_prompts(
            WarmPrefixSettings.model_construct(num_questions=2, prefix_tokens=10**6)
        )


def test_each_question_is_asked_cold_and_warm(engine: Any) -> None:
    point = measure(PrefixCache(engine))
    asked = [p for p in engine.payloads if p.get("stream")]
    salts = [p["cache_salt"] for p in asked]
    # The priming one and three warm ones share a salt.
    assert len(asked) == 1 + 2 * 3 and len(set(salts)) == 4
    questions = [p["messages"][1]["content"] for p in asked]
    assert all(questions.count(question) == 2 for question in set(questions[1:]))
    assert point.num_questions == 3 and point.num_prompt_tokens == 3
    assert point.ttft_cold_ms >= 1e3 * COLD_S > point.ttft_warm_ms
    assert point.ttft_ratio == point.ttft_warm_ms / point.ttft_cold_ms
    # (2, 1, 3): seven drafts accepted in six steps
    assert point.acceptance_cold == point.acceptance_warm == pytest.approx(1 + 7 / 6)
    assert (point.cached_cold, point.cached_warm) == (0, 2)


def test_measuring_again_is_cold_again(engine: Any) -> None:
    cache = PrefixCache(engine)
    measure(cache)
    assert measure(cache).cached_cold == 0


def test_no_drafter_accepts_nothing_and_an_engine_may_say_nothing_of_its_cache(engine: Any) -> None:
    engine.histogram = ()
    point = measure(PrefixCache(engine, tells_cached=False), num_draft_tokens=0)
    assert (point.acceptance_cold, point.acceptance_warm) == (None, None)
    assert (point.cached_cold, point.cached_warm) == (None, None)


def test_an_engine_that_heeds_no_salt_is_refused(engine: Any) -> None:
    with pytest.raises(EvaluationError, match="never saw"):
        measure(PrefixCache(engine, heeds_salt=False))


def test_a_drafting_arm_without_metrics_is_refused(engine: Any) -> None:
    engine.has_request_metrics = False
    with pytest.raises(EvaluationError, match="--per-request-spec-decode-metrics"):
        measure(PrefixCache(engine))


def test_settings_without_a_warm_prefix_are_an_error() -> None:
    endpoint = ArmEndpoint(
        arm="a", url="http://engine", model="m", checkpoint_digest=None, num_draft_tokens=0
    )
    with pytest.raises(EvaluationError, match="not set"):
        measure_warm_prefix(endpoint, settings=EvaluationSettings(slices={"a": 1}))
