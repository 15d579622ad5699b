"""DSpark on the real target, in the dtype it is served in: 50 prompts, greedy, with the drafter against without."""

from __future__ import annotations

from pathlib import Path

import pytest
from dspark_drafter import write_dspark
from dspark_serving import complete, serve
from transformers import AutoTokenizer

from components.settings import load_recipe

pytestmark = pytest.mark.e2e

MAX_TOKENS = 48
DTYPE = "bfloat16"
BF16_TIE_GAP = 0.25
"""Two steps of bf16 at a logit of 16 to 32, the size of this target's best logits: below it, rounding may decide."""

TOPICS = (
    "the sea", "a lighthouse", "winter bread", "the moon", "a violin", "train stations", "honey bees", "old maps",
    "the number seven", "a garden wall",
)  # fmt: skip
REQUESTS = (
    "Write two sentences about {}.",
    "Explain {} to a child.",
    "List five words that go with {}.",
    "What is the best question to ask about {}?",
    "Translate 'I like {}' into French.",
)


def make_prompts(target: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(target)
    chats = [[{"role": "user", "content": request.format(topic)}] for topic in TOPICS for request in REQUESTS]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]


def test_greedy_output_is_the_same_with_and_without_the_drafter(real_target: Path, tmp_path: Path) -> None:
    recipe, prompts = load_recipe("demo"), make_prompts(real_target)
    assert len(prompts) == 50
    with serve(real_target, log=tmp_path / "plain.log", dtype=DTYPE, num_cores=None) as url:
        plain = complete(url, prompts, max_tokens=MAX_TOKENS, num_in_flight=16, with_gaps=True)
    checkpoint = write_dspark(
        tmp_path / "dspark",
        target=real_target,
        aux_layer_ids=recipe.stream.aux_layer_ids,
        start_layers=recipe.drafter.start_layers,
        draft_vocab_size=None,
        markov_rank=recipe.drafter.markov_rank,
        learn_from=[completion.token_ids for completion in plain],
    )
    num_drafts = recipe.drafter.block_size - 1
    speculative = {"method": "dflash", "model": str(checkpoint), "num_speculative_tokens": num_drafts}
    log = tmp_path / "drafted.log"
    with serve(real_target, log=log, dtype=DTYPE, speculative=speculative, num_cores=None) as url:
        drafted = complete(url, prompts, max_tokens=MAX_TOKENS, num_in_flight=16)
    num_ties = 0
    for index, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            print(f"prompt {index}: outputs part at {first}, where the target's top-2 gap is {theirs.gaps[first]:.3f}")
            assert theirs.gaps[first] <= BF16_TIE_GAP
            num_ties += 1
    metrics = [item.speculation for item in drafted if item.speculation]
    accepted = sum(item["num_accepted_draft_tokens"] for item in metrics)
    steps = sum(item["num_spec_steps"] for item in metrics)
    print(f"{len(prompts) - num_ties} of {len(prompts)} equal, {num_ties} ties; acceptance {1 + accepted / steps:.3f}")
    assert len(metrics) == len(prompts)
    assert accepted / steps > 0.1
    assert num_ties <= len(prompts) // 5
