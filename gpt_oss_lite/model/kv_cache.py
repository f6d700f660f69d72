"""Keys and values of the tokens so far, for decoding: a windowed layer keeps no more than its window.

Shapes: B batch, G key/value heads, T new tokens, S keys to attend to, N slots, C head width.
"""

import torch
from torch import Tensor

from gpt_oss_lite.config import ModelConfig


class KVCache:
    """Slots for every layer: min(window, max_len) on a windowed layer, used round and round; max_len on a full one.

    Filled by `GPTOSS.hidden_states(ids, cache=cache)`, any number of tokens at a time.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, max_len: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Allocate all slots.

        Args:
            config: sizes and windows.
            batch_size: sequences, all of the same length.
            max_len: tokens of the longest sequence to come, prompt included.
            device: where the slots lie; "meta" counts bytes without using them.
            dtype: of keys and values.
        """
        if batch_size < 1 or max_len < 1:
            raise ValueError(f"batch_size is {batch_size} and max_len {max_len}: both must be at least 1")
        self.max_len = max_len
        self.length = 0
        """Tokens seen so far: the position of the next one."""
        self._windows = [config.layer_window(layer) for layer in range(config.n_layers)]
        slots = [min(window or max_len, max_len) for window in self._windows]
        shapes = [(batch_size, config.n_kv_heads, count, config.head_dim) for count in slots]
        self._keys = [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]
        self._values = [torch.empty(shape, device=device, dtype=dtype) for shape in shapes]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not."""
        return sum(slots.nbytes for slots in (*self._keys, *self._values))

    def update(self, layer: int, k_BGTC: Tensor, v_BGTC: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values.

        `length` moves with `advance`, once all layers have stored theirs.

        Returns:
            Keys and values (B, G, S, C) to attend to, the new ones last: all tokens so far on a full layer; on a
            windowed one those that the oldest of the new tokens still sees. For a single new token on a full ring the
            order is the ring's, which softmax does not see.

        Raises:
            ValueError: the tokens do not fit.
        """
        n_new = k_BGTC.shape[2]
        if self.length + n_new > self.max_len:
            raise ValueError(
                f"the cache holds {self.length} of at most {self.max_len} tokens: {n_new} more do not fit; "
                "make it with a larger max_len"
            )
        store = self._update_full if self._windows[layer] is None else self._update_windowed
        return store(self._keys[layer], k_BGTC), store(self._values[layer], v_BGTC)

    def advance(self, n_tokens: int) -> None:
        """Count tokens that all layers have stored."""
        self.length += n_tokens

    def _update_full(self, slots_BGNC: Tensor, new_BGTC: Tensor) -> Tensor:
        stop = self.length + new_BGTC.shape[2]
        slots_BGNC[:, :, self.length : stop] = new_BGTC
        return slots_BGNC[:, :, :stop]

    def _update_windowed(self, slots_BGNC: Tensor, new_BGTC: Tensor) -> Tensor:
        """The token at position p lies in slot p % N."""
        n_slots, n_new = slots_BGNC.shape[2], new_BGTC.shape[2]
        stop = self.length + n_new
        if n_new == 1:  # decoding: no copy of the ring
            slots_BGNC[:, :, self.length % n_slots] = new_BGTC[:, :, 0]
            return slots_BGNC[:, :, : min(stop, n_slots)]
        device = slots_BGNC.device
        earlier = torch.arange(max(0, stop - n_new - n_slots + 1), self.length, device=device) % n_slots
        attended = torch.cat((slots_BGNC[:, :, earlier], new_BGTC.to(slots_BGNC.dtype)), dim=2)
        kept = torch.arange(max(self.length, stop - n_slots), stop, device=device)
        slots_BGNC[:, :, kept % n_slots] = attended[:, :, -len(kept) :]
        return attended
