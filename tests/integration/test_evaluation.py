"""Acceptance, speed and the gate against real vLLM engines serving a tiny random target, with and
without a drafter.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from components.contracts import (
    ArmEndpoint,
    CheckpointRef,
    CompatibilityTable,
    Rival,
    Served,
    TargetFingerprint,
    TargetRef,
    Verdict,
    digest_json,
)
from components.drafter.build import build_drafter
from components.drafter.checkpoint import export_checkpoint
from components.errors import EvaluationError
from components.evaluation.acceptance import expected_counters, measure_acceptance
from components.evaluation.outputs.losslessness import losslessness
from components.evaluation.prompts import Prompt
from components.evaluation.report import build_report
from components.evaluation.requests.compatibility import compatibility_of
from components.evaluation.rules.decide import decide
from components.evaluation.rules.rivals import beaten_by, measure_rival, with_rivals
from components.evaluation.speed import measure_speed
from components.evaluation.statistics.all_steps import all_step_length
from components.evaluation.warm_prefix import measure_warm_prefix
from components.reporting.gate.rivals import rivals_section
from components.serving.engines.command import EngineSpec
from components.serving.engines.engine import start_engines
from components.settings import (
    DrafterSettings,
    EngineSettings,
    EvaluationSettings,
    GateSettings,
    WarmPrefixSettings,
    load_recipe,
)
from components.stages.prompts import load_prompts
from components.system.ports import free_port

pytestmark = pytest.mark.integration

MODEL = "tiny"
AUX_LAYERS = (1, 2, 3)
NUM_DRAFT_TOKENS = 3
FINGERPRINT = TargetFingerprint(
    **{part: digest_json(part) for part in TargetFingerprint.model_fields}
)
SETTINGS = EvaluationSettings(
    slices={"letters": 4, "numbers": 4},
    max_tokens=24,
    speed_requests_in_flight=(1, 2),
    speed_requests=2,
    speed_repeats=2,
)
ENGINE = EngineSettings(
    device="cpu",
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=8,
    max_num_batched_tokens=1024,
    kv_cache_gib=0.1,
    startup_timeout_s=900,
)


def _prompt(slice_name: str, number: int, text: str) -> Prompt:
    return Prompt(f"{slice_name}/{number}", slice_name, ({"role": "user", "content": text},))


PROMPTS = tuple(
    [_prompt("letters", n, f"tell me about {letter * 3}") for n, letter in enumerate("abcd")]
    + [_prompt("numbers", n, f"what is {n} and {n + 7}") for n in range(4)]
)


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
def checkpoint(target: TargetRef, tmp_path_factory: pytest.TempPathFactory) -> CheckpointRef:
    settings = DrafterSettings(
        algorithm="dflash",
        num_layers=1,
        block_size=NUM_DRAFT_TOKENS + 1,
        markov_rank=0,
        confidence_head=False,
    )
    model = build_drafter(
        settings, target_path=Path(target.path), aux_layer_ids=AUX_LAYERS, draft_vocab=None, seed=0
    )
    return export_checkpoint(
        model,
        tmp_path_factory.mktemp("drafters") / "random",
        target=target,
        settings=settings,
        dataset_digest=None,
        step=0,
        num_trained_tokens=0,
        parent_digest=None,
        expected_acceptance_length=None,
        extra={},
    )


@pytest.fixture(scope="module")
def endpoints(
    target: TargetRef, checkpoint: CheckpointRef, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ArmEndpoint]]:
    port = free_port()
    shared = {
        "model_path": target.path,
        "served_model_name": MODEL,
        "settings": ENGINE,
        "device": "cpu",
    }
    specs = [
        EngineSpec(name="candidate", port=port, checkpoint=checkpoint, num_cores=1, **shared),
        EngineSpec(name="no_draft", port=free_port(port + 1), num_cores=1, **shared),
    ]
    with start_engines(
        specs, log_dir=tmp_path_factory.mktemp("logs"), fingerprint=FINGERPRINT
    ) as engines:
        yield {engine.spec.name: engine.endpoint(engine.spec.name) for engine in engines}


def test_arms_are_measured_and_decided_on(
    endpoints: dict[str, ArmEndpoint], target: TargetRef, tmp_path: Path
) -> None:
    measured = {
        arm: measure_acceptance(one, PROMPTS, settings=SETTINGS, with_logprobs=arm == "no_draft")
        for arm, one in endpoints.items()
    }
    itself = {
        load: measure_acceptance(
            endpoints["no_draft"],
            PROMPTS,
            settings=SETTINGS.model_copy(update={"acceptance_requests_in_flight": load}),
            with_logprobs=True,
        )
        for load in (
            SETTINGS.acceptance_requests_in_flight,
            2 * SETTINGS.acceptance_requests_in_flight,
        )
    }
    candidate, plain = measured["candidate"], measured["no_draft"]

    # Equal to the token: what the requests say, and what the engine's counters grew by.
    expected = expected_counters(candidate.prompts)
    assert {name: candidate.counters[name] for name in expected} == expected
    assert expected["vllm:spec_decode_num_drafts"] > len(PROMPTS)
    assert plain.counters["vllm:generation_tokens"] == sum(
        p.num_output_tokens for p in plain.prompts
    )
    assert all(len(p.accepted_by_position) == NUM_DRAFT_TOKENS for p in candidate.prompts)
    assert all(p.num_steps == p.num_draft_tokens == 0 for p in plain.prompts)

    speed = measure_speed(list(endpoints.values()), PROMPTS, settings=SETTINGS)
    for points in speed.values():
        assert [point.requests_in_flight for point in points] == [1, 2]
        assert all(
            point.output_tokens_per_s > 0 and point.ttft_p50_ms > 0 and point.itl_p50_ms > 0
            for point in points
        )
        assert all(point.num_requests == 4 for point in points)

    recipe = load_recipe("demo").model_copy(update={"evaluation": SETTINGS, "engine": ENGINE})
    report = build_report(
        target, measured=measured, speed=speed, prompts=PROMPTS, recipe=recipe, itself=itself
    )
    assert report.num_compared_outputs == len(PROMPTS)
    # A random drafter changes no output but at ties within float32's rounding.
    lossless = losslessness(report, GateSettings())
    assert lossless is not None and lossless.verdict is Verdict.PASS, lossless
    assert report.arms["candidate"].draft_coverage > 0.9
    assert report.arms["no_draft"].acceptance_length == 1.0

    # A random drafter is no drafter: the gate says so, from memory and from the file alike.
    decision = decide(report, settings=GateSettings(min_acceptance_length=1.2))
    assert decision.verdict is Verdict.FAIL
    from_file = type(report).read(report.write(tmp_path / "r.json"))
    assert (
        decide(from_file, settings=GateSettings(min_acceptance_length=1.2)).digest
        == decision.digest
    )


def test_too_long_prompt_is_left_out_with_its_reason(endpoints: dict[str, ArmEndpoint]) -> None:
    long = _prompt("letters", 99, "never ending story " * 200)
    settings = SETTINGS.model_copy(update={"max_excluded_share": 0.2})
    measured = measure_acceptance(endpoints["candidate"], (*PROMPTS, long), settings=settings)
    assert list(measured.excluded) == [long.prompt_id]
    assert "length" in measured.excluded[long.prompt_id]
    assert len(measured.prompts) == len(PROMPTS)
    with pytest.raises(EvaluationError, match="too many evaluation prompts"):
        measure_acceptance(endpoints["candidate"], (*PROMPTS[:2], long), settings=settings)


def test_foreign_traffic_makes_the_counts_differ(
    endpoints: dict[str, ArmEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = endpoints["candidate"]
    monkeypatch.setattr("components.evaluation.acceptance.COUNTER_SETTLE_S", 1.0)

    def intrude(what: str, num_done: int, num_total: int) -> None:
        if num_done == 1:
            payload = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 8,
            }
            httpx.post(
                f"{endpoint.url}/v1/chat/completions", json=payload, timeout=600
            ).raise_for_status()

    with pytest.raises(EvaluationError, match="counters and its per-request metrics differ"):
        measure_acceptance(endpoint, PROMPTS, settings=SETTINGS, progress=intrude)


def test_wrong_arms_are_told_apart(endpoints: dict[str, ArmEndpoint]) -> None:
    plain = endpoints["no_draft"].model_copy(update={"num_draft_tokens": NUM_DRAFT_TOKENS})
    with pytest.raises(EvaluationError, match="no speculative metrics"):
        measure_acceptance(plain, PROMPTS[:1], settings=SETTINGS)
    drafting = endpoints["candidate"].model_copy(update={"num_draft_tokens": 0})
    with pytest.raises(EvaluationError, match="its engine speculates"):
        measure_acceptance(drafting, PROMPTS[:1], settings=SETTINGS)
    stranger = endpoints["no_draft"].model_copy(update={"model": "somebody-else"})
    with pytest.raises(EvaluationError):
        measure_acceptance(stranger, PROMPTS[:1], settings=SETTINGS)


def test_every_kind_of_request_is_sent_to_both_engines_and_the_table_is_kept(
    endpoints: dict[str, ArmEndpoint], tmp_path: Path
) -> None:
    def table() -> CompatibilityTable:
        return compatibility_of(
            endpoints["no_draft"],
            endpoints["candidate"],
            method="dflash",
            device="cpu",
            folder=tmp_path,
        )

    measured = table()
    by_feature = {row.feature: row for row in measured.rows}
    assert {name for name, row in by_feature.items() if row.plain is Served.REFUSED} == set()
    # vLLM 0.32 refuses these two of a drafting engine (`SamplingParams._validate_spec_decode`), and
    # no others.
    assert {name for name, row in by_feature.items() if row.drafting is Served.REFUSED} == {
        "min_p",
        "logit_bias",
    }
    assert by_feature["seed"].plain is by_feature["seed"].drafting is Served.OK
    served = ("chat", "stream", "top_k", "logprobs", "max_tokens_1", "end_of_context")
    assert {name: by_feature[name].drafting for name in served} == dict.fromkeys(served, Served.OK)
    # What a random model writes may be no JSON of the schema, with a drafter and without.
    assert by_feature["json_schema"].drafting is by_feature["json_schema"].plain
    assert table() == measured
    # All that was sent left both engines whole.
    measure_acceptance(endpoints["candidate"], PROMPTS[:2], settings=SETTINGS)


def test_a_shared_prefix_is_computed_cold_and_taken_from_the_cache_warm(
    endpoints: dict[str, ArmEndpoint],
) -> None:
    warm = WarmPrefixSettings(num_questions=2, prefix_tokens=130)
    settings = SETTINGS.model_copy(update={"warm_prefix": warm, "max_tokens": 8})
    for arm in ("candidate", "no_draft"):
        point = measure_warm_prefix(endpoints[arm], settings=settings)
        assert point.cached_cold == 0
        assert point.cached_warm is not None and 0 < point.cached_warm < point.num_prompt_tokens
        assert (point.acceptance_warm is None) == (arm == "no_draft")


def test_a_slice_from_a_file_is_asked_whole_and_in_the_recipes_variants(
    endpoints: dict[str, ArmEndpoint], tmp_path: Path
) -> None:
    rows = [
        [
            ("system", "Be brief."),
            ("user", f"what is {n}"),
            ("assistant", "a number"),
            ("user", "and then"),
        ]
        for n in range(4)
    ]
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in row]})
        for row in rows
    ]
    path = tmp_path / "ours.jsonl"
    path.write_text("\n".join(lines))
    own = {"kind": "file", "path": str(path), "num_prompts": 4}
    settings = EvaluationSettings.model_validate(SETTINGS.model_dump() | {"slices": {"ours": own}})
    prompts = load_prompts(settings, template_variants=({}, {"enable_thinking": False}))
    assert sorted(len(prompt.variant) for prompt in prompts) == [0, 0, 1, 1]
    measured = measure_acceptance(endpoints["candidate"], prompts, settings=settings)
    alone = measure_acceptance(
        endpoints["candidate"],
        [_prompt("ours", n, "and then") for n in range(1)],
        settings=settings,
    )
    # The system prompt and the earlier turns are asked, too.
    assert (
        min(p.num_prompt_tokens for p in measured.prompts) > alone.prompts[0].num_prompt_tokens + 20
    )


@pytest.mark.long
def test_ngram_copies_what_the_prompt_repeats_and_is_compared(
    endpoints: dict[str, ArmEndpoint], target: TargetRef, tmp_path: Path
) -> None:
    rival = Rival(method="ngram", num_draft_tokens=NUM_DRAFT_TOKENS, lookup=(1, 3))
    spec = EngineSpec(
        name="ngram", port=free_port(), model_path=target.path, served_model_name=MODEL,
        settings=ENGINE, device="cpu", num_cores=1, rival=rival,
    )  # fmt: skip
    measure = partial(measure_acceptance, settings=SETTINGS)
    plain = endpoints["no_draft"]
    with start_engines([spec], log_dir=tmp_path, fingerprint=FINGERPRINT) as (engine,):
        found = measure_rival(
            engine.endpoint("candidate"), plain, PROMPTS, measure=measure,
            speed=partial(measure_speed, settings=SETTINGS),
        )  # fmt: skip

    # Drafts where something repeats and not at every step; what it answers is what the plain engine
    # answers.
    drafted = sum(one.num_steps for one in found.measured.prompts)
    assert 0 < drafted < sum(one.num_output_tokens for one in found.measured.prompts)
    answers = {one.prompt_id: one for one in measure(plain, PROMPTS).prompts}
    assert all(
        one.num_output_tokens == answers[one.prompt_id].num_output_tokens
        for one in found.measured.prompts
    )
    assert all(
        1.0 <= all_step_length([one]) <= 1 + NUM_DRAFT_TOKENS for one in found.measured.prompts
    )

    measured = {
        arm: measure(one, PROMPTS, with_logprobs=arm == "no_draft")
        for arm, one in endpoints.items()
    }
    speed = dict.fromkeys(endpoints, found.no_draft_speed)
    recipe = load_recipe("demo").model_copy(update={"evaluation": SETTINGS, "engine": ENGINE})
    report = build_report(target, measured=measured, speed=speed, prompts=PROMPTS, recipe=recipe)
    report = with_rivals(report, [found])
    overall = beaten_by(report, GateSettings())[0]
    # A random drafter keeps about one token per step; what copies from a repeating answer keeps
    # more.
    assert overall.rival_length > 1.0
    assert overall.candidate_length < 1.2
    assert "Against drafting without a drafter" in rivals_section(
        report, beaten_by(report, GateSettings())
    )


def test_engine_that_is_not_there() -> None:
    with pytest.raises(EvaluationError, match="does not answer"):
        asyncio.run(
            _version_of(
                ArmEndpoint(arm="candidate", url=f"http://127.0.0.1:{free_port()}", model=MODEL)
            )
        )


async def _version_of(endpoint: ArmEndpoint) -> str:
    from components.evaluation.engine_client import EngineClient

    async with EngineClient(endpoint, temperature=0, max_tokens=8, timeout_s=30) as client:
        return await client.version()
