"""Helpers for tests of commands: a corpus of real text with the real tokenizer, a recipe for it, and ways to run."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tiny_run

from shared_data.manifest import CorpusInfo, SourceInfo
from shared_data.shard_writer import write_corpus
from shared_data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]

# The structure of every recipe, in the size of a test, under the full vocabulary.
MODEL_SETTINGS = {
    "vocab_size": 128000, "padded_vocab_size": 128256, "d_model": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1,
    "head_dim": 4, "max_seq_len": 16, "window_size": 4, "yarn_scale_factor": 4.0, "yarn_original_max_seq_len": 16,
    "yarn_target_seq_len": 64, "eval_max_seq_len": 64, "expert_hidden_size": 8,
}  # fmt: skip
TRAINING_SETTINGS = {
    "warmup_steps": 1, "total_steps": 4, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "loss_chunk_size": 16,
    "num_workers": 0, "pin_memory": False, "log_interval": 1, "save_interval": 2,
}  # fmt: skip


def settings(**data: str) -> list[str]:
    """`--set` words that make a full recipe small."""
    blocks: dict[str, dict[str, Any]] = {"model": MODEL_SETTINGS, "training": TRAINING_SETTINGS, "data": data}
    pairs = [f"{block}.{key}={value}" for block, keys in blocks.items() for key, value in keys.items()]
    return [word for pair in pairs for word in ("--set", pair.replace("=False", "=false").replace("=None", "=null"))]


def write_text_corpus(folder: Path, n_texts: int = 60, mixture: str = "tiny") -> Path:
    """A corpus of two sources in real token ids, with validation/ beside it."""
    tokenizer = load_tokenizer()
    info = CorpusInfo(
        corpus="text", mixture=mixture, tokenizer_name=tokenizer.name, vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, shard_size_tokens=500,
        sources=[SourceInfo(id="prose", weight=0.5), SourceInfo(id="code", weight=0.5)],
    )  # fmt: skip
    texts = [f"A sentence about the number {number}. And one more." for number in range(n_texts)]
    texts = [text if index % 2 else f"def f{index}(x):\n    return x + {index}\n" for index, text in enumerate(texts)]
    documents = [
        (np.array(tokenizer.encode(text)), 1 - index % 2, len(text.encode())) for index, text in enumerate(texts)
    ]
    write_corpus(folder, info, documents[:-10])
    write_corpus(folder / "validation", info, documents[-10:], split="validation")
    return folder


def write_stock_model(folder: Path) -> None:
    """A stock gpt_oss model in the size of a test, under the full vocabulary, as transformers saves it."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=128256, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=None,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(folder)


def write_recipe(path: Path, corpus: Path, **training: object) -> Path:
    """The small recipe as a file."""
    return tiny_run.write_recipe(path, corpus, model=MODEL_SETTINGS, **{**TRAINING_SETTINGS, **training})


def run(
    *words: str | Path, cwd: Path = ROOT, unprivileged: bool = False, **environment: str
) -> subprocess.CompletedProcess:
    """Run a command in a process of its own; `unprivileged` holds also root to the files' permissions."""
    prefix = []
    if unprivileged:
        setpriv = shutil.which("setpriv")
        assert setpriv, "setpriv (util-linux) holds root to the files' permissions"
        prefix = [setpriv, "--inh-caps=-dac_override,-dac_read_search", "--bounding-set=-dac_override,-dac_read_search"]
    command = [*prefix, *(sys.executable if word == "python" else str(word) for word in words)]
    variables = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        command, cwd=cwd, env={**variables, **environment}, capture_output=True, text=True, timeout=300
    )
