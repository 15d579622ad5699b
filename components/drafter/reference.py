"""Reference decoder: exact propose-verify-commit in plain PyTorch, one sequence at a time, to check served drafting by.

One step (Leviathan et al., arXiv:2211.17192), with the anchor x_0 = the token committed last:
  propose  x_k from q_k, left to right, k = 1..K, where q_k = softmax((backbone_k + W2 W1[x_{k-1}]) / temperature)
  verify   one pass of the target over [x_0, x_1..x_K] gives p_1..p_{K+1}; keep x_k while u < p_k(x_k) / q_k(x_k)
  commit   the kept drafts and one token more: from max(p_k - q_k, 0), normalised, at the first refusal, else p_{K+1}
At temperature 0 both sides take the argmax. The committed tokens have the target's own distribution either way.

Shapes: T tokens, L aux layers, H hidden, K draft tokens, R = K + 1 rows of a verification, V draft vocabulary,
W target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from components.drafter.reference_drafter import ReferenceDrafter
from components.errors import ConfigError, TargetError

TIE_GAP = 1e-3
"""Top-2 logit gap below which float32 implementations may order two tokens differently."""


@dataclass(frozen=True)
class ReferenceStep:
    """One propose-verify-commit step."""

    position: int
    """Of the anchor in the sequence, from 0."""
    anchor: int
    draft_ids: tuple[int, ...]
    """The K drafts, as target ids."""
    num_accepted: int
    draft_gaps: tuple[float, ...]
    """Top-2 gap of each draft position's logits."""
    target_gaps: tuple[float, ...]
    """Top-2 gap of the target's logits at each committed token."""

    @property
    def is_tie(self) -> bool:
        """Whether a committed token of a greedy step hung on less than `TIE_GAP`."""
        return min(self.target_gaps) < TIE_GAP

    @property
    def is_draft_tie(self) -> bool:
        """Whether a greedy draft token hung on less than `TIE_GAP`."""
        return min(self.draft_gaps) < TIE_GAP


@dataclass(frozen=True)
class ReferenceProposal:
    """Greedy drafts at one point of a sequence."""

    draft_ids: tuple[int, ...]
    """The K drafts, as target ids."""
    gaps: tuple[float, ...]
    """Top-2 gap of each position's logits."""


@dataclass(frozen=True)
class ReferenceOutput:
    """A decoded sequence."""

    token_ids: tuple[int, ...]
    """Committed after the prompt; cut after the end token or at `max_new_tokens`."""
    steps: tuple[ReferenceStep, ...]
    first_gap: float
    """Top-2 gap of the target's logits at the first token, which the prompt alone decides."""

    @property
    def acceptance_length(self) -> float:
        """(accepted + steps) / steps: tokens per target step, the bonus token counted; 1.0 with no steps."""
        if not self.steps:
            return 1.0
        return 1.0 + sum(step.num_accepted for step in self.steps) / len(self.steps)


class ReferenceDecoder:
    """Decodes with a target and a DSpark or DFlash drafter, on CPU.

    Args:
        target_path: folder of the target, as transformers loads it.
        checkpoint_path: folder of the drafter, as speculators writes it.
        dtype: of the computation; float32 to compare with.

    Raises:
        TargetError: the target cannot be loaded.
        CheckpointError: the drafter cannot be loaded.
    """

    def __init__(self, target_path: Path, checkpoint_path: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self.target = _Target(Path(target_path), dtype=dtype)
        self.drafter = ReferenceDrafter(
            Path(checkpoint_path),
            embedding_WH=self.target.model.get_input_embeddings().weight.detach(),
            lm_head_WH=self.target.model.get_output_embeddings().weight.detach(),
            dtype=dtype,
        )
        self.target.capture(self.drafter.aux_layer_ids)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        ignore_eos: bool = False,
    ) -> ReferenceOutput:
        """Decode after `prompt_ids`.

        Args:
            prompt_ids: at least one token.
            max_new_tokens: tokens to commit; the last step may propose beyond them.
            temperature: 0 for greedy.
            generator: of the random draws; None for torch's own.
            ignore_eos: go on after the target's end tokens.

        Raises:
            ConfigError: an empty prompt, no tokens wanted, or a negative temperature.
        """
        if not prompt_ids or max_new_tokens < 1 or temperature < 0:
            raise ConfigError(
                "nothing to decode",
                got=f"{len(prompt_ids)} prompt tokens, {max_new_tokens} new, temperature {temperature}",
                expected="at least one of each, temperature >= 0",
            )
        ends = frozenset() if ignore_eos else self.target.end_ids
        self.drafter.reset()
        logits_TW, aux_TLH = self.target.start(prompt_ids)
        self.drafter.extend_context(aux_TLH)
        anchor = int(logits_TW[-1].argmax()) if temperature == 0 else _draw(logits_TW[-1] / temperature, generator)
        tokens, steps = [anchor], []
        while len(tokens) < max_new_tokens and not ends.intersection(tokens):
            step, committed = self._step(tokens[-1], temperature, generator)
            steps.append(step)
            tokens += committed
        return ReferenceOutput(tuple(_cut(tokens, ends)[:max_new_tokens]), tuple(steps), _gap(logits_TW[-1]))

    @torch.inference_mode()
    def propose_after(self, token_ids: Sequence[int], *, num_draft_tokens: int | None = None) -> ReferenceProposal:
        """Greedy drafts after a committed sequence, computed from nothing: no cache of an earlier step is used.

        Args:
            token_ids: prompt and committed tokens; the last is the anchor, at least one comes before it.
            num_draft_tokens: K of this step; None for the checkpoint's block_size - 1.
        """
        self.drafter.reset()
        _, aux_TLH = self.target.start(token_ids[:-1])
        self.drafter.extend_context(aux_TLH)
        drafts, logits_KV = self._propose(token_ids[-1], 0.0, None, num_draft_tokens=num_draft_tokens)
        return ReferenceProposal(tuple(drafts), tuple(map(_gap, logits_KV)))

    def _step(
        self, anchor: int, temperature: float, generator: torch.Generator | None
    ) -> tuple[ReferenceStep, list[int]]:
        position = self.drafter.num_context
        drafts, draft_logits_KV = self._propose(anchor, temperature, generator)
        logits_RW, aux_RLH = self.target.extend([anchor, *drafts])
        if temperature == 0:
            committed = verify_greedy(drafts, logits_RW)
        else:
            draft_probs_KW = self._in_target_vocabulary((draft_logits_KV / temperature).softmax(-1), logits_RW.shape[1])
            committed = verify_sampled(drafts, draft_probs_KW, (logits_RW / temperature).softmax(-1), generator)
        self.drafter.extend_context(aux_RLH[: len(committed)])
        self.target.crop(position + len(committed))
        step = ReferenceStep(
            position=position,
            anchor=anchor,
            draft_ids=tuple(drafts),
            num_accepted=len(committed) - 1,
            draft_gaps=tuple(map(_gap, draft_logits_KV)),
            target_gaps=tuple(map(_gap, logits_RW[: len(committed)])),
        )
        return step, committed

    def _propose(
        self,
        anchor: int,
        temperature: float,
        generator: torch.Generator | None,
        *,
        num_draft_tokens: int | None = None,
    ) -> tuple[list[int], torch.Tensor]:
        """The K drafts as target ids, and the logits [K, V] each was taken from."""
        previous, drafts, logits = anchor, [], []
        for backbone_V in self.drafter.block_logits(anchor, num_draft_tokens=num_draft_tokens):
            logits_V = backbone_V + self.drafter.markov_bias(previous)
            draft_id = int(logits_V.argmax()) if temperature == 0 else _draw(logits_V / temperature, generator)
            previous = int(self.drafter.target_ids_V[draft_id])
            drafts.append(previous)
            logits.append(logits_V)
        return drafts, torch.stack(logits)

    def _in_target_vocabulary(self, probs_KV: torch.Tensor, vocab_size: int) -> torch.Tensor:
        probs_KW = torch.zeros(probs_KV.shape[0], vocab_size)
        probs_KW[:, self.drafter.target_ids_V] = probs_KV
        return probs_KW


def verify_greedy(draft_ids: Sequence[int], target_logits_RW: torch.Tensor) -> list[int]:
    """Committed tokens of a greedy step: drafts while they are the target's argmax, then the target's own token.

    Args:
        draft_ids: the K drafts, as target ids.
        target_logits_RW: [K + 1, W]; row k follows draft k (row 0 the anchor).
    """
    choices = target_logits_RW.argmax(-1).tolist()
    num_accepted = next((k for k, draft in enumerate(draft_ids) if draft != choices[k]), len(draft_ids))
    return [*draft_ids[:num_accepted], choices[num_accepted]]


def verify_sampled(
    draft_ids: Sequence[int],
    draft_probs_KW: torch.Tensor,
    target_probs_RW: torch.Tensor,
    generator: torch.Generator | None,
) -> list[int]:
    """Committed tokens of a sampled step: rejection sampling with residual (arXiv:2211.17192, algorithm 1).

    Args:
        draft_ids: the K drafts, each drawn from its row of `draft_probs_KW`.
        draft_probs_KW: [K, W], q over target ids.
        target_probs_RW: [K + 1, W], p; row k follows draft k (row 0 the anchor).
        generator: of the random draws; None for torch's own.
    """
    for k, draft in enumerate(draft_ids):
        p_W, q_W = target_probs_RW[k], draft_probs_KW[k]
        if float(torch.rand((), generator=generator)) * float(q_W[draft]) < float(p_W[draft]):
            continue
        residual_W = (p_W - q_W).clamp_min(0)
        # A refusal with p equal to q up to rounding leaves nothing to draw from but p itself.
        source_W = residual_W if float(residual_W.sum()) > 0 else p_W
        return [*draft_ids[:k], int(torch.multinomial(source_W, 1, generator=generator))]
    return [*draft_ids, int(torch.multinomial(target_probs_RW[-1], 1, generator=generator))]


class _Target:
    """The target with a KV cache that can be cut back, and its residual stream after chosen layers."""

    def __init__(self, path: Path, *, dtype: torch.dtype) -> None:
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype).eval()
        except (OSError, ValueError) as error:
            raise TargetError("the target cannot be loaded", got=f"{path}: {error}") from None
        ends = self.model.generation_config.eos_token_id
        self.end_ids = frozenset([ends] if isinstance(ends, int) else ends or [])
        self._cache = DynamicCache()
        self._captured: dict[int, torch.Tensor] = {}

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Keep the residual stream after each of `layer_ids` (1 is after the first layer), before any final norm."""
        for layer_id in layer_ids:
            self._captured[layer_id] = torch.empty(0)
            # A hook on the layer, not `output_hidden_states`: there, the last state has the final norm applied.
            self.model.base_model.layers[layer_id - 1].register_forward_hook(self._keeper(layer_id))

    def _keeper(self, layer_id: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            states_1TH = output[0] if isinstance(output, tuple) else output
            self._captured[layer_id] = states_1TH[0]

        return keep

    def start(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a new sequence's first tokens: float32 logits [T, W] and aux states [T, L, H]."""
        self._cache = DynamicCache()
        return self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the next tokens, as `start`."""
        output = self.model(torch.tensor([list(token_ids)]), past_key_values=self._cache, use_cache=True)
        return output.logits[0].float(), torch.stack(list(self._captured.values()), dim=1)

    def crop(self, num_tokens: int) -> None:
        """Forget everything after the first `num_tokens` positions."""
        num_surplus = self._cache.get_seq_length() - num_tokens
        if num_surplus:
            self._cache.crop(-num_surplus)


def _draw(logits_V: torch.Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))


def _gap(logits_V: torch.Tensor) -> float:
    first, second = logits_V.topk(2).values.tolist()
    return float(first - second)


def _cut(tokens: list[int], ends: frozenset[int]) -> list[int]:
    end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]
