"""A DSpark or DFlash drafter for one sequence in plain PyTorch, from the tensors of its checkpoint alone.

Part of the reference that served drafting is checked against, so it shares no code with speculators' or vLLM's models.
Layout, as trained ("1+K fill-in"): the block [anchor, mask * K] stands at positions n..n+K, where n is the number of
tokens before the anchor. Every slot attends to all context positions 0..n-1 and to the whole block, both ways.
The context's keys and values come from the target, the same states in each layer: kv_proj(hidden_norm(fc(aux states))).

Shapes: T context tokens, L aux layers, H hidden, Q block slots (K + 1), K draft tokens, N query heads, G key heads,
D head size, V draft vocabulary, W target vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from components.errors import CheckpointError


class ReferenceDrafter:
    """Draft logits of one sequence; holds the sequence's context keys and values.

    Args:
        checkpoint_path: folder with speculators' config.json and model.safetensors.
        embedding_WH: the target's input embedding, which the drafter shares.
        lm_head_WH: the target's output head, used where the checkpoint carries none.
        dtype: of the computation.

    Raises:
        CheckpointError: files are missing, or the checkpoint is not a full-attention, vanilla-head, fill-in drafter.
    """

    def __init__(
        self, checkpoint_path: Path, *, embedding_WH: torch.Tensor, lm_head_WH: torch.Tensor, dtype: torch.dtype
    ) -> None:
        config, weights = _read_checkpoint(Path(checkpoint_path))
        self.config = Qwen3Config(**config["transformer_layer_config"])
        self.aux_layer_ids = tuple(int(layer) for layer in config["aux_hidden_state_layer_ids"])
        self.num_draft_tokens = int(config["block_size"]) - 1
        self.mask_token_id = int(config["mask_token_id"])
        self._weights = {name: value.to(dtype) for name, value in weights.items() if value.is_floating_point()}
        self._embedding_WH = embedding_WH.to(dtype)
        self._lm_head_VH = self._weights.get("lm_head.weight", lm_head_WH.to(dtype))
        num_drafts = self._lm_head_VH.shape[0]
        self.target_ids_V = torch.arange(num_drafts) + weights.get("d2t", torch.zeros(num_drafts, dtype=torch.long))
        self._rotary = Qwen3RotaryEmbedding(self.config)
        self._dtype = dtype
        self._keys_GTD: list[torch.Tensor] = []
        self._values_GTD: list[torch.Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Forget the context: the next `extend_context` starts a new sequence."""
        empty = torch.empty(self.config.num_key_value_heads, 0, self.config.head_dim, dtype=self._dtype)
        self._keys_GTD = [empty] * self.config.num_hidden_layers
        self._values_GTD = [empty] * self.config.num_hidden_layers

    @property
    def num_context(self) -> int:
        """Context tokens held, which is also the position of the next anchor."""
        return int(self._keys_GTD[0].shape[1])

    def extend_context(self, aux_TLH: torch.Tensor) -> None:
        """Append the target's states of the next T committed positions.

        Args:
            aux_TLH: [T, L, H], the residual stream after each of `aux_layer_ids`.
        """
        states_TH = functional.linear(aux_TLH.to(self._dtype).flatten(1), self._weights["fc.weight"])
        states_TH = self._norm(states_TH, "hidden_norm.weight")
        positions_T = torch.arange(self.num_context, self.num_context + states_TH.shape[0])
        for layer in range(self.config.num_hidden_layers):
            keys_GTD, values_GTD = self._keys_values(layer, states_TH, positions_T)
            self._keys_GTD[layer] = torch.cat([self._keys_GTD[layer], keys_GTD], dim=1)
            self._values_GTD[layer] = torch.cat([self._values_GTD[layer], values_GTD], dim=1)

    def block_logits(self, anchor: int, *, num_draft_tokens: int | None = None) -> torch.Tensor:
        """Backbone logits [K, V], float32, of the K positions after `anchor`, before the Markov bias.

        Args:
            anchor: target id of the token that was committed last; it is not part of the context yet.
            num_draft_tokens: K; None for the checkpoint's block_size - 1.
        """
        num_masks = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        hidden_QH = self._embedding_WH[torch.tensor([anchor, *[self.mask_token_id] * num_masks])]
        positions_Q = torch.arange(self.num_context, self.num_context + num_masks + 1)
        for layer in range(self.config.num_hidden_layers):
            hidden_QH = hidden_QH + self._attend(layer, hidden_QH, positions_Q)
            hidden_QH = hidden_QH + self._feed_forward(layer, hidden_QH)
        hidden_KH = self._norm(hidden_QH, "norm.weight")[1:]
        return functional.linear(hidden_KH, self._lm_head_VH).float()

    def markov_bias(self, previous: int) -> torch.Tensor:
        """Bias [V], float32, that the previous token (a target id) adds to the next position: W2 W1[previous].

        Zero for a drafter without a Markov head, which is plain DFlash.
        """
        embedding_WR = self._weights.get("markov_head.markov_w1.weight")
        if embedding_WR is None:
            return torch.zeros(self._lm_head_VH.shape[0])
        return functional.linear(embedding_WR[previous], self._weights["markov_head.markov_w2.weight"]).float()

    def _attend(self, layer: int, hidden_QH: torch.Tensor, positions_Q: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{layer}."
        normed_QH = self._norm(hidden_QH, f"{prefix}input_layernorm.weight")
        query_NQD = self._heads(normed_QH, f"{prefix}self_attn.q")
        query_NQD = self._rotate(self._norm(query_NQD, f"{prefix}self_attn.q_norm.weight"), positions_Q)
        keys_GQD, values_GQD = self._keys_values(layer, normed_QH, positions_Q)
        attended_NQD = functional.scaled_dot_product_attention(
            query_NQD[None],
            torch.cat([self._keys_GTD[layer], keys_GQD], dim=1)[None],
            torch.cat([self._values_GTD[layer], values_GQD], dim=1)[None],
            enable_gqa=True,
        )[0]
        return self._linear(attended_NQD.transpose(0, 1).flatten(1), f"{prefix}self_attn.o_proj")

    def _keys_values(
        self, layer: int, states_TH: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = f"layers.{layer}.self_attn."
        keys_GTD = self._norm(self._heads(states_TH, f"{prefix}k"), f"{prefix}k_norm.weight")
        return self._rotate(keys_GTD, positions_T), self._heads(states_TH, f"{prefix}v")

    def _feed_forward(self, layer: int, hidden_QH: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{layer}."
        normed_QH = self._norm(hidden_QH, f"{prefix}post_attention_layernorm.weight")
        gate = ACT2FN[self.config.hidden_act](self._linear(normed_QH, f"{prefix}mlp.gate_proj"))
        return self._linear(gate * self._linear(normed_QH, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj")

    def _heads(self, states_TH: torch.Tensor, name: str) -> torch.Tensor:
        return self._linear(states_TH, f"{name}_proj").unflatten(1, (-1, self.config.head_dim)).transpose(0, 1)

    def _linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(states, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[name]
        normed = functional.rms_norm(states.float(), weight.shape, weight.float(), self.config.rms_norm_eps)
        return normed.to(self._dtype)

    def _rotate(self, heads_NTD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding, halves layout: x cos + (-x2, x1) sin (RoFormer, arXiv:2104.09864)."""
        cos_1TD, sin_1TD = self._rotary(heads_NTD, positions_T[None])
        first, second = heads_NTD.chunk(2, dim=-1)
        return heads_NTD * cos_1TD + torch.cat([-second, first], dim=-1) * sin_1TD


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError("the drafter checkpoint cannot be read", got=f"{folder}: {error}") from None
    algorithm = config.get("speculators_model_type")
    layer_types = set(config.get("transformer_layer_config", {}).get("layer_types") or ())
    for problem, got, expected in (
        ("no drafter the reference can decode with", algorithm, ("dspark", "dflash")),
        ("the reference knows full attention only", layer_types - {"full_attention"} or None, (None,)),
        (
            "the reference knows the fill-in layout only",
            config.get("sample_from_anchor", algorithm == "dspark"),
            (False,),
        ),
        ("the reference knows the vanilla Markov head only", config.get("markov_head_type", "vanilla"), ("vanilla",)),
    ):
        if got not in expected:
            raise CheckpointError(problem, got=got, expected=" or ".join(map(str, expected)))
    return config, weights
