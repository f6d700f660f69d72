"""Streaming and the loop over lines: what is printed, when, and what a wrong line does."""

import io

import pytest
import torch
from command_line import MODEL_SETTINGS

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.inference.text import Settings, TextStream, complete, prompt_ids, repl, stream_text
from gpt_oss_lite.model.transformer import GPTOSS
from shared_data.errors import UserError
from shared_data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()
GREEDY = Settings(max_new_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def model() -> GPTOSS:
    torch.manual_seed(0)
    return GPTOSS(ModelConfig(**MODEL_SETTINGS))


@pytest.mark.parametrize(
    "text", ["plain words", "Ω≈ 日本語 👩‍👩‍👧‍👦 ümläut", "\ufffd, and \ufffd\ufffd\ufffd\ufffd\ufffd!"]
)
def test_a_stream_prints_whole_characters_and_loses_none(text):
    printed = []
    stream = TextStream(TOKENIZER, printed.append)
    for token in TOKENIZER.encode(text):
        stream(0, token)
    stream.flush()
    assert "".join(printed) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in printed)


def test_tokens_that_are_no_character_are_printed_as_such():
    alone = TOKENIZER.encode("👩")[0]  # its first bytes only
    printed = []
    stream = TextStream(TOKENIZER, printed.append)
    for _ in range(9):
        stream(0, alone)
    assert "".join(printed)  # does not wait for ever
    stream.flush()
    assert set("".join(printed)) == {"\ufffd"}


def test_what_streams_is_what_is_drawn(model):
    (sample,), _ = complete(model, TOKENIZER, "One two", GREEDY)
    out = io.StringIO()
    speed = stream_text(model, TOKENIZER, "One two", GREEDY, out)
    assert out.getvalue() == "One two" + TOKENIZER.decode(sample.ids) + "\n"
    assert speed.prefill_tokens == len(prompt_ids(TOKENIZER, "One two")) == 3
    assert speed.decode_tokens == 5


def test_the_loop_continues_lines_and_survives_wrong_ones(model, capsys):
    lines = ["One two\n", "\n", ":temperature -1\n", "One\\ntwo\n", ":temperature 0\n", ":max_new_tokens two\n",
             ":top_p none\n", ":colour red\n", ":\n", "word " * 90 + "\n", "One two\r\n"]  # fmt: skip
    out = io.StringIO()
    repl(model, TOKENIZER, GREEDY, lines, out)
    (sample,), _ = complete(model, TOKENIZER, "One two", GREEDY)
    expected = "One two" + TOKENIZER.decode(sample.ids) + "\n"
    (after,), _ = complete(model, TOKENIZER, "One\ntwo", GREEDY)  # a setting out of range is not taken
    assert out.getvalue().startswith(expected + "One\ntwo" + TOKENIZER.decode(after.ids) + "\n")
    assert out.getvalue().endswith(expected)
    said = capsys.readouterr().err
    for message in (
        "error: temperature is -1.0: it must be a finite number",
        "error: max_new_tokens is 'two': it must be an integer\n",
        "error: there is no setting 'colour'; there are: max_new_tokens, temperature",
        "together they may be at most 64 (model.eval_max_seq_len)",
        "tokens/s)",
    ):
        assert message in said
    assert "Traceback" not in said


def test_settings_are_read_by_type():
    settings = Settings().changed("top_k", "5").changed("temperature", "0.5").changed("seed", "7")
    assert (settings.top_k, settings.temperature, settings.seed) == (5, 0.5, 7)
    assert settings.changed("top_k", "none").top_k is None
    with pytest.raises(UserError, match="temperature is 'none': it must be a number"):
        settings.changed("temperature", "none")
    with pytest.raises(UserError, match=r"top_k is '5\.5': it must be an integer or none"):
        settings.changed("top_k", "5.5")
