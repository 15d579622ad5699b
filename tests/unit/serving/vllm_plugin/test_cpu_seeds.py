"""A request's generator on CPU: what was drawn and thrown away is drawn again."""

from __future__ import annotations

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from components.serving.vllm_plugin import cpu_seeds
from components.serving.vllm_plugin.cpu_seeds import RewindableGenerator


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator))


def seeded(seed: int) -> RewindableGenerator:
    return RewindableGenerator.of(torch.Generator().manual_seed(seed))


def take_back(generator: torch.Generator) -> None:
    """As vLLM's runner does it."""
    generator.set_offset(generator.get_offset() - 4)


def test_it_draws_what_a_generator_of_that_seed_draws() -> None:
    plain = torch.Generator().manual_seed(7)
    rewindable = seeded(7)
    assert [draw(rewindable) for _ in range(5)] == [draw(plain) for _ in range(5)]


def test_a_draw_that_is_taken_back_comes_again() -> None:
    generator = seeded(7)
    first = draw(seeded(7))
    for _ in range(3):
        generator.remember()
        assert draw(generator) == first
        take_back(generator)
    generator.remember()
    assert draw(generator) == first
    assert draw(generator) != first


def test_taking_back_nothing_changes_nothing() -> None:
    generator = seeded(7)
    take_back(generator)
    assert draw(generator) == draw(seeded(7))


def test_an_offset_is_never_set_to_something() -> None:
    with pytest.raises(ValueError, match="taken back"):
        seeded(7).set_offset(4)


def test_vllms_own_request_and_sampler_go_back_with_it() -> None:
    """A prompt in three steps draws, for its one answer, what a prompt in one step draws."""
    post_init = cpu_seeds.with_rewindable_generator(CachedRequestState.__post_init__)
    request = CachedRequestState(
        req_id="r",
        prompt_token_ids=[1, 2],
        mm_features=[],
        sampling_params=SamplingParams(seed=7),
        generator=torch.Generator().manual_seed(7),
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
    )
    post_init(request)
    assert isinstance(request.generator, RewindableGenerator)
    assert request.num_prompt_tokens == 2

    sampler = TopKTopPSampler()
    forward = cpu_seeds.remembering(TopKTopPSampler.forward_cpu)
    logits = torch.zeros(1, 512)

    def sample(generator: torch.Generator) -> int:
        tokens, _ = forward(sampler, logits.clone(), {0: generator}, None, None)
        return int(tokens[0])

    for _ in range(2):
        sample(request.generator)
        take_back(request.generator)
    assert [sample(request.generator) for _ in range(3)] == [
        sample(generator) for generator in [seeded(7)] for _ in range(3)
    ]


def test_a_request_without_a_seed_has_no_generator() -> None:
    class Request:
        generator = None

    request = Request()
    cpu_seeds.with_rewindable_generator(lambda _request: None)(request)
    assert request.generator is None
