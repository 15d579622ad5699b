"""EAGLE-3's training objective: the draft steps that vLLM will run, unrolled at the anchors of a
pack.

Row j of a document pairs token j + 1 with state j of the target: (embedding of token j + 1 | fc(aux
states of j)). The target has just committed the anchor, token n, so the rows up to n - 1 are known.
Draft step 1 is row n - 1; step k is a row of its own with token n + k - 1 (teacher forced) and the
drafter's own output of step k - 1, before the final norm. A step sees the rows up to n - 1, its own
earlier steps, and itself: EAGLE-3's training-time test (Li et al. 2025, arXiv:2503.01840, section
3.2).

It runs the modules of speculators' `Eagle3DraftModel`, but steps at anchors only: all anchors of a
document share its rows, and of a row the last layer needs keys and values alone. What follows vLLM
and this project where speculators differs: row j stands at position j (there j + 1, the same to a
rotary embedding), no slot reads the next document's tokens, a slot counts if the token it predicts
is supervised (there the one it reads), and the loss is a mean over all slots (there a sum of each
step's mean).

Shapes: T tokens or rows, N anchors, K draft steps, S supervised slots, H hidden, X query heads, G
key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch

from components.drafter.protocol import Drafter
from components.errors import ConfigError
from components.settings import TrainingSettings
from components.training.objectives.attention import block_attention, causal_attention, rotate
from components.training.objectives.backbone import finish_layer, rope_at
from components.training.objectives.block import BlockObjective
from components.training.objectives.slots import Slots
from components.training.packing import Blocks, Pack

Rope = tuple[torch.Tensor, torch.Tensor]
PLAIN = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of EAGLE-3 that `build_drafter` does not build, so none of them is computed here."""


class Eagle3Objective(BlockObjective):
    """Loss of an EAGLE-3 drafter at the anchors of a pack; losses and scores are those of
    `BlockObjective`.

    Args:
        drafter: EAGLE-3 drafter of `build_drafter`.
        settings: loss weights and position decay.

    Raises:
        ConfigError: a loss of another name, gradient checkpointing, or a drafter this objective
            does not train.
    """

    def __init__(self, drafter: Drafter, settings: TrainingSettings) -> None:
        super().__init__(drafter, settings)
        if settings.gradient_checkpointing:
            raise ConfigError(
                "training.gradient_checkpointing is for dspark and dflash",
                got="eagle3",
                fix="Leave it out.",
            )

    def _require_trainable(self, drafter: Drafter) -> None:
        config = drafter.config
        if config.speculators_model_type != "eagle3":
            raise ConfigError(
                "this objective does not train this drafter",
                got=config.speculators_model_type,
                expected="eagle3",
            )

        variants = [name for name in PLAIN if getattr(config, name)]
        if variants:
            raise ConfigError(
                "this objective does not train this variant of EAGLE-3",
                got=variants,
                expected="none",
            )

    def _backbone(self, pack: Pack, blocks: Blocks, slots: Slots) -> tuple[torch.Tensor, None]:
        """The drafter's states after its final norm at the supervised slots, [S, H]."""
        drafter, anchors_N = self.drafter, blocks.anchors_N
        embedded_TH = drafter.layers[0].input_layernorm(drafter.embed_tokens(pack.token_ids_T))
        fused_TH = drafter.fc(pack.states_TLH[:, :-1].flatten(1).to(embedded_TH.dtype)).to(
            embedded_TH.dtype
        )
        layers = [_UnrolledLayer(layer, blocks) for layer in drafter.layers]
        # The last row of a document gets a token of the next one; no anchor sees that row.
        row_embedded_TH = embedded_TH.roll(-1, dims=0)

        states_TH = fused_TH
        rope_T = rope_at(drafter, states_TH, pack.positions_T)
        for layer in layers[:-1]:
            states_TH = layer.all_rows(row_embedded_TH, states_TH, rope_T, pack.bounds)

        steps = [layers[-1].first_step(row_embedded_TH, states_TH, rope_T)]
        for step in range(1, blocks.valid_NK.shape[1]):
            # Beyond the document's end no slot is supervised, and only later steps read this one.
            tokens_N = (anchors_N + step).clamp(max=pack.num_tokens - 1)
            rope_N = rope_at(drafter, steps[-1], pack.positions_T[anchors_N] - 1 + step)
            states_NH = steps[-1]
            for layer in layers:
                states_NH = layer.next_step(embedded_TH[tokens_N], states_NH, rope_N)
            steps.append(states_NH)

        hidden_SH: torch.Tensor = drafter.norm(
            torch.stack(steps, dim=1)[slots.block_S, slots.offset_S - 1]
        )
        return hidden_SH, None


class _UnrolledLayer:
    """One draft layer with the keys and values of all rows, and of each anchor's own steps after
    the first.
    """

    def __init__(self, layer: Any, blocks: Blocks) -> None:
        self._layer = layer
        self._attention = layer.self_attn
        self._blocks = blocks
        self._row_key_TGD = self._row_value_TGD = torch.empty(0)
        self._own_keys: list[torch.Tensor] = []
        self._own_values: list[torch.Tensor] = []

    def all_rows(
        self,
        embedded_TH: torch.Tensor,
        states_TH: torch.Tensor,
        rope_T: Rope,
        bounds: tuple[tuple[int, int], ...],
    ) -> torch.Tensor:
        """The layer on all rows, [T, H]; an anchor's first step is the row before it."""
        normed = self._normed(embedded_TH, states_TH)
        self._row_key_TGD, self._row_value_TGD = self._keys_values(normed, rope_T)
        attended = causal_attention(
            self._queries(normed, rope_T),
            self._row_key_TGD,
            self._row_value_TGD,
            bounds=bounds,
            scaling=self._attention.scaling,
        )
        return finish_layer(self._layer, states_TH, attended)

    def first_step(
        self, embedded_TH: torch.Tensor, states_TH: torch.Tensor, rope_T: Rope
    ) -> torch.Tensor:
        """Keys and values of all rows, but queries of the row before each anchor only; its states,
        [N, H].
        """
        normed = self._normed(embedded_TH, states_TH)
        self._row_key_TGD, self._row_value_TGD = self._keys_values(normed, rope_T)
        rows_N = self._blocks.anchors_N - 1
        query_NGD = self._queries(normed[rows_N], (rope_T[0][rows_N], rope_T[1][rows_N]))
        return finish_layer(self._layer, states_TH[rows_N], self._attend(query_NGD))

    def next_step(
        self, embedded_NH: torch.Tensor, states_NH: torch.Tensor, rope_N: Rope
    ) -> torch.Tensor:
        """One more step of each anchor, [N, H]."""
        normed = self._normed(embedded_NH, states_NH)
        key_NGD, value_NGD = self._keys_values(normed, rope_N)
        self._own_keys.append(key_NGD)
        self._own_values.append(value_NGD)
        return finish_layer(self._layer, states_NH, self._attend(self._queries(normed, rope_N)))

    def _normed(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What the projections take: normed embedding | normed states, [.., 2H], in the first
        layer; then [.., H].
        """
        if not hasattr(self._layer, "hidden_norm"):
            normed: torch.Tensor = self._layer.input_layernorm(states)
            return normed
        return torch.cat([embedded, self._layer.hidden_norm(states)], dim=-1)

    def _queries(self, normed: torch.Tensor, rope: Rope) -> torch.Tensor:
        return rotate(self._heads(self._attention.q_proj(normed)), *rope)

    def _keys_values(self, normed: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        key = rotate(self._heads(self._attention.k_proj(normed)), *rope)
        return key, self._heads(self._attention.v_proj(normed))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self._attention.head_dim))

    def _attend(self, query_NXD: torch.Tensor) -> torch.Tensor:
        """Attention of the anchors over the rows before them and their own steps so far, [N, heads
        * D].
        """
        none = self._row_key_TGD.new_zeros(len(query_NXD), 0, *self._row_key_TGD.shape[1:])
        return block_attention(
            query_NXD[:, None],
            self._row_key_TGD,
            self._row_value_TGD,
            torch.stack(self._own_keys, dim=1) if self._own_keys else none,
            torch.stack(self._own_values, dim=1) if self._own_values else none,
            anchors_N=self._blocks.anchors_N,
            spans=self._blocks.spans,
            scaling=self._attention.scaling,
        )[:, 0]
