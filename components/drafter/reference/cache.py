"""Keys and values of a batch whose sequences have different lengths: the slot of a token is its
position.

Nothing is ever moved or rolled back. A sequence's refused drafts lie behind its end, where no query
looks, until the next tokens at these positions overwrite them; so sequences may commit different
numbers of tokens in one step. What a query sees is one number, the last slot: its own position
where attention is causal, the block's end in a draft block.

Shapes: B sequences, T new tokens, S slots, G key heads, D head size.
"""

from __future__ import annotations

import torch


class SlotCache:
    """Per layer, keys and values [B, S, G, D], zero where nothing was written yet.

    transformers' models take it for their own cache: their attention calls `update` and uses what
    it returns.

    Args:
        num_slots: S, more than the highest position that will be written.
    """

    def __init__(self, *, num_slots: int) -> None:
        self.num_slots = num_slots
        self._keys_BSGD: dict[int, torch.Tensor] = {}
        self._values_BSGD: dict[int, torch.Tensor] = {}
        self._positions_BT = torch.empty(0, 0, dtype=torch.long)
        self._num_read = 0

    def aim(self, positions_BT: torch.Tensor, last_slots_BT: torch.Tensor) -> torch.Tensor:
        """Where the next `update` of each layer writes, and what each of these tokens sees.

        Args:
            positions_BT: int64; a position past the sequence's end may hold padding, which later
                tokens overwrite.
            last_slots_BT: int64, the last slot that each token sees.

        Returns:
            Mask [B, 1, T, S'], True where a slot is seen; S' slots are what `update` returns from
            now on.
        """
        self._positions_BT = positions_BT
        self._num_read = int(last_slots_BT.max()) + 1
        assert int(positions_BT.max()) < self.num_slots, "a position without a slot"
        slots_S = torch.arange(self._num_read, device=positions_BT.device)
        return (slots_S <= last_slots_BT[..., None])[:, None]

    def update(
        self, keys_BGTD: torch.Tensor, values_BGTD: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new keys and values; returns all of its first S' slots, [B, G, S', D]
        each.
        """
        if layer_idx not in self._keys_BSGD:
            batch_size, num_heads, _, head_size = keys_BGTD.shape
            shape = (batch_size, self.num_slots, num_heads, head_size)
            # Zeros, not whatever memory held: a masked slot still meets the weights, and 0 * NaN is
            # NaN.
            self._keys_BSGD[layer_idx] = keys_BGTD.new_zeros(shape)
            self._values_BSGD[layer_idx] = values_BGTD.new_zeros(shape)

        rows_B1 = torch.arange(keys_BGTD.shape[0], device=keys_BGTD.device)[:, None]
        self._keys_BSGD[layer_idx][rows_B1, self._positions_BT] = keys_BGTD.transpose(1, 2)
        self._values_BSGD[layer_idx][rows_B1, self._positions_BT] = values_BGTD.transpose(1, 2)
        return (
            self._keys_BSGD[layer_idx][:, : self._num_read].transpose(1, 2),
            self._values_BSGD[layer_idx][:, : self._num_read].transpose(1, 2),
        )

    def select(self, rows_N: torch.Tensor) -> None:
        """Keep only the sequences at these batch rows, in this order."""
        for cached in (self._keys_BSGD, self._values_BSGD):
            for layer, states_BSGD in cached.items():
                cached[layer] = states_BSGD.index_select(0, rows_N)
