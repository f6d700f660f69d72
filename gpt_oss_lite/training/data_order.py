"""Which windows a step trains on: a pure function of the seed and the position, with no state to lose.

The stream of windows is the concatenation of one permutation per epoch. A position counts windows from the start of
that stream; step s of B windows takes [B s, B s + B), plus an offset after a rollback. Neither loader workers nor
micro-batches nor ranks change the stream, and an epoch's last windows are not dropped: a step may take its windows from
two epochs.

Of several corpora with weights each has such a stream of its own, and a fixed cycle of turns says which one gives the
next window. The cycle is a Pfair schedule (Baruah et al., 1996, "Proportionate progress"): after any number of windows
each corpus has given its share to within less than one window.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DataOrder:
    """The order of one corpus under one seed."""

    n_windows: int
    """Windows of the corpus, at least 1."""
    seed: int
    """The run's seed, in [0, 2**64)."""

    def windows(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """`count` windows of the stream from `position` on."""
        pieces = []
        while count > 0:
            epoch, start = divmod(position, self.n_windows)
            piece = _permutations(0)(self.n_windows, self.seed, epoch)[start : start + count]
            pieces.append(piece)
            position, count = position + len(piece), count - len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def epoch(self, position: int) -> int:
        """The epoch that the window at `position` belongs to, from 0."""
        return position // self.n_windows

    def passes(self, position: int) -> list[float]:
        """How often the corpus, or each of several, has been read before `position`."""
        return [position / self.n_windows]


@dataclass(frozen=True)
class MixedOrder(DataOrder):
    """The order of several corpora, whose windows are numbered one corpus after the other."""

    sizes: tuple[int, ...]
    """Windows of each corpus, at least 1; n_windows together."""
    shares: tuple[int, ...]
    """Turns of each corpus in a cycle, at least 1."""

    def __post_init__(self) -> None:
        assert sum(self.sizes) == self.n_windows
        assert len(self.sizes) == len(self.shares) > 0

    def windows(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """`count` windows of the stream from `position` on."""
        cycle = turns(self.shares)
        cycles, places = np.divmod(np.arange(position, position + count), len(cycle.corpus))
        corpora = cycle.corpus[places]
        draws = cycles * np.array(self.shares)[corpora] + cycle.given[places, corpora]
        epochs, within = np.divmod(draws, np.array(self.sizes)[corpora])
        starts = np.cumsum([0, *self.sizes])
        found = np.empty(count, np.int64)
        for corpus, epoch in sorted(set(zip(corpora.tolist(), epochs.tolist(), strict=True))):
            mine = (corpora == corpus) & (epochs == epoch)
            permutation = _permutations(corpus)(self.sizes[corpus], self.seed, epoch)
            found[mine] = starts[corpus] + permutation[within[mine]]
        return found

    def given(self, position: int) -> list[int]:
        """Windows that each corpus has given before `position`."""
        cycle = turns(self.shares)
        cycles, place = divmod(position, len(cycle.corpus))
        return [cycles * share + int(own) for share, own in zip(self.shares, cycle.given[place], strict=True)]

    def epoch(self, position: int) -> int:
        """How often every corpus has been read whole before `position`: the epoch of the one that is read slowest."""
        return min(given // size for given, size in zip(self.given(position), self.sizes, strict=True))

    def passes(self, position: int) -> list[float]:
        """How often each corpus has been read before `position`."""
        return [given / size for given, size in zip(self.given(position), self.sizes, strict=True)]


@dataclass(frozen=True)
class Turns:
    """A cycle of P turns among N corpora."""

    corpus: npt.NDArray[np.int64]
    """Whose turn each is, (P,)."""
    given: npt.NDArray[np.int64]
    """Turns that each corpus had before each turn, (P, N)."""


@cache
def turns(shares: tuple[int, ...]) -> Turns:
    """The cycle in which each corpus has its number of turns, spread evenly.

    The k-th window of a corpus with share a of P may come from turn floor(k P / a) on and must have come by turn
    ceil((k + 1) P / a); of those that may, the one that must come first does, and of equals the first corpus.
    """
    period = sum(shares)
    had = [0] * len(shares)
    corpus, given = [], []
    for place in range(period):
        given.append(had.copy())
        due = [(-(-(k + 1) * period // a), n) for n, (k, a) in enumerate(zip(had, shares, strict=True))
               if k * period < a * (place + 1)]  # fmt: skip
        chosen = min(due)[1]
        corpus.append(chosen)
        had[chosen] += 1
    return Turns(np.array(corpus, np.int64), np.array(given, np.int64))


@cache
def _permutations(corpus: int) -> Callable[[int, int, int], npt.NDArray[np.int64]]:
    """The permutations of the corpus of that number in a mixture, by n_windows, seed and epoch; two are kept."""

    @lru_cache(maxsize=2)
    def permutation(n_windows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        return _permutation(n_windows, seed, epoch + (corpus << 48))

    return permutation


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
