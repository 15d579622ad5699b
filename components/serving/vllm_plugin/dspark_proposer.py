"""The V1 runner's DFlash proposer, extended by DSpark's sequential sampling. Imported only inside
vLLM on CPU.

Shapes: B requests, K draft tokens, H hidden, V draft vocabulary, W target vocabulary.
One forward pass over the query block [anchor, mask * K] of each request gives hidden states at the
K masks. Then, left to right (DSpark, section "semi-autoregressive drafting"; vLLM's runner V2 does
the same on GPUs):

    logits_k = lm_head(hidden_k) + W2 W1[x_{k-1}],   x_0 = anchor,   x_k ~ softmax(logits_k /
    temperature) or argmax
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.v1.spec_decode.dflash import DFlashProposer

from components.errors import CheckpointError, ConfigError, EngineError

TRACE_VARIABLE = "DSPARK_CPU_TRACE"
"""Environment variable: file that gets one JSON line per request and step (request, position,
anchor, drafts).
"""


class DSparkProposer(DFlashProposer):
    """Drafts DSpark checkpoints through their Markov head, and plain DFlash ones exactly as vLLM
    does.

    Args:
        vllm_config: the engine's configuration; its speculative method is "dflash".
        device: the CPU.
        runner: the V1 model runner, asked for request ids when a trace is written.

    Raises:
        ConfigError: more draft tokens per step than the drafter's block holds.
        CheckpointError: the drafter's vocabulary is larger than the target's.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self._trace_path: Path | None = None
        self._target_ids_V: torch.Tensor | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the drafter as vLLM does, then prepare sampling if it is a DSpark one."""
        super().load_model(target_model)
        if not isinstance(self.model, Qwen3DSparkForCausalLM):
            return
        self._check_sizes()
        draft_ids_V = torch.arange(self.model.config.draft_vocab_size, device=self.device)
        self._target_ids_V = self.model.map_draft_to_target(draft_ids_V)
        path = os.environ.get(TRACE_VARIABLE)
        self._trace_path = Path(path) if path else None

    def _check_sizes(self) -> None:
        config, num_drafts = self.model.config, self.speculative_config.num_speculative_tokens
        block_size = getattr(config, "block_size", None)
        if block_size is not None and num_drafts > block_size - 1:
            raise ConfigError(
                "more draft tokens per step than the drafter's block holds",
                got=f"num_speculative_tokens={num_drafts}",
                expected=f"at most block_size - 1 = {block_size - 1}",
            )
        if config.draft_vocab_size > self.model.target_vocab_size:
            raise CheckpointError(
                "the drafter's vocabulary is larger than the target's",
                got=config.draft_vocab_size,
                expected=f"at most {self.model.target_vocab_size}",
            )

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample the K drafts of each request, left to right.

        Args:
            hidden_states: [B * K, H], request-major: the backbone's output at the masks.
            sampling_metadata: vLLM's, one row per request.

        Returns:
            Draft tokens as target ids [B * K], and their probabilities [B * K, W], float32: None
            when every request is greedy or drafts are not sampled (the rejection sampler then takes
            the drafts as certain).
        """
        if not isinstance(self.model, Qwen3DSparkForCausalLM):
            plain: tuple[torch.Tensor, torch.Tensor | None] = super()._sample_draft_tokens(
                hidden_states, sampling_metadata
            )
            return plain

        num_drafts = self.num_speculative_tokens
        anchors_B, positions_B = self._read_anchors(hidden_states.shape[0] // num_drafts)
        logits_BKV = self.model.compute_draft_logits(hidden_states).unflatten(0, (-1, num_drafts))
        previous_B = anchors_B
        tokens = []
        probs = []

        for k in range(num_drafts):
            draft_ids_B, probs_BV = self._sample_from_logits(
                self._biased(logits_BKV[:, k], previous_B), sampling_metadata
            )
            previous_B = self.model.map_draft_to_target(draft_ids_B)
            tokens.append(previous_B)
            if probs_BV is not None:
                probs.append(self._in_target_vocabulary(probs_BV))

        drafts_BK = torch.stack(tokens, dim=1)
        if self._trace_path is not None:
            self._write_trace(self._trace_path, anchors_B, positions_B, drafts_BK)
        return drafts_BK.flatten(), torch.stack(probs, dim=1).flatten(0, 1) if probs else None

    def _biased(self, logits_BV: torch.Tensor, previous_B: torch.Tensor) -> torch.Tensor:
        """Backbone logits plus the Markov bias of the previous token, in float32: a bf16 sum makes
        ties.
        """
        if self.model.config.markov_rank == 0:
            return logits_BV.float()
        return (
            logits_BV.float() + self.model.markov_bias(self.model.markov_embed(previous_B)).float()
        )

    def _in_target_vocabulary(self, probs_BV: torch.Tensor) -> torch.Tensor:
        """[B, V] over draft ids -> [B, W] over target ids; zero where the drafter has no token."""
        assert self._target_ids_V is not None
        probs_BW = probs_BV.new_zeros(probs_BV.shape[0], self.model.target_vocab_size)
        probs_BW[:, self._target_ids_V] = probs_BV
        return probs_BW

    def _read_anchors(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchor ids and positions [B] from the query block that `propose` has just run.

        Raises:
            EngineError: the block is not [anchor, mask * K] per request, so drafts would start from
                wrong tokens.
        """
        stride = self.num_speculative_tokens + 1
        block = self.input_ids[: num_reqs * stride].view(num_reqs, stride)
        if not bool((block[:, 1:] == self.parallel_drafting_token_id).all()):
            raise EngineError(
                "vLLM's DFlash query layout is not the one the CPU DSpark plug-in needs",
                got=f"first block {block[0].tolist()}",
                expected=f"an anchor, then {self.num_speculative_tokens} times mask "
                f"{self.parallel_drafting_token_id}",
                fix="Serve without a drafter, or with the vLLM version this project pins.",
            )
        return block[:, 0].long(), self.positions[: num_reqs * stride : stride]

    def _write_trace(
        self,
        path: Path,
        anchors_B: torch.Tensor,
        positions_B: torch.Tensor,
        drafts_BK: torch.Tensor,
    ) -> None:
        requests = self._runner.input_batch.req_ids
        columns = (requests, positions_B.tolist(), anchors_B.tolist(), drafts_BK.tolist())
        names = ("request", "position", "anchor", "drafts")
        # Opened for each step, so that a reader sees whole steps and an engine that is ended loses
        # none.
        with path.open("a") as file:
            file.writelines(
                json.dumps(dict(zip(names, row, strict=True))) + "\n"
                for row in zip(*columns, strict=True)
            )
