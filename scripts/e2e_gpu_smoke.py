"""Does every part of the stack work on this machine's GPU? Minutes at most, a small model, random tokens.

    python scripts/e2e_gpu_smoke.py

For each backend of attention and experts that this machine has: forward, backward, three optimizer steps whose
loss must fall, a checkpoint saved and loaded again with equal logits, and decoding with the cache, which must choose
what decoding without it chooses. Without CUDA the same runs on the CPU in miniature.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import needs_packages  # noqa: F401
import numpy as np
import torch
import typer
from torch import Tensor

from gpt_oss_lite.inference.generate import generate
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.options import AsJson, Overrides, print_json
from gpt_oss_lite.training.fp8 import EXPERTS_CAPABILITY
from gpt_oss_lite.training.knobs import autocast
from gpt_oss_lite.training.pretrain import PretrainOptions, save, train_step
from gpt_oss_lite.training.run import Run, open_run, plan_run
from gpt_oss_lite.training.weights import load_model
from shared_data.console import run_app, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "pretrain_gpu_smoke.yaml"
STEPS = 3
PROMPT_TOKENS, NEW_TOKENS = (
    20,
    44,
)  # beyond the recipe's window; together one of its training windows, which FlexAttention knows
# On the CPU only the vocabulary is cut: everything else of the recipe is a miniature already.
CPU_SETTINGS = ["model.vocab_size=2000", "model.padded_vocab_size=null"]
# One pattern over and over, at once at the full rate: a loss that does not fall then is a fault, not bad luck.
SETTINGS = ["training.warmup_steps=0", "training.lr=1e-2", f"training.total_steps={STEPS}", "data.data_mix=null"]
PERIOD = 37
# Two windows of the pattern differ by a per cent or so before any learning; three steps bring a quarter.
LARGEST_RATIO = 0.9
# model.attention_backend and model.moe_dispatch, every value once.
BACKENDS = {
    "cpu": [("reference", "reference")],
    "cuda": [("fused", "grouped"), ("fused", "triton_grouped"), ("flex", "reference"), ("reference", "reference")],
}
# Where the card has such products.
EIGHT_BITS = ("fused", "grouped_fp8")
# Greedy choices of an almost untrained model hang on single bits of bf16, so on CUDA a few may differ.
MIN_AGREEMENT = {"cpu": 1.0, "cuda": 0.9}


@app.command()
def smoke(overrides: Overrides = None, as_json: AsJson = False) -> int:
    """Run every check with every backend that this machine has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = [*SETTINGS, *(CPU_SETTINGS if device == "cpu" else []), *(overrides or [])]
    if device == "cpu":
        say("no CUDA device: the same checks run on the CPU in miniature")
    results = []
    backends = BACKENDS[device]
    if device == "cuda" and torch.cuda.get_device_capability() == EXPERTS_CAPABILITY:
        backends = [*backends, EIGHT_BITS]
    for attention, experts in backends:
        chosen = [f"model.attention_backend={attention}", f"model.moe_dispatch={experts}"]
        with tempfile.TemporaryDirectory() as folder:
            results.append(check(f"{attention}+{experts}", [*settings, *chosen], Path(folder)))
    failed = [result["backend"] for result in results if not result["passed"]]
    if as_json:
        print_json({"device": device, "results": results})
    else:
        for result in results:
            print("  ".join(f"{name}={value}" for name, value in result.items()))
        print(f"{device}: {len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def check(backend: str, settings: list[str], folder: Path) -> dict[str, Any]:
    """Train, save, load and decode with one backend; what was seen, and whether it is as it must be."""
    started = time.perf_counter()
    corpus = folder / "tokens.bin"
    np.resize(np.arange(PERIOD, dtype="<u4"), 20_000).tofile(corpus)
    settings = [*settings, f"data.train_data_path={corpus}"]
    run = open_run(plan_run(PretrainOptions(config=RECIPE, out=folder / "run", seed=0, overrides=settings)))
    losses = [train_step(run).ce.item() for _ in range(STEPS)]
    save(run)
    run.saver.drain()  # saves are written in the background
    loaded, _ = load_model(run.folder, device=run.device)
    same_logits = torch.equal(logits(run.model, run), logits(loaded, run))
    agreement = decoding_agreement(loaded)
    return {
        "backend": backend,
        "passed": losses[-1] < LARGEST_RATIO * losses[0]
        and same_logits
        and agreement >= MIN_AGREEMENT[run.device.type],
        "first_loss": round(losses[0], 3),
        "last_loss": round(losses[-1], 3),
        "loaded_equals_saved": same_logits,
        "cache_agreement": round(agreement, 3),
        "seconds": round(time.perf_counter() - started, 1),
    }


@torch.no_grad()
def logits(model: GPTOSS, run: Run) -> Tensor:
    """Logits of one window, in evaluation mode."""
    ids_BT = run.dataset[0][0][None].to(run.device)
    with autocast(run.device, model.config.dtype):
        return model.eval()(ids_BT)[0]


@torch.no_grad()
def decoding_agreement(model: GPTOSS) -> float:
    """Decode greedily with the cache, then once more without it over the finished text.

    Returns:
        Share of the new tokens that both choose.
    """
    prompt = [token % PERIOD for token in range(PROMPT_TOKENS)]
    new = generate(model, [prompt], NEW_TOKENS, temperature=0)[0].ids
    device = model.embed.weight.device
    with autocast(device, model.config.dtype):
        whole_BTV, _ = model(torch.tensor([prompt + new], device=device))
    chosen = whole_BTV[0, PROMPT_TOKENS - 1 : -1, : model.config.vocab_size].argmax(dim=-1).tolist()
    return sum(one == other for one, other in zip(chosen, new, strict=True)) / len(new)


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="e2e_gpu_smoke.py"))
