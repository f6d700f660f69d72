"""Windows of token ids from a prepared corpus: a folder with manifest.json and shards, or one file.

Window i holds tokens [i T, i T + T + 1): its input is all but the last, its target all but the first. A window may
cross shards. Each shard is mapped once, when a window first needs it; the mapping keeps no file descriptor, so a corpus
may have more shards than the process may open files.
"""

import codecs
import errno
import hashlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.documents import document_ids
from gpt_oss_lite.training.data_order import DataOrder
from shared_data.console import progress
from shared_data.errors import UserError
from shared_data.manifest import MANIFEST_NAME, TOKEN_BYTES, Manifest

DEFAULT_FOLDER = Path("data/pretrain_chinchilla")
PREPARE_COMMAND = "python data/prepare_data.py --stage pretrain"
DEMO_FOLDER = Path("data/quickstart")
# torch.save writes a zip archive. As an id these four bytes would be 67,324,752: no raw corpus starts with them.
TENSOR_FILE_MAGIC = b"PK\x03\x04"

HEAD_BYTES = 4096
"""Of a corpus in one file, to tell text from ids."""

# Ids are read before the first step up to this many tokens; every window's ids are checked when it is loaded besides.
SCAN_TOKENS = 256_000_000

Ids = npt.NDArray[np.uint32]


def resolve_data_path(path: str | Path) -> Path:
    """Where a corpus lies: the path itself, or, when it is not there, $LLM_DATA_ROOT in place of its leading `data/`.

    Raises:
        FileNotFoundError: neither exists; the message says what to do.
    """
    path = Path(path)
    if path.exists():
        return path
    root = os.environ.get("LLM_DATA_ROOT")
    if root and path.parts[:1] == ("data",):
        moved = Path(root, *path.parts[1:])
        if moved.exists():
            return moved
    raise FileNotFoundError(errno.ENOENT, _why_missing(path), str(path))


def _why_missing(path: Path) -> str:
    if path.name == "validation" and path.parent.is_dir():
        return "no such folder: nothing was held out of that corpus (validation_share of the pipeline's settings)"
    looked = "no such corpus" if path.is_absolute() else f"no such corpus in the working folder {Path.cwd()}"
    if path.is_relative_to(DEMO_FOLDER):
        return f"{looked}; `make demo` makes it"
    if path.is_relative_to(DEFAULT_FOLDER):
        return f"{looked}; prepare it with `{PREPARE_COMMAND}`, or set LLM_DATA_ROOT"
    return f"{looked}; `{PREPARE_COMMAND} --mixture FILE --data-root DIR` makes DIR/pretrain_chinchilla"


class _MappedShard:
    """A file of little-endian uint32 ids, mapped when first read."""

    def __init__(self, path: Path, n_tokens: int) -> None:
        self.path, self.n_tokens = path, n_tokens
        self._ids: Ids | None = None

    @property
    def ids(self) -> Ids:
        if self._ids is None:
            open(self.path, "rb").close()  # an OSError where the file may not be read; torch makes it a RuntimeError
            mapped = torch.from_file(str(self.path), shared=False, size=self.n_tokens, dtype=torch.int32)
            self._ids = mapped.numpy().view("<u4")
        return self._ids


class _Tokens(Protocol):
    path: Path
    n_tokens: int

    @property
    def ids(self) -> Ids: ...


class _TensorFile:
    """A one-dimensional integer tensor written by torch.save."""

    def __init__(self, path: Path) -> None:
        try:
            tensor = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:  # the disk's, not the content's
            raise
        except Exception as error:  # a forged file makes the reader fail in any way
            raise UserError(f"{path}: not a saved tensor of token ids ({type(error).__name__})") from error
        if not isinstance(tensor, Tensor) or tensor.dim() != 1 or tensor.dtype.is_floating_point or tensor.is_complex():
            raise UserError(f"{path}: a saved corpus is one 1-dimensional integer tensor")
        if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < 2**32:
            raise UserError(f"{path}: token ids must lie in [0, 2**32), found {int(tensor.min())}..{int(tensor.max())}")
        self.path, self.n_tokens = path, tensor.numel()
        self.ids: Ids = tensor.to(torch.int64).numpy().astype("<u4")


class PretrainDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a corpus. `len` counts them; indexing gives (input, target), each (T,) int64.

    Args:
        path: folder with manifest.json and shards; or one file, raw little-endian uint32 ids or a tensor that
            torch.save wrote.
        max_seq_len: T, tokens of a window.
        vocab_rows: rows of the model's embedding; a window with an id beyond them raises. None: any id.

    Raises:
        FileNotFoundError: the path is not there; the message says what to do.
        UserError: the corpus is damaged, or shorter than one window.
    """

    def __init__(self, path: str | Path, max_seq_len: int, vocab_rows: int | None = None) -> None:
        self.path = resolve_data_path(path)
        self.max_seq_len = max_seq_len
        self.vocab_rows = vocab_rows
        self.manifest: Manifest | None = None
        if self.path.is_dir():
            self.manifest = Manifest.load(self.path)
            self.shards: list[_Tokens] = [
                _MappedShard(path, shard.n_tokens)
                for path, shard in zip(self.manifest.shard_paths(self.path), self.manifest.shards, strict=True)
            ]
        else:
            self.shards = [_open_file(self.path)]
        self.shard_starts = np.concatenate([[0], np.cumsum([shard.n_tokens for shard in self.shards], dtype=np.int64)])
        self.total_tokens = int(self.shard_starts[-1])
        self._n_windows = max(0, (self.total_tokens - 1) // max_seq_len)
        if self._n_windows == 0:
            raise UserError(
                f"{self.path}: {self.total_tokens} tokens, but one window takes {max_seq_len + 1} "
                "(model.max_seq_len + 1)"
            )

    def __len__(self) -> int:
        return self._n_windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = self.start_of(index)
        ids = self.tokens(start, start + self.max_seq_len + 1).astype(np.int64)
        if self.vocab_rows is not None and ids.max() >= self.vocab_rows:
            raise self._out_of_range(start, int(ids.max()))
        tokens = torch.from_numpy(ids)
        return tokens[:-1], tokens[1:]

    @property
    def parts(self) -> "Sequence[PretrainDataset]":
        """The corpora that this one is mixed of; itself where it is one."""
        return [self]

    def order(self, seed: int) -> DataOrder:
        """The order in which a run with this seed reads the windows."""
        return DataOrder(len(self), seed)

    def start_of(self, window: int) -> int:
        """First token of a window."""
        return window * self.max_seq_len

    def tokens(self, start: int, stop: int) -> Ids:
        """Ids [start, stop) of the whole corpus, across shards."""
        pieces = [self.shards[shard].ids[first:end] for shard, first, end in self.by_shard(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def by_shard(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where tokens [start, stop) of the whole corpus lie: (shard, first, end), its own tokens [first, end)."""
        shard = self.shard_of(start)
        while start < stop:
            first, end = int(self.shard_starts[shard]), min(stop, int(self.shard_starts[shard + 1]))
            yield shard, start - first, end - first
            start, shard = end, shard + 1

    def shard_of(self, position: int) -> int:
        """The shard that holds a token of the whole corpus."""
        return int(np.searchsorted(self.shard_starts, position, side="right")) - 1

    def check_ids(self) -> None:
        """Read the first SCAN_TOKENS ids and hold them against vocab_rows.

        Raises:
            UserError: an id is out of range; names the shard, the id and the rows.
        """
        assert self.vocab_rows is not None
        total = min(self.total_tokens, SCAN_TOKENS)
        block = 4_000_000
        with progress(f"check token ids of {self.path}", total, "tokens") as report:
            for start in range(0, total, block):
                ids = self.tokens(start, min(start + block, total))
                if ids.max() >= self.vocab_rows:
                    raise self._out_of_range(start + int(ids.argmax()), int(ids.max()))
                report.advance(len(ids))

    def _out_of_range(self, position: int, token: int) -> UserError:
        return UserError(
            f"{self.shards[self.shard_of(position)].path}: token id {token}, but the model has {self.vocab_rows} rows "
            "(model.padded_vocab_size, or model.vocab_size without it); run `gpt-oss-lite verify` on the corpus"
        )

    def fingerprint(self) -> dict[str, Any]:
        """What tells this corpus from another: its tokens, and a digest of the shards' digests or of the one file."""
        if self.manifest is not None:
            digests = "\n".join(f"{shard.n_tokens} {shard.sha256}" for shard in self.manifest.shards)
            return {"total_tokens": self.total_tokens, "sha256": hashlib.sha256(digests.encode()).hexdigest()}
        with open(self.path, "rb") as file:
            return {"total_tokens": self.total_tokens, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _open_file(path: Path) -> _Tokens:
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    size = path.stat().st_size
    if head.startswith(TENSOR_FILE_MAGIC):
        return _TensorFile(path)
    if _is_text(head):
        raise UserError(
            f"{path}: it holds text ({size} bytes), not token ids; make a corpus of it with `gpt-oss-lite prepare` "
            '(README.md, "Your own text") and name that'
        )
    if size == 0 or size % TOKEN_BYTES:
        raise UserError(
            f"{path}: {size} bytes; a corpus in one file is uint32 ids (a multiple of {TOKEN_BYTES} bytes, not 0) or a "
            "tensor that torch.save wrote"
        )
    return _MappedShard(path, size // TOKEN_BYTES)


def _is_text(head: bytes) -> bool:
    """Whether a file that begins so is text: each id below 2**24 has a byte that is 0, which text has not."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # which lets a character be cut off at the end
    except UnicodeDecodeError:
        return False
    return bool(head) and b"\0" not in head


def document_ids_of(ids_BT: Tensor, dataset: PretrainDataset, model: ModelConfig) -> Tensor | None:
    """Number of the document at each position of some windows, (B, T) int64; None unless model.document_mask."""
    if not model.document_mask:
        return None
    assert dataset.manifest is not None, "check_corpus refuses such a corpus"
    return document_ids(ids_BT, dataset.manifest.eos_token_id)


def check_corpus(dataset: PretrainDataset, model: ModelConfig, data_mix: str | None = None) -> None:
    """Hold a corpus against the model before the first step.

    Raises:
        UserError: an id, the EOS, the pad id or the vocabulary does not fit, or the mixture is another; names both
            values.
    """
    if len(dataset.parts) > 1:
        for part in dataset.parts:
            check_corpus(part, model, data_mix)
        return
    manifest = dataset.manifest
    if model.document_mask and manifest is None:
        raise UserError(f"model.document_mask is true, but {dataset.path} has no manifest that names its EOS id")
    rows = model.embedding_rows
    if manifest is not None:
        where = dataset.path / MANIFEST_NAME
        advice = "Set padded_vocab_size, or prepare the corpus with another tokenizer."
        keys = f"model.vocab_size {model.vocab_size}, model.padded_vocab_size {model.padded_vocab_size}"
        have = f"the model has {rows} rows ({keys})"
        for key in ("eos_token_id", "pad_token_id"):
            value = getattr(manifest, key)
            if value >= rows:
                raise UserError(f"{where}: {key} is {value}, but {have}. {advice}")
        if manifest.vocab_size != model.vocab_size:
            advice = f"Set model.vocab_size: {manifest.vocab_size}, or prepare the corpus with another tokenizer."
            raise UserError(f"{where}: vocab_size is {manifest.vocab_size}, but {have}. {advice}")
        _check_mixture(manifest, where, data_mix)
    elif data_mix is not None:
        raise UserError(f"data.data_mix is {data_mix!r}, but {dataset.path} has no manifest to check it against")
    dataset.check_ids()


def _check_mixture(manifest: Manifest, where: Path, data_mix: str | None) -> None:
    if data_mix is None:
        return
    if manifest.mixture != data_mix:
        its_name = f"--set data.data_mix={shlex.quote(manifest.mixture)}, or " if manifest.mixture else "--set "
        raise UserError(
            f"data.data_mix is {data_mix!r}, but {where} says that the corpus was made with {manifest.mixture!r} "
            f"(sources: {', '.join(manifest.sources)}); if that is the one you want: "
            f"{its_name}data.data_mix=null to take any"
        )
