"""The reference decoder against the target alone, speculators' training layout, and exact probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from dspark_drafter import write_dspark
from scipy.stats import chisquare
from speculators import SpeculatorModel
from transformers import LlamaConfig, LlamaForCausalLM

from components.drafter.reference import ReferenceDecoder, verify_greedy, verify_sampled
from components.drafter.reference_drafter import ReferenceDrafter
from components.errors import CheckpointError, ConfigError, TargetError

PROMPTS = ([1, 50, 60, 70], [1, 100, 200, 300, 301, 302], [400, 401], [7])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are many times slower on two threads that share their cores with others."""
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


def decode_plainly(decoder: ReferenceDecoder, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
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


def test_some_drafts_are_accepted_and_some_refused(decoder: ReferenceDecoder) -> None:
    outputs = [decoder.generate(prompt, max_new_tokens=64, ignore_eos=True) for prompt in PROMPTS]
    assert 1.0 < sum(output.acceptance_length for output in outputs) / len(outputs) < 5.0


def test_steps_tell_the_whole_story(decoder: ReferenceDecoder) -> None:
    prompt = PROMPTS[0]
    output = decoder.generate(prompt, max_new_tokens=30, ignore_eos=True)
    sequence = [*prompt, *output.token_ids]
    position = len(prompt)
    for step in output.steps:
        assert (step.position, step.anchor) == (position, sequence[position])
        assert len(step.draft_ids) == decoder.drafter.num_draft_tokens == 4
        accepted = sequence[position + 1 : position + 1 + step.num_accepted]
        assert list(step.draft_ids[: len(accepted)]) == accepted
        position += step.num_accepted + 1
    assert position >= len(sequence) - 1


def test_cached_context_gives_the_drafts_of_a_fresh_start(decoder: ReferenceDecoder) -> None:
    prompt = PROMPTS[1]
    output = decoder.generate(prompt, max_new_tokens=20, ignore_eos=True)
    sequence = [*prompt, *output.token_ids]
    for step in output.steps:
        if step.position < len(sequence):
            fresh = decoder.propose_after(sequence[: step.position + 1])
            assert fresh.draft_ids == step.draft_ids
            assert fresh.gaps == pytest.approx(step.draft_gaps, abs=1e-4)


def test_logits_equal_the_training_models_at_its_anchors(
    decoder: ReferenceDecoder, checkpoint: Path, tiny_target: Path
) -> None:
    """Teacher-forced logits of speculators' own block forward, Markov bias included, against ours anchor by anchor."""
    model = SpeculatorModel.from_pretrained(str(checkpoint)).float().eval()
    token_ids = torch.randint(3, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        _, aux_TLH = decoder.target.start(token_ids)
        last_1TH = torch.zeros(1, len(token_ids), 64)
        loss_mask = torch.ones(1, len(token_ids))
        hidden, logits, _, _, block_indices = model._backbone_forward(
            aux_TLH.flatten(1)[None],
            torch.tensor([token_ids]),
            loss_mask,
            last_1TH,
            torch.zeros(1, len(token_ids), dtype=torch.long),
            max_anchors=6,
        )
        for block, anchor_position in enumerate(block_indices.view(6, 5)[:, 0].tolist()):
            decoder.drafter.reset()
            decoder.drafter.extend_context(aux_TLH[:anchor_position])
            block_tokens = torch.tensor(token_ids[anchor_position : anchor_position + 5])
            bias = model.markov_head.block_bias(
                prev_token_ids=block_tokens[None, [0, 0, 1, 2, 3]], hidden_states=hidden.view(6, 5, -1)[block][None]
            )[0]
            expected = (logits.view(6, 5, -1)[block] + bias)[1:]
            ours = decoder.drafter.block_logits(token_ids[anchor_position])
            ours = ours + torch.stack([decoder.drafter.markov_bias(int(token)) for token in block_tokens[:-1]])
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_output_ends_at_the_targets_end_token(decoder: ReferenceDecoder) -> None:
    free = decoder.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True).token_ids
    ends = decoder.target.end_ids
    try:
        decoder.target.end_ids = frozenset({free[5]})
        ended = decoder.generate(PROMPTS[0], max_new_tokens=12).token_ids
    finally:
        decoder.target.end_ids = ends
    assert ended == free[: free.index(free[5]) + 1]


def test_greedy_verification_keeps_the_matching_prefix() -> None:
    logits_RW = torch.eye(5)[[1, 2, 3]]
    assert verify_greedy([1, 2], logits_RW) == [1, 2, 3]
    assert verify_greedy([1, 4], logits_RW) == [1, 2]
    assert verify_greedy([0, 2], logits_RW) == [1]


def test_a_perfect_drafter_is_always_accepted_and_a_disjoint_one_never() -> None:
    generator = torch.Generator().manual_seed(0)
    p_RW = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert all(verify_sampled([0, 1], p_RW[:2], p_RW, generator) == [0, 1, 3] for _ in range(50))
    q_KW = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 1.0, 0.0]])
    assert all(len(verify_sampled([3, 2], q_KW, p_RW, generator)) == 1 for _ in range(50))


def test_first_committed_token_is_the_targets_and_acceptance_the_overlap() -> None:
    """P(first committed token) is p, and P(accept) is sum_v min(p_v, q_v), for any q."""
    generator = torch.Generator().manual_seed(1)
    p_W, q_W = torch.tensor([0.55, 0.25, 0.15, 0.05]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    num_trials, counts, num_accepted = 8000, [0, 0, 0, 0], 0
    for draft in torch.multinomial(q_W, num_trials, replacement=True, generator=generator).tolist():
        tokens = verify_sampled([draft], q_W[None], p_W.expand(2, -1), generator)
        counts[tokens[0]] += 1
        num_accepted += len(tokens) - 1
    assert p_value(counts, p_W.tolist()) > 1e-3
    assert num_accepted / num_trials == pytest.approx(float(torch.minimum(p_W, q_W).sum()), abs=0.02)


def test_sampled_sequences_follow_the_targets_distribution(tmp_path: Path) -> None:
    """All 4^3 sequences of a four-token target: their exact probabilities against what temperature 1 commits."""
    target = write_four_token_target(tmp_path / "target")
    checkpoint = write_dspark(
        tmp_path / "drafter",
        target=target,
        draft_vocab_size=3,
        start_layers=(0,),
        aux_layer_ids=(1, 2),
        mask_token_id=3,
    )
    decoder = ReferenceDecoder(target, checkpoint)
    exact = enumerate_sequences(decoder, prompt=[0], length=3)
    generator = torch.Generator().manual_seed(2)
    num_samples = 1500
    outputs = [
        decoder.generate([0], max_new_tokens=3, temperature=1.0, generator=generator, ignore_eos=True)
        for _ in range(num_samples)
    ]
    counts = dict.fromkeys(exact, 0)
    for output in outputs:
        counts[output.token_ids] += 1
    frequent = [sequence for sequence, probability in exact.items() if probability * num_samples >= 5]
    rare = [sequence for sequence in exact if sequence not in frequent]
    assert len(frequent) > 10
    observed = [*(counts[sequence] for sequence in frequent), sum(counts[sequence] for sequence in rare)]
    expected = [*(exact[sequence] for sequence in frequent), sum(exact[sequence] for sequence in rare)]
    assert p_value(observed, expected) > 1e-3
    assert sum(abs(counts[key] / num_samples - exact[key]) for key in exact) / 2 < 0.12
    assert 1.1 < sum(output.acceptance_length for output in outputs) / num_samples < 3


def p_value(observed: list[int], weights: list[float]) -> float:
    """Chi-squared p-value of counts against cells with probabilities proportional to `weights`."""
    scale = sum(observed) / sum(weights)
    return float(chisquare(observed, [weight * scale for weight in weights]).pvalue)


def write_four_token_target(path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def enumerate_sequences(decoder: ReferenceDecoder, *, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    sequences = list(product(range(4), repeat=length))
    with torch.inference_mode():
        logits = decoder.target.model(torch.tensor([[*prompt, *sequence] for sequence in sequences])).logits
    log_probs = logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    chosen = log_probs.gather(2, torch.tensor(sequences)[..., None]).sum((1, 2)).exp()
    assert float(chosen.sum()) == pytest.approx(1.0, abs=1e-4)
    return dict(zip(sequences, chosen.tolist(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "fill-in layout"),
        ({"markov_head_type": "gated"}, "vanilla Markov head"),
        ({"speculators_model_type": "eagle3"}, "no drafter"),
    ],
)
def test_what_the_reference_does_not_know_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    embedding = torch.zeros(512, 64)
    with pytest.raises(CheckpointError, match=message):
        ReferenceDrafter(tmp_path, embedding_WH=embedding, lm_head_WH=embedding, dtype=torch.float32)


def test_missing_folders_are_named(tiny_target: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be loaded"):
        ReferenceDecoder(tmp_path / "no-target", checkpoint)
    with pytest.raises(CheckpointError, match="no-drafter"):
        ReferenceDecoder(tiny_target, tmp_path / "no-drafter")


@pytest.mark.parametrize("bad", [{"prompt_ids": []}, {"max_new_tokens": 0}, {"temperature": -1.0}])
def test_nothing_to_decode_is_refused(decoder: ReferenceDecoder, bad: dict[str, object]) -> None:
    arguments = {"prompt_ids": [1], "max_new_tokens": 1} | bad
    with pytest.raises(ConfigError, match="nothing to decode"):
        decoder.generate(**arguments)  # type: ignore[arg-type]
