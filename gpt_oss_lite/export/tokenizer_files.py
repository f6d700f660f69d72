"""The LLaMA-3 tokenizer as files that transformers loads: tokenizer.json and tokenizer_config.json.

Ids equal those that the shards were made with, with two exceptions that only very unusual text meets: a run of more
than 25,000 characters without (or of nothing but) white space is not cut, and lone surrogates are refused by the
library. As in the shards, a text follows the end-of-document id, and text that spells a control token is only text.
"""

import json
from pathlib import Path

from gpt_oss_lite.config import ModelConfig
from shared_data.errors import require_extra
from shared_data.files import write_atomic
from shared_data.tokenizer import LLAMA3_EOS_ID, LLAMA3_PAD_ID, LLAMA3_VOCAB_SIZE, llama3_rank_file, load_tokenizer

LLAMA3_ROWS = 128_256
"""Ranks and control tokens together."""


def has_llama3_vocabulary(config: ModelConfig) -> bool:
    """Whether the model's ids are those of the LLaMA-3 tokenizer, the end-of-document id included."""
    return config.vocab_size == LLAMA3_VOCAB_SIZE and config.embedding_rows > LLAMA3_EOS_ID


def special_ids(config: ModelConfig) -> dict[str, int]:
    """The ids that config.json and generation_config.json name; none for a model of another vocabulary.

    A document's first token is predicted from the end of the one before, so the end-of-document id also begins a text.
    """
    if not has_llama3_vocabulary(config):
        return {}
    return {"bos_token_id": LLAMA3_EOS_ID, "eos_token_id": LLAMA3_EOS_ID, "pad_token_id": LLAMA3_PAD_ID}


def write_tokenizer(folder: Path, model_max_length: int, *, document_start: bool = True) -> None:
    """Write the tokenizer's files.

    Args:
        folder: where to.
        model_max_length: tokens of the longest context; longer texts make transformers warn.
        document_start: put the end-of-document id before a text.

    Raises:
        UserError: transformers or llama-models is not installed.
    """
    convert = require_extra("transformers.convert_slow_tokenizer", "export")
    processors = require_extra("tokenizers.processors", "export")
    tokenizer = load_tokenizer("llama3")
    names = [tokenizer.decode([token]) for token in range(LLAMA3_VOCAB_SIZE, LLAMA3_ROWS)]
    converter = convert.TikTokenConverter(vocab_file=str(llama3_rank_file()), extra_special_tokens=names)
    converted = converter.converted()
    begin, pad = tokenizer.decode([LLAMA3_EOS_ID]), tokenizer.decode([LLAMA3_PAD_ID])
    if document_start:
        converted.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, LLAMA3_EOS_ID)]
        )
    write_atomic(folder / "tokenizer.json", converted.to_str())
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": begin,
        "pad_token": pad,
        "model_max_length": model_max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        # "<|eot_id|>" in a text is eleven characters, as in the shards; control ids come from the template alone.
        "split_special_tokens": True,
    }
    write_atomic(folder / "tokenizer_config.json", json.dumps(about, indent=2) + "\n")
