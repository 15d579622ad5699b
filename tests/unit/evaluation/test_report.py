"""Figures of an arm from its prompts, and what cannot be put into one report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from components.contracts import ArmEndpoint, PromptMeasurement, TargetFingerprint, TargetRef
from components.errors import EvaluationError
from components.evaluation.acceptance import Measured
from components.evaluation.prompts import Prompt, prompt_digest
from components.evaluation.report import build_report, paired_acceptance_lengths
from components.settings import EvaluationSettings, load_recipe

SETTINGS = EvaluationSettings(slices={"a": 2})
TARGET = TargetRef(
    name="t", path="p", source="s", quantization="none",
    fingerprint=TargetFingerprint(weights="w", quantization="q", tokenizer="t", serving="s"),
)  # fmt: skip
PROMPTS = [Prompt(f"a/{n}", "a", ({"role": "user", "content": str(n)},)) for n in range(3)]


def measured(
    arm: str, prompts: list[PromptMeasurement], *, k: int = 0, version: str = "1", **excluded: str
) -> Measured:
    endpoint = ArmEndpoint(
        arm=arm, url="u", model="m", checkpoint_digest="c" if k else None, num_draft_tokens=k
    )
    return Measured(endpoint, tuple(prompts), {"vllm:generation_tokens": 1.0}, excluded, version)


def build(arms: list[Measured], *, settings: EvaluationSettings = SETTINGS) -> Any:
    by_arm = {one.endpoint.arm: one for one in arms}
    recipe = load_recipe("demo").model_copy(update={"evaluation": settings})
    return build_report(TARGET, measured=by_arm, speed={}, prompts=PROMPTS, recipe=recipe)


def test_perfect_and_useless_drafts(measurement: Callable[..., PromptMeasurement]) -> None:
    perfect = build(
        [measured("candidate", [measurement(f"a/{n}", histogram=(0, 0, 5)) for n in range(3)], k=2)]
    )
    assert perfect.arms["candidate"].acceptance_length == 3.0
    assert perfect.arms["candidate"].acceptance_by_position == (1.0, 1.0)
    interval = perfect.arms["candidate"].acceptance_interval
    # Three prompts that agree are no certainty.
    assert interval is not None and interval[0] < interval[1] == 3.0
    assert perfect.arms["candidate"].draft_coverage == 15 / 16
    useless = build(
        [measured("candidate", [measurement(f"a/{n}", histogram=(5, 0, 0)) for n in range(3)], k=2)]
    )
    assert useless.arms["candidate"].acceptance_length == 1.0
    # None of 15 steps accepted a draft: a Poisson mean of 3.69 in all gives that in 2.5 % of cases.
    assert useless.arms["candidate"].acceptance_interval == pytest.approx(
        (1.0, 1 - math.log(0.025) / 15)
    )
    assert useless.arms["candidate"].acceptance_by_position == (0.0, 0.0)


def test_two_measurements_are_compared_over_their_common_prompts(
    measurement: Callable[..., PromptMeasurement],
) -> None:
    # The easy prompt of one side alone made 3.0 of 2.0, and a change of the target out of a change
    # of the prompts.
    hard = [measurement(f"a/{n}", histogram=(2, 2, 0)) for n in range(2)]
    easy = measurement("a/2", histogram=(0, 0, 40))
    assert paired_acceptance_lengths([*hard, easy], hard) == (1.5, 1.5, 2)
    better = [measurement(f"a/{n}", histogram=(0, 4, 0)) for n in range(2)]
    assert paired_acceptance_lengths(hard, [*better, easy]) == (1.5, 2.0, 2)
    assert paired_acceptance_lengths([], hard) == (1.0, 1.0, 0)


def test_slices_and_positions(measurement: Callable[..., PromptMeasurement]) -> None:
    prompts = [
        measurement("a/0", histogram=(1, 1, 2)),
        measurement("b/0", slice_name="b", histogram=(4, 0, 0)),
    ]
    arm = build([measured("candidate", prompts, k=2)]).arms["candidate"]
    assert arm.acceptance_by_slice == {"a": 2.25, "b": 1.0}
    assert arm.interval_by_slice == {}
    assert arm.acceptance_by_position == (3 / 8, 2 / 8)
    assert arm.acceptance_length == 13 / 8


def test_coverage_never_exceeds_the_output(measurement: Callable[..., PromptMeasurement]) -> None:
    cut = [measurement(f"a/{n}", histogram=(0, 0, 5), num_output_tokens=13) for n in range(2)]
    assert build([measured("candidate", cut, k=2)]).arms["candidate"].draft_coverage == 1.0


def test_no_drafts_at_all(measurement: Callable[..., PromptMeasurement]) -> None:
    silent = [measurement(f"a/{n}", histogram=(0, 0, 0), num_output_tokens=9) for n in range(2)]
    arm = build([measured("candidate", silent, k=2)]).arms["candidate"]
    assert (arm.acceptance_length, arm.acceptance_interval, arm.draft_coverage) == (1.0, None, 0.0)


def test_outputs_are_compared_by_prompt(measurement: Callable[..., PromptMeasurement]) -> None:
    candidate = [
        measurement("a/0", histogram=(3, 1)),
        measurement("a/1", histogram=(3, 1), output="other"),
    ]
    plain = [measurement("a/1", num_output_tokens=5), measurement("a/0", num_output_tokens=5)]
    report = build([measured("candidate", candidate, k=1), measured("no_draft", plain)])
    assert (report.num_equal_outputs, report.num_compared_outputs) == (1, 2)
    assert report.prompt_digest == prompt_digest(PROMPTS)
    sampled = SETTINGS.model_copy(update={"temperatures": (1.0,)})
    report = build(
        [measured("candidate", candidate, k=1), measured("no_draft", plain)], settings=sampled
    )
    assert report.num_compared_outputs == 0


def test_a_prompt_one_arm_left_out_is_left_out_everywhere(
    measurement: Callable[..., PromptMeasurement],
) -> None:
    both = [measurement(f"a/{n}", histogram=(3, 1)) for n in range(2)]
    report = build(
        [
            measured("candidate", both, k=1),
            measured("champion", both[:1], k=1, **{"a/1": "prompt too long"}),
        ]
    )
    assert [p.prompt_id for p in report.arms["candidate"].prompts] == ["a/0"]
    assert report.excluded == {"a/1": "prompt too long"}


def test_what_cannot_be_compared_is_refused(measurement: Callable[..., PromptMeasurement]) -> None:
    prompts = [measurement(f"a/{n}", histogram=(3, 1)) for n in range(3)]
    candidate = measured("candidate", prompts, k=1)
    with pytest.raises(EvaluationError, match="no candidate"):
        build([measured("no_draft", prompts)])
    with pytest.raises(EvaluationError, match="same prompts"):
        build([candidate, measured("champion", prompts[:2], k=1)])
    with pytest.raises(EvaluationError, match="same prompts"):
        build([measured("candidate", [*prompts, prompts[0]], k=1)])
    with pytest.raises(EvaluationError, match="different engine versions"):
        build([candidate, measured("champion", prompts, k=1, version="2")])
    assert (
        len(build([candidate, measured("untrained", prompts[:1], k=1)]).arms["untrained"].prompts)
        == 1
    )


def test_histogram_counts_steps_by_accepted_tokens(
    measurement: Callable[..., PromptMeasurement],
) -> None:
    prompts = [measurement("a/0", histogram=(1, 1, 2)), measurement("a/1", histogram=(4, 0, 3))]
    arm = build(
        [
            measured("candidate", prompts, k=2),
            measured("no_draft", [measurement("a/0"), measurement("a/1")]),
        ]
    )
    assert arm.arms["candidate"].acceptance_histogram == (5, 1, 5)
    assert arm.arms["no_draft"].acceptance_histogram == ()


def test_an_interval_ends_at_the_longest_step(
    measurement: Callable[..., PromptMeasurement],
) -> None:
    prompts = [measurement("a/0", histogram=(1, 0, 9)), measurement("a/1", histogram=(9, 1, 0))]
    interval = build([measured("candidate", prompts, k=2)]).arms["candidate"].acceptance_interval
    assert interval is not None and interval[1] == 3.0


def test_further_temperatures_memory_and_speed_alone(
    measurement: Callable[..., PromptMeasurement],
) -> None:
    prompts = [measurement(f"a/{n}", histogram=(3, 1)) for n in range(2)]
    candidate = measured("candidate", prompts, k=1)
    few = measured("candidate", prompts[:1], k=1)
    report = build_report(
        TARGET,
        measured={"candidate": candidate},
        speed={"scheduled": ()},
        prompts=PROMPTS,
        recipe=load_recipe("demo"),
        further={1.0: {"candidate": few}},
        peak_memory_bytes={"candidate": 7},
    )
    assert report.arms["candidate"].peak_memory_bytes == 7
    assert report.arms["scheduled"].prompts == ()
    assert report.further_temperatures[0].temperature == 1.0
    assert len(report.further_temperatures[0].arms["candidate"].prompts) == 1
