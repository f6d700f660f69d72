"""The fast encoder is used only where it equals tiktoken; and tokenizers other than LLaMA-3's."""

import random
import sysconfig
from pathlib import Path

import numpy as np
import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from shared_data import encoders
from shared_data.config.schema import TokenizerConfig
from shared_data.errors import UserError
from shared_data.tokenizer import llama3_rank_file, load_tokenizer
from shared_data.tokenizing import tokenizer_of

FAST, REFERENCE = load_tokenizer(encoder="auto"), load_tokenizer()
CONTROL = ["<|begin_of_text|>", "<|eot_id|>"]


def test_the_fast_encoder_is_in_use_here_and_says_so():
    assert FAST.about_encoder == "splintr-rs (equal to tiktoken on the probe texts)"
    assert REFERENCE.about_encoder == "tiktoken (as configured)"


def test_the_fast_encoder_equals_tiktoken_on_real_text():
    folders = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    paths = [*sorted(folders[0].glob("*.py"))[:60], *sorted(folders[1].glob("*.dist-info/METADATA"))]
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        assert np.array_equal(FAST.encode_array(text), REFERENCE.encode_array(text)), path


def test_the_fast_encoder_equals_tiktoken_on_random_text():
    rng = random.Random(1)
    for _ in range(1000):
        text = "".join(chr(rng.choice((rng.randint(0, 255), rng.randint(0, 0xD7FF), 32, 10))) for _ in range(60))
        assert FAST.encode(text) == REFERENCE.encode(text), repr(text)


def test_a_text_of_many_long_runs_equals_tiktoken():
    text = ("x" * 25_001 + " " * 25_000 + "y") * 9
    assert FAST.encode(text) == REFERENCE.encode(text)


def wrong_on_one_text(text: str) -> np.ndarray:
    ids = REFERENCE.encode_array(text)
    return ids[:-1] if text == "a<|eot_id|>b <|eot_id|> \n" else ids


def panics(text: str) -> np.ndarray:
    class PanicException(BaseException):
        pass

    if text.startswith("ab" * 1500):
        raise PanicException("index out of bounds")
    return REFERENCE.encode_array(text)


@pytest.mark.parametrize(
    ("encode", "differs_on"), [(wrong_on_one_text, "a<|eot_id|>b <|eot_id|> \n"), (panics, "ab" * 1500)]
)
def test_one_difference_is_enough_for_tiktoken(monkeypatch, encode, differs_on):
    assert encoders.prove(encode, REFERENCE.encode_array, CONTROL) == differs_on
    monkeypatch.setattr(encoders.Fast, "encode", lambda self, text: encode(text))
    reference = REFERENCE.encoder
    chosen = encoders.choose(reference, llama3_rank_file(), r"\S+|\s+", CONTROL)
    assert chosen.encoder is reference
    assert chosen.reason.startswith("splintr-rs differs from tiktoken on ")


def test_another_pattern_is_no_reason_to_differ_in_silence():
    """The check is about this rank file and this pattern: whatever the encoder makes of them, ids are tiktoken's."""
    settings = {"eos_token_id": 128_000, "pad_token_id": 128_001, "pattern": r"\w+|\W+"}
    own = load_tokenizer(str(llama3_rank_file()), encoder="auto", **settings)
    plain = load_tokenizer(str(llama3_rank_file()), **settings)
    text = "Words, words... and  123456\n"
    assert own.encode(text) == plain.encode(text) != REFERENCE.encode(text)
    assert own.identity == plain.identity != REFERENCE.identity


def test_d18_memory_stays_flat_on_text_that_never_repeats():
    rng, process, sizes = random.Random(2), psutil.Process(), []
    for _ in range(6):
        for _ in range(1000):
            FAST.encode_array(" ".join(f"{rng.getrandbits(60):x}" for _ in range(200)))
        sizes.append(process.memory_info().rss)
    assert max(sizes[2:]) < sizes[1] + (6 << 20)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> Path:
    """A byte-level tokenizer with a control token, trained here."""
    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    own.train_from_iterator(["the cat and the hat sat on the mat"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    own.save(str(path))
    return path


def test_a_tokenizer_json_encodes_text_as_text(tokenizer_json):
    size = tokenizers.Tokenizer.from_file(str(tokenizer_json)).get_vocab_size()
    settings = TokenizerConfig(name=str(tokenizer_json), vocab_size=size, eos_token_id=0, pad_token_id=0)
    own = tokenizer_of(settings)
    assert (own.vocab_size, own.eos_token_id) == (size, 0)
    for text in ("the cat", "a<|end|>b", "naïve 中\n"):
        ids = own.encode(text)
        assert 0 not in ids, "a text that spells the control token must not end the document"
        assert own.decode(ids) == text
    with pytest.raises(UserError, match=f"has ids 0 to {size - 1}"):
        own.decode([size])


def test_a_rank_file_needs_ids_above_its_ranks():
    path = str(llama3_rank_file())
    with pytest.raises(UserError, match="only llama3 has known EOS and pad ids"):
        load_tokenizer(path)
    with pytest.raises(UserError, match="eos_token_id is 5: above the 128000 ranks"):
        load_tokenizer(path, eos_token_id=5, pad_token_id=128_000)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("x.json", "{}", "not a tokenizer.json"), ("x.model", "no ranks", "not a tiktoken rank file"),
     ("y.model", "YQ== 0\nYg== 2\n", "the ranks are not 0 to 1")],
)  # fmt: skip
def test_a_damaged_tokenizer_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(str(tmp_path / name), eos_token_id=2, pad_token_id=2)
    assert name in str(caught.value)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub():
    with pytest.raises(UserError, match=r"a/tokenizer\.json'.*it must be 'llama3', a tokenizer.json"):
        load_tokenizer("a/tokenizer.json", eos_token_id=0, pad_token_id=0)
