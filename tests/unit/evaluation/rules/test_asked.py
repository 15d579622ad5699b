"""The report must bear the decision: what cannot be is refused, what the recipe asks for must be
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from components.contracts import (
    AcceptanceReport,
    ArmReport,
    PromptMeasurement,
    RuleResult,
    SampledOutputs,
    SelfComparison,
    TemperatureReport,
    Verdict,
)
from components.errors import ConfigError
from components.evaluation.prompts import Prompt, prompt_digest
from components.evaluation.report import arm_report
from components.evaluation.rules.asked import Asked, as_asked, expected_loads
from components.evaluation.rules.decide import check_decision, decide
from components.settings import load_recipe

DEMO = load_recipe("demo")
RECIPE = DEMO.model_copy(update={"engine": DEMO.engine.model_copy(update={"dtype": "bfloat16"})})
EVALUATION = RECIPE.evaluation.model_copy(
    update={"slices": {"a": 6, "b": 6}, "speed_requests_in_flight": (1,), "num_sampled_prompts": 6}
)
GATE = RECIPE.gate.model_copy(
    update={"min_speedup": None, "max_train_served_gap": None, "non_inferiority_margin": 0.5}
)
PROMPTS = tuple(
    Prompt(f"{name}/{n}", name, ({"role": "user", "content": f"{name} {n}"},))
    for name in "ab"
    for n in range(6)
)
LOADS = (4, 12)  # at K = 2


def asked(champion: str | None = None, **settings: Any) -> Asked:
    evaluation = EVALUATION.model_copy(update=settings)
    recipe = RECIPE.model_copy(update={"evaluation": evaluation, "gate": GATE})
    return Asked(recipe, None, PROMPTS, champion)


@pytest.fixture
def measured(
    measurement: Callable[..., PromptMeasurement], arm: Any, report: Any
) -> Callable[..., AcceptanceReport]:
    def make(
        *,
        champion: bool = False,
        prompts: tuple[Prompt, ...] = PROMPTS,
        edit: Callable[[dict[str, Any]], Any] = id,
    ) -> AcceptanceReport:
        def drafting(name: str) -> ArmReport:
            drafted = [
                measurement(p.prompt_id, slice_name=p.slice, histogram=(10 + 2 * (n % 2), 6, 4))
                for n, p in enumerate(prompts)
            ]
            return arm(name, drafted, num_draft_tokens=2, rates={1: 60.0})

        plain = arm(
            "no_draft",
            [measurement(p.prompt_id, slice_name=p.slice) for p in prompts],
            rates={1: 50.0},
        )
        arms = [drafting("candidate"), plain, *([drafting("champion")] if champion else [])]
        digests = {p.prompt_id: p.output_digest for p in plain.prompts}
        itself = [
            SelfComparison(
                num_in_flight=load,
                digests=digests,
                divergences={},
                num_gaps=500,
                max_gap_change_nats=0.1,
            )
            for load in LOADS
        ]
        whole = report(
            *arms,
            itself=itself,
            further={"recipe": "demo", "prompt_digest": prompt_digest(prompts)},
        )
        fields = {name: getattr(whole, name) for name in AcceptanceReport.model_fields}
        edit(fields)
        return AcceptanceReport(**fields)

    return make


def told(report: AcceptanceReport, about: Asked) -> RuleResult:
    return as_asked(report, about)


def test_a_report_as_asked_passes(measured: Any) -> None:
    decision = decide(measured(), settings=GATE, asked=asked())
    assert decision.verdict is Verdict.PASS
    assert (decision.rules[0].rule, decision.recipe, decision.look) == (
        "measured as the recipe asks",
        "demo",
        1,
    )


def test_rows_in_a_step_are_those_of_verification() -> None:
    assert expected_loads(RECIPE, num_draft_tokens=4) == (4, 20)
    few = RECIPE.model_copy(update={"engine": RECIPE.engine.model_copy(update={"max_num_seqs": 8})})
    assert expected_loads(few, num_draft_tokens=4) == (4, 8)
    sampled = RECIPE.model_copy(
        update={"evaluation": EVALUATION.model_copy(update={"temperatures": (1.0,)})}
    )
    assert expected_loads(sampled, num_draft_tokens=4) == ()


def drop_plain(fields: dict[str, Any]) -> None:
    fields["arms"] = {name: one for name, one in fields["arms"].items() if name != "no_draft"}
    fields |= {"num_equal_outputs": 0, "num_compared_outputs": 0, "self_comparisons": ()}


def without(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.update(changes)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (drop_plain, "no plain engine beside the candidate"),
        (without(self_comparisons=()), "the plain engine against itself at"),
        (
            without(temperature=0.7, num_equal_outputs=0, num_compared_outputs=0),
            "temperature 0.7 for 0.0",
        ),
        (without(max_tokens=16), "answers' length 16 for 64"),
        (without(recipe="other"), "recipe other for demo"),
        (without(size="test"), "size test for None"),
        (without(dtype="float32"), "dtype float32 for bfloat16"),
        (without(prompt_digest="0" * 64), "other prompts than the recipe's"),
        (without(excluded={"a/1": "too long", "a/2": "too long"}), "prompts left out"),
    ],
)
def test_what_is_missing_or_another_is_no_pass(edit: Any, words: str, measured: Any) -> None:
    report = measured(edit=edit)
    rule = told(report, asked())
    assert rule.verdict is Verdict.INCONCLUSIVE and words in rule.detail
    assert decide(report, settings=GATE, asked=asked()).verdict is not Verdict.PASS


def test_an_unknown_slice_or_fewer_prompts_are_no_pass(measured: Any) -> None:
    strange = tuple(Prompt(f"z/{n}", "z", ({"role": "user", "content": str(n)},)) for n in range(8))
    for prompts in (strange, PROMPTS[:8]):
        rule = told(measured(prompts=prompts), asked())
        assert rule.verdict is Verdict.INCONCLUSIVE and "of the recipe's are missing" in rule.detail


def test_the_champion_in_service_may_not_be_left_out(measured: Any) -> None:
    with_champion = measured(champion=True)
    digest = with_champion.arms["champion"].checkpoint_digest
    assert told(with_champion, asked(digest)).verdict is Verdict.PASS
    for report, champion in ((measured(), digest), (with_champion, "f" * 64)):
        rule = told(report, asked(champion))
        assert rule.verdict is Verdict.INCONCLUSIVE and "was not measured" in rule.detail


def test_further_temperatures_need_their_arms_and_draws(measured: Any) -> None:
    report = measured()
    about = asked(temperatures=(0.0, 1.0), num_draws=20, num_draw_prompts=2)
    assert "further temperatures [] for [1.0]" in told(report, about).detail
    further = TemperatureReport(temperature=1.0, arms={"candidate": report.arms["candidate"]})
    halfway = report.model_copy(update={"further_temperatures": (further,)})
    assert "no draws with and without the drafter at temperature 1" in told(halfway, about).detail
    draws = {name: tuple((1, 2) for _ in range(20)) for name in ("a/0", "b/0")}
    drawn = SampledOutputs(temperature=1.0, plain=draws, drafted=draws)
    assert (
        told(halfway.model_copy(update={"sampled_outputs": (drawn,)}), about).verdict
        is Verdict.PASS
    )
    few = SampledOutputs(
        temperature=1.0, plain=draws, drafted={name: one[:5] for name, one in draws.items()}
    )
    assert (
        told(halfway.model_copy(update={"sampled_outputs": (few,)}), about).verdict
        is Verdict.INCONCLUSIVE
    )


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            {"num_equal_outputs": 10, "num_compared_outputs": 10},
            "10 of 10 outputs are said to be equal",
        ),
        ({"num_equal_outputs": 14, "num_compared_outputs": 12}, "14 of 12"),
        ({"num_equal_outputs": -3, "num_compared_outputs": -3}, "greater than or equal to 0"),
    ],
)
def test_counts_of_equal_outputs_are_those_of_the_digests(
    counts: dict[str, int], words: str, measured: Any
) -> None:
    with pytest.raises(ValidationError, match=words):
        measured(edit=without(**counts))


def test_different_digests_cannot_be_called_equal(measured: Any) -> None:
    def differ(fields: dict[str, Any]) -> None:
        candidate = fields["arms"]["candidate"]
        others = tuple(p.model_copy(update={"output_digest": "f" * 64}) for p in candidate.prompts)
        fields["arms"] = fields["arms"] | {
            "candidate": candidate.model_copy(update={"prompts": others})
        }

    with pytest.raises(
        ValidationError, match="12 of 12 outputs are said to be equal, but the digests give 0 of 12"
    ):
        measured(edit=differ)


def test_one_prompt_twenty_times_is_refused(measurement: Any) -> None:
    with pytest.raises(ValidationError, match="holds a prompt more than once"):
        arm_report(
            "candidate",
            prompts=tuple(measurement("a/1", histogram=(3, 1)) for _ in range(20)),
            speed=(),
            checkpoint_digest="c",
            num_draft_tokens=1,
            engine_counters={},
        )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {
                "num_accepted_tokens": 400,
                "num_draft_tokens": 800,
                "accepted_by_position": (200, 200),
            },
            "left to right",
        ),
        ({"accepted_by_position": (4, 10)}, "left to right"),
        ({"num_accepted_tokens": 15}, "15 accepted tokens, but 14 by position"),
        ({"num_draft_tokens": 13}, "14 tokens accepted of 13 drafted"),
        ({"num_steps": -1}, "greater than or equal to 0"),
    ],
)
def test_counts_that_cannot_be_are_refused(
    changed: dict[str, Any], words: str, measurement: Any
) -> None:
    possible = measurement("a/1", histogram=(10, 6, 4))
    assert possible.num_accepted_tokens == 14
    with pytest.raises(ValidationError, match=words):
        PromptMeasurement(**(possible.model_dump() | changed))


def test_figures_written_beside_the_prompts_fail(measured: Any) -> None:
    report = measured()
    better = report.arms["candidate"].model_copy(update={"acceptance_length": 3.0})
    forged = report.model_copy(update={"arms": report.arms | {"candidate": better}})
    decision = decide(forged, settings=GATE, asked=asked())
    rule = next(one for one in decision.rules if one.rule == "figures follow from the prompts")
    assert rule.verdict is decision.verdict is Verdict.FAIL
    assert "candidate.acceptance_length" in rule.detail


def test_a_decision_is_checked_under_the_recipe_not_by_the_rules_inside_it(measured: Any) -> None:
    report = measured()
    decision = decide(
        report, settings=GATE, asked=asked(), expected_fingerprint=report.target.fingerprint
    )
    check_decision(decision, report, asked=asked())

    mild = GATE.model_copy(update={"min_acceptance_length": 1.0, "alpha": 0.4})
    talked_round = decide(
        report, settings=mild, asked=asked(), expected_fingerprint=report.target.fingerprint
    )
    with pytest.raises(ConfigError, match="does not give this decision under the recipe"):
        check_decision(talked_round, report, asked=asked())
    other = measured(champion=True)
    with pytest.raises(ConfigError, match="made of another report"):
        check_decision(decision, other, asked=asked())


def test_a_configured_key_asks_for_its_signature(measured: Any) -> None:
    report = measured()
    key = b"a key of thirty-two bytes or more"
    about = {"settings": GATE, "asked": asked(), "expected_fingerprint": report.target.fingerprint}
    signed = decide(report, **about, signing_key=key)
    plain = decide(report, **about)
    check_decision(signed, report, asked=asked(), signing_key=key)
    # Nobody configured a key: the digest is all there is.
    check_decision(signed, report, asked=asked())
    with pytest.raises(ConfigError, match="is not signed"):
        check_decision(plain, report, asked=asked(), signing_key=key)
    with pytest.raises(ConfigError, match="signed with another key"):
        check_decision(
            signed, report, asked=asked(), signing_key=b"another key, as long as the first"
        )
    assert signed.content_digest == plain.content_digest and plain.signature is None
