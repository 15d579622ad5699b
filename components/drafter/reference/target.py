"""The target of the reference decoder: a transformers model over a batch of sequences that grow
unevenly.

Shapes: B sequences, T new tokens, L aux layers, H hidden, W target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from components.drafter.reference.cache import SlotCache
from components.errors import CheckpointError, TargetError


class ReferenceTarget:
    """Logits and aux states of new tokens; a token counts as committed once `advance` says so.

    Args:
        path: folder of the target, as transformers loads it.
        dtype: of the computation.
        device: of the weights and of all tensors returned.

    Raises:
        TargetError: it cannot be loaded, or has layers with a sliding window.
    """

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        try:
            model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
        except (OSError, ValueError) as error:
            raise TargetError("the target cannot be loaded", got=f"{path}: {error}") from None
        self.model: Any = model.eval().to(device)
        self.device = device
        _require_full_attention(self.model.config)
        ends = self.model.generation_config.eos_token_id
        self.end_ids = frozenset([ends] if isinstance(ends, int) else ends or [])
        self._cache = SlotCache(num_slots=0)
        self._lengths_B = torch.zeros(0, dtype=torch.long, device=device)
        self._captured: dict[int, torch.Tensor] = {}

    @property
    def lengths_B(self) -> torch.Tensor:
        """Committed tokens of each sequence, which is also the position of the next one; int64."""
        return self._lengths_B

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Keep the residual stream after each of `layer_ids` (1 is after the first layer), before
        any final norm.

        Raises:
            CheckpointError: the drafter wants a layer that the target does not have.
        """
        layers = self.model.base_model.layers
        if not layer_ids or not all(1 <= layer_id <= len(layers) for layer_id in layer_ids):
            raise CheckpointError(
                "the drafter's aux layers do not exist",
                got=tuple(layer_ids),
                expected=f"1..{len(layers)}",
            )
        for layer_id in layer_ids:
            self._captured[layer_id] = torch.empty(0)
            # A hook on the layer, not `output_hidden_states`: there, the last state has the final
            # norm applied.
            layers[layer_id - 1].register_forward_hook(self._keeper(layer_id))

    def _keeper(self, layer_id: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    def reset(self, *, batch_size: int, num_slots: int) -> None:
        """Start `batch_size` new sequences with room for `num_slots` tokens each."""
        self._cache = SlotCache(num_slots=num_slots)
        self._lengths_B = torch.zeros(batch_size, dtype=torch.long, device=self.device)

    def extend(
        self, token_ids_BT: torch.Tensor, *, keep_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens that follow the committed ones, without committing them.

        Args:
            token_ids_BT: int64; shorter sequences are padded on the right with any token.
            keep_T: the columns whose logits are wanted, int64; None for all.

        Returns:
            Logits [B, T or len(keep_T), W] in float32, and aux states [B, T, L, H] of all T tokens.
        """
        positions_BT = self._lengths_B[:, None] + torch.arange(
            token_ids_BT.shape[1], device=self.device
        )
        output = self.model(
            token_ids_BT,
            attention_mask=self._cache.aim(positions_BT, positions_BT),
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if keep_T is None else keep_T,
        )
        return output.logits.float(), torch.stack(list(self._captured.values()), dim=2)

    def advance(self, num_tokens_B: torch.Tensor) -> None:
        """Commit the first `num_tokens_B` of the tokens run last; what follows them is
        forgotten.
        """
        self._lengths_B = self._lengths_B + num_tokens_B

    def select(self, rows_N: torch.Tensor) -> None:
        """Keep only the sequences at these batch rows, in this order."""
        self._lengths_B = self._lengths_B[rows_N]
        self._cache.select(rows_N)


def _require_full_attention(config: Any) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types and getattr(config, "sliding_window", None) is not None:
        layer_types = {"sliding_attention"}
    if layer_types - {"full_attention"}:
        raise TargetError(
            "the reference decodes with full attention only",
            got=", ".join(sorted(layer_types)),
            expected="full_attention in every layer",
        )
