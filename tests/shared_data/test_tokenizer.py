"""The LLaMA-3 tokenizer against Meta's own code (llama-models) and against published ids."""

import random
import subprocess
import sys

import pytest
from llama_models.llama3.api.tokenizer import Tokenizer as MetaTokenizer

from shared_data.errors import UserError
from shared_data.tokenizer import cut_long_text, llama3_rank_file, load_tokenizer, read_ranks, replace_lone_surrogates


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def meta():
    return MetaTokenizer.get_instance()


def test_known_ids(tokenizer):
    assert tokenizer.encode("Hello world") == [9906, 1917]
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id) == (128000, 128009, 128002)
    assert tokenizer.decode([9906, 1917, 128009]) == "Hello world<|eot_id|>"


@pytest.mark.parametrize("text", ["a<|eot_id|>b", "<|begin_of_text|>", "<|reserved_special_token_0|> <|end_of_text|>"])
def test_d12_text_that_spells_a_control_token_stays_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert max(ids) < 128000
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "expected", "replaced"),
    [
        ("a\ud800b", "a\ufffdb", 1),
        ("\udc00\ud800", "\ufffd\ufffd", 2),
        ("\ud83d\ude00", "\U0001f600", 0),
        ("plain", "plain", 0),
    ],
)
def test_d13_lone_surrogates_have_one_outcome_and_are_counted(tokenizer, text, expected, replaced):
    assert replace_lone_surrogates(text) == (expected, replaced)
    assert tokenizer.decode(tokenizer.encode(text)) == expected


HARD = {
    "spaces": " " * 100_000,
    "letters": "a" * 60_000,
    "runs at the limit": ("x" * 25_001 + " " * 25_000 + "y") * 20,
    "exactly the limit": " " * 25_000 + "a" * 25_000,
    "over 400,000 characters": "word and é ß 12345 \n\n" * 25_000,
    "odd white space": "\x85\x1c\u3000" * 12_000,
    "empty": "",
}


@pytest.mark.parametrize("name", HARD)
def test_ids_equal_metas_on_long_runs(tokenizer, meta, name):
    assert tokenizer.encode(HARD[name]) == meta.encode(HARD[name], bos=False, eos=False)


def test_ids_equal_metas_on_random_text(tokenizer, meta):
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(" \n\t.,'sabcÄ中😀١٢3 <|>\u200d\x00", k=rng.randint(0, 200)))
        assert tokenizer.encode(text) == meta.encode(text, bos=False, eos=False)


def test_cutting_loses_nothing():
    text = ("a" * 30_000 + " ") * 40
    assert "".join(cut_long_text(text)) == text


def test_rank_file_is_found_without_importing_its_package():
    code = "import sys; from shared_data.tokenizer import *; load_tokenizer(); print('llama_models' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_another_rank_file_is_refused(tmp_path):
    changed = tmp_path / "tokenizer.model"
    changed.write_bytes(llama3_rank_file().read_bytes().replace(b"IQ== 0", b"IQ== 1", 1))
    with pytest.raises(UserError, match="SHA-256"):
        read_ranks(changed, "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55")


def test_unknown_names_and_ids_are_refused(tokenizer):
    with pytest.raises(UserError, match="'gpt2': it must be 'llama3'"):
        load_tokenizer("gpt2")
    with pytest.raises(UserError, match="token id 128256: the tokenizer llama3 has ids 0 to 128255"):
        tokenizer.decode([128256])
