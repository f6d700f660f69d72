"""Which windows a step trains on: a pure function of the seed and the position, with no state to lose.

The stream of windows is the concatenation of one permutation per epoch. A position counts windows from the start of
that stream; step s of B windows takes [B s, B s + B), plus an offset after a rollback. Neither loader workers nor
micro-batches nor ranks change the stream, and an epoch's last windows are not dropped: a step may take its windows from
two epochs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DataOrder:
    """The order of one corpus under one seed."""

    n_windows: int
    """Windows of the corpus, at least 1."""
    seed: int
    """The run's seed, in [0, 2**64)."""

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """The windows of an epoch in their order, (n_windows,)."""
        return _permutation(self.n_windows, self.seed, epoch)

    def windows(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """`count` windows of the stream from `position` on."""
        pieces = []
        while count > 0:
            epoch, start = divmod(position, self.n_windows)
            piece = self.permutation(epoch)[start : start + count]
            pieces.append(piece)
            position, count = position + len(piece), count - len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def epoch(self, position: int) -> int:
        """The epoch that the window at `position` belongs to, from 0."""
        return position // self.n_windows


@lru_cache(maxsize=2)
def _permutation(n_windows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # Generator.permutation may change between releases of NumPy; the raw stream of a bit generator may not, and sorting
    # by random 64-bit keys is a uniform permutation but for ties, which the stable sort settles by index.
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n_windows)
    permutation = np.argsort(keys, kind="stable")
    permutation.flags.writeable = False
    return permutation


@dataclass(frozen=True)
class MicroBatchSampler:
    """Yields the windows of this rank's micro-batches, one after another, for ever; a `batch_sampler` of torch's
    DataLoader."""

    order: DataOrder
    position: int
    """Where in the stream the first micro-batch starts."""
    micro_batch_size: int
    rank: int = 0
    """The first micro-batch is the first rank's, the next one the next rank's, and so round."""
    ranks: int = 1

    def __iter__(self) -> Iterator[list[int]]:
        position = self.position + self.rank * self.micro_batch_size
        while True:
            yield self.order.windows(position, self.micro_batch_size).tolist()
            position += self.ranks * self.micro_batch_size
