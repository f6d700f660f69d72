"""A packed corpus on disk: shards of token ids, a sidecar beside each, and the manifest that names them.

    FOLDER/manifest.json
    FOLDER/shard_00000.bin     little-endian uint32 ids and nothing else; each document ends with the EOS id
    FOLDER/shard_00000.idx     where its documents start, their source, length in bytes and id (safetensors)

The manifest is a function of the shards and sidecars alone (`manifest_builder`), so that a lost one is rebuilt byte for
byte and never guessed. Readers that know only the .bin files are unaffected by the rest.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

import numpy as np
import safetensors
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.numpy import save as save_safetensors

from shared_data.errors import UserError
from shared_data.files import sha256_file, write_atomic

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = "1.0.0"
TOKEN_BYTES = 4
TOKEN_DTYPE = np.dtype("<u4")
SIDECAR_VERSION = 2
"""2: with the documents' ids, which a reader of version 1 passes over."""
_SIDECAR_KEY = "sidecar"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class SourceInfo(_Record):
    """A source as the mixture names it."""

    id: str
    weight: float
    """Share of the training tokens."""


class CorpusInfo(_Record):
    """What holds for a whole corpus. Each sidecar carries it, so that the manifest can be rebuilt."""

    corpus: str
    """Fingerprint of everything that the packing depended on: shards of two packings are never taken for one corpus."""
    mixture: str
    tokenizer_name: str
    vocab_size: int
    eos_token_id: int
    pad_token_id: int
    dtype: Literal["uint32"] = "uint32"
    shard_size_tokens: int = Field(ge=1)
    window_tokens: int = Field(default=4096, ge=1)
    """Size of the windows that long-context shards are made of."""
    sources: list[SourceInfo]


class Position(_Record):
    """Which shard of its packing a file is."""

    split: Literal["train", "validation", "long"]
    index: int = Field(ge=0)
    count: int = Field(ge=1)
    """Shards of this split: tells a rebuilt manifest that one is missing."""


@dataclass(frozen=True)
class Sidecar:
    """A shard's documents, in the shard's order; N of them."""

    starts: np.ndarray
    """First token of each document, int64 (N,)."""
    source_index: np.ndarray
    """Index into `sources`, int32 (N,)."""
    n_bytes: np.ndarray
    """UTF-8 bytes of each document's text, int64 (N,): the denominator of bits per byte."""
    n_tokens: int
    """Tokens of the shard, EOS included."""
    sha256: str
    """SHA-256 of the shard."""
    info: CorpusInfo
    position: Position
    inserts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Which of the documents are passkey inserts, not text of their source, int64."""
    ids: Sequence[str] | None = None
    """Where each document comes from: its id or URL at its source, else its place there. None: unknown, or not read."""

    @property
    def sources(self) -> list[str]:
        """Ids of the corpus's sources, in the mixture's order."""
        return [source.id for source in self.info.sources]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, EOS included, int64 (N,)."""
        return np.diff(self.starts, append=self.n_tokens)


def sidecar_path(shard: Path) -> Path:
    """The sidecar that belongs to a shard."""
    return shard.with_suffix(".idx")


def sidecar_bytes(sidecar: Sidecar) -> bytes:
    """The content of a sidecar file. One metadata key only: safetensors keeps several in no fixed order."""
    arrays: dict[str, np.ndarray] = {
        "starts": sidecar.starts.astype(np.int64),
        "source_index": sidecar.source_index.astype(np.int32),
        "n_bytes": sidecar.n_bytes.astype(np.int64),
    }
    if len(sidecar.inserts):
        arrays["inserts"] = sidecar.inserts.astype(np.int64)
    about: dict[str, Any] = {
        "version": 1 if sidecar.ids is None else SIDECAR_VERSION,
        "n_tokens": sidecar.n_tokens,
        "sha256": sidecar.sha256,
        "position": sidecar.position.model_dump(),
        "info": sidecar.info.model_dump(),
    }
    if sidecar.ids is not None:
        arrays["ids"], arrays["id_ends"] = join_ids([name.encode() for name in sidecar.ids])
        about["ids_sha256"] = _digest_of_ids(arrays)
    return save_safetensors(arrays, metadata={_SIDECAR_KEY: json.dumps(about)})


def join_ids(ids: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Ids as a file keeps them: their UTF-8 bytes, uint8, and where each of the N ends, int64 (N,)."""
    return np.frombuffer(b"".join(ids), np.uint8), np.cumsum([len(own) for own in ids], dtype=np.int64)


def split_ids(content: np.ndarray, ends: np.ndarray, rows: Sequence[int] | np.ndarray) -> list[str]:
    """Some of the ids that `join_ids` joined."""
    return [content[ends[row - 1] if row else 0 : ends[row]].tobytes().decode() for row in rows]


def _digest_of_ids(arrays: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(arrays["ids"].tobytes() + arrays["id_ends"].tobytes()).hexdigest()


def read_sidecar(path: Path | str, *, with_ids: bool = False) -> Sidecar:
    """Read a sidecar, given its path or that of its shard; the documents' ids only if asked for.

    Raises:
        UserError: it is missing or damaged.
    """
    path = sidecar_path(Path(path))
    if not path.is_file():
        raise UserError(
            f"{path} is not there: without its sidecar a shard's documents are unknown; pack the corpus again"
        )
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()[_SIDECAR_KEY])
            optional = {"inserts"} & set(file.keys())
            arrays = {name: file.get_tensor(name) for name in ("starts", "source_index", "n_bytes", *optional)}
            ids = _read_ids(file, about["ids_sha256"]) if with_ids and "ids_sha256" in about else None
        info, position = CorpusInfo.model_validate(about["info"]), Position.model_validate(about["position"])
        known: dict[str, Any] = {"n_tokens": int(about["n_tokens"]), "sha256": str(about["sha256"]), "ids": ids}
        return Sidecar(**arrays, **known, info=info, position=position)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a whole sidecar ({str(error).splitlines()[0]}); pack the corpus again") from None


def _read_ids(file: Any, sha256: str) -> list[str]:
    arrays = {name: file.get_tensor(name) for name in ("ids", "id_ends")}
    if _digest_of_ids(arrays) != sha256:
        raise ValueError("its documents' ids are damaged")
    return split_ids(arrays["ids"], arrays["id_ends"], range(len(arrays["id_ends"])))


class ShardEntry(_Record):
    """A shard as the manifest names it."""

    index: int = Field(ge=0)
    path: str
    """Relative to the manifest."""
    n_tokens: int = Field(ge=1)
    sha256: str
    n_eos: int = Field(ge=0)
    """EOS ids, which is the number of documents."""


class SourceEntry(_Record):
    """What a source contributed to this corpus."""

    weight: float
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    bytes: int = Field(ge=0)
    """UTF-8 bytes of its documents' text."""
    inserts: int = Field(0, ge=0)
    """Passkey inserts among its documents."""
    insert_tokens: int = Field(0, ge=0)
    """Tokens of these, among its tokens."""


class LongContextEntry(_Record):
    """The long-context windows of a corpus."""

    window_tokens: int = Field(ge=1)
    windows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    """Documents of text."""
    inserts: int = Field(ge=0)
    insert_tokens: int = Field(ge=0)


class Manifest(_Record):
    """manifest.json. Keys that it does not know are allowed."""

    version: str
    corpus: str | None = None
    mixture: str | None = None
    """Name of the mixture that the corpus was made with."""
    vocab_size: int = Field(ge=1)
    eos_token_id: int = Field(ge=0)
    pad_token_id: int = Field(ge=0)
    tokenizer_name: str
    dtype: Literal["uint32"]
    shard_size_tokens: int = Field(ge=1)
    total_tokens: int = Field(ge=0)
    total_documents: int = Field(0, ge=0)
    oversized_documents: int = Field(0, ge=0)
    """Documents longer than shard_size_tokens; each has a shard of its own."""
    shard_count: int = Field(ge=0)
    shards_dir: str
    shards: list[ShardEntry]
    sources: dict[str, SourceEntry]
    long_context: LongContextEntry | None = None
    """What of all this lies in long-context shards, which are the first."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.shard_count != len(self.shards):
            raise ValueError(f"shard_count is {self.shard_count}, but shards has {len(self.shards)} entries")
        if self.total_tokens != sum(shard.n_tokens for shard in self.shards):
            raise ValueError(f"total_tokens is {self.total_tokens}, but the shards' n_tokens add up to another number")
        for position, shard in enumerate(self.shards):
            path = PurePosixPath(shard.path)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(
                    f"shards[{position}].path is {shard.path!r}: it must stay inside the manifest's folder"
                )
            if shard.index != position:
                raise ValueError(f"shards[{position}].index is {shard.index}: it must be {position}")
        return self

    @classmethod
    def load(cls, folder: Path | str, *, check_sizes: bool = True, check_hashes: bool = False) -> Self:
        """Read and check the manifest of a corpus.

        Args:
            folder: the corpus, which holds manifest.json.
            check_sizes: look whether every shard is there with its size.
            check_hashes: also read every shard and compare its SHA-256.

        Raises:
            UserError: the manifest is missing or wrong, or a shard is not as it says.
        """
        folder = Path(folder)
        path = folder / MANIFEST_NAME
        if not path.is_file() and not any(folder.glob("shard_*.bin")):
            inside = folder / "pretrain_chinchilla"
            hint = f"; did you mean {inside}?" if inside.is_dir() else ""
            raise UserError(f"{folder} holds no corpus: neither {MANIFEST_NAME} nor shards{hint}")
        if not path.is_file():
            raise UserError(f"{path} is not there: rebuild it with: gpt-oss-lite verify {folder} --repair")
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise UserError(f"{path}: {_first_error(error)}") from None
        problems = manifest.problems(folder, check_hashes=check_hashes) if check_sizes else []
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise UserError(f"{problems[0]}{more}; see: gpt-oss-lite verify {folder}")
        return manifest

    def shard_paths(self, folder: Path | str) -> list[Path]:
        """The shards' paths, in order."""
        return [Path(folder) / shard.path for shard in self.shards]

    def problems(self, folder: Path, *, check_hashes: bool) -> list[str]:
        """One line per shard that is missing, has the wrong size or, if asked, the wrong bytes."""
        found = []
        for shard, path in zip(self.shards, self.shard_paths(folder), strict=True):
            expected = shard.n_tokens * TOKEN_BYTES
            if not path.is_file():
                found.append(f"{path} is not there, but {MANIFEST_NAME} names it")
            elif path.stat().st_size != expected:
                found.append(f"{path} has {path.stat().st_size} bytes, but {MANIFEST_NAME} says {expected}")
            elif check_hashes and sha256_file(path) != shard.sha256:
                found.append(f"{path}: SHA-256 is not the one in {MANIFEST_NAME}")
        return found

    def write(self, folder: Path | str) -> None:
        """Write manifest.json, whole or not at all."""
        write_atomic(Path(folder) / MANIFEST_NAME, self.to_json())

    def to_json(self) -> str:
        """The content of manifest.json."""
        return self.model_dump_json(indent=2) + "\n"


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"{key}: {first['msg']}" if key else first["msg"].removeprefix("Value error, ")


def shard_files(folder: Path) -> list[Path]:
    """The shards in a folder, by number."""
    return sorted(folder.glob("shard_*.bin"), key=lambda path: (len(path.name), path.name))
