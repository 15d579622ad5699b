"""The reference decoder against the target alone, one sequence at a time and in ragged batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from components.drafter.confidence.scheduler import PrefixScheduler
from components.drafter.reference.decoder import ReferenceDecoder, ReferenceOutput
from components.errors import CheckpointError, ConfigError, TargetError
from tests.support.dspark_drafter import write_dspark
from tests.support.reference_cases import DRAFTERS, write_random_drafter

PROMPTS = ([1, 50, 60, 70], [1, 100, 200, 300, 301, 302], [400, 401], [7])
KEPT = tuple(range(0, 512, 2))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are many times slower on two threads that share their cores with
    others.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def checkpoint(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dspark(tmp_path_factory.mktemp("drafters") / "dspark", target=tiny_target)


@pytest.fixture(scope="module")
def decoder(tiny_target: Path, checkpoint: Path) -> ReferenceDecoder:
    return ReferenceDecoder(tiny_target, checkpoint)


@pytest.fixture(scope="module")
def decoders(
    tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ReferenceDecoder]:
    """One of each kind, with random weights."""
    folder = tmp_path_factory.mktemp("drafters")
    shape: dict[str, Any] = {
        "target": tiny_target,
        "aux_layer_ids": (1, 2, 4),
        "draft_token_ids": KEPT,
    }
    return {
        kind: ReferenceDecoder(
            tiny_target, write_random_drafter(folder / kind, kind, weight_std=0.1, **shape)
        )
        for kind in DRAFTERS
    }


def decode_plainly(
    decoder: ReferenceDecoder, prompt: list[int], num_tokens: int
) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.inference_mode():
            tokens.append(int(decoder.target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_output_is_the_targets_own(decoder: ReferenceDecoder, prompt: list[int]) -> None:
    output = decoder.generate(prompt, max_new_tokens=24, ignore_eos=True)
    assert not any(step.is_tie for step in output.steps)
    assert output.token_ids == decode_plainly(decoder, prompt, 24)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_ragged_batch_gives_what_each_sequence_gives_alone(
    decoders: dict[str, ReferenceDecoder], kind: str
) -> None:
    decoder = decoders[kind]
    generator = torch.Generator().manual_seed(4)
    lengths = (1, 2, 3, 9, 30, 31)
    prompts = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in lengths]
    together = decoder.generate_batch(prompts, max_new_tokens=20, ignore_eos=True)
    for prompt, output in zip(prompts, together, strict=True):
        alone = decoder.generate(prompt, max_new_tokens=20, ignore_eos=True)
        assert (
            min(gap for step in alone.steps for gap in (*step.target_gaps, *step.draft_gaps)) > 1e-5
        )
        assert without_gaps(output) == without_gaps(alone)
        assert [g for s in output.steps for g in s.draft_gaps] == pytest.approx(
            [g for s in alone.steps for g in s.draft_gaps], abs=1e-3
        )
        assert output.token_ids == decode_plainly(decoder, prompt, 20)


def without_gaps(output: ReferenceOutput) -> list[Any]:
    return [
        output.token_ids,
        *(replace(step, draft_gaps=(), target_gaps=()) for step in output.steps),
    ]


def test_sequences_of_a_batch_commit_different_numbers_of_tokens(decoder: ReferenceDecoder) -> None:
    outputs = decoder.generate_batch(PROMPTS, max_new_tokens=64, ignore_eos=True)
    assert all(len(output.token_ids) == 64 for output in outputs)
    side_by_side = zip(*(output.steps for output in outputs), strict=False)
    assert any(len({step.num_accepted for step in steps}) > 1 for steps in side_by_side)
    assert 1.0 < sum(output.acceptance_length for output in outputs) / len(outputs) < 5.0


def test_steps_tell_the_whole_story(decoder: ReferenceDecoder) -> None:
    for prompt, output in zip(
        PROMPTS, decoder.generate_batch(PROMPTS, max_new_tokens=30, ignore_eos=True), strict=True
    ):
        sequence = [*prompt, *output.token_ids]
        position = len(prompt)
        for step in output.steps:
            assert (step.position, step.anchor) == (position, sequence[position])
            assert (
                len(step.draft_ids) == len(step.draft_gaps) == decoder.drafter.num_draft_tokens == 4
            )
            assert step.num_scheduled == 4 and len(step.target_gaps) == step.num_accepted + 1
            accepted = sequence[position + 1 : position + 1 + step.num_accepted]
            assert list(step.draft_ids[: len(accepted)]) == accepted
            position += step.num_accepted + 1
        assert position >= len(sequence) - 1


@pytest.mark.parametrize("kind", DRAFTERS)
def test_cached_context_gives_the_drafts_of_a_fresh_start(
    decoders: dict[str, ReferenceDecoder], kind: str
) -> None:
    decoder = decoders[kind]
    output = decoder.generate(PROMPTS[1], max_new_tokens=20, ignore_eos=True)
    sequence = [*PROMPTS[1], *output.token_ids]
    for step in output.steps:
        if step.position < len(sequence):
            fresh = decoder.propose_after(sequence[: step.position + 1])
            assert fresh.draft_ids == step.draft_ids
            assert fresh.gaps == pytest.approx(step.draft_gaps, abs=1e-3)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_more_and_fewer_drafts_than_trained_for(
    decoders: dict[str, ReferenceDecoder], kind: str
) -> None:
    decoder = decoders[kind]
    plain = decode_plainly(decoder, PROMPTS[0], 16)
    for num_drafts in (1, 2, 7):
        output = decoder.generate(
            PROMPTS[0], max_new_tokens=16, ignore_eos=True, num_draft_tokens=num_drafts
        )
        assert output.token_ids == plain
        assert {len(step.draft_ids) for step in output.steps} == {num_drafts}


def test_chained_drafts_do_not_depend_on_how_many_follow(
    decoders: dict[str, ReferenceDecoder],
) -> None:
    """EAGLE-3 is causal: two drafts are the first two of seven. A block is not: each mask sees all
    others.
    """
    few, many = (decoders["eagle3"].propose_after(PROMPTS[1], num_draft_tokens=k) for k in (2, 7))
    assert many.draft_ids[:2] == few.draft_ids
    assert many.gaps[:2] == pytest.approx(few.gaps, abs=1e-4)
    few, many = (decoders["dflash"].propose_after(PROMPTS[1], num_draft_tokens=k) for k in (2, 7))
    assert many.gaps[:2] != pytest.approx(few.gaps, abs=1e-4)


def test_output_ends_at_the_targets_end_token(
    decoder: ReferenceDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [
        output.token_ids
        for output in decoder.generate_batch(PROMPTS, max_new_tokens=12, ignore_eos=True)
    ]
    ends = {free[0][5], free[1][0]}
    monkeypatch.setattr(decoder.target, "end_ids", frozenset(ends))
    ended = [output.token_ids for output in decoder.generate_batch(PROMPTS, max_new_tokens=12)]
    for tokens, all_tokens in zip(ended, free, strict=True):
        end = next(
            (place for place, token in enumerate(all_tokens) if token in ends), len(all_tokens)
        )
        assert tokens == all_tokens[: end + 1]
    assert len(ended[1]) == 1


def test_an_end_token_in_a_prompt_ends_nothing(
    decoder: ReferenceDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = decoder.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True).token_ids
    end = PROMPTS[0][1]
    assert end not in free
    monkeypatch.setattr(decoder.target, "end_ids", frozenset({end}))
    assert decoder.generate(PROMPTS[0], max_new_tokens=8).token_ids == free


def test_a_generator_makes_sampling_repeatable(decoder: ReferenceDecoder) -> None:
    def draw(seed: int) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(seed)
        outputs = decoder.generate_batch(
            PROMPTS, max_new_tokens=12, temperature=1.0, generator=generator
        )
        return [output.token_ids for output in outputs]

    assert draw(1) == draw(1) != draw(2)


def test_sample_gives_the_tokens_that_generate_gives(decoder: ReferenceDecoder) -> None:
    calls = [torch.Generator().manual_seed(3) for _ in range(2)]
    tokens_BM = decoder.sample(PROMPTS, max_new_tokens=9, temperature=0.7, generator=calls[0])
    outputs = decoder.generate_batch(
        PROMPTS, max_new_tokens=9, temperature=0.7, generator=calls[1], ignore_eos=True
    )
    assert tokens_BM.tolist() == [list(output.token_ids) for output in outputs]


def test_bfloat16_decodes_the_bfloat16_targets_greedy_tokens(
    tiny_target: Path, checkpoint: Path
) -> None:
    decoder = ReferenceDecoder(tiny_target, checkpoint, dtype=torch.bfloat16)
    assert decoder.target.model.dtype == torch.bfloat16
    for output in decoder.generate_batch(PROMPTS, max_new_tokens=6, ignore_eos=True):
        assert len(output.token_ids) == 6 and all(0 <= token < 512 for token in output.token_ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_cuda_decodes_what_the_cpu_decodes(
    decoders: dict[str, ReferenceDecoder], tiny_target: Path, kind: str
) -> None:
    cpu = decoders[kind]
    cuda = ReferenceDecoder(tiny_target, cpu.checkpoint_path, device="cuda")
    ours, theirs = (
        d.generate_batch(PROMPTS, max_new_tokens=16, ignore_eos=True) for d in (cuda, cpu)
    )
    assert [without_gaps(output) for output in ours] == [without_gaps(output) for output in theirs]
    generator = torch.Generator("cuda").manual_seed(0)
    sampled = cuda.sample(PROMPTS, max_new_tokens=8, temperature=1.0, generator=generator)
    assert sampled.device.type == "cuda" and sampled.shape == (4, 8)


def test_a_scheduler_cuts_drafts_and_changes_no_greedy_token(decoder: ReferenceDecoder) -> None:
    plain = decoder.generate_batch(PROMPTS, max_new_tokens=24, ignore_eos=True)
    for threshold, scheduled in ((0.0, {4}), (0.4, None), (1.1, {0})):
        cut = decoder.generate_batch(
            PROMPTS, max_new_tokens=24, ignore_eos=True, scheduler=PrefixScheduler(threshold)
        )
        assert [output.token_ids for output in cut] == [output.token_ids for output in plain]
        steps = [step for output in cut for step in output.steps]
        assert all(
            step.num_accepted <= step.num_scheduled <= 4 == len(step.draft_ids) for step in steps
        )
        assert scheduled is None or {step.num_scheduled for step in steps} == scheduled


class FixedScheduler:
    def __init__(self, answer: np.ndarray) -> None:
        self.answer = answer

    def num_scheduled(self, confidence_logits_NK: np.ndarray) -> np.ndarray:
        return self.answer


@pytest.mark.parametrize(
    "answer", [np.array([5]), np.array([-1]), np.array([1.5]), np.array([1, 2]), np.array(1)]
)
def test_a_scheduler_that_answers_nonsense_is_refused(
    decoder: ReferenceDecoder, answer: np.ndarray
) -> None:
    with pytest.raises(ConfigError, match="no number of drafts"):
        decoder.generate([1], max_new_tokens=4, scheduler=FixedScheduler(answer))


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_scheduler_needs_a_confidence_head(
    decoders: dict[str, ReferenceDecoder], kind: str
) -> None:
    with pytest.raises(ConfigError, match="no confidence head"):
        decoders[kind].generate([1], max_new_tokens=4, scheduler=PrefixScheduler(0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "fill-in layout"),
        ({"markov_head_type": "bilinear"}, "no such Markov head"),
        ({"speculators_model_type": "mtp"}, "no drafter"),
        ({"aux_hidden_state_layer_ids": [1, 2, 9]}, r"aux layers do not exist.*1\.\.4"),
        (
            {"transformer_layer_config": {"model_type": "gpt2"}},
            "does not know the drafter's layers",
        ),
        (
            {
                "transformer_layer_config": {
                    "model_type": "qwen3",
                    "layer_types": ["sliding_attention"],
                }
            },
            "full attention only",
        ),
    ],
)
def test_what_the_reference_does_not_know_is_refused(
    tiny_target: Path, checkpoint: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        ReferenceDecoder(tiny_target, tmp_path)


def test_missing_folders_are_named(tiny_target: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be loaded"):
        ReferenceDecoder(tmp_path / "no-target", checkpoint)
    with pytest.raises(CheckpointError, match="no-drafter"):
        ReferenceDecoder(tiny_target, tmp_path / "no-drafter")


def test_a_target_with_a_sliding_window_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shape = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = MistralConfig(**shape, num_attention_heads=1, num_key_value_heads=1, sliding_window=4)
    MistralForCausalLM(config).save_pretrained(tmp_path / "sliding")
    with pytest.raises(TargetError, match="full attention only"):
        ReferenceDecoder(tmp_path / "sliding", checkpoint)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_ids": []}, "nothing to decode"),
        ({"max_new_tokens": 0}, "nothing to decode"),
        ({"temperature": -1.0}, "nothing to decode"),
        ({"num_draft_tokens": 0}, "nothing to draft"),
    ],
)
def test_nothing_to_decode_is_refused(
    decoder: ReferenceDecoder, bad: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"prompt_ids": [1], "max_new_tokens": 1} | bad
    with pytest.raises(ConfigError, match=message):
        decoder.generate(**arguments)


def test_an_empty_batch_and_an_anchor_without_context_are_refused(
    decoder: ReferenceDecoder,
) -> None:
    with pytest.raises(ConfigError, match="nothing to decode"):
        decoder.generate_batch([], max_new_tokens=1)
    with pytest.raises(ConfigError, match="nothing to draft after"):
        decoder.propose_after([1])


def test_a_generator_of_another_device_is_refused(
    decoder: ReferenceDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder.target, "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match="another device"):
        decoder.generate([1], max_new_tokens=1, temperature=1.0, generator=torch.Generator())
