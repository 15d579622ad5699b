"""Reference decoder: exact propose-verify-commit in plain PyTorch, over a batch, to check served
drafting by.

One step (Leviathan et al., arXiv:2211.17192), with the anchor x_0 = the token committed last:
  propose  x_k from q_k, left to right, k = 1..K (DSpark and DFlash: one block; EAGLE-3: chained,
  one row per draft) cut      a scheduler may keep only the first drafts of a sequence
  verify   one pass of the target over [x_0, x_1..x_K] gives p_1..p_{K+1}; keep x_k while u <
  p_k(x_k) / q_k(x_k) commit   the kept drafts and one token more: from max(p_k - q_k, 0),
  normalised, at the first refusal, else p_{K+1}
At temperature 0 both sides take the argmax. The committed tokens have the target's own distribution
either way.

Sequences of a batch have lengths of their own and commit different numbers of tokens in a step
(`reference_cache`); those that are done leave the batch. In float32 a sequence's greedy tokens do
not depend on what it is batched with, but for ties.

Shapes: B sequences, N of them still decoding, T tokens, S positions, L aux layers, H hidden, K
draft tokens, R = K + 1 rows of a verification, V draft vocabulary, W target vocabulary, M new
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from components.drafter.reference.base import ContextRows, ReferenceDrafter, Scheduler
from components.drafter.reference.drafter import BlockDrafter
from components.drafter.reference.eagle3 import Eagle3Drafter
from components.drafter.reference.layers import Checkpoint, TargetParts
from components.drafter.reference.loop import Batch, DecodeLoop
from components.drafter.reference.records import (
    TIE_GAP,
    ReferenceOutput,
    ReferenceProposal,
    ReferenceStep,
    top2_gaps,
)
from components.drafter.reference.target import ReferenceTarget
from components.drafter.reference.verify import Sampler
from components.errors import CheckpointError, ConfigError

__all__ = [
    "TIE_GAP",
    "ReferenceDecoder",
    "ReferenceOutput",
    "ReferenceProposal",
    "ReferenceStep",
    "load_drafter",
]

DRAFTERS: dict[str, type[BlockDrafter] | type[Eagle3Drafter]] = {
    "dspark": BlockDrafter,
    "dflash": BlockDrafter,
    "eagle3": Eagle3Drafter,
}


def load_drafter(checkpoint_path: Path, target: TargetParts) -> ReferenceDrafter:
    """The drafter whose algorithm the checkpoint names.

    Raises:
        CheckpointError: it cannot be read, or is of an algorithm or a layout the reference does not
            know.
    """
    checkpoint = Checkpoint.read(Path(checkpoint_path))
    if checkpoint.algorithm not in DRAFTERS:
        raise CheckpointError(
            "no drafter the reference can decode with",
            got=checkpoint.algorithm,
            expected=" or ".join(DRAFTERS),
        )
    return DRAFTERS[checkpoint.algorithm](checkpoint, target)


class ReferenceDecoder:
    """Decodes with a target and a DSpark, DFlash or EAGLE-3 drafter.

    Args:
        target_path: folder of the target, as transformers loads it.
        checkpoint_path: folder of the drafter, as speculators writes it.
        dtype: of the computation; float32 to compare with. Probabilities are float32 always.
        device: where everything is computed, "cpu" or "cuda[:N]".

    Raises:
        TargetError: the target cannot be loaded.
        CheckpointError: the drafter cannot be loaded.
    """

    def __init__(
        self,
        target_path: Path,
        checkpoint_path: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.checkpoint_path = Path(checkpoint_path)
        self.target = ReferenceTarget(Path(target_path), dtype=dtype, device=self.device)
        parts = TargetParts(
            embedding_WH=self.target.model.get_input_embeddings().weight.detach(),
            lm_head_WH=self.target.model.get_output_embeddings().weight.detach(),
            dtype=dtype,
            device=self.device,
        )
        self.drafter = load_drafter(checkpoint_path, parts)
        self.target.capture(self.drafter.aux_layer_ids)

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        ignore_eos: bool = False,
        num_draft_tokens: int | None = None,
        scheduler: Scheduler | None = None,
    ) -> ReferenceOutput:
        """Decode after one prompt: `generate_batch` with a batch of one."""
        outputs: list[ReferenceOutput] = self.generate_batch(
            [prompt_ids],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            generator=generator,
            ignore_eos=ignore_eos,
            num_draft_tokens=num_draft_tokens,
            scheduler=scheduler,
        )
        return outputs[0]

    @torch.inference_mode()
    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        ignore_eos: bool = False,
        num_draft_tokens: int | None = None,
        scheduler: Scheduler | None = None,
    ) -> list[ReferenceOutput]:
        """Decode after each of `prompts`.

        Args:
            prompts: at least one, each of at least one token; lengths may differ.
            max_new_tokens: tokens to commit per sequence; the last step may propose beyond them.
            temperature: 0 for greedy.
            generator: of the random draws, on the decoder's device; None for torch's own.
            ignore_eos: go on after the target's end tokens.
            num_draft_tokens: K of each step; None for what the checkpoint was trained for.
            scheduler: cuts each sequence's drafts before they are verified; needs a confidence
                head.

        Returns:
            One output per prompt, in order.

        Raises:
            ConfigError: an empty prompt, nothing wanted, a negative temperature, a generator of
                another device, or a scheduler for a drafter without a confidence head.
        """
        loop = DecodeLoop(
            self.target,
            self.drafter,
            Sampler(temperature, generator),
            num_draft_tokens=num_draft_tokens,
            scheduler=scheduler,
            end_ids=() if ignore_eos else tuple(self.target.end_ids),
            keep_steps=True,
        )
        batch = loop.decode(prompts, max_new_tokens)
        return _outputs(batch, batch.new_tokens(max_new_tokens, loop.end_ids_E))

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        generator: torch.Generator | None = None,
        num_draft_tokens: int | None = None,
        scheduler: Scheduler | None = None,
    ) -> torch.Tensor:
        """New tokens alone, [B, max_new_tokens] int64, of many sequences; end tokens do not end
        one.

        Arguments and errors are those of `generate_batch`; no step is recorded, which for thousands
        of short sequences would take longer than decoding them.
        """
        sampler = Sampler(temperature, generator)
        loop = DecodeLoop(
            self.target,
            self.drafter,
            sampler,
            num_draft_tokens=num_draft_tokens,
            scheduler=scheduler,
        )
        return loop.decode(prompts, max_new_tokens).new_tokens(max_new_tokens, loop.end_ids_E)

    @torch.inference_mode()
    def propose_after(
        self, token_ids: Sequence[int], *, num_draft_tokens: int | None = None
    ) -> ReferenceProposal:
        """Greedy drafts after a committed sequence, computed from nothing: no cache of an earlier
        step is used.

        Args:
            token_ids: prompt and committed tokens; the last is the anchor, at least one comes
                before it.
            num_draft_tokens: K of this step; None for what the checkpoint was trained for.

        Raises:
            ConfigError: fewer than two tokens, or K below 1.
        """
        loop = DecodeLoop(
            self.target, self.drafter, Sampler(0.0, None), num_draft_tokens=num_draft_tokens
        )
        if len(token_ids) < 2:
            raise ConfigError(
                "nothing to draft after", got=f"{len(token_ids)} tokens", expected="at least 2"
            )

        num_context = len(token_ids) - 1
        context_1T = torch.tensor([list(token_ids[:-1])], device=self.device)
        next_ids_1T = torch.tensor([list(token_ids[1:])], device=self.device)
        self.target.reset(batch_size=1, num_slots=num_context)
        _, aux_1TLH = self.target.extend(
            context_1T, keep_T=torch.tensor([num_context - 1], device=self.device)
        )

        self.drafter.reset(batch_size=1, num_slots=num_context + loop.num_draft_tokens + 1)
        num_valid_1 = torch.tensor([num_context], device=self.device)
        self.drafter.extend_context(ContextRows(aux_1TLH, next_ids_1T, num_valid_1))
        proposal = self.drafter.propose(loop.sampler, num_draft_tokens=loop.num_draft_tokens)
        gaps = top2_gaps(proposal.logits_BKV[0]).tolist()

        return ReferenceProposal(tuple(proposal.draft_ids_BK[0].tolist()), tuple(gaps))


def _outputs(batch: Batch, tokens_BM: torch.Tensor) -> list[ReferenceOutput]:
    """Per sequence, what was committed and every step that did it."""
    steps: list[list[ReferenceStep]] = [[] for _ in range(tokens_BM.shape[0])]
    for batch_step in batch.steps:
        for row, step in batch_step.per_sequence():
            steps[row].append(step)
    return [
        ReferenceOutput(tuple(token for token in row if token >= 0), tuple(row_steps), gap)
        for row, row_steps, gap in zip(
            tokens_BM.tolist(), steps, batch.first_gaps_B.tolist(), strict=True
        )
    ]
