"""Keys and values of a batch whose rows have different lengths.

The token at position p of a row stands in slot p of that row, in every layer. Nothing is rolled back
when draft tokens are rejected: what they left behind lies at positions that no query may see until
the next tokens have overwritten it. The active rows are always the first ones, so that a forward
reads a view and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GROWTH = 256  # slots are added in steps, so that a longer request seldom moves the others


class KeyValueCache:
    """The cache of one model.

    Args:
        num_rows: requests that can be held at once.
        device: where the tensors live.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.num_slots = 0
        self._device = device
        self._layers: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # (rows, slots, K, D) each, made when first written
        self._rows = slice(0, 0)
        self._start: int | None = None
        self._flat = torch.empty(0, dtype=torch.long)
        self._length = 0

    def reserve(self, num_slots: int) -> None:
        """Have room for sequences of that many tokens; keeps what is there."""
        if num_slots <= self.num_slots:
            return
        self.num_slots = -(-num_slots // GROWTH) * GROWTH
        self._layers = {
            layer: (self._grown(keys), self._grown(values)) for layer, (keys, values) in self._layers.items()
        }

    def move_row(self, source: int, to: int) -> None:
        """Copy a row over another one."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[to] = tensor[source]

    def at(self, first_row: int, starts: Sequence[int], width: int) -> Tensor:
        """Announce the tokens of the next forward.

        Args:
            first_row: rows `first_row, first_row + 1, ...` are written and read.
            starts: for each of them, the position of its first new token.
            width: new tokens a row.

        Returns:
            The positions of the new tokens, int64, shape (rows, width).
        """
        num_rows = len(starts)
        self._rows = slice(first_row, first_row + num_rows)
        self._length = max(starts) + width
        self._start = starts[0] if num_rows == 1 else None
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        self._flat = (positions + torch.arange(num_rows)[:, None] * self.num_slots).flatten().to(self._device)
        return positions.to(self._device)

    @property
    def length(self) -> int:
        """Slots that the announced forward reads."""
        return self._length

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write the announced tokens of one layer, and return all keys and values of its rows.

        Args:
            keys: (rows, K, width, D), rotated.
            values: (rows, K, width, D of the values).
            layer: index of the layer.

        Returns:
            Keys and values, views of shape (rows, K, length, D).
        """
        if layer not in self._layers:
            self._layers[layer] = self._empty(keys), self._empty(values)
        stored_keys, stored_values = self._layers[layer]
        return self._write(stored_keys, keys), self._write(stored_values, values)

    def _write(self, stored: Tensor, new: Tensor) -> Tensor:
        rows = stored[self._rows]
        if self._start is not None:
            rows[:, self._start : self._length] = new.transpose(1, 2)
        else:
            rows.flatten(0, 1).index_copy_(0, self._flat, new.transpose(1, 2).flatten(0, 1))
        return rows[:, : self._length].transpose(1, 2)

    def _empty(self, like: Tensor) -> Tensor:
        heads, depth = like.shape[1], like.shape[3]
        # zeros, because a masked slot still enters the softmax times zero, and 0 * NaN is NaN
        return like.new_zeros((self.num_rows, self.num_slots, heads, depth))

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros((self.num_rows, self.num_slots, *old.shape[2:]))
        new[:, : old.shape[1]] = old
        return new


def attention_mask(positions: Tensor, length: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """What each new token may see, as numbers to add to the attention logits.

    Args:
        positions: of the new tokens, (rows, width).
        length: slots that are read.
        dtype: of the result.
        window: tokens that a sliding layer sees, the token itself among them.

    Returns:
        0 where seen, the dtype's lowest number where not; shape (rows, 1, width, length).
    """
    slots = torch.arange(length, device=positions.device)
    hidden = slots > positions[:, None, :, None]
    if window is not None:
        hidden |= slots <= positions[:, None, :, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(
        hidden, torch.finfo(dtype).min
    )
