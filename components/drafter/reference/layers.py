"""Decoder layers of the reference drafters in plain PyTorch, from the tensors of a checkpoint
alone.

Part of the reference that served drafting is checked against, so it shares no code with
speculators' or vLLM's models.

Shapes: B sequences, T tokens, S slots, H hidden, I input of a projection, N query heads, G key
heads, D head size, V draft vocabulary, W target vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from components.drafter.reference.cache import SlotCache
from components.errors import CheckpointError

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
    "llama": (LlamaConfig, LlamaRotaryEmbedding),
}


@dataclass(frozen=True)
class TargetParts:
    """What a drafter shares with its target, and where and how it computes."""

    embedding_WH: torch.Tensor
    """The target's input embedding; used where the checkpoint carries none."""
    lm_head_WH: torch.Tensor
    """The target's output head; used where the checkpoint carries none."""
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's config.json and tensors, as speculators writes them."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a checkpoint's folder.

        Raises:
            CheckpointError: files are missing or broken, or layers are of a kind the reference does
                not know.
        """
        try:
            config = json.loads((folder / "config.json").read_text())
            tensors = load_file(folder / "model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                "the drafter checkpoint cannot be read", got=f"{folder}: {error}"
            ) from None

        layers = config.get("transformer_layer_config") or {}
        if layers.get("model_type") not in ARCHITECTURES:
            raise CheckpointError(
                "the reference does not know the drafter's layers",
                got=layers.get("model_type"),
                expected=" or ".join(ARCHITECTURES),
            )

        strange = set(layers.get("layer_types") or ()) - {"full_attention"}
        if strange:
            raise CheckpointError(
                "the reference knows full attention only", got=", ".join(sorted(strange))
            )

        return cls(config, tensors)

    @property
    def algorithm(self) -> str:
        """speculators' name of it: dspark, dflash, eagle3."""
        return str(self.config.get("speculators_model_type"))


class DraftLayers:
    """Norms, projections, attention and feed-forward of a drafter, and its embedding and head.

    Args:
        checkpoint: where the tensors come from.
        target: what is shared with the target.
    """

    def __init__(self, checkpoint: Checkpoint, target: TargetParts) -> None:
        fields = checkpoint.config["transformer_layer_config"]
        config_class, rotary_class = ARCHITECTURES[fields["model_type"]]
        self.config = config_class(**fields)
        self.dtype, self.device = target.dtype, target.device
        self.weights = {
            name: tensor.to(device=target.device, dtype=target.dtype)
            for name, tensor in checkpoint.tensors.items()
            if tensor.is_floating_point()
        }

        place = {"device": target.device, "dtype": target.dtype}
        self.embedding_WH = self.weights.get("embed_tokens.weight", target.embedding_WH.to(**place))
        self.lm_head_VH = self.weights.get("lm_head.weight", target.lm_head_WH.to(**place))
        num_drafts = self.lm_head_VH.shape[0]
        offsets_V = checkpoint.tensors.get("d2t", torch.zeros(num_drafts, dtype=torch.long))
        self.target_ids_V = (torch.arange(num_drafts) + offsets_V).to(target.device)
        self._rotary = rotary_class(self.config).to(target.device)

    def rotation(self, positions_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [B, 1, T, D] each, of these positions."""
        cos_BTD, sin_BTD = self._rotary(self.embedding_WH[:0], positions_BT)
        return cos_BTD[:, None], sin_BTD[:, None]

    def store(
        self,
        layer: int,
        states_BTI: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values of `states_BTI` into the cache; returns all that it
        holds, [B, G, S, D].
        """
        prefix = f"layers.{layer}.self_attn."
        keys_BGTD = self._rotate(self._normed_heads(states_BTI, f"{prefix}k"), rotation)
        return cache.update(keys_BGTD, self._heads(states_BTI, f"{prefix}v"), layer)

    def attend(
        self,
        layer: int,
        states_BTI: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
        mask_B1TS: torch.Tensor,
    ) -> torch.Tensor:
        """Attention output [B, T, H] of normed states, whose own keys and values are written
        first.
        """
        prefix = f"layers.{layer}.self_attn."
        query_BNTD = self._rotate(self._normed_heads(states_BTI, f"{prefix}q"), rotation)
        keys_BGSD, values_BGSD = self.store(layer, states_BTI, rotation, cache)
        attended_BNTD = functional.scaled_dot_product_attention(
            query_BNTD, keys_BGSD, values_BGSD, attn_mask=mask_B1TS, enable_gqa=True
        )
        return self.linear(attended_BNTD.transpose(1, 2).flatten(2), f"{prefix}o_proj")

    def feed_forward(self, layer: int, hidden_BTH: torch.Tensor) -> torch.Tensor:
        """The gated feed-forward of a layer, [B, T, H], its norm included."""
        prefix = f"layers.{layer}."
        normed_BTH = self.norm(hidden_BTH, f"{prefix}post_attention_layernorm")
        gate_BTI = ACT2FN[self.config.hidden_act](self.linear(normed_BTH, f"{prefix}mlp.gate_proj"))
        return self.linear(
            gate_BTI * self.linear(normed_BTH, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj"
        )

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Draft logits [..., V], float32, of states [..., H] after the final norm."""
        return functional.linear(normed, self.lm_head_VH).float()

    def linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        """The projection called `name`, with its bias where the checkpoint has one."""
        return functional.linear(
            states, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )

    def norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        """RMS norm over the last dimension, computed in float32 (arXiv:1910.07467)."""
        weight = self.weights[f"{name}.weight"]
        normed = functional.rms_norm(
            states.float(), weight.shape, weight.float(), self.config.rms_norm_eps
        )
        return normed.to(self.dtype)

    def _heads(self, states_BTI: torch.Tensor, name: str) -> torch.Tensor:
        return (
            self.linear(states_BTI, f"{name}_proj")
            .unflatten(2, (-1, self.config.head_dim))
            .transpose(1, 2)
        )

    def _normed_heads(self, states_BTI: torch.Tensor, name: str) -> torch.Tensor:
        heads_BNTD = self._heads(states_BTI, name)
        # Qwen3 norms queries and keys per head; Llama does not.
        return (
            self.norm(heads_BNTD, f"{name}_norm")
            if f"{name}_norm.weight" in self.weights
            else heads_BNTD
        )

    def _rotate(
        self, heads_BNTD: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Rotary position embedding, halves layout: x cos + (-x2, x1) sin (RoFormer,
        arXiv:2104.09864).
        """
        cos_B1TD, sin_B1TD = rotation
        first, second = heads_BNTD.chunk(2, dim=-1)
        return heads_BNTD * cos_B1TD + torch.cat([-second, first], dim=-1) * sin_B1TD
