"""What turns text into ids: tiktoken, which is the reference, a fast encoder that must prove itself, and tokenizers.

The fast encoder (splintr-rs, extra `fast`) is young. `prove` compares it with tiktoken on texts that encoders are known
to get wrong, at every start; one difference and tiktoken is used.
"""

import importlib.util
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tiktoken

from shared_data.errors import UserError, require_extra

ID_DTYPE = np.dtype("<u4")


class Encoder(Protocol):
    """Encodes ordinary text: what spells a control token stays text."""

    name: str

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text without lone surrogates, uint32."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; incomplete UTF-8 becomes U+FFFD. Raises KeyError or OverflowError for an unknown id."""
        ...


class Tiktoken:
    """tiktoken, also the decoder of the fast encoder."""

    name = "tiktoken"

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding

    def encode(self, text: str) -> np.ndarray:
        """See Encoder."""
        return np.array(self.encoding.encode_ordinary(text), ID_DTYPE)

    def decode(self, ids: Sequence[int]) -> str:
        """See Encoder."""
        return self.encoding.decode(list(ids), errors="replace")


class Fast:
    """splintr-rs for encoding, tiktoken for decoding."""

    name = "splintr-rs"

    def __init__(self, rank_file: Path, pattern: str, reference: Tiktoken) -> None:
        library = require_extra("splintr", "fast")
        self._tokenizer = library.Tokenizer(str(rank_file), pattern)
        self._reference = reference

    def encode(self, text: str) -> np.ndarray:
        """See Encoder."""
        return np.frombuffer(self._tokenizer.encode_flat(text), ID_DTYPE)

    def decode(self, ids: Sequence[int]) -> str:
        """See Encoder."""
        return self._reference.decode(ids)


class HuggingFace:
    """A tokenizer.json, through the library tokenizers."""

    name = "tokenizers"

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are processes
        library = require_extra("tokenizers", "data")
        try:
            self._tokenizer: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"{path}: not a tokenizer.json ({error})") from None
        # Otherwise text that spells a control token would become one.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.n_ids: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> np.ndarray:
        """See Encoder."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, ID_DTYPE)

    def decode(self, ids: Sequence[int]) -> str:
        """See Encoder."""
        for own in ids:
            if self._tokenizer.id_to_token(int(own)) is None:
                raise KeyError(own)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class Chosen(NamedTuple):
    """The encoder in use and why it is that one."""

    encoder: Encoder
    reason: str


def choose(reference: Tiktoken, rank_file: Path, pattern: str, control: Sequence[str]) -> Chosen:
    """The fast encoder where it is installed and proves equal to the reference, else the reference."""
    if importlib.util.find_spec("splintr") is None:
        return Chosen(reference, "a faster encoder comes with: pip install 'gpt-oss-lite[fast]'")
    try:
        fast = Fast(rank_file, pattern, reference)
    except Exception as error:  # a young library: whatever it raises, there is tiktoken
        return Chosen(reference, f"splintr-rs cannot read the rank file ({error})")
    if (wrong := prove(fast.encode, reference.encode, control)) is not None:
        return Chosen(reference, f"splintr-rs differs from tiktoken on {wrong[:40]!r}")
    return Chosen(fast, "equal to tiktoken on the probe texts")


def prove(
    encode: Callable[[str], np.ndarray], reference: Callable[[str], np.ndarray], control: Sequence[str]
) -> str | None:
    """The first probe text that two encoders encode differently, or None."""
    for text in probe_texts(control):
        try:
            same = np.array_equal(encode(text), reference(text))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            same = False  # a panic in Rust arrives as a BaseException
        if not same:
            return text
    return None


_HARD = (
    "", " ", "\n", "a", " \n \n\n  x", "\t\t\tif x:\n\t\t\t\treturn\r\n\r\n", "x \n" * 300, "\r\n" * 300,
    "don't I'll WE'VE it's 'S 'LL can’t ʼs", "'" * 50 + "s", "1234567890 1 12 123 1234 ١٢٣٤ ४५६ Ⅷ ²³",
    "\x00\x01\x7f\x85\xa0\u200b\u200d\u2028\u3000\ufeff", "e\u0301 é Å \u212b ﬁ ǆ ſK İı ŉ", "ÄÖÜß" * 200,
    "中文字符，日本語のテキスト。한국어 ไทย हिन्दी العربية עברית", "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0001f600\U000e0061",
    "\ufffd\ufffe\U0010ffff", "!!!???...,,,;;;---___***///\\\\\\", "https://a.b/c?d=e&f=%20#g $x_1 = {'k': [1]};",
    "a" * 3000, " " * 3000, "\n" * 1000, "ab" * 1500, "<|", "|>", "<|eot_id", "<||>",
)  # fmt: skip
_CHARS = " \n\t\r.,'\"!-_(){}<|>#0123789abcdeszABCZÄéß中あ한😀١\u200d\u00a0\u0301\x00\u2028"
_PIECES = [*_CHARS, " the", "ing", "'re", "'LL", "  ", "\r\n", "http"]


def probe_texts(control: Sequence[str]) -> list[str]:
    """Texts that encoders are known to differ on: contractions, digits, white space, spelled control tokens, ..."""
    spelled = [text for token in control[:24] for text in (token, f"a{token}b {token} \n")]
    rng = random.Random(17)
    return [*_HARD, *spelled, *("".join(rng.choices(_PIECES, k=rng.randint(1, 80))) for _ in range(400))]
