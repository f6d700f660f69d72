"""Near duplicates by MinHash (Broder, 1997) and bands, as FineWeb uses it (Penedo et al., 2024, section 3.4).

A document's signature is cut into bands; documents that agree in one whole band are taken for near duplicates. With b
bands of r hashes, two documents whose sets of word n-grams overlap by s (Jaccard) meet with probability
1 - (1 - s^r)^b: 14 bands of 8 find 77 % of the pairs at 0.75 and 99.6 % at 0.85. Of the documents that
are linked, over any number of steps, the first in the order of (source, piece, line) stays.

Bands are compared one at a time, so memory is that of one band over all documents: 24 bytes a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save as save_safetensors

from shared_data.errors import require_extra
from shared_data.executor import Result
from shared_data.files import write_atomic


@dataclass(frozen=True)
class Banding:
    """How signatures are made and compared."""

    ngram_words: int
    bands: int
    rows: int
    """Hashes per band."""
    seed: int


class Signer:
    """Makes the bands of a document, with the library rensa."""

    def __init__(self, banding: Banding) -> None:
        self._banding = banding
        self._library = require_extra("rensa", "dedup")

    def __call__(self, text: str) -> np.ndarray:
        """A 64-bit value per band; equal bands have equal values. uint64 (bands,)."""
        own, words = self._banding, text.lower().split()
        grams = [" ".join(words[i : i + own.ngram_words]) for i in range(max(1, len(words) - own.ngram_words + 1))]
        minhash = self._library.RMinHash(num_perm=own.bands * own.rows, seed=own.seed)
        minhash.update(grams)
        hashes = np.array(minhash.digest(), np.uint64).reshape(own.bands, own.rows)
        values = np.zeros(own.bands, np.uint64)
        for column in hashes.T:
            values = (values ^ column) * np.uint64(0x9E3779B97F4A7C15)
            values ^= values >> np.uint64(32)
        return values


@dataclass(frozen=True)
class CompareBand:
    """Link the documents that agree in one band: writes (document, earlier document) of each link."""

    digests: tuple[Path, ...]
    """The digests file of each piece, in the order of (source, piece); documents are numbered through all of them."""
    band: int
    output: Path

    def run(self) -> Result:
        """Write the links."""
        columns = []
        for path in self.digests:
            with safetensors.safe_open(path, framework="numpy") as file:
                bands = file.get_slice("bands")
                if bands.get_shape()[0]:  # safetensors takes no slice of nothing: a piece whose documents all fell out
                    columns.append(np.ascontiguousarray(bands[:, self.band : self.band + 1])[:, 0])
        values = np.concatenate(columns) if columns else np.zeros(0, np.uint64)
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        # The sort is stable: within a group of equals each document follows the one before it in the corpus's order.
        links = np.stack([order[again], order[again - 1]], axis=1).astype(np.int64)
        write_atomic(self.output, save_safetensors({"links": np.ascontiguousarray(links)}))
        return Result({self.output: None}, {"links": len(links)})


def linked_documents(paths: Sequence[Path], n_documents: int) -> np.ndarray:
    """Which documents are linked to an earlier one over any number of steps: bool (n_documents,)."""
    first = np.arange(n_documents)
    links = np.zeros((0, 2), np.int64)
    for path in paths:
        with safetensors.safe_open(path, framework="numpy") as file:
            links = np.unique(np.concatenate([links, file.get_tensor("links")]), axis=0)
    # Each round hands the earliest known document along every link, then along the chains that this makes.
    while len(links):
        lowest = np.minimum(first[links[:, 0]], first[links[:, 1]])
        before = first.copy()
        for end in (first[links[:, 0]], first[links[:, 1]], links[:, 0], links[:, 1]):
            np.minimum.at(first, end, lowest)
        first = first[first]
        if (first == before).all():
            break
    return first != np.arange(n_documents)
