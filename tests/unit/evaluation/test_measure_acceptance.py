"""What `measure_acceptance` accepts, refuses, and says, against an in-process engine."""

from __future__ import annotations

from typing import Any

import pytest

from components.contracts import ArmEndpoint
from components.errors import EvaluationError
from components.evaluation.acceptance import counter_growth, measure_acceptance
from components.evaluation.prompts import Prompt
from components.settings import EvaluationSettings

SETTINGS = EvaluationSettings(slices={"a": 3}, acceptance_concurrency=2, max_excluded_share=0.5)
CANDIDATE = ArmEndpoint(arm="candidate", url="http://engine", model="m", checkpoint_digest="c", num_draft_tokens=2)
PROMPTS = tuple(Prompt(f"a/{n}", "a", ({"role": "user", "content": f"prompt {n}"},)) for n in range(3))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.evaluation.acceptance.COUNTER_SETTLE_S", 0.4)


def measure(engine: Any, endpoint: ArmEndpoint = CANDIDATE, prompts: tuple[Prompt, ...] = PROMPTS) -> Any:
    return measure_acceptance(endpoint, prompts, settings=SETTINGS, transport=engine.transport)


def test_figures_come_from_the_engine_and_warm_up_is_left_out(engine: Any) -> None:
    measured = measure(engine)
    assert [p.prompt_id for p in measured.prompts] == ["a/0", "a/1", "a/2"]
    first = measured.prompts[0]
    assert (first.num_steps, first.num_draft_tokens, first.num_accepted_tokens) == (6, 12, 7)
    assert first.accepted_by_position == (4, 3)
    assert first.num_output_tokens == 14
    assert measured.counters["vllm:spec_decode_num_drafts"] == 18
    assert measured.counters['vllm:spec_decode_num_accepted_tokens_per_pos{position="1"}'] == 9
    assert measured.counters["vllm:generation_tokens"] == 42
    assert len(engine.payloads) == 3 + SETTINGS.acceptance_concurrency
    assert measured.engine_version == "0.0"


def test_no_request_carries_a_seed(engine: Any) -> None:
    measure(engine)
    assert all("seed" not in payload and payload["n"] == 1 for payload in engine.payloads)


def test_missing_request_metrics_name_the_flag(engine: Any) -> None:
    engine.has_request_metrics = False
    with pytest.raises(EvaluationError, match="--per-request-spec-decode-metrics summary"):
        measure(engine)


def test_restart_of_the_engine_is_noticed(engine: Any) -> None:
    engine.restart_after = SETTINGS.acceptance_concurrency + 2
    with pytest.raises(EvaluationError, match="restarted while it was measured"):
        measure(engine)


def test_counters_of_another_engine_are_refused(engine: Any) -> None:
    engine.model = "somebody-else"
    with pytest.raises(EvaluationError, match=r"not those of its engine.*somebody-else"):
        measure(engine)


def test_other_number_of_draft_tokens_is_refused(engine: Any) -> None:
    engine.histogram = (1, 1, 1, 1)
    with pytest.raises(EvaluationError, match="another number of tokens"):
        measure(engine)


def test_different_counts_name_both(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = engine._completion

    def counted_twice(payload: dict[str, Any]) -> Any:
        complete(payload)
        return complete(payload)

    monkeypatch.setattr(engine, "_completion", counted_twice)
    with pytest.raises(EvaluationError, match="num_drafts counter 36, requests 18"):
        measure(engine)


def test_zero_drafts_are_measured_as_they_are(engine: Any) -> None:
    engine.histogram = (0, 0, 0)
    measured = measure(engine)
    assert all(p.num_steps == 0 and p.accepted_by_position == (0, 0) for p in measured.prompts)


def test_no_draft_arm_needs_no_speculative_metrics(engine: Any) -> None:
    engine.histogram = ()
    plain = ArmEndpoint(arm="no_draft", url="http://engine", model="m")
    measured = measure(engine, plain)
    assert all(p.num_steps == 0 and p.accepted_by_position == () for p in measured.prompts)


def test_long_prompts_are_left_out_up_to_a_share(engine: Any) -> None:
    long = Prompt("a/9", "a", ({"role": "user", "content": "too long"},))
    measured = measure(engine, prompts=(*PROMPTS, long))
    assert list(measured.excluded) == ["a/9"] and len(measured.prompts) == 3
    with pytest.raises(EvaluationError, match="too many evaluation prompts"):
        measure(engine, prompts=(PROMPTS[0], long, Prompt("a/8", "a", long.messages)))


def test_no_prompts_is_an_error(engine: Any) -> None:
    with pytest.raises(EvaluationError, match="no prompts"):
        measure(engine, prompts=())


def test_counter_growth() -> None:
    assert counter_growth({"x": 2.0}, {"x": 5.0, "y": 1.0}, arm="a") == {"x": 3.0, "y": 1.0}
    with pytest.raises(EvaluationError, match="x fell from 2 to 0"):
        counter_growth({"x": 2.0}, {}, arm="a")
