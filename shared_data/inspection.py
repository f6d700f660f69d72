"""`inspect`: random windows of a packed corpus as text, with the documents' boundaries and sources."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from shared_data import options
from shared_data.errors import UserError
from shared_data.manifest import TOKEN_DTYPE, Manifest, Sidecar, read_sidecar, sidecar_path
from shared_data.tokenizer import load_tokenizer

EXCERPT_CHARS = 300


@dataclass(frozen=True)
class Piece:
    """What a window holds of one document."""

    source: str | None
    """None: the shard has no sidecar, so that nobody knows."""
    shard: str
    document: int
    """Number of the document in its shard."""
    id: str | None
    """Its id or URL at its source, else its place there; None: nobody knows."""
    is_passkey: bool
    begin: int
    """First token in the window."""
    n_tokens: int
    starts_here: bool
    ends_here: bool
    text: str


class Corpus:
    """A folder of shards, read by token."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, Manifest.load(folder)
        self.paths = self.manifest.shard_paths(folder)
        self.starts = np.cumsum([0, *(shard.n_tokens for shard in self.manifest.shards)])
        self._tokenizer = load_tokenizer(self.manifest.tokenizer_name)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """The documents of tokens [begin, end), in order."""
        first = int(np.searchsorted(self.starts, begin, side="right")) - 1
        for shard in range(first, len(self.paths)):
            start, stop = int(self.starts[shard]), int(self.starts[shard + 1])
            if start >= end:
                return
            for piece in self._pieces_of_shard(shard, max(begin, start) - start, min(end, stop) - start):
                yield Piece(**{**asdict(piece), "begin": piece.begin + start - begin})

    def _pieces_of_shard(self, shard: int, begin: int, end: int) -> Iterator[Piece]:
        ids = np.memmap(self.paths[shard], TOKEN_DTYPE, mode="r")
        starts, sidecar = self._boundaries(shard, ids)
        for number in range(int(np.searchsorted(starts, begin, side="right")) - 1, len(starts)):
            whole = int(starts[number]), int(starts[number + 1]) if number + 1 < len(starts) else len(ids)
            first, last = max(whole[0], begin), min(whole[1], end)
            if first >= end:
                return
            own = [token for token in ids[first:last].tolist() if token != self.manifest.eos_token_id]
            yield Piece(
                source=sidecar.sources[sidecar.source_index[number]] if sidecar else None,
                shard=self.paths[shard].name,
                document=number,
                id=sidecar.ids[number] if sidecar and sidecar.ids is not None else None,
                is_passkey=bool(sidecar and number in sidecar.inserts),
                begin=first,
                n_tokens=last - first,
                starts_here=first == whole[0],
                ends_here=last == whole[1],
                text=self._tokenizer.decode(own),
            )

    def _boundaries(self, shard: int, ids: np.ndarray) -> tuple[np.ndarray, Sidecar | None]:
        if sidecar_path(self.paths[shard]).is_file():
            sidecar = read_sidecar(self.paths[shard], with_ids=True)
            return sidecar.starts, sidecar
        ends = np.flatnonzero(ids == self.manifest.eos_token_id)
        return np.concatenate([[0], ends[ends + 1 < len(ids)] + 1]), None


def excerpt(text: str, n_chars: int) -> str:
    """Beginning and end of a long text, with the number of characters between; control characters made visible."""
    shown = text.translate({code: f"\\x{code:02x}" for code in [*range(9), 11, *range(13, 32), 127]})
    if len(shown) <= 2 * n_chars:
        return shown
    return f"{shown[:n_chars]}\n      [... {len(shown) - 2 * n_chars:,} characters ...]\n{shown[-n_chars:]}"


def describe(piece: Piece, n_chars: int | None) -> str:
    """A piece as lines: a rule that says whose it is, and its text."""
    source = piece.source or "source unknown"
    kind = f"{source}, passkey" if piece.is_passkey else source
    begins = "" if piece.starts_here else ", begun in an earlier window"
    ends = "[end of document]" if piece.ends_here else "[goes on in the next window]"
    known = "" if piece.id is None or piece.is_passkey else f", from {excerpt(piece.id, EXCERPT_CHARS)}"
    place = f"document {piece.document} of {piece.shard}, tokens {piece.begin} to {piece.begin + piece.n_tokens - 1}"
    text = piece.text if n_chars is None else excerpt(piece.text, n_chars)
    return f"--- {kind}: {place}{known}{begins}\n{text}\n    {ends}"


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of shards: data/pretrain_chinchilla.")],
    windows: Annotated[int, typer.Option(min=1, help="Windows to show.")] = 2,
    window_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a window: the model's max_seq_len.")] = 4096,
    window: Annotated[list[int] | None, typer.Option(min=0, help="Show this window; may be repeated.")] = None,
    source: Annotated[str | None, typer.Option(metavar="ID", help="Only windows with a document of it.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole texts, not their beginnings and ends.")] = False,
    seed: Annotated[int | None, typer.Option(help="The same seed shows the same windows.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show random windows of a corpus as text, with where documents begin and end and what source they are of."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder of shards: name e.g. data/pretrain_chinchilla")
    corpus = Corpus(folder)
    total = int(corpus.starts[-1])
    count = max(1, (total - 1) // window_tokens)
    if source is not None and source not in corpus.manifest.sources:
        raise UserError(f"--source is {source!r}: the corpus has {', '.join(corpus.manifest.sources)}")
    if wrong := [number for number in window or () if number >= count]:
        raise UserError(f"--window is {wrong[0]}: the corpus has {count} windows of {window_tokens} tokens, from 0")
    numbers: Any = window or random.Random(seed).sample(range(count), count if source else min(windows, count))
    shown: list[dict[str, Any]] = []
    for number in numbers:
        begin = number * window_tokens
        pieces = list(corpus.pieces(begin, min(begin + window_tokens, total)))
        if source is None or any(piece.source == source for piece in pieces):
            shown.append({"window": number, "begin": begin, "pieces": [asdict(piece) for piece in pieces]})
            if not as_json:
                print(f"=== window {number} of {count}: {len(pieces)} documents, tokens from {begin:,} of {total:,}")
                for piece in pieces:
                    print(describe(piece, None if full else EXCERPT_CHARS))
                print()
        if not window and len(shown) == windows:
            break
    if as_json:
        print(json.dumps(shown, indent=2))
    if not shown:
        raise UserError(f"no window of {folder} has a document of {source}")
