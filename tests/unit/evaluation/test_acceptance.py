"""What `measure_acceptance` accepts, refuses, and says, against an in-process engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.contracts import ArmEndpoint
from components.errors import EvaluationError
from components.evaluation.acceptance import counter_growth, measure_acceptance
from components.evaluation.prompts import Prompt
from components.settings import EvaluationSettings

SETTINGS = EvaluationSettings(
    slices={"a": 3}, acceptance_requests_in_flight=2, max_excluded_share=0.5
)
CANDIDATE = ArmEndpoint(
    arm="candidate", url="http://engine", model="m", checkpoint_digest="c", num_draft_tokens=2
)
PROMPTS = tuple(
    Prompt(f"a/{n}", "a", ({"role": "user", "content": f"prompt {n}"},)) for n in range(3)
)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.evaluation.acceptance.COUNTER_SETTLE_S", 0.4)


def measure(
    engine: Any, endpoint: ArmEndpoint = CANDIDATE, prompts: tuple[Prompt, ...] = PROMPTS
) -> Any:
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
    assert len(engine.payloads) == 3 + SETTINGS.acceptance_requests_in_flight
    assert measured.engine_version == "0.0"


def test_no_request_carries_a_seed(engine: Any) -> None:
    measure(engine)
    assert all("seed" not in payload and payload["n"] == 1 for payload in engine.payloads)


def test_missing_request_metrics_name_the_flag(engine: Any) -> None:
    engine.has_request_metrics = False
    with pytest.raises(EvaluationError, match="--per-request-spec-decode-metrics summary"):
        measure(engine)


def test_restart_of_the_engine_is_noticed(engine: Any) -> None:
    engine.restart_after = SETTINGS.acceptance_requests_in_flight + 2
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


def grouped(size: int) -> EvaluationSettings:
    return SETTINGS.model_copy(update={"prompts_per_checkpoint": size})


def asked(engine: Any) -> list[str]:
    return [
        p["messages"][0]["content"]
        for p in engine.payloads
        if p["messages"][0]["content"].startswith("prompt")
    ]


def test_a_measurement_goes_on_after_its_engine_died(engine: Any, tmp_path: Path) -> None:
    """Ten prompts in groups of four; the engine dies at the seventh. Every prompt counts once,
    counters add up.
    """
    prompts = tuple(
        Prompt(f"a/{n}", "a", ({"role": "user", "content": f"prompt {n}"},)) for n in range(10)
    )
    dying = [7]
    journal = tmp_path / "journal.jsonl"

    def die(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/chat/completions" and b"prompt" in request.content:
            dying[0] -= 1
            if dying[0] < 0:
                raise httpx.ConnectError("gone")
        return engine.answer(request)

    def measured(transport: httpx.MockTransport) -> Any:
        return measure_acceptance(
            CANDIDATE, prompts, settings=grouped(4), journal=journal, transport=transport
        )

    with pytest.raises(EvaluationError, match="does not answer"):
        measured(httpx.MockTransport(die))
    first = asked(engine)
    engine.counters.clear()  # the engine that comes up again starts at zero
    engine.payloads.clear()
    whole = measured(engine.transport)
    assert [p.prompt_id for p in whole.prompts] == [prompt.prompt_id for prompt in prompts]
    # The first group was kept; the one in which it died is asked again, whole.
    assert sorted(asked(engine)) == [f"prompt {n}" for n in range(4, 10)]
    assert len(first) == 7
    assert (
        whole.counters["vllm:spec_decode_num_drafts"]
        == 60
        == sum(p.num_steps for p in whole.prompts)
    )
    # Asked once more, nothing is left to do.
    engine.payloads.clear()
    assert measured(engine.transport) == whole
    assert not engine.payloads


def test_another_measurement_starts_afresh(engine: Any, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"

    def measured(endpoint: ArmEndpoint) -> Any:
        engine.payloads.clear()
        return measure_acceptance(
            endpoint, PROMPTS, settings=grouped(2), journal=journal, transport=engine.transport
        )

    measured(CANDIDATE)
    measured(CANDIDATE.model_copy(update={"url": "http://elsewhere"}))
    assert not asked(engine)
    measured(CANDIDATE.model_copy(update={"checkpoint_digest": "other"}))
    assert len(asked(engine)) == 3


def test_a_line_cut_short_by_a_kill_is_measured_again(engine: Any, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"

    def measured() -> Any:
        return measure_acceptance(
            CANDIDATE, PROMPTS, settings=grouped(2), journal=journal, transport=engine.transport
        )

    whole = measured()
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]) + lines[-1][:30])
    engine.payloads.clear()
    again = measured()
    assert asked(engine) == ["prompt 2"]
    assert again.prompts[:2] == whole.prompts[:2] and again.counters == whole.counters
    journal.write_text("not a journal\n")
    assert measured().counters == whole.counters


def test_requests_carry_tools_and_template_variables_and_measurements_the_language(
    engine: Any,
) -> None:
    tools = ({"type": "function", "function": {"name": "weather"}},)
    messages = ({"role": "user", "content": "Is it raining?"},)
    prompts = (
        Prompt("a/1", "a", messages),
        Prompt(
            "a/2", "a", messages, tools=tools, variant={"enable_thinking": False}, language="en"
        ),
    )
    measured = measure(engine, prompts=prompts)
    plain, full = [p for p in engine.payloads if p["messages"] == list(messages)]
    assert not {"tools", "tool_choice", "chat_template_kwargs"} & plain.keys()
    assert full["tools"] == list(tools) and full["tool_choice"] == "none"
    assert full["chat_template_kwargs"] == {"enable_thinking": False}
    assert [one.language for one in measured.prompts] == [None, "en"]


def test_a_journal_of_another_template_variable_is_not_gone_on_with(
    engine: Any, tmp_path: Path
) -> None:
    def asked(variant: dict[str, bool]) -> tuple[Prompt, ...]:
        return tuple(replace(prompt, variant=variant) for prompt in PROMPTS)

    for variant in (
        {},
        {},
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"enable_thinking": True},
    ):
        measure_acceptance(
            CANDIDATE,
            asked(variant),
            settings=SETTINGS,
            journal=tmp_path / "kept",
            transport=engine.transport,
        )
    asked_for = [p for p in engine.payloads if p["messages"][0]["content"].startswith("prompt")]
    assert len(asked_for) == 3 * len(PROMPTS)  # each of the three measurements once
