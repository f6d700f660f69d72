"""Samples of a run for its page: drawn from its newest checkpoint and kept in RUN/samples.jsonl.

Drawn on the CPU, so that a run that is training on the GPU keeps its memory, and with the same seed at each step, so
that texts of several steps can be compared.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from gpt_oss_lite.report.run_log import SAMPLES_NAME, JsonLines
from shared_data.errors import UserError

SEED = 0
TEMPERATURE = 0.8
MAX_NEW_TOKENS = 64


def draw_samples(run: Path, prompts: Sequence[str]) -> None:
    """Continue each prompt with a run's newest complete checkpoint, unless that step has continued it already.

    Raises:
        UserError: no complete checkpoint, or the model does not have the tokenizer's vocabulary.
    """
    from gpt_oss_lite.inference.generate import generate
    from gpt_oss_lite.inference.text import load_with_tokenizer, prompt_ids
    from gpt_oss_lite.training.checkpoint import CheckpointManager, checkpoint_folder

    step = CheckpointManager(checkpoint_folder(run)).latest_step()
    if step is None:
        raise UserError(f"--prompt needs a checkpoint: {run} has no complete one yet")
    known = {(row["step"], row.get("prompt")) for row in JsonLines(run / SAMPLES_NAME).read()}
    missing = [prompt for prompt in dict.fromkeys(prompts) if (step, prompt) not in known]
    if not missing:
        return
    model, tokenizer = load_with_tokenizer(run, step)
    prompts_ids = [prompt_ids(tokenizer, prompt) for prompt in missing]
    drawn = generate(
        model,
        prompts_ids,
        max(min(MAX_NEW_TOKENS, model.config.eval_context - max(map(len, prompts_ids))), 1),
        temperature=TEMPERATURE,
        seed=SEED,
        stop_ids=[tokenizer.eos_token_id],
    )
    with open(run / SAMPLES_NAME, "a") as file:
        for prompt, sample in zip(missing, drawn, strict=True):
            row = {"step": step, "prompt": prompt, "text": tokenizer.decode(sample.ids), "time": time.time()}
            file.write(json.dumps(row) + "\n")
