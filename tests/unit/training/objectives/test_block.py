"""The objective against speculators' own forward and loss, and against leaks between documents and
from the future.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import speculators.models.dflash.core as dflash_core
import torch
from speculators.losses import resolve_loss_config

from components.errors import ConfigError
from components.settings import TrainingSettings
from components.training.objectives.block import BlockObjective, dpace_weights
from components.training.packing import Blocks, Pack, choose_blocks

K = 3


def whole_blocks(pack: Pack) -> Blocks:
    """All blocks whose slots are all supervised: there speculators' mask and ours agree."""
    blocks = choose_blocks(pack, num_draft_tokens=K, num_anchors=None)
    assert blocks is not None
    keep = blocks.valid_NK.all(1)
    kept_before = torch.cat([torch.zeros(1, dtype=torch.long), keep.long().cumsum(0)]).tolist()
    spans = [
        (start, end, kept_before[first], kept_before[last])
        for start, end, first, last in blocks.spans
    ]
    return Blocks(
        blocks.anchors_N[keep], blocks.valid_NK[keep], [span for span in spans if span[2] < span[3]]
    )


def theirs(
    monkeypatch: pytest.MonkeyPatch,
    drafter: Any,
    pack: Pack,
    blocks: Blocks,
    loss: str,
    **more: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    num_anchors = len(blocks.anchors_N)
    chosen = (blocks.anchors_N, torch.ones(num_anchors, dtype=torch.bool))
    monkeypatch.setattr(dflash_core, "select_anchors", lambda *_: chosen)
    documents = torch.cat(
        [torch.full((end - start,), i) for i, (start, end) in enumerate(pack.bounds)]
    )
    extra = (
        {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}
        if hasattr(drafter, "markov_head")
        else {}
    )
    _, value, metrics = drafter(
        pack.states_TLH[:, :-1].flatten(1).float()[None],
        pack.token_ids_T[None],
        pack.supervised_T[None],
        pack.states_TLH[:, -1].float()[None],
        documents[None],
        position_ids=pack.positions_T[None],
        loss_config=resolve_loss_config(loss, "eager"),
        gamma=4.0,
        max_anchors=num_anchors,
        **extra,
        **more,
    )
    return value, metrics


def grads_of(drafter: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {
        name: value.grad.clone()
        for name, value in drafter.named_parameters()
        if value.grad is not None
    }


@pytest.mark.parametrize(
    ("algorithm", "pruned", "ours_loss", "their_loss"),
    [
        ("dspark", True, {"kl": 1.0}, "kl_div"),
        ("dspark", False, {"ce": 0.1, "tv": 1.8}, '{"ce": 0.1, "tv": 1.8}'),
        ("dflash", True, {"ce": 1.0}, "ce"),
    ],
)
def test_loss_gradients_and_acceptance_equal_speculators(
    monkeypatch: pytest.MonkeyPatch,
    make_drafter: Callable[..., Any],
    packs: list[Pack],
    algorithm: str,
    pruned: bool,
    ours_loss: dict[str, float],
    their_loss: str,
) -> None:
    drafter = make_drafter(algorithm=algorithm, pruned=pruned)
    pack = packs[0]
    blocks = whole_blocks(packs[0])
    objective = BlockObjective(drafter, TrainingSettings(loss=ours_loss, mixed_precision="no"))
    scores = objective(pack, blocks)
    ours = grads_of(drafter, scores.loss)
    value, metrics = theirs(monkeypatch, drafter, pack, blocks, their_loss)
    wanted = grads_of(drafter, value)
    assert scores.loss.item() == pytest.approx(value.item(), abs=1e-4)
    assert ours.keys() == wanted.keys()
    for name, grad in ours.items():
        assert (grad - wanted[name]).norm() <= 1e-3 * wanted[name].norm() + 1e-6, name
    greedy = scores.match_NK.int().cumprod(1).sum(1).float().mean() + 1
    assert greedy.item() == pytest.approx(
        (metrics["eal_sum"] / metrics["eal_total"]).item(), abs=1e-6
    )
    if algorithm == "dspark":
        expected = scores.overlap_NK.cumprod(1).sum(1).mean() + 1
        assert expected.item() == pytest.approx(
            (metrics["accept_len_sum"] / metrics["accept_len_total"]).item(), 1e-4
        )


@pytest.mark.parametrize(
    ("settings", "decay"),
    [
        ({"markov_head": "gated"}, "fixed"),
        ({"markov_head": "rnn"}, "fixed"),
        ({"confidence_head": False}, "fixed"),
        ({"markov_rank": 0}, "fixed"),
        ({}, "dpace"),
        ({"algorithm": "dflash"}, "dpace"),
    ],
)
def test_other_heads_and_decays_equal_speculators(
    monkeypatch: pytest.MonkeyPatch,
    make_drafter: Callable[..., Any],
    packs: list[Pack],
    settings: dict[str, Any],
    decay: str,
) -> None:
    drafter = make_drafter(**settings)
    pack = packs[0]
    blocks = whole_blocks(packs[0])
    chosen = TrainingSettings(
        loss={"ce": 1.0}, loss_decay=decay, dpace_alpha=0.3, mixed_precision="no"
    )
    scores = BlockObjective(drafter, chosen)(pack, blocks)
    ours = grads_of(drafter, scores.loss)
    name = {"fixed": "fixed-exp-decay", "dpace": "dpace"}[decay]
    value, _ = theirs(
        monkeypatch, drafter, pack, blocks, "ce", per_position_loss_weight=name, dpace_alpha=0.3
    )
    wanted = grads_of(drafter, value)
    assert scores.loss.item() == pytest.approx(value.item(), abs=1e-4)
    assert ours.keys() == wanted.keys()
    for name, grad in ours.items():
        assert (grad - wanted[name]).norm() <= 1e-3 * wanted[name].norm() + 1e-6, name


def test_dpace_weighs_a_slot_by_the_length_that_hangs_on_it() -> None:
    likelihood_NK = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.9]])
    valid_NK = torch.tensor([[True, True, True], [True, True, False]])
    weights_NK = dpace_weights(likelihood_NK, valid_NK, alpha=0.2)  # smoothed likelihood 0.6
    wanted = [[0.6 + 0.36 + 0.216, 0.36 + 0.216, 0.216], [0.6 + 0.36, 0.36, 0.0]]
    torch.testing.assert_close(weights_NK, torch.tensor(wanted))
    torch.testing.assert_close(
        dpace_weights(likelihood_NK, valid_NK, alpha=1.0)[0], torch.tensor([3.0, 2.0, 1.0])
    )


def test_gradient_checkpointing_changes_no_gradient(
    make_drafter: Callable[..., Any], packs: list[Pack]
) -> None:
    drafter = make_drafter()
    pack = packs[0]
    blocks = choose_blocks(pack, num_draft_tokens=K, num_anchors=None)
    assert blocks is not None
    grads = []
    for is_on in (False, True):
        settings = TrainingSettings(mixed_precision="no", gradient_checkpointing=is_on)
        grads.append(grads_of(drafter, BlockObjective(drafter, settings)(pack, blocks).loss))
    assert all(torch.equal(value, grads[1][name]) for name, value in grads[0].items())


def test_documents_and_the_future_do_not_leak(
    make_drafter: Callable[..., Any], packs: list[Pack]
) -> None:
    drafter = make_drafter()
    pack = packs[0]
    objective = BlockObjective(drafter, TrainingSettings(mixed_precision="no"))
    blocks = choose_blocks(pack, num_draft_tokens=K, num_anchors=None)
    assert blocks is not None and len(blocks.spans) > 1
    start, end, first, last = blocks.spans[1]
    middle = (first + last) // 2
    anchor = int(blocks.anchors_N[middle])
    changed = pack.states_TLH.clone()
    changed[:start, :-1] = 7.0
    changed[end:, :-1] = 7.0
    changed[anchor:end, :-1] = 7.0
    other = Pack(
        pack.token_ids_T,
        pack.supervised_T,
        pack.positions_T,
        changed,
        pack.bounds,
        pack.indices,
        pack.sample_ids,
    )
    with torch.no_grad():
        before, after = objective(pack, blocks), objective(other, blocks)
    torch.testing.assert_close(before.overlap_NK[middle], after.overlap_NK[middle])
    assert not torch.allclose(before.overlap_NK[last - 1], after.overlap_NK[last - 1])


def test_validation_compares_with_the_full_vocabulary(
    make_drafter: Callable[..., Any], packs: list[Pack]
) -> None:
    drafter = make_drafter()
    pack = packs[0]
    objective = BlockObjective(drafter, TrainingSettings(mixed_precision="no"))
    blocks = choose_blocks(pack, num_draft_tokens=K, num_anchors=None)
    assert blocks is not None
    with torch.no_grad():
        outside = objective(
            pack, blocks, torch.full((pack.num_tokens,), 511), torch.zeros(pack.num_tokens)
        )
    assert not outside.match_NK.any() and float(outside.overlap_NK.sum()) == 0.0


def test_losses_of_another_name_and_other_drafters_are_refused(
    make_drafter: Callable[..., Any],
) -> None:
    with pytest.raises(ConfigError, match=r"training\.loss"):
        BlockObjective(make_drafter(), TrainingSettings(loss={"mse": 1.0}))
    with pytest.raises(ConfigError, match="eagle3"):
        BlockObjective(make_drafter(algorithm="eagle3"), TrainingSettings())


@pytest.mark.parametrize("markov_rank", [8, 0])
def test_drafts_see_their_own_tokens_and_forward_agrees_where_the_text_is_the_drafts(
    make_drafter: Callable[..., Any], packs: list[Pack], markov_rank: int
) -> None:
    drafter = make_drafter(markov_rank=markov_rank)
    torch.manual_seed(3)
    for parameter in drafter.parameters():  # a fresh Markov head says next to nothing
        if parameter.requires_grad and parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    objective = BlockObjective(drafter, TrainingSettings(mixed_precision="no"))
    pack = packs[0]
    blocks = whole_blocks(packs[0])
    drafts = objective.draft(pack, blocks)
    assert (
        drafts is not None
        and drafts.draft_ids_NK.shape == drafts.logits_NK.shape == blocks.valid_NK.shape
    )
    forced = objective(pack, blocks).confidence_NK
    assert torch.allclose(drafts.logits_NK[:, 0].sigmoid(), forced[:, 0], atol=1e-5)
    assert torch.allclose(drafts.logits_NK.sigmoid(), forced, atol=1e-5) == (markov_rank == 0)
    for n, anchor in enumerate(blocks.anchors_N.tolist()):
        text_T = pack.token_ids_T.clone()
        text_T[anchor + 1 : anchor + 1 + K] = drafts.draft_ids_NK[n]
        as_text = replace(pack, token_ids_T=text_T)
        span = next(
            (start, end, 0, 1) for start, end, first, last in blocks.spans if first <= n < last
        )
        alone = Blocks(blocks.anchors_N[n : n + 1], blocks.valid_NK[n : n + 1], [span])
        target_T = torch.full((pack.num_tokens,), -1).index_put_(
            (torch.arange(anchor, anchor + K),), drafts.draft_ids_NK[n]
        )
        scores = objective(as_text, alone, target_T)
        assert torch.allclose(
            scores.confidence_NK, drafts.logits_NK[n : n + 1].sigmoid(), atol=1e-5
        )
        assert scores.match_NK.all()  # the drafts are those of the loss, too


def test_without_a_confidence_head_there_are_no_confidences(
    make_drafter: Callable[..., Any], packs: list[Pack]
) -> None:
    objective = BlockObjective(
        make_drafter(confidence_head=False), TrainingSettings(mixed_precision="no")
    )
    assert objective.draft(packs[0], whole_blocks(packs[0])) is None
