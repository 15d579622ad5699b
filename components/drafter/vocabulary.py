"""The draft vocabulary: the tokens a drafter may propose, chosen by measured frequency.

A drafter with a smaller output vocabulary than its target has a cheaper head; a token outside it
can never be drafted, so the share of supervised tokens it covers bounds acceptance and is reported.

Shapes: D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from components.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class DraftVocabulary:
    """Both mappings as speculators and vLLM store them.

    `d2t_D` holds offsets (target id = draft id + d2t[draft id], int64); `t2d_V` marks the target
    ids that are kept (bool).
    """

    d2t_D: torch.Tensor
    t2d_V: torch.Tensor
    coverage: float

    @property
    def size(self) -> int:
        """Number of draft tokens D."""
        return int(self.d2t_D.numel())

    @property
    def token_ids_D(self) -> torch.Tensor:
        """Target id of each draft id, ascending, int64."""
        return self.d2t_D + torch.arange(self.size)

    @property
    def draft_ids_V(self) -> torch.Tensor:
        """Draft id of each target id, int64; -1 for tokens outside the draft vocabulary."""
        draft_ids_V = torch.full((self.t2d_V.numel(),), -1, dtype=torch.long)
        draft_ids_V[self.token_ids_D] = torch.arange(self.size)
        return draft_ids_V

    def measure_coverage(self, counts_V: torch.Tensor) -> float:
        """Share of the counted tokens that are in the draft vocabulary, 0 to 1."""
        total = int(counts_V.sum())
        return float(counts_V[self.t2d_V].sum()) / total if total else 1.0


def build_draft_vocabulary(
    counts_V: torch.Tensor,
    *,
    size: int,
    min_coverage: float,
    context_counts_V: torch.Tensor | None = None,
) -> DraftVocabulary:
    """Keep the `size` most frequent target tokens; ties go to tokens of the context, then to the
    lower id.

    A small dataset supervises fewer distinct tokens than there is room for. Words of prompts are
    likely in other answers, and low ids are frequent merges of the tokenizer, so the room goes to
    these.

    Args:
        counts_V: how often each target token is supervised in the training split, int64.
        context_counts_V: how often it stands there without being supervised, int64.
        size: number of draft tokens D, at most V.
        min_coverage: least share of supervised tokens that must be covered, 0 to 1.

    Raises:
        ConfigError: `size` exceeds the target's vocabulary, or the coverage is below
            `min_coverage`.
    """
    if size > counts_V.numel():
        raise ConfigError(
            "drafter.draft_vocab_size exceeds the target's vocabulary",
            got=size,
            expected=counts_V.numel(),
        )

    order_V = torch.arange(counts_V.numel())
    # Stable sorts: the last key decides, earlier ones break its ties.
    for key_V in (
        context_counts_V,
        counts_V,
    ):
        if key_V is not None:
            order_V = order_V[torch.argsort(key_V[order_V], descending=True, stable=True)]

    vocabulary = from_token_ids(order_V[:size], target_vocab_size=counts_V.numel())
    coverage = vocabulary.measure_coverage(counts_V)
    if coverage < min_coverage:
        raise ConfigError(
            "the draft vocabulary covers too few supervised tokens",
            got=f"{coverage:.4f} with {size} tokens",
            expected=f">= {min_coverage} (drafter.min_vocab_coverage)",
            fix="Raise drafter.draft_vocab_size.",
        )

    return DraftVocabulary(d2t_D=vocabulary.d2t_D, t2d_V=vocabulary.t2d_V, coverage=coverage)


def from_token_ids(token_ids_D: torch.Tensor, *, target_vocab_size: int) -> DraftVocabulary:
    """Both mappings for a given set of target tokens; coverage is unknown (NaN) until measured."""
    ascending_D = torch.sort(token_ids_D.long()).values
    t2d_V = torch.zeros(target_vocab_size, dtype=torch.bool)
    t2d_V[ascending_D] = True
    d2t_D = ascending_D - torch.arange(ascending_D.numel())
    return DraftVocabulary(d2t_D=d2t_D, t2d_V=t2d_V, coverage=float("nan"))


def from_mappings(d2t_D: torch.Tensor, t2d_V: torch.Tensor) -> DraftVocabulary:
    """The vocabulary stored in a checkpoint.

    Raises:
        CheckpointError: the two mappings contradict each other.
    """
    token_ids_D = d2t_D.long() + torch.arange(d2t_D.numel())
    kept_D = torch.nonzero(t2d_V.bool()).flatten()
    if not torch.equal(token_ids_D, kept_D):
        raise CheckpointError(
            "the checkpoint's d2t and t2d contradict each other",
            got=f"{token_ids_D.numel()} and {kept_D.numel()} tokens",
        )
    return from_token_ids(token_ids_D, target_vocab_size=t2d_V.numel())
