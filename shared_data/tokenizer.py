"""The LLaMA-3 tokenizer: byte-level BPE with 128,000 ranks, followed by 256 control ids.

Text is only ever text: what spells a control token ("<|eot_id|>") is encoded as ordinary characters, so no id of
128,000 or more can come out of `encode`. The rank file belongs to the package llama-models (Llama 3 Community
Licence) and is read from where that package lies, without importing it. The split pattern, the order of the control
tokens and the two cuts of long text are those of `llama_models/llama3/api/tokenizer.py`, so that ids equal Meta's.
"""

import base64
import functools
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tiktoken

from shared_data.errors import UserError

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
    """BPE ranks: `encode` returns ids below it."""
    eos_token_id: int
    """Ends each document in a shard; a control id, at or above vocab_size."""
    pad_token_id: int
    _encoding: tiktoken.Encoding = field(repr=False)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, all below vocab_size. Lone surrogates are encoded as U+FFFD."""
        text, _ = replace_lone_surrogates(text)
        if len(text) <= MAX_RUN_CHARS:
            return self._encoding.encode_ordinary(text)
        return [token for piece in cut_long_text(text) for token in self._encoding.encode_ordinary(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control ids become their names, incomplete UTF-8 becomes U+FFFD.

        Raises:
            UserError: an id that the tokenizer does not have.
        """
        try:
            return self._encoding.decode(list(ids), errors="replace")
        except (KeyError, OverflowError):
            limit = self.vocab_size + _N_CONTROL_TOKENS
            wrong = next((token for token in ids if not 0 <= token < limit), None)
            raise UserError(f"token id {wrong}: the tokenizer {self.name} has ids 0 to {limit - 1}") from None


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


def read_ranks(path: Path, expected_sha256: str) -> dict[bytes, int]:
    """Read a tiktoken rank file: a token in base64 and its rank on each line.

    Raises:
        UserError: the file's bytes are not those of `expected_sha256`.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected_sha256:
        raise UserError(f"{path}: SHA-256 is {digest}, but the LLaMA-3 rank file has {expected_sha256}")
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


@functools.cache
def load_tokenizer(name: str = "llama3") -> Tokenizer:
    """Load a tokenizer once per process.

    Raises:
        UserError: an unknown name, a missing package, or a rank file that is not the known one.
    """
    if name != "llama3":
        raise UserError(f"tokenizer name is {name!r}: it must be 'llama3'")
    ranks = read_ranks(llama3_rank_file(), LLAMA3_SHA256)
    assert len(ranks) == LLAMA3_VOCAB_SIZE
    n_reserved = _N_CONTROL_TOKENS - len(_NAMED_CONTROL_TOKENS)
    control = [*_NAMED_CONTROL_TOKENS, *(f"<|reserved_special_token_{2 + i}|>" for i in range(n_reserved))]
    encoding = tiktoken.Encoding(
        name=name,
        pat_str=_SPLIT_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={token: LLAMA3_VOCAB_SIZE + i for i, token in enumerate(control)},
    )
    return Tokenizer(name, LLAMA3_VOCAB_SIZE, LLAMA3_EOS_ID, LLAMA3_PAD_ID, encoding)
