"""Factories for per-prompt measurements and whole reports, and an engine that answers over an
in-process transport.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from components.contracts import (
    FEATURES,
    AcceptanceReport,
    ArmReport,
    CompatibilityRow,
    CompatibilityTable,
    Divergence,
    PromptMeasurement,
    SelfComparison,
    Served,
    SpeedPoint,
    TargetFingerprint,
    TargetRef,
    TrainServedGap,
    digest_json,
)
from components.evaluation.report import arm_report

SERVED = CompatibilityTable(
    engine_version="0.0",
    method="dspark",
    device="cpu",
    model="m",
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    rows=tuple(
        CompatibilityRow(feature=name, plain=Served.OK, drafting=Served.OK) for name in FEATURES
    ),
)
"""A drafter that costs no kind of request."""

FINGERPRINT = TargetFingerprint(
    **{part: digest_json(part) for part in TargetFingerprint.model_fields}
)


def _measurement(
    prompt_id: str,
    *,
    slice_name: str = "a",
    histogram: Sequence[int] = (),
    num_output_tokens: int | None = None,
    output: str = "same",
) -> PromptMeasurement:
    """One prompt whose steps accepted j drafts `histogram[j]` times; by default all tokens but one
    are drafted.
    """
    steps = sum(histogram)
    accepted = sum(j * count for j, count in enumerate(histogram))
    return PromptMeasurement(
        prompt_id=prompt_id,
        slice=slice_name,
        num_prompt_tokens=10,
        num_output_tokens=1 + steps + accepted if num_output_tokens is None else num_output_tokens,
        num_steps=steps,
        num_draft_tokens=steps * max(0, len(histogram) - 1),
        num_accepted_tokens=accepted,
        accepted_by_position=tuple(sum(histogram[k:]) for k in range(1, len(histogram))),
        latency_s=0.5,
        output_digest=digest_json(output),
    )


@pytest.fixture
def measurement() -> Callable[..., PromptMeasurement]:
    return _measurement


def _speed(
    rates: Mapping[int, float], *, rounds: Sequence[float] = (0.99, 1.0, 1.01, 1.0)
) -> tuple[SpeedPoint, ...]:
    """Points at these tok/s by load; `rounds` are factors of each round's."""
    return tuple(
        SpeedPoint(
            requests_in_flight=level, num_requests=8, output_tokens_per_s=rate,
            ttft_p50_ms=10, ttft_p99_ms=20, itl_p50_ms=5, itl_p99_ms=9,
            round_tokens_per_s=tuple(rate * factor for factor in rounds),
        )
        for level, rate in rates.items()
    )  # fmt: skip


@pytest.fixture
def speed_points() -> Callable[[Mapping[int, float]], tuple[SpeedPoint, ...]]:
    return _speed


@pytest.fixture
def arm() -> Callable[..., ArmReport]:
    def make(
        name: str,
        prompts: Sequence[PromptMeasurement],
        *,
        num_draft_tokens: int = 0,
        rates: Mapping[int, float] = {},
    ) -> ArmReport:
        return arm_report(
            name,
            prompts=tuple(prompts),
            speed=_speed(rates),
            checkpoint_digest=digest_json(name) if num_draft_tokens else None,
            num_draft_tokens=num_draft_tokens,
            engine_counters={},
        )

    return make


@pytest.fixture
def report() -> Callable[..., AcceptanceReport]:
    def make(
        *arms: ArmReport,
        temperature: float = 0,
        divergences: Mapping[str, Divergence] = {},
        itself: Sequence[SelfComparison] | None = None,
        further: Mapping[str, object] = {},
    ) -> AcceptanceReport:
        """A report whose plain engine agrees with itself and with the candidate, unless told
        otherwise.
        """
        names = {one.arm for one in arms}
        if "candidate" in names and "no_draft" not in names:
            arms = (*arms, _plain_like(next(one for one in arms if one.arm == "candidate")))
        by_name = {one.arm: {p.prompt_id: p.output_digest for p in one.prompts} for one in arms}
        pairs = [
            (digest, by_name.get("no_draft", {}).get(name))
            for name, digest in by_name.get("candidate", {}).items()
            if name in by_name.get("no_draft", {})
        ]
        if itself is None:
            itself = (
                [agreeing(by_name["no_draft"])]
                if "no_draft" in by_name and temperature == 0
                else []
            )
        return AcceptanceReport(
            target=TargetRef(
                name="t", path="p", source="s", fingerprint=FINGERPRINT, quantization="none"
            ),
            temperature=temperature,
            max_tokens=64,
            arms={one.arm: one for one in arms},
            num_equal_outputs=sum(a == b for a, b in pairs) if temperature == 0 else 0,
            num_compared_outputs=len(pairs) if temperature == 0 else 0,
            divergences=dict(divergences),
            compatibility=SERVED,
            self_comparisons=tuple(itself),
            train_served_gap=TrainServedGap(
                teacher_forced=1.5, reference=1.5, served=1.5, num_prompts=8
            ),
            engine_version="0.0",
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            **({"prompt_digest": "0" * 64} | dict(further)),
        )

    return make


def _plain_like(candidate: ArmReport) -> ArmReport:
    """No draft, which answered as the candidate did."""
    prompts = tuple(
        one.model_copy(
            update={
                "num_steps": 0,
                "num_draft_tokens": 0,
                "num_accepted_tokens": 0,
                "accepted_by_position": (),
            }
        )
        for one in candidate.prompts
    )
    return arm_report(
        "no_draft",
        prompts=prompts,
        speed=(),
        checkpoint_digest=None,
        num_draft_tokens=0,
        engine_counters={},
    )


def agreeing(digests: Mapping[str, str]) -> SelfComparison:
    """The plain engine against itself where it answered the very same."""
    return SelfComparison(
        num_in_flight=20,
        digests=dict(digests),
        divergences={},
        num_gaps=1_000,
        max_gap_change_nats=0.1,
    )


@dataclass
class InProcessEngine:
    """Answers as vLLM does: each request takes `histogram` steps; faults are switched on by
    attributes.
    """

    histogram: tuple[int, ...] = (2, 1, 3)
    model: str = "m"
    has_request_metrics: bool = True
    restart_after: int | None = None
    counters: dict[str, float] = field(default_factory=dict)
    payloads: list[dict[str, Any]] = field(default_factory=list)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self._metrics())
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "0.0"})
        payload = json.loads(request.content)
        self.payloads.append(payload)
        if "too long" in payload["messages"][0]["content"]:
            return httpx.Response(
                400, json={"error": {"message": "This model's maximum context length is 8 tokens."}}
            )
        if self.restart_after is not None and len(self.payloads) > self.restart_after:
            self.counters.clear()
        return self._completion(payload)

    def _completion(self, payload: dict[str, Any]) -> httpx.Response:
        steps = sum(self.histogram)
        accepted = sum(j * n for j, n in enumerate(self.histogram))
        num_tokens = 1 + steps + accepted
        grown = {"generation_tokens": num_tokens, "prompt_tokens": 3}
        if self.histogram:
            grown |= {
                "spec_decode_num_drafts": steps,
                "spec_decode_num_draft_tokens": steps * (len(self.histogram) - 1),
                "spec_decode_num_accepted_tokens": accepted,
            }
            for k in range(1, len(self.histogram)):
                grown[f"spec_decode_num_accepted_tokens_per_pos/{k - 1}"] = sum(self.histogram[k:])
        for name, value in grown.items():
            self.counters[name] = self.counters.get(name, 0) + value
        usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
        told: dict[str, Any] = {}
        if self.histogram and self.has_request_metrics:
            told = {
                "acceptance_histogram": list(self.histogram),
                "num_draft_tokens": steps * (len(self.histogram) - 1),
            }
        metrics = {"speculative_decoding": told} if told else None
        if payload.get("stream"):
            return httpx.Response(200, text=self._stream(num_tokens, usage, metrics))
        choice: dict[str, Any] = {
            "message": {"content": f"echo {payload['messages'][0]['content']}"}
        }
        told_ids: dict[str, Any] = {}
        if payload.get("return_token_ids"):
            told_ids = {"prompt_token_ids": [1, 2, 3]}
            choice["token_ids"] = self.token_ids(payload, num_tokens)
        if payload.get("logprobs"):
            choice["logprobs"] = {"content": [self._place(token) for token in choice["token_ids"]]}
        return httpx.Response(
            200, json={"choices": [choice], "usage": usage, "metrics": metrics, **told_ids}
        )

    def token_ids(self, payload: dict[str, Any], num_tokens: int) -> list[int]:
        """Of an answer: the prompt's length, over and over."""
        return [len(payload["messages"][0]["content"])] * num_tokens

    def _place(self, token: int) -> dict[str, Any]:
        best = {"token": f"token_id:{token}", "logprob": -0.5}
        return best | {"top_logprobs": [best, {"token": f"token_id:{token + 1}", "logprob": -1.5}]}

    def _stream(self, num_tokens: int, usage: dict[str, int], metrics: object) -> str:
        chunks = [
            {"choices": [{"delta": {"content": "x"}}], "usage": usage | {"completion_tokens": n}}
            for n in range(1, num_tokens + 1)
        ]
        chunks.append({"choices": [], "usage": usage, "metrics": metrics})
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def _metrics(self) -> str:
        lines = []
        for key, value in ({"generation_tokens": 0} | self.counters).items():
            name, _, position = key.partition("/")
            labels = f'engine="0",model_name="{self.model}"' + (
                f',position="{position}"' if position else ""
            )
            lines += [f"# TYPE vllm:{name}_total counter", f"vllm:{name}_total{{{labels}}} {value}"]
        return "\n".join(lines) + "\n"


@pytest.fixture
def engine() -> InProcessEngine:
    return InProcessEngine()
