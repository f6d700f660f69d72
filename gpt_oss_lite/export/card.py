"""The model card: what the model is, what it was trained on and how well it does, as far as its run's folder says."""

import json
from pathlib import Path
from typing import Any

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.export.hf_config import exported_context
from gpt_oss_lite.export.layouts import Layout

_OPENING = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt-oss-lite, moe]
---

# A GPT-OSS-Lite model

A sparse mixture-of-experts language model of {total:.2f}M parameters, {active:.2f}M of them per token, in {layers}
layers, {origin}. It continues text; nothing here tuned it to follow instructions or keeps it from false or harmful
output.

Weights are bf16, read by {kind}; context {context:,} tokens (RoPE scale {scale:g}).

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({arguments})
```
"""

_TOKENIZER = """\
## Tokenizer

`tokenizer.json` is made from the LLaMA-3 rank file, which comes under the Llama 3 Community Licence: its terms apply to
whoever hands this folder on. In training every document followed the end-of-document id, which is why it also begins
texts here (`bos_token`). Text that spells a control token is encoded as text.
"""


def model_card(
    config: ModelConfig, layout: Layout, meta: dict[str, Any], run: Path, n_parameters: tuple[int, int], tokenizer: bool
) -> str:
    """README.md of an exported folder.

    Args:
        config: of the model as exported.
        layout: of its weights.
        meta: the checkpoint's.
        run: the run's folder; what it lacks (a bare checkpoint folder has neither log nor recipe) is left out.
        n_parameters: in all, and per token.
        tokenizer: whether the folder has tokenizer files.
    """
    total, active = n_parameters
    stock = layout == "gpt_oss"
    opening = _OPENING.format(
        total=total / 1e6,
        active=active / 1e6,
        layers=config.n_layers,
        origin="read from a gpt-oss checkpoint" if "imported_from" in meta else "pre-trained from scratch",
        kind="transformers' own `gpt_oss` classes" if stock else "the modelling file in this folder",
        context=exported_context(config),
        scale=config.rope_scale,
        arguments="folder" if stock else "folder, trust_remote_code=True",
    )
    parts = [opening]
    if tokenizer:
        parts.append(_TOKENIZER)
    if config.document_mask:
        parts.append(
            "Training kept attention inside documents; this model reads one document per row, so documents packed into "
            "one row see each other.\n"
        )
    parts += ["## Training\n", _training_table(meta, run)]
    recipe = run / "config.yaml"
    if recipe.is_file():
        parts.append(f"## Recipe\n\n```yaml\n{recipe.read_text().rstrip()}\n```\n")
    return "\n".join(parts)


def _training_table(meta: dict[str, Any], run: Path) -> str:
    """Where the weights come from and their last figures, one a row."""
    step = meta["step"]
    record = _json(run / "run.json")
    corpus = record.get("corpus", {})
    row = _last(run / "metrics.jsonl", step)
    evaluation = _last(run / "events.jsonl", step, event="eval")
    model_file = next((about["sha256"] for name, about in meta["files"].items() if name.endswith(".safetensors")), None)
    cells = {
        "step": step,
        "tokens seen": meta.get("tokens"),
        "seed": meta.get("seed"),
        "corpus, tokens": corpus.get("total_tokens"),
        "corpus, SHA-256 over the manifest's shards": corpus.get("sha256"),
        "checkpoint, SHA-256": model_file,
        "training cross-entropy, nats per token": row.get("ce"),
        f"held-out loss at step {evaluation.get('step')}, nats per token": evaluation.get("loss"),
        f"held-out perplexity at step {evaluation.get('step')}": evaluation.get("perplexity"),
        f"held-out bits per byte at step {evaluation.get('step')}": evaluation.get("bits_per_byte"),
        "imported from": meta.get("imported_from"),
    }
    rows = [f"| {name} | {_cell(value)} |" for name, value in cells.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *rows]) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"`{value}`"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _last(path: Path, step: int, **wanted: Any) -> dict[str, Any]:
    """The last line of a log up to a step; a line torn by a killed process does not count."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("step", step + 1) <= step and all(row.get(key) == value for key, value in wanted.items()):
            found = row
    return found
