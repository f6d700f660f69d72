"""The exported tokenizer, loaded by transformers: ids equal tiktoken's, text is only text, decoding inverts."""

import pytest
import torch
from command_line import MODEL_SETTINGS
from exported import save
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.export.hf import export_checkpoint
from gpt_oss_lite.inference.generate import generate
from gpt_oss_lite.model.transformer import GPTOSS
from shared_data.tokenizer import load_tokenizer

TEXTS = [
    "",
    "Hello world",
    " leading and trailing  ",
    "tabs\tand\nlines\r\n\r\n  indented\n\n\n",
    "def f(x):\n    return x**2  # ümläut\n",
    "12345678901234 3.14159 1,000,000",
    "it's WE'RE they'd I'M",
    "日本語のテキスト。 Ελληνικά Кириллица العربية हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇬🇧 zero\u200bwidth \u00a0 nbsp",
    "\x00\x01\x7f\ufffd",
    "a<|eot_id|>b <|begin_of_text|><|reserved_special_token_0|>",
    "x" * 5000 + " " * 300,
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    torch.manual_seed(0)
    model = GPTOSS(ModelConfig(**MODEL_SETTINGS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    done = export_checkpoint(save(model, folder / "run"), folder / "hf")
    assert done.has_tokenizer
    return model, folder / "hf"


@pytest.fixture(scope="module")
def theirs(exported):
    return AutoTokenizer.from_pretrained(exported[1], trust_remote_code=True)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_shards(theirs, text):
    ours = load_tokenizer()
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.encode(text) == [128009, *ours.encode(text)]
    assert theirs.decode(ours.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_ids_are_those_of_the_shards_for_any_text(theirs, text):
    assert theirs.encode(text, add_special_tokens=False) == load_tokenizer().encode(text)


def test_special_ids_and_sizes(theirs, exported):
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (128009, 128009, 128002)
    assert len(theirs) == 128256
    assert theirs.model_max_length == 16
    model = AutoModelForCausalLM.from_pretrained(exported[1], trust_remote_code=True)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (128009, 128009, 128002)


def test_a_batch_is_padded_and_continued_as_our_command_does(theirs, exported):
    model, folder = exported
    twin = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    prompts = ["One two", "One"]
    batch = theirs(prompts, return_tensors="pt", padding=True, padding_side="left")
    assert batch["input_ids"][1, 0] == 128002
    generated = twin.generate(**batch, max_new_tokens=6)[:, batch["input_ids"].shape[1] :]
    ids = [[128009, *load_tokenizer().encode(prompt)] for prompt in prompts]
    for sample, row in zip(generate(model, ids, 6, temperature=0, stop_ids=[128009]), generated, strict=True):
        assert sample.ids == row[: len(sample.ids)].tolist()
        assert sample.stopped == (128009 in row)


def test_a_plain_tokenizer_adds_nothing(exported, tmp_path):
    model, _ = exported
    export_checkpoint(save(model, tmp_path / "run"), tmp_path / "hf", document_start=False)
    plain = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert plain.encode("Hello world") == [9906, 1917]
    assert plain.bos_token_id == 128009
