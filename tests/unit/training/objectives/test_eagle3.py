"""EAGLE-3's objective against speculators' own forward and loss, slot by slot, and against leaks
between documents.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from speculators.losses import resolve_loss_config

from components.drafter.build import num_draft_tokens
from components.errors import ConfigError
from components.settings import TrainingSettings
from components.training.objectives.block import BlockObjective, supervised_slots
from components.training.objectives.build import build_objective
from components.training.objectives.eagle3 import Eagle3Objective
from components.training.packing import Blocks, Pack, choose_blocks

K = 3
GAMMA = 4.0


def their_blocks(pack: Pack) -> Blocks:
    """The slots that speculators supervises: step k of an anchor whose k-th token, the one it
    reads, is supervised.

    Ours are fewer: a supervised anchor, and a supervised token to predict at each step so far.
    """
    anchors, spans = [], []
    for start, end in pack.bounds:
        spans.append((start, end, len(anchors), len(anchors) + end - start - 1))
        anchors += range(start + 1, end)
    anchors_N = torch.tensor(anchors)
    ends_N = torch.cat([torch.full((end - start - 1,), end) for start, end in pack.bounds])
    read_NK = anchors_N[:, None] + torch.arange(K)
    inside_NK = read_NK < ends_N[:, None]
    valid_NK = inside_NK & pack.supervised_T[read_NK.clamp(max=pack.num_tokens - 1)]
    return Blocks(anchors_N, valid_NK, spans)


def theirs(
    drafter: Any, pack: Pack, loss: str
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of each step [rows, V], loss and metrics of `Eagle3DraftModel.forward`; rows are
    tokens less one each.
    """
    first = torch.cat([torch.arange(start, end - 1) for start, end in pack.bounds])
    documents = torch.cat(
        [torch.full((end - start - 1,), i) for i, (start, end) in enumerate(pack.bounds)]
    )
    logits: list[torch.Tensor] = []
    hook = drafter.lm_head.register_forward_hook(
        lambda _module, _inputs, output: logits.append(output[0])
    )
    _, value, metrics = drafter(
        pack.states_TLH[first, :-1].flatten(1).float()[None],
        pack.token_ids_T[first + 1][None],
        documents[None],
        loss_mask=pack.supervised_T[first + 1][None],
        position_ids=pack.positions_T[first + 1][None],
        verifier_last_hidden_states=pack.states_TLH[first + 1, -1].float()[None],
        ttt_steps=K,
        ttt_step_loss_decay=math.exp(-1 / GAMMA),
        loss_config=resolve_loss_config(loss, "eager"),
    )
    hook.remove()
    return logits, value, metrics


def grads_of(drafter: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {
        name: value.grad.clone()
        for name, value in drafter.named_parameters()
        if value.grad is not None
    }


@pytest.mark.parametrize(
    ("num_layers", "pruned", "ours_loss", "their_loss"),
    [
        (1, True, {"kl": 1.0}, "kl_div"),
        (2, False, {"ce": 0.1, "tv": 1.8}, '{"ce": 0.1, "tv": 1.8}'),
        (3, True, {"ce": 1.0}, "ce"),
    ],
)
def test_logits_loss_and_gradients_equal_speculators(
    make_drafter: Callable[..., Any],
    packs: list[Pack],
    num_layers: int,
    pruned: bool,
    ours_loss: dict[str, float],
    their_loss: str,
) -> None:
    drafter = make_drafter(algorithm="eagle3", num_layers=num_layers, pruned=pruned)
    pack = packs[0]
    blocks = their_blocks(pack)
    objective = Eagle3Objective(
        drafter, TrainingSettings(loss=ours_loss, mixed_precision="no", loss_gamma=GAMMA)
    )
    scores = objective(pack, blocks)
    # A mean over all slots, theirs a sum of means: each step has as many.
    ours = grads_of(drafter, scores.loss * K)
    logits, value, metrics = theirs(drafter, pack, their_loss)
    wanted = grads_of(drafter, value)
    assert len(set(blocks.valid_NK.sum(0).tolist())) == 1 and len(pack.bounds) > 1
    slots = supervised_slots(blocks)
    with torch.no_grad():
        logits_SV = drafter.lm_head(objective._backbone(pack, blocks, slots)[0])
    # With one row less per document, the rows of speculators are the anchors in order.
    wanted_SV = torch.stack(logits)[slots.offset_S - 1, slots.block_S]
    difference = (logits_SV - wanted_SV.detach()).abs().max().item()
    assert difference < 1e-4
    assert scores.loss.item() * K == pytest.approx(value.item(), abs=1e-4)
    assert ours.keys() == wanted.keys()
    errors = [
        float((grad - wanted[name]).norm() / wanted[name].norm()) for name, grad in ours.items()
    ]
    print(
        f"logits {difference:.1e}, loss {scores.loss.item() * K:.6f} {value.item():.6f}, "
        f"gradients {max(errors):.1e}"
    )
    assert max(errors) < 1e-3
    accepted_K = scores.match_NK[blocks.valid_NK[:, 0]].int().cumprod(1).sum(0)
    assert accepted_K.tolist() == [int(metrics[f"full_acc_{step}_sum"]) for step in range(K)]


def test_documents_and_the_future_do_not_leak(
    make_drafter: Callable[..., Any], packs: list[Pack]
) -> None:
    drafter = make_drafter(algorithm="eagle3")
    pack = packs[0]
    objective = Eagle3Objective(drafter, TrainingSettings(mixed_precision="no"))
    blocks = choose_blocks(pack, num_draft_tokens=K, num_anchors=None)
    assert blocks is not None and len(blocks.spans) > 1
    start, _, first, last = blocks.spans[1]
    middle = (first + last) // 2
    anchor = int(blocks.anchors_N[middle])
    changed, tokens = pack.states_TLH.clone(), pack.token_ids_T.clone()
    for elsewhere in (slice(0, start), slice(anchor, None)):
        changed[elsewhere, :-1] = 7.0
    for elsewhere in (slice(0, start), slice(anchor + K, None)):
        tokens[elsewhere] = 3
    other = dataclasses.replace(pack, states_TLH=changed, token_ids_T=tokens)
    with torch.no_grad():
        before, after = objective(pack, blocks), objective(other, blocks)
    torch.testing.assert_close(before.overlap_NK[middle], after.overlap_NK[middle])
    assert not torch.allclose(before.overlap_NK[last - 1], after.overlap_NK[last - 1])


def test_later_steps_read_the_true_tokens_and_the_last_slot_of_a_pack_has_none(
    make_drafter: Callable[..., Any], packs: list[Pack]
) -> None:
    drafter = make_drafter(algorithm="eagle3", num_layers=1)
    pack = packs[0]
    objective = build_objective(drafter, TrainingSettings(mixed_precision="no"))
    blocks = choose_blocks(pack, num_draft_tokens=K, num_anchors=None, in_prompts=True)
    assert blocks is not None and int(blocks.anchors_N[-1]) == pack.num_tokens - 2
    assert not blocks.valid_NK[-1, 1:].any() and blocks.valid_NK[0].all()
    tokens = pack.token_ids_T.clone()
    tokens[int(blocks.anchors_N[0]) + 1] = 5
    with torch.no_grad():
        before = objective(pack, blocks)
        after = objective(dataclasses.replace(pack, token_ids_T=tokens), blocks)
    assert torch.isfinite(before.loss)
    torch.testing.assert_close(before.overlap_NK[0, 0], after.overlap_NK[0, 0])
    assert not torch.allclose(before.overlap_NK[0, 1:], after.overlap_NK[0, 1:])
    assert not before.overlap_NK[-1, 1:].any() and before.confidence_NK is None


def test_validation_compares_with_the_full_vocabulary(
    make_drafter: Callable[..., Any], packs: list[Pack]
) -> None:
    objective = build_objective(
        make_drafter(algorithm="eagle3"), TrainingSettings(mixed_precision="no")
    )
    blocks = choose_blocks(packs[0], num_draft_tokens=K, num_anchors=None)
    assert blocks is not None
    with torch.no_grad():
        outside = objective(
            packs[0],
            blocks,
            torch.full((packs[0].num_tokens,), 511),
            torch.zeros(packs[0].num_tokens),
        )
    assert not outside.match_NK.any() and float(outside.overlap_NK.sum()) == 0.0


def test_the_factory_knows_all_three_and_the_objective_refuses_what_it_does_not_compute(
    make_drafter: Callable[..., Any],
) -> None:
    made = {name: make_drafter(algorithm=name) for name in ("dspark", "dflash", "eagle3")}
    kinds = {
        name: type(build_objective(drafter, TrainingSettings())) for name, drafter in made.items()
    }
    assert kinds == {"dspark": BlockObjective, "dflash": BlockObjective, "eagle3": Eagle3Objective}
    assert {num_draft_tokens(drafter) for drafter in made.values()} == {K}
    with pytest.raises(ConfigError, match="dspark"):
        Eagle3Objective(made["dspark"], TrainingSettings())
    made["eagle3"].config.norm_output = True
    with pytest.raises(ConfigError, match="norm_output"):
        build_objective(made["eagle3"], TrainingSettings())
