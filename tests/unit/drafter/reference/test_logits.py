"""Draft logits and confidence of the reference against speculators' own training forward,
teacher-forced.

Every anchor of the one sequence that speculators sees is a sequence of its own here, with a context
of its own length. Shapes: A anchors, K draft tokens, T tokens, V draft vocabulary, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import AutoConfig

from components.drafter.reference.base import ContextRows, Proposal
from components.drafter.reference.decoder import ReferenceDecoder
from tests.support.reference_cases import write_random_drafter

NUM_TOKENS, NUM_DRAFTS, NUM_ANCHORS = 40, 3, 8
KEPT = tuple(range(3, 512, 5))
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Forced:
    """Chooses given drafts, whatever the logits say."""

    def __init__(self, draft_ids_BK: torch.Tensor) -> None:
        self.draft_ids_BK = draft_ids_BK
        self.num_chosen = 0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.ndim == 3:
            return self.draft_ids_BK
        self.num_chosen += 1
        return self.draft_ids_BK[:, self.num_chosen - 1]


def load_speculator(path: Path) -> Any:
    """speculators' model of a checkpoint, with an attention that runs on CPU and at any length."""
    config = SpeculatorModelConfig.from_pretrained(str(path))
    config.transformer_layer_config._attn_implementation = "sdpa"
    return SpeculatorModel.from_pretrained(str(path), config=config).float().eval()


def tokens_of(draft_vocab: tuple[int, ...] | None) -> torch.Tensor:
    """[T] tokens that the drafter can all propose."""
    kept = torch.arange(512) if draft_vocab is None else torch.tensor(draft_vocab)
    return kept[torch.randint(len(kept), (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))]


def run_target(decoder: ReferenceDecoder, token_ids_T: torch.Tensor) -> torch.Tensor:
    """Aux states [1, T, L, H]."""
    decoder.target.reset(batch_size=1, num_slots=NUM_TOKENS)
    return decoder.target.extend(token_ids_T[None])[1]


def propose_at(
    decoder: ReferenceDecoder,
    aux_1TLH: torch.Tensor,
    token_ids_T: torch.Tensor,
    anchors_A: torch.Tensor,
) -> Proposal:
    """Forced proposals after the anchors at these positions, all in one batch."""
    drafter = decoder.drafter
    num_anchors = len(anchors_A)
    drafter.reset(batch_size=num_anchors, num_slots=NUM_TOKENS + NUM_DRAFTS)
    rows = ContextRows(
        aux_1TLH[:, :-1].expand(num_anchors, -1, -1, -1),
        token_ids_T[1:].expand(num_anchors, -1),
        anchors_A,
    )
    drafter.extend_context(rows)
    assert torch.equal(drafter.num_context_B, anchors_A)
    forced_AK = token_ids_T[anchors_A[:, None] + torch.arange(1, NUM_DRAFTS + 1)]
    draft_ids_AK = torch.searchsorted(drafter.target_ids_V, forced_AK)
    assert torch.equal(drafter.target_ids_V[draft_ids_AK], forced_AK)
    proposal = drafter.propose(
        Forced(draft_ids_AK), num_draft_tokens=NUM_DRAFTS, with_confidence=drafter.has_confidence
    )
    assert torch.equal(proposal.draft_ids_BK, forced_AK)
    return proposal


@pytest.mark.parametrize("draft_vocab", [None, KEPT], ids=["full", "pruned"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("dspark-vanilla", {}),
        ("dspark-vanilla", {"confidence_head_with_markov": False}),
        ("dspark-gated", {}),
        ("dspark-rnn", {}),
        ("dflash", {}),
    ],
)
@torch.inference_mode()
def test_block_drafters_equal_speculators(
    tiny_target: Path,
    tmp_path: Path,
    kind: str,
    config: dict[str, Any],
    draft_vocab: tuple[int, ...] | None,
) -> None:
    path = write_random_drafter(
        tmp_path / kind,
        kind,
        target=tiny_target,
        aux_layer_ids=(1, 2, 4),
        draft_token_ids=draft_vocab,
        weight_std=0.1,
        block_size=NUM_DRAFTS + 1,
        **config,
    )
    decoder = ReferenceDecoder(tiny_target, path)
    model = load_speculator(path)
    token_ids_T = tokens_of(draft_vocab)
    aux_1TLH = run_target(decoder, token_ids_T)
    has_context_1T = (torch.arange(NUM_TOKENS) > 0)[None].float()
    hidden, logits, _, _, indices = model._backbone_forward(
        aux_1TLH.flatten(2), token_ids_T[None], has_context_1T, torch.zeros(1, NUM_TOKENS, 64),
        torch.zeros(1, NUM_TOKENS, dtype=torch.long), max_anchors=NUM_ANCHORS,
    )  # fmt: skip
    positions_AQ = indices.view(NUM_ANCHORS, NUM_DRAFTS + 1)
    hidden_AQH, logits_AQV = (x.view(NUM_ANCHORS, NUM_DRAFTS + 1, -1) for x in (hidden, logits))
    previous_AQ = token_ids_T[positions_AQ][:, [0, *range(NUM_DRAFTS)]]
    ours = propose_at(decoder, aux_1TLH, token_ids_T, positions_AQ[:, 0])
    if kind != "dflash":
        bias_AQV = model.markov_head.block_bias(
            prev_token_ids=previous_AQ, hidden_states=hidden_AQH
        )
        assert float(bias_AQV.std()) > 0.02 * float(logits_AQV.std())
        logits_AQV = logits_AQV + bias_AQV
        features = hidden_AQH
        if model.config.confidence_head_with_markov:
            features = torch.cat(
                [hidden_AQH, model.markov_head.prev_embeddings(previous_AQ)], dim=-1
            )
        torch.testing.assert_close(
            ours.confidence_BK, model.confidence_head(features)[:, 1:], **CLOSE
        )
    torch.testing.assert_close(ours.logits_BKV, logits_AQV[:, 1:], **CLOSE)


@pytest.mark.parametrize(
    ("layer_kind", "config"),
    [
        ("llama", {}),
        ("llama", {"norm_before_residual": True}),
        ("llama", {"norm_before_fc": True}),
        ("llama", {"fc_norm": True, "norm_output": True}),
        ("qwen3", {}),
    ],
)
@torch.inference_mode()
def test_eagle3_equals_speculators_at_each_chained_step(
    tiny_target: Path, tmp_path: Path, layer_kind: str, config: dict[str, Any]
) -> None:
    path = write_random_drafter(
        tmp_path / "eagle3",
        "eagle3",
        target=tiny_target,
        aux_layer_ids=(1, 2, 4),
        draft_token_ids=KEPT,
        weight_std=0.1,
        block_size=NUM_DRAFTS + 1,
        layer_kind=layer_kind,
        **config,
    )
    decoder = ReferenceDecoder(tiny_target, path)
    assert decoder.drafter.num_draft_tokens == NUM_DRAFTS
    model = load_speculator(path)
    assert model.config.transformer_layer_config.model_type == layer_kind
    token_ids_T = tokens_of(KEPT)
    aux_1TLH = run_target(decoder, token_ids_T)
    steps: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: steps.append(output[0]))
    num_rows = NUM_TOKENS - 1
    model(
        aux_1TLH[:, :-1].flatten(2),
        token_ids_T[None, 1:],
        torch.zeros(1, num_rows, dtype=torch.long),
        ttt_steps=NUM_DRAFTS,
    )
    anchors_A = torch.tensor([1, 2, 5, 17, NUM_TOKENS - NUM_DRAFTS - 1])
    expected_AKV = torch.stack(steps, dim=1)[anchors_A - 1]
    ours = propose_at(decoder, aux_1TLH, token_ids_T, anchors_A)
    torch.testing.assert_close(ours.logits_BKV, expected_AKV, **CLOSE)


def test_the_targets_states_are_those_before_its_final_norm(
    tiny_target: Path, tmp_path: Path
) -> None:
    path = write_random_drafter(
        tmp_path / "drafter", "dflash", target=tiny_target, aux_layer_ids=(1, 4)
    )
    decoder = ReferenceDecoder(tiny_target, path)
    token_ids_T = tokens_of(None)
    with torch.inference_mode():
        aux_1TLH = run_target(decoder, token_ids_T)
        states = decoder.target.model(token_ids_T[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(aux_1TLH[:, :, 0], states[1])
        torch.testing.assert_close(
            decoder.target.model.base_model.norm(aux_1TLH[:, :, 1]), states[4]
        )
    assert AutoConfig.from_pretrained(tiny_target).num_hidden_layers == 4
