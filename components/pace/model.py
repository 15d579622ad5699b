"""Expected seconds of each stage of the loop on a probed machine.

An engine's step takes a + c * b seconds with b requests in it: a is what a step costs however small
it is (weights read, Python), c what each further row costs. Two loads of the probe give both.
Everything that is mostly imports, files and small Python (engines, trainer, reports) is counted in
starts of the plain engine.

The constants are those of the demo recipe's runs in docs/lab-notes/whole-loop.md (entries of
2026-11-30 and 2026-12-01); a stage that takes longer than expected takes its time from training,
whose limit is set when it begins (`plan.training_limit`).
"""

from __future__ import annotations

from dataclasses import dataclass

from components.contracts import Amounts, MachineProbe
from components.settings import Recipe

WRITTEN_TOKENS = 50.0
"""Tokens of a prompt that the target writes, those cut off for their length included."""
SURPLUS = 1.7
"""Prompts written for one that is kept (curation/self_prompts.py)."""
ANSWER_SHARE = 0.75
"""Mean length of an answer as a share of curation.max_answer_tokens."""
PROMPT_TOKENS = 65.0
"""Mean tokens of a conversation before its answer, template included."""
PACK_FILL = 0.73
"""Tokens in a pack as a share of training.tokens_per_step."""
CONVERSATIONS_PER_START = 900.0
"""Conversations filtered, rendered and validated in the time of an engine start."""
PLAIN_ROUNDS, DRAFTING_ROUNDS = 3, 1
"""How often the plain engine (its own control) and each drafting one answer the evaluation prompts.
"""
GATE_STARTS = 2.0
"""The candidate's engine, and the process of the train-served gap."""
ARMS = 2
"""Engines that are compared: the candidate's and no draft."""
NUM_REQUEST_KINDS, REQUEST_TOKENS = 19, 12
"""Of the table of requests (evaluation/request_probes.py), asked one at a time, of both arms at
once.
"""
CANARY_STARTS = 1.0
REST_STARTS = 1.0
"""Registering, the report, and the ends of engines."""


@dataclass(frozen=True)
class EnginePace:
    """Seconds of an engine's step with b requests: `base_s + b * row_s`."""

    base_s: float
    row_s: float

    @classmethod
    def fit(cls, tokens_per_s: dict[int, float]) -> EnginePace:
        """Through the smallest and the largest load measured; with one of them, or with rates that
        contradict the form (noise), steps take as long at every load, or as long per request.
        """
        (low, *_), (*_, high) = sorted(tokens_per_s), sorted(tokens_per_s)
        low_s, high_s = low / tokens_per_s[low], high / tokens_per_s[high]
        if low == high:
            return cls(base_s=0.0, row_s=high_s / high)
        row_s = max(0.0, (high_s - low_s) / (high - low))
        base_s = max(0.0, high_s - row_s * high)
        return cls(base_s=base_s, row_s=(high_s - base_s) / high)

    def tokens_per_s(self, in_flight: int) -> float:
        """Answer tokens per second with that many requests in flight."""
        return in_flight / (self.base_s + self.row_s * in_flight)


def stage_seconds(recipe: Recipe, amounts: Amounts, probe: MachineProbe) -> dict[str, float]:
    """Expected seconds of the stages after the probe, by name, in order."""
    engine = EnginePace.fit(probe.tokens_per_s)
    return {
        "write prompts": _write_s(recipe, amounts, engine),
        "collect and validate": probe.engine_up_s
        * amounts.num_conversations
        / CONVERSATIONS_PER_START,
        "regenerate": _answer_s(recipe, amounts, engine),
        "train": _train_s(recipe, amounts, probe),
        "gate": _gate_s(recipe, amounts, engine, probe),
        "canary": _canary_s(recipe, amounts, engine, probe),
        "rest": REST_STARTS * probe.engine_up_s,
    }


def training_steps(recipe: Recipe, amounts: Amounts) -> int:
    """Optimizer steps of the recipe's passes over that many conversations, or fewer where it limits
    them.
    """
    training = recipe.training
    length = PROMPT_TOKENS + ANSWER_SHARE * recipe.curation.max_answer_tokens
    num_trained = amounts.num_conversations * (1 - recipe.curation.validation_share)
    packs = training.num_epochs * num_trained * length / (PACK_FILL * training.tokens_per_step)
    steps = round(packs * training.updates_per_pack / training.packs_per_step)
    return max(1, min(steps, training.num_steps or steps))


def _in_flight(recipe: Recipe) -> int:
    return min(recipe.curation.requests_in_flight, recipe.engine.max_num_seqs)


def _write_s(recipe: Recipe, amounts: Amounts, engine: EnginePace) -> float:
    sources = recipe.curation.sources
    share = sum(s.weight for s in sources if s.kind == "target") / sum(s.weight for s in sources)
    num_tokens = SURPLUS * share * amounts.num_conversations * WRITTEN_TOKENS
    return num_tokens / engine.tokens_per_s(_in_flight(recipe))


def _answer_s(recipe: Recipe, amounts: Amounts, engine: EnginePace) -> float:
    num_tokens = amounts.num_conversations * ANSWER_SHARE * recipe.curation.max_answer_tokens
    return num_tokens / engine.tokens_per_s(_in_flight(recipe))


def _train_s(recipe: Recipe, amounts: Amounts, probe: MachineProbe) -> float:
    """Start, steps beside the engine that reads their tokens, a validation for each twentieth of
    them.
    """
    training = recipe.training
    read_s = (
        PACK_FILL * training.tokens_per_step * training.packs_per_step / probe.prompt_tokens_per_s
    )
    step_s = probe.training_step_s * training.packs_per_step + read_s / training.updates_per_pack
    bigrams_s = (recipe.drafter.draft_vocab_size or 0) / probe.prompt_tokens_per_s
    start_s = max(probe.trainer_up_s, probe.engine_up_s) + bigrams_s
    return start_s + 1.05 * training_steps(recipe, amounts) * step_s


def _gate_s(recipe: Recipe, amounts: Amounts, engine: EnginePace, probe: MachineProbe) -> float:
    evaluation = recipe.evaluation
    rate = engine.tokens_per_s(evaluation.acceptance_requests_in_flight)
    num_answers = (
        sum(amounts.slices.values()) * (PLAIN_ROUNDS + DRAFTING_ROUNDS)
        + amounts.num_untrained_prompts
    )
    num_starts = GATE_STARTS + (1 if amounts.num_untrained_prompts else 0)

    if recipe.gate.max_train_served_gap is not None:
        num_answers += 2 * evaluation.num_gap_prompts
    return (
        num_starts * probe.engine_up_s
        + num_answers * evaluation.max_tokens / rate
        + _speed_s(recipe, amounts, engine)
        + NUM_REQUEST_KINDS * REQUEST_TOKENS / engine.tokens_per_s(1)
        + _further_arms_s(recipe, amounts, engine, probe)
        + _sampled_s(recipe, amounts, engine)
        + _warm_prefix_s(recipe, engine, probe)
    )


def _speed_s(recipe: Recipe, amounts: Amounts, engine: EnginePace) -> float:
    """Rounds of two arms in turns, at each load."""
    evaluation = recipe.evaluation
    return sum(
        ARMS
        * evaluation.speed_repeats
        * max(evaluation.speed_requests, level)
        * evaluation.max_tokens
        / engine.tokens_per_s(level)
        for level in amounts.speed_requests_in_flight
    )


def _further_arms_s(
    recipe: Recipe, amounts: Amounts, engine: EnginePace, probe: MachineProbe
) -> float:
    """Rivals, shorter drafts and the shipped schedule: an engine each, answers, speed in turns with
    no draft.
    """
    evaluation = recipe.evaluation
    num_engines = (
        len(evaluation.rivals) + len(evaluation.draft_lengths) + evaluation.measure_schedule
    )
    num_prompts = sum(amounts.slices.values())
    num_answers = len(evaluation.rivals) * num_prompts
    num_answers += len(evaluation.draft_lengths) * min(evaluation.num_sampled_prompts, num_prompts)

    answers_s = (
        num_answers
        * evaluation.max_tokens
        / engine.tokens_per_s(evaluation.acceptance_requests_in_flight)
    )

    return num_engines * (probe.engine_up_s + _speed_s(recipe, amounts, engine)) + answers_s


def _sampled_s(recipe: Recipe, amounts: Amounts, engine: EnginePace) -> float:
    """Acceptance at further temperatures, and draws of both arms at those above 0."""
    evaluation = recipe.evaluation
    num_prompts = min(evaluation.num_sampled_prompts, sum(amounts.slices.values()))
    num_tokens = len(evaluation.temperatures[1:]) * num_prompts * evaluation.max_tokens
    num_hot = sum(temperature > 0 for temperature in evaluation.temperatures)
    num_tokens += (
        num_hot * ARMS * evaluation.num_draw_prompts * evaluation.num_draws * evaluation.draw_tokens
    )
    return num_tokens / engine.tokens_per_s(evaluation.acceptance_requests_in_flight)


def _warm_prefix_s(recipe: Recipe, engine: EnginePace, probe: MachineProbe) -> float:
    """Each question cold and warm, one at a time; the prefix is read once more than there are
    questions.
    """
    warm = recipe.evaluation.warm_prefix
    if warm is None:
        return 0.0
    read_s = (warm.num_questions + 1) * warm.prefix_tokens / probe.prompt_tokens_per_s
    return ARMS * (
        read_s + 2 * warm.num_questions * recipe.evaluation.max_tokens / engine.tokens_per_s(1)
    )


def _canary_s(recipe: Recipe, amounts: Amounts, engine: EnginePace, probe: MachineProbe) -> float:
    canary = recipe.canary
    answered_s = (
        canary.requests_in_flight
        * canary.max_tokens
        / engine.tokens_per_s(canary.requests_in_flight)
    )
    step_s = max(amounts.canary_step_s, answered_s)
    return CANARY_STARTS * probe.engine_up_s + len(canary.weights_percent) * step_s
