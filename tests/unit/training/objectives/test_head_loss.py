"""The fused head and loss: equal to the plain formulas, gradients included, for any chunking."""

from __future__ import annotations

import pytest
import torch

from components.training.objectives import head_loss as module
from components.training.objectives.head_loss import SlotTargets, head_loss

S = 23
U = 11
H = 16
R = 4
V = 37


def inputs(*, markov: bool = True) -> tuple[dict[str, torch.Tensor], torch.Tensor, SlotTargets]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    leaves = {"hidden": normal(S, H).requires_grad_()}
    if markov:
        leaves |= {"markov": normal(S, R).requires_grad_(), "w2": normal(V, R).requires_grad_()}
    index_S = torch.randint(0, U, (S,), generator=generator).sort().values
    return leaves, normal(V, H), SlotTargets(normal(U, H), index_S)


def plain_loss(
    leaves: dict[str, torch.Tensor],
    head_VH: torch.Tensor,
    targets: SlotTargets,
    weights: dict[str, float],
) -> torch.Tensor:
    logits = leaves["hidden"] @ head_VH.T
    if "markov" in leaves:
        logits = logits + leaves["markov"] @ leaves["w2"].T
    target_logits = (targets.last_UH @ head_VH.T)[targets.index_S]
    log_q, log_p = logits.log_softmax(-1), target_logits.log_softmax(-1)
    terms = {
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "ce": -log_q.gather(1, target_logits.argmax(-1, keepdim=True))[:, 0],
        "tv": 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1),
    }
    return sum(weight * terms[name] for name, weight in weights.items())


@pytest.mark.parametrize(
    "weights", [{"kl": 1.0}, {"ce": 0.1, "tv": 1.8}, {"kl": 0.3, "ce": 0.2, "tv": 0.5}]
)
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("chunk", [V * 5, 2**21])
def test_loss_and_gradients_equal_the_plain_formulas(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, float], markov: bool, chunk: int
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    leaves, head_VH, targets = inputs(markov=markov)
    slot_weights = torch.linspace(0.1, 1.0, S)
    expected = (plain_loss(leaves, head_VH, targets, weights) * slot_weights).sum()
    expected_grads = torch.autograd.grad(expected * 3, list(leaves.values()))
    scores = head_loss(
        leaves["hidden"], leaves.get("markov"), head_VH, leaves.get("w2"), targets,
        slot_weights_S=slot_weights, loss_weights=weights,
    )  # fmt: skip
    assert scores.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    grads = torch.autograd.grad(scores.loss * 3, list(leaves.values()))
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


def test_a_perfect_draft_overlaps_fully_and_loses_nothing() -> None:
    _, head_VH, targets = inputs()
    hidden = targets.last_UH[targets.index_S]
    scores = head_loss(
        hidden,
        None,
        head_VH,
        None,
        targets,
        slot_weights_S=torch.ones(S),
        loss_weights={"kl": 1.0, "tv": 1.0},
    )
    assert scores.loss.item() == pytest.approx(0, abs=1e-4)
    torch.testing.assert_close(scores.overlap_S, torch.ones(S), rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.draft_S, scores.target_S)


def test_a_uniform_draft_against_a_point_mass_overlaps_by_one_over_v() -> None:
    head_VH = torch.eye(V)
    last = torch.zeros(1, V)
    last[0, 5] = 100.0
    scores = head_loss(
        torch.zeros(1, V), None, head_VH, None, SlotTargets(last, torch.zeros(1, dtype=torch.long)),
        slot_weights_S=torch.ones(1), loss_weights={"tv": 1.0},
    )  # fmt: skip
    assert scores.overlap_S.item() == pytest.approx(1 / V)
    assert scores.loss.item() == pytest.approx(1 - 1 / V)


def test_mass_outside_the_draft_vocabulary_lowers_the_overlap_only() -> None:
    _, head_VH, targets = inputs()
    hidden = targets.last_UH[targets.index_S]
    halved = SlotTargets(targets.last_UH, targets.index_S, torch.full((U,), 0.5))
    scores = head_loss(
        hidden, None, head_VH, None, halved, slot_weights_S=torch.ones(S), loss_weights={"kl": 1.0}
    )
    torch.testing.assert_close(scores.overlap_S, torch.full((S,), 0.5), rtol=1e-5, atol=1e-5)
    assert scores.loss.item() == pytest.approx(0, abs=1e-4)
