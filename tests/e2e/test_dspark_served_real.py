"""DSpark on the real target, in the dtype it is served in: 50 prompts, greedy, with the drafter
against without.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from components.contracts import SelfComparison, Verdict
from components.evaluation.outputs.greedy_answers import (
    GreedyAnswer,
    compare_with_itself,
    divergences,
)
from components.evaluation.outputs.losslessness import JudgedOutputs, judge_outputs
from components.settings import GateSettings, load_recipe, native_dtype
from tests.support import wrong_drafts_plugin
from tests.support.dspark_drafter import write_dspark
from tests.support.dspark_serving import Completion, complete, serve

# Long: the loop's own gate judges outputs on the real target in every run of the tests.
pytestmark = [pytest.mark.e2e, pytest.mark.long]

MAX_TOKENS = 48
DTYPE = native_dtype("cpu")
NUM_IN_FLIGHT, MAX_NUM_SEQS = 16, 32

TOPICS = (
    "the sea",
    "a lighthouse",
    "winter bread",
    "the moon",
    "a violin",
    "train stations",
    "honey bees",
    "old maps",
    "the number seven",
    "a garden wall",
)
REQUESTS = (
    "Write two sentences about {}.",
    "Explain {} to a child.",
    "List five words that go with {}.",
    "What is the best question to ask about {}?",
    "Translate 'I like {}' into French.",
)


def make_prompts(target: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = [
        [{"role": "user", "content": request.format(topic)}]
        for topic in TOPICS
        for request in REQUESTS
    ]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for chat in chats
    ]


def answers(completions: list[Completion]) -> dict[str, GreedyAnswer]:
    return {
        str(index): GreedyAnswer(one.token_ids, one.top) for index, one in enumerate(completions)
    }


@pytest.fixture(scope="module")
def plain(
    real_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Completion], list[SelfComparison]]:
    """The plain engine's answers, and how they compare with its own: as loaded, and as full as it
    runs.
    """
    prompts = make_prompts(real_target)
    assert len(prompts) == 50
    with serve(
        real_target, log=tmp_path_factory.mktemp("plain") / "plain.log", dtype=DTYPE, num_cores=None
    ) as url:
        first, again, crowded = (
            complete(url, prompts, max_tokens=MAX_TOKENS, num_in_flight=load, with_logprobs=True)
            for load in (NUM_IN_FLIGHT, NUM_IN_FLIGHT, MAX_NUM_SEQS)
        )
    control = [
        compare_with_itself(answers(first), answers(other), num_in_flight=load)
        for other, load in ((again, NUM_IN_FLIGHT), (crowded, MAX_NUM_SEQS))
    ]
    return first, control


@pytest.fixture(scope="module")
def drafter(real_target: Path, plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that learnt its bigrams from the plain engine's own answers."""
    recipe = load_recipe("demo")
    return write_dspark(
        tmp_path_factory.mktemp("drafter") / "dspark",
        target=real_target,
        aux_layer_ids=recipe.stream.aux_layer_ids,
        start_layers=recipe.drafter.start_layers,
        draft_vocab_size=None,
        markov_rank=recipe.drafter.markov_rank,
        learn_from=[completion.token_ids for completion in plain[0]],
    )


def drafted(
    real_target: Path, drafter: Path, log: Path, *, environment: Mapping[str, str] | None = None
) -> list[Completion]:
    num_drafts = load_recipe("demo").drafter.block_size - 1
    speculative = {
        "method": "dflash",
        "model": str(drafter),
        "num_speculative_tokens": num_drafts,
    }
    with serve(
        real_target,
        log=log,
        dtype=DTYPE,
        speculative=speculative,
        num_cores=None,
        environment=environment,
    ) as url:
        return complete(
            url, make_prompts(real_target), max_tokens=MAX_TOKENS, num_in_flight=NUM_IN_FLIGHT
        )


def judged(
    ours: list[Completion], plain: tuple[list[Completion], list[SelfComparison]]
) -> JudgedOutputs:
    """As the gate judges; printed, since the figures are the machine's."""
    parted = divergences(answers(plain[0]), answers(ours))
    told = judge_outputs(parted, plain[1], dtype=DTYPE, alpha=GateSettings().losslessness_alpha)
    margins = sorted(round(one.margin_nats or 0.0, 3) for one in parted.values())
    own = [len(one.divergences) for one in plain[1]]
    print(f"{len(parted)} of {len(ours)} part, the plain engine's own {own}; margins {margins}")
    print(
        f"rounding reaches {told.reach_nats:.4f} nats over {told.num_gaps} gaps; p "
        f"{told.share_p_value:.3g}"
    )
    return told


def test_greedy_output_is_the_same_with_and_without_the_drafter(
    real_target: Path, plain: Any, drafter: Path, tmp_path: Path
) -> None:
    ours = drafted(real_target, drafter, tmp_path / "drafted.log")
    assert judged(ours, plain).verdict is Verdict.PASS
    metrics = [item.speculation for item in ours if item.speculation]
    accepted = sum(item["num_accepted_draft_tokens"] for item in metrics)
    steps = sum(item["num_spec_steps"] for item in metrics)
    print(f"acceptance length {1 + accepted / steps:.3f}")
    assert len(metrics) == len(ours)
    assert accepted / steps > 0.1


def test_an_engine_that_keeps_one_wrong_draft_in_fifty_fails(
    real_target: Path, plain: Any, drafter: Path, tmp_path: Path
) -> None:
    environment = wrong_drafts_plugin.install(tmp_path / "plugin")
    log = tmp_path / "wrong.log"
    ours = drafted(real_target, drafter, log, environment=environment)
    assert "one wrong draft in 50 is kept" in log.read_text()
    assert judged(ours, plain).verdict is Verdict.FAIL
