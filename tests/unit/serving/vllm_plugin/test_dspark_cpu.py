"""The CPU plug-in: what it refuses, how it installs, and its left-to-right sampling on an analytic
drafter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.speculators.algos import (
    SUPPORTED_SPECULATORS_TYPES,
    update_dspark,
)
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.spec_decode import dflash
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from components.errors import CheckpointError, ConfigError, EngineError
from components.serving.vllm_plugin import cpu_sampling, dspark_cpu
from components.serving.vllm_plugin.dspark_proposer import DSparkProposer

CONFIG = {
    "speculators_model_type": "dspark",
    "sample_from_anchor": False,
    "markov_head_type": "vanilla",
    "markov_rank": 4,
    "block_size": 5,
    "mask_token_id": 0,
    "draft_vocab_size": 8,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "aux_hidden_state_layer_ids": [1, 2],
    "transformer_layer_config": {"layer_types": ["full_attention"]},
}
NUM_DRAFTS = 3
MASK = 9


@pytest.fixture
def clean_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM as it is without the plug-in, put back afterwards."""
    plain = next(
        base for base in DSparkProposer.__mro__ if base.__module__ == "vllm.v1.spec_decode.dflash"
    )
    for module in (dflash, sys.modules.get("vllm.v1.worker.gpu_model_runner")):
        if module is not None:
            monkeypatch.setattr(module, "DFlashProposer", plain)
    for name in ("expand_batch_to_tokens", "rejection_sample", "apply_top_k_top_p"):
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    for owner, name in ((TopKTopPSampler, "forward_cpu"), (CachedRequestState, "__post_init__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setitem(SUPPORTED_SPECULATORS_TYPES, "dspark", update_dspark)
    monkeypatch.setattr(
        Qwen3DSparkForCausalLM, "compute_logits", plain_compute_logits, raising=False
    )
    yield


def plain_compute_logits(_model: object, _hidden_states: object) -> None: ...


@pytest.mark.usefixtures("clean_vllm")
def test_register_installs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    dspark_cpu.register()
    reader = SUPPORTED_SPECULATORS_TYPES["dspark"]
    assert dflash.DFlashProposer is DSparkProposer
    assert rejection_sampler.expand_batch_to_tokens is cpu_sampling.expand_batch_to_tokens
    repaired = rejection_sampler.rejection_sample
    dspark_cpu.register()
    assert rejection_sampler.rejection_sample is repaired
    assert SUPPORTED_SPECULATORS_TYPES["dspark"] is reader
    with pytest.raises(EngineError, match="without its Markov head"):
        Qwen3DSparkForCausalLM.compute_logits(object(), torch.zeros(1))


@pytest.mark.usefixtures("clean_vllm")
def test_register_does_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    dspark_cpu.register()
    assert SUPPORTED_SPECULATORS_TYPES["dspark"] is update_dspark
    assert dflash.DFlashProposer is not DSparkProposer


@pytest.mark.usefixtures("clean_vllm")
def test_reader_keeps_vllms_fields_and_drops_the_confidence_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    dspark_cpu.register()
    expected: dict[str, Any] = {}
    update_dspark(config_dict=CONFIG, pre_trained_config=expected)
    found: dict[str, Any] = {}
    SUPPORTED_SPECULATORS_TYPES["dspark"](config_dict=CONFIG, pre_trained_config=found)
    assert expected["enable_confidence_head"] is True
    assert found == expected | {"enable_confidence_head": False}


@pytest.mark.usefixtures("clean_vllm")
def test_drift_refuses_dspark_with_one_message_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    monkeypatch.delattr(Qwen3DSparkForCausalLM, "markov_bias")
    dspark_cpu.register()
    assert dflash.DFlashProposer is not DSparkProposer
    with pytest.raises(
        EngineError, match=r"does not fit this vLLM: Qwen3DSparkForCausalLM lacks markov_bias"
    ):
        SUPPORTED_SPECULATORS_TYPES["dspark"](config_dict=CONFIG, pre_trained_config={})
    SUPPORTED_SPECULATORS_TYPES["dflash"](config_dict=CONFIG, pre_trained_config={})


@pytest.mark.usefixtures("clean_vllm")
def test_changed_signature_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    monkeypatch.setattr(
        dflash.DFlashProposer, "_sample_draft_tokens", lambda self, hidden_states: None
    )
    dspark_cpu.register()
    with pytest.raises(EngineError, match="_sample_draft_tokens takes"):
        SUPPORTED_SPECULATORS_TYPES["dspark"](config_dict=CONFIG, pre_trained_config={})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "samples from the anchor"),
        ({"markov_head_type": "rnn"}, "only the vanilla Markov head"),
        ({"transformer_layer_config": {"layer_types": ["sliding_attention"]}}, "different windows"),
    ],
)
def test_what_the_cpu_path_cannot_draft_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        dspark_cpu.check_servable(CONFIG | change)


def test_a_config_that_does_not_say_counts_as_sampled_from_the_anchor() -> None:
    with pytest.raises(CheckpointError, match="samples from the anchor"):
        dspark_cpu.check_servable(
            {key: value for key, value in CONFIG.items() if key != "sample_from_anchor"}
        )


class CountingDrafter(Qwen3DSparkForCausalLM):
    """Draft id d stands for target id 2d (8 draft tokens of 16); the Markov head says "the next
    draft id", gain 20.

    The backbone adds a gain of 30 for draft id 7 at the last position, so order and position both
    show.
    """

    def __init__(self, *, markov_rank: int = 1) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(
            draft_vocab_size=8, markov_rank=markov_rank, block_size=NUM_DRAFTS + 1
        )
        self.target_vocab_size = 16

    def compute_draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(hidden_states.shape[0], 8)
        logits[hidden_states[:, 0] == NUM_DRAFTS, 7] = 30.0
        return logits

    def markov_embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    def markov_bias(self, markov_embed: torch.Tensor) -> torch.Tensor:
        return 20.0 * torch.nn.functional.one_hot((markov_embed // 2 + 1) % 8, 8).float()

    def map_draft_to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return 2 * draft_ids


def make_proposer(
    anchors: list[int],
    *,
    probabilistic: bool = False,
    markov_rank: int = 1,
    request_ids: list[str] | None = None,
) -> DSparkProposer:
    """A proposer in the state `propose` leaves it in when it asks for samples, without an engine
    around it.
    """
    proposer = object.__new__(DSparkProposer)
    proposer.model = CountingDrafter(markov_rank=markov_rank)
    proposer.device = torch.device("cpu")
    proposer.num_speculative_tokens = NUM_DRAFTS
    proposer.speculative_config = SimpleNamespace(num_speculative_tokens=NUM_DRAFTS)
    proposer.parallel_drafting_token_id = MASK
    proposer.use_fp64_gumbel = False
    proposer._enable_probabilistic_draft_probs = probabilistic
    proposer._trace_path = None
    proposer._target_ids_V = proposer.model.map_draft_to_target(torch.arange(8))
    proposer._runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=request_ids))
    proposer.input_ids = (
        torch.tensor([[anchor, *[MASK] * NUM_DRAFTS] for anchor in anchors]).flatten().int()
    )
    proposer.positions = torch.cat(
        [10 * row + torch.arange(NUM_DRAFTS + 1) for row in range(len(anchors))]
    )
    return proposer


def hidden_states(num_reqs: int) -> torch.Tensor:
    """[B * K, 1]: each row holds its draft position, 1..K."""
    return torch.arange(1, NUM_DRAFTS + 1).repeat(num_reqs)[:, None].float()


def sampling(temperatures: list[float]) -> SimpleNamespace:
    greedy = [value == 0 for value in temperatures]
    return SimpleNamespace(
        all_greedy=all(greedy),
        all_random=not any(greedy),
        temperature=torch.tensor(temperatures),
        generators={},
    )


def test_greedy_drafts_run_left_to_right_from_each_anchor() -> None:
    tokens, probs = make_proposer([4, 10])._sample_draft_tokens(
        hidden_states(2), sampling([0.0, 0.0])
    )
    assert tokens.view(2, NUM_DRAFTS).tolist() == [[6, 8, 14], [12, 14, 14]]
    assert probs is None


def test_without_a_markov_head_the_backbone_decides() -> None:
    tokens, _ = make_proposer([4], markov_rank=0)._sample_draft_tokens(
        hidden_states(1), sampling([0.0])
    )
    assert tokens.tolist() == [0, 0, 14]


def test_greedy_drafting_gives_no_probabilities_at_any_temperature() -> None:
    _, probs = make_proposer([4])._sample_draft_tokens(hidden_states(1), sampling([1.0]))
    assert probs is None


def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from() -> None:
    """At temperature 20 the Markov gain is e to 1: q = (e, 1, ..., 1) / (e + 7) around the previous
    *sampled* token.
    """
    torch.manual_seed(0)
    num_reqs = 4000
    proposer = make_proposer([4] * num_reqs, probabilistic=True)
    tokens, probs = proposer._sample_draft_tokens(
        hidden_states(num_reqs), sampling([20.0] * num_reqs)
    )
    assert probs is not None
    tokens_BK = tokens.view(num_reqs, NUM_DRAFTS)
    probs_BKW = probs.view(num_reqs, NUM_DRAFTS, 16)
    torch.testing.assert_close(probs_BKW.sum(-1), torch.ones(num_reqs, NUM_DRAFTS))
    assert float(probs_BKW[..., 1::2].sum()) == 0
    favoured = torch.e / (torch.e + 7)
    assert float(probs_BKW[0, 0, 6]) == pytest.approx(favoured, rel=1e-5)
    following = (tokens_BK[:, 0] + 2) % 16
    assert probs_BKW[:, 1].gather(1, following[:, None]).flatten().tolist() == pytest.approx(
        [favoured] * num_reqs, rel=1e-5
    )
    assert float((tokens_BK[:, 0] == 6).float().mean()) == pytest.approx(favoured, abs=0.03)
    assert float((tokens_BK[:, 1] == following).float().mean()) == pytest.approx(favoured, abs=0.03)


def test_greedy_requests_stay_greedy_in_a_mixed_batch() -> None:
    proposer = make_proposer([4, 4], probabilistic=True)
    tokens, probs = proposer._sample_draft_tokens(hidden_states(2), sampling([0.0, 1e-3]))
    assert tokens.view(2, NUM_DRAFTS).tolist() == [[6, 8, 14], [6, 8, 14]]
    assert probs is not None and probs.shape == (2 * NUM_DRAFTS, 16)


def test_another_query_layout_stops_the_engine() -> None:
    proposer = make_proposer([4, 4])
    proposer.input_ids[NUM_DRAFTS + 2] = 5
    with pytest.raises(EngineError, match="query layout"):
        proposer._sample_draft_tokens(hidden_states(2), sampling([0.0, 0.0]))


def test_more_drafts_than_the_block_holds_are_refused() -> None:
    proposer = make_proposer([4])
    proposer.speculative_config.num_speculative_tokens = NUM_DRAFTS + 1
    with pytest.raises(ConfigError, match="block_size - 1 = 3"):
        proposer._check_sizes()
    proposer.speculative_config.num_speculative_tokens = NUM_DRAFTS
    proposer.model.target_vocab_size = 7
    with pytest.raises(CheckpointError, match="vocabulary is larger"):
        proposer._check_sizes()


def test_trace_has_a_line_per_request_and_step(tmp_path: Path) -> None:
    proposer = make_proposer([4, 10], request_ids=["a", "b"])
    proposer._trace_path = tmp_path / "trace.jsonl"
    for _ in range(2):
        proposer._sample_draft_tokens(hidden_states(2), sampling([0.0, 0.0]))
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert lines[:2] == [
        {"request": "a", "position": 0, "anchor": 4, "drafts": [6, 8, 14]},
        {"request": "b", "position": 10, "anchor": 10, "drafts": [12, 14, 14]},
    ]
    assert len(lines) == 4
