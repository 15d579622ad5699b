"""Calibrates a trained drafter's confidence head on validation conversations: what it says, and
what becomes of it.

Shapes: T tokens, N blocks, K draft positions, V target vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from components.contracts import Calibration
from components.drafter.confidence.calibration import fit_calibration
from components.training.checks.acceptance import target_words
from components.training.objectives.block import BlockObjective
from components.training.packing import Blocks, Pack, choose_blocks


@dataclass(frozen=True)
class Confidences:
    """Blocks of validation conversations, drafted greedily as served.

    `logits_NK` of the confidence head; `accepted_NK` says whether draft k is the target's argmax,
    over its full vocabulary; both mean something where `valid_NK`. `conversations_N` numbers the
    conversations from 0.
    """

    logits_NK: NDArray[np.float64]
    accepted_NK: NDArray[np.bool_]
    valid_NK: NDArray[np.bool_]
    conversations_N: NDArray[np.int64]


def calibrate(
    objective: BlockObjective,
    packs: Iterable[Pack],
    *,
    lm_head_VH: torch.Tensor,
    num_draft_tokens: int,
    target_weights: str,
) -> Calibration | None:
    """Draft on validation packs and fit `fit_calibration` to what the target makes of the drafts.

    Args:
        objective: of the trained drafter.
        packs: validation conversations.
        lm_head_VH: the target's full output head.
        num_draft_tokens: K.
        target_weights: fingerprint part of the target that made the states, for the record.

    Returns:
        None without a confidence head or without a supervised token.

    Raises:
        TrainingError: the head's logits are not finite.
    """
    held = collect_confidences(
        objective, packs, lm_head_VH=lm_head_VH, num_draft_tokens=num_draft_tokens
    )
    if held is None:
        return None
    return fit_calibration(
        held.logits_NK,
        held.accepted_NK,
        held.conversations_N,
        valid_NK=held.valid_NK,
        target_weights=target_weights,
    )


def calibration_metrics(calibration: Calibration) -> dict[str, float]:
    """For MLflow: figures before and after, and by position the ECE and what was fitted."""
    values: dict[str, float | None] = {
        "num_blocks": calibration.num_blocks,
        "num_conversations": calibration.num_conversations,
    }

    for when, figures in (("before", calibration.before), ("after", calibration.after)):
        values |= {
            f"{name}_{when}": getattr(figures, name)
            for name in ("ece", "ece_floor", "brier", "auc")
        }

    for k, figures in enumerate(calibration.after_by_position, 1):
        values[f"ece_after_position_{k}"] = figures.ece
        values[f"temperature_position_{k}"] = calibration.temperatures[k - 1]
        values[f"bias_position_{k}"] = calibration.biases[k - 1]

    return {
        f"calibration/{name}": float(value) for name, value in values.items() if value is not None
    }


def calibration_line(calibration: Calibration) -> str:
    """One line for people, which says what could not be fitted."""
    before, after = calibration.before, calibration.after
    unfitted = [str(k) for k, is_fitted in enumerate(calibration.is_fitted, 1) if not is_fitted]
    left_out = f"; too few events to fit position {', '.join(unfitted)}" if unfitted else ""
    return (
        f"confidence head calibrated on {calibration.num_blocks} blocks of"
        f" {calibration.num_conversations} conversations: ECE {before.ece:.4f} before, "
        f"{after.ece:.4f} after"
        f" (noise alone {after.ece_floor:.4f}){left_out}"
    )


@torch.no_grad()
def collect_confidences(
    objective: BlockObjective,
    packs: Iterable[Pack],
    *,
    lm_head_VH: torch.Tensor,
    num_draft_tokens: int,
) -> Confidences | None:
    """Draft at every supervised token of `packs`, which are used one after the other and not kept.

    A slot is valid while the text before it is what the target's argmax says, since an accepted
    draft is that token, and the target was run on the text. Answers sampled at a temperature lose
    blocks by this, greedy ones almost none.

    Args:
        objective: of the trained drafter.
        packs: validation conversations.
        lm_head_VH: the target's full output head.
        num_draft_tokens: K.

    Returns:
        None without a confidence head or without a supervised token.
    """
    parts: list[Confidences] = []
    num_conversations = 0
    for pack in packs:
        blocks = choose_blocks(pack, num_draft_tokens=num_draft_tokens, num_anchors=None)
        if blocks is None:
            continue
        argmax_T, _ = target_words(pack, lm_head_VH, objective.drafter)
        held = pack.to(argmax_T.device)
        blocks = blocks.to(argmax_T.device)
        drafts = objective.draft(held, blocks)
        if drafts is None:
            return None
        previous_NK = blocks.anchors_N[:, None] + torch.arange(
            num_draft_tokens, device=argmax_T.device
        )
        # Where no token follows, nothing is valid.
        previous_NK = previous_NK.clamp_max(pack.num_tokens - 1)
        parts.append(
            Confidences(
                logits_NK=drafts.logits_NK.double().cpu().numpy(),
                accepted_NK=(drafts.draft_ids_NK == argmax_T[previous_NK]).cpu().numpy(),
                valid_NK=_on_greedy_path(held.token_ids_T, argmax_T, blocks, previous_NK)
                .cpu()
                .numpy(),
                conversations_N=_conversations(blocks, first=num_conversations),
            )
        )
        num_conversations += len(blocks.spans)

    if not parts:
        return None
    return Confidences(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])}
    )


def _on_greedy_path(
    token_ids_T: torch.Tensor, argmax_T: torch.Tensor, blocks: Blocks, previous_NK: torch.Tensor
) -> torch.Tensor:
    """[N, K] valid slots whose block's tokens 1..k-1 are the target's argmax."""
    text_NK = token_ids_T[previous_NK[:, 1:]]
    said_NK = argmax_T[previous_NK[:, :-1]]
    is_greedy_NK = torch.ones_like(blocks.valid_NK)
    is_greedy_NK[:, 1:] = (text_NK == said_NK).int().cumprod(1).bool()
    return blocks.valid_NK & is_greedy_NK


def _conversations(blocks: Blocks, *, first: int) -> NDArray[np.int64]:
    """[N] number of each block's conversation, counted on from `first`."""
    counts = [last - begin for _, _, begin, last in blocks.spans]
    return np.repeat(np.arange(first, first + len(counts)), counts)
