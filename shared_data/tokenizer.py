"""Tokenizers: LLaMA-3's (byte-level BPE with 128,000 ranks, then 256 control ids), or one from a file or the hub.

Text is only ever text: what spells a control token ("<|eot_id|>") is encoded as ordinary characters, so no id of
128,000 or more can come out of `encode`. The rank file belongs to the package llama-models (Llama 3 Community
Licence) and is read from where that package lies, without importing it. The split pattern, the order of the control
tokens and the two cuts of long text are those of `llama_models/llama3/api/tokenizer.py`, so that ids equal Meta's.
"""

import binascii
import functools
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken

from shared_data.encoders import Chosen, Encoder, HuggingFace, Tiktoken, choose
from shared_data.errors import UserError, require_extra
from shared_data.files import sha256_file

LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
LLAMA3_VOCAB_SIZE = 128_000
LLAMA3_EOS_ID = 128_009
LLAMA3_PAD_ID = 128_002

# tiktoken overflows its stack on very long matches (github.com/openai/tiktoken/issues/195): Meta's cuts, in characters.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED_CONTROL_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", "<|image|>",
)  # fmt: skip
_N_CONTROL_TOKENS = 256

_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_RUN = re.compile(r"\s+|\S+")


def replace_lone_surrogates(text: str) -> tuple[str, int]:
    """Make `text` encodable as UTF-8.

    A high surrogate followed by a low one is the character that the two stand for; a surrogate alone becomes U+FFFD.

    Returns:
        the text and the number of surrogates replaced.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        joined = _SURROGATE_PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
        return _LONE_SURROGATE.subn("\ufffd", joined)
    return text, 0


def _may_hold_long_run(text: str) -> bool:
    """Whether a run may be over the limit: such a run fills at least one aligned window of half the limit."""
    window_chars = MAX_RUN_CHARS // 2
    for start in range(0, len(text) - window_chars + 1, window_chars):
        window = text[start : start + window_chars]
        words = window.split(None, 1)
        if not words or len(words[0]) == window_chars:
            return True
    return False


def cut_long_text(text: str) -> Iterator[str]:
    """Cut text at 400,000 characters, and each run of white space or of other characters at every 25,000."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        if not _may_hold_long_run(piece):
            yield piece
            continue
        cuts = [
            cut for run in _RUN.finditer(piece) for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS)
        ]
        for begin, end in itertools.pairwise([0, *cuts, len(piece)]):
            yield piece[begin:end]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the ids that the shards need. Make it with `load_tokenizer`."""

    name: str
    vocab_size: int
    """`encode` returns ids below it."""
    eos_token_id: int
    """Ends each document in a shard, and never comes out of `encode`; LLaMA-3's lies above vocab_size."""
    pad_token_id: int
    n_ids: int
    """All ids, control ids included."""
    identity: str
    """What the ids depend on: the name of a known tokenizer, else the SHA-256 of its file."""
    encoder: Encoder = field(repr=False)
    about_encoder: str = ""
    """Which encoder is in use, and why."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, all below vocab_size. Lone surrogates are encoded as U+FFFD."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as an array, uint32."""
        text, _ = replace_lone_surrogates(text)
        if len(text) <= MAX_RUN_CHARS:
            return self.encoder.encode(text)
        return np.concatenate([self.encoder.encode(piece) for piece in cut_long_text(text)])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control ids become their names, incomplete UTF-8 becomes U+FFFD.

        Raises:
            UserError: an id that the tokenizer does not have.
        """
        try:
            return self.encoder.decode(ids)
        except (KeyError, OverflowError):
            wrong = next((token for token in ids if not 0 <= token < self.n_ids), None)
            raise UserError(f"token id {wrong}: the tokenizer {self.name} has ids 0 to {self.n_ids - 1}") from None


def llama3_rank_file() -> Path:
    """Where the installed llama-models keeps the rank file.

    Raises:
        UserError: the package is missing, or is a release that keeps the file elsewhere.
    """
    spec = importlib.util.find_spec("llama_models")
    advice = "install it with: pip install 'gpt-oss-lite[data]'"
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the LLaMA-3 tokenizer's package llama-models is not installed; {advice}")
    path = Path(spec.submodule_search_locations[0], "llama3", "api", "tokenizer.model")
    if not path.is_file():
        raise UserError(f"{path} is not there: this release of llama-models has no LLaMA-3 rank file; {advice}")
    return path


def read_ranks(path: Path, expected_sha256: str | None) -> dict[bytes, int]:
    """Read a tiktoken rank file: a token in base64 and its rank on each line.

    Raises:
        UserError: it is no rank file, or its bytes are not those of `expected_sha256`.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if expected_sha256 is not None and digest != expected_sha256:
        raise UserError(f"{path}: SHA-256 is {digest}, but the LLaMA-3 rank file has {expected_sha256}")
    try:
        words = content.split()  # in one go: this is half of the time that a process takes to begin
        decode = functools.partial(binascii.a2b_base64, strict_mode=True)
        return dict(zip(map(decode, words[::2]), map(int, words[1::2]), strict=True))
    except ValueError as error:
        raise UserError(f"{path}: not a tiktoken rank file ({error})") from None


LLAMA3 = "llama3"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".json", ".model", ".tiktoken")
EncoderChoice = Literal["auto", "tiktoken"]


@functools.cache
def load_tokenizer(
    name: str = LLAMA3,
    *,
    encoder: EncoderChoice = "tiktoken",
    pattern: str | None = None,
    revision: str | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> Tokenizer:
    """Load a tokenizer once per process.

    Args:
        name: llama3; or a tokenizer.json; or a tiktoken rank file (.model, .tiktoken); or ORG/NAME on the hub, which
            must have a tokenizer.json.
        encoder: auto takes the fast encoder of a rank file where that proves equal (see `encoders`).
        pattern: the regular expression that splits text before a rank file is applied. None: LLaMA-3's.
        revision: commit or tag on the hub.
        eos_token_id: ends documents; needed but for llama3.
        pad_token_id: may pad windows; needed but for llama3.

    Raises:
        UserError: an unknown name, a missing package, a file that is not what it should be, or ids that are not there.
    """
    if name == LLAMA3:
        return _load_ranks(name, llama3_rank_file(), encoder, _SPLIT_PATTERN, LLAMA3_EOS_ID, LLAMA3_PAD_ID)
    path = Path(name).expanduser()
    if not path.is_file() and (_HUB_NAME.fullmatch(name) is None or path.suffix in _FILE_SUFFIXES):
        raise UserError(
            f"tokenizer name is {name!r}: it must be 'llama3', a tokenizer.json or a tiktoken rank file that is there, "
            "or ORG/NAME on the hub"
        )
    if eos_token_id is None or pad_token_id is None:
        raise UserError(f"tokenizer name is {name!r}: only llama3 has known EOS and pad ids; give both")
    if not path.is_file():
        path = _hub_file(name, revision)
    if path.suffix != ".json":
        return _load_ranks(name, path, encoder, pattern or _SPLIT_PATTERN, eos_token_id, pad_token_id)
    loaded = HuggingFace(path)
    for key, value in (("eos_token_id", eos_token_id), ("pad_token_id", pad_token_id)):
        if value >= loaded.n_ids:
            raise UserError(f"tokenizer {key} is {value}: the tokenizer {name} has ids 0 to {loaded.n_ids - 1}")
    about = "tokenizers, which reads tokenizer.json"
    return Tokenizer(name, loaded.n_ids, eos_token_id, pad_token_id, loaded.n_ids, sha256_file(path), loaded, about)


def _load_ranks(
    name: str, path: Path, encoder: EncoderChoice, pattern: str, eos_token_id: int, pad_token_id: int
) -> Tokenizer:
    """A rank file, with LLaMA-3's control tokens above its ranks if it is LLaMA-3's, else with EOS and pad there."""
    ranks = read_ranks(path, LLAMA3_SHA256 if name == LLAMA3 else None)
    size = len(ranks)
    if sorted(ranks.values()) != list(range(size)):
        raise UserError(f"{path}: the ranks are not 0 to {size - 1}")
    n_reserved = _N_CONTROL_TOKENS - len(_NAMED_CONTROL_TOKENS)
    control = [*_NAMED_CONTROL_TOKENS, *(f"<|reserved_special_token_{2 + i}|>" for i in range(n_reserved))]
    for key, value in (("eos_token_id", eos_token_id), ("pad_token_id", pad_token_id)):
        if not size <= value < size + _N_CONTROL_TOKENS:
            raise UserError(
                f"tokenizer {key} is {value}: above the {size} ranks of {name} there are ids {size} to "
                f"{size + _N_CONTROL_TOKENS - 1}"
            )
    encoding = tiktoken.Encoding(
        name=name,
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={token: size + i for i, token in enumerate(control)},
    )
    reference = Tiktoken(encoding)
    chosen = choose(reference, path, pattern, control) if encoder == "auto" else Chosen(reference, "as configured")
    identity = name if name == LLAMA3 else fingerprint_text(sha256_file(path) + pattern)
    about = f"{chosen.encoder.name} ({chosen.reason})"
    n_ids = size + _N_CONTROL_TOKENS
    return Tokenizer(name, size, eos_token_id, pad_token_id, n_ids, identity, chosen.encoder, about)


def fingerprint_text(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _hub_file(name: str, revision: str | None) -> Path:
    hub = require_extra("huggingface_hub", "data")
    try:
        return Path(hub.hf_hub_download(name, "tokenizer.json", revision=revision))
    except Exception as error:  # the hub client's and the network's own errors, told in one line
        words = " ".join(str(error).split())[:200]
        raise UserError(f"tokenizer {name}: cannot be fetched from the hub ({type(error).__name__}: {words})") from None
