"""Bytes of the key/value cache beside plain grouped-query attention, and decoding speed of a small model with each.

    python scripts/kv_cache_benchmark.py

The caches are allocated, without a model; one that does not fit is counted on the meta device and marked so. On a layer
with a window only the window's tokens keep their keys and values, so half of the layers stop growing with the context.
"""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import torch
import typer

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.model.kv_cache import KVCache
from gpt_oss_lite.model.layers import compute_dtype
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.options import AsJson, print_json
from gpt_oss_lite.training.knobs import autocast
from shared_data.console import progress, run_app, say
from shared_data.errors import UserError

GIB = 2**30
CONTEXTS = [4096, 32_768, 131_072]
SMALL_MODEL = ModelConfig(
    vocab_size=4096, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, n_experts=4, expert_hidden_size=256
)
PREFILL_TOKENS = 512


def cache_bytes(
    config: ModelConfig, batch_size: int, context: int, device: str, dtype: torch.dtype
) -> tuple[int, bool]:
    """Bytes of a cache, and whether it was really allocated (else it did not fit, and the meta device counted it)."""
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        cache = KVCache(config, batch_size, context, device, dtype)
    except RuntimeError:
        return KVCache(config, batch_size, context, "meta", dtype).nbytes, False
    return (torch.cuda.memory_allocated() - before if device == "cuda" else cache.nbytes), True


def compare_bytes(config: ModelConfig, batch_size: int, context: int, device: str) -> dict[str, float | int | bool]:
    """Bytes at one context with plain grouped-query attention and with the alternating window; bf16."""
    plain, plain_fits = cache_bytes(config.replace(window_size=None), batch_size, context, device, torch.bfloat16)
    alternating, fits = cache_bytes(config, batch_size, context, device, torch.bfloat16)
    return {
        "context": context,
        "plain_bytes": plain,
        "alternating_bytes": alternating,
        "ratio": plain / alternating,
        "allocated": plain_fits and fits,
    }


@torch.no_grad()
def decode_speed(config: ModelConfig, context: int, n_tokens: int, device: str) -> float:
    """Tokens a second of one row that is decoded greedily up to `context`, the prompt before it read at no charge."""
    torch.manual_seed(0)
    model = GPTOSS(config).to(device).eval()
    ids_BT = torch.randint(config.vocab_size, (1, context - n_tokens), device=device)
    layout = "plain" if config.window_size is None else "alternating"
    with (
        autocast(torch.device(device), config.dtype),
        progress(f"decode, {layout}", context, "tokens") as report,
    ):
        cache = KVCache(config, 1, context, device, compute_dtype(model.embed.weight))
        for part_BT in ids_BT.split(PREFILL_TOKENS, dim=1):
            h_BTD, _ = model.hidden_states(part_BT, cache=cache)
            report.advance(part_BT.shape[1])
        _wait_for(device)
        start = time.perf_counter()
        for _ in range(n_tokens):
            token_B1 = model.head(h_BTD[:, -1:]).argmax(dim=-1)
            h_BTD, _ = model.hidden_states(token_B1, cache=cache)
            report.advance(1)
        _wait_for(device)
        return n_tokens / (time.perf_counter() - start)


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _print_table(result: dict[str, Any]) -> None:
    model = result["model"]
    print(
        f"KV cache on {result['device']}: {model['n_layers']} layers, {model['n_kv_heads']} key/value heads x "
        f"{model['head_dim']}, window {model['window_size']} on every second layer, bf16, batch {result['batch_size']}"
    )
    print(f"{'context':>9}  {'plain GQA':>12}  {'alternating':>12}  {'ratio':>7}")
    for row in result["cache"]:
        plain, alternating = row["plain_bytes"] / GIB, row["alternating_bytes"] / GIB
        note = "" if row["allocated"] else "  (counted: it does not fit)"
        print(f"{row['context']:>9,}  {plain:>8.4f} GiB  {alternating:>8.4f} GiB  {row['ratio']:>6.3f}x{note}")
    speed = result["decode"]
    print(
        f"decoding one row of a small model ({speed['n_layers']} layers of {speed['d_model']}) up to "
        f"{speed['context']:,} tokens: plain GQA {speed['plain_tokens_per_s']:.1f} tokens/s, alternating "
        f"{speed['alternating_tokens_per_s']:.1f}"
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=__doc__)
def benchmark(
    config: Annotated[Path | None, typer.Option(help="Recipe whose model is counted; default the 502M model.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of it.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows.")] = 8,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Tokens; may be repeated.")] = None,
    decode_context: Annotated[int, typer.Option(min=2, help="Tokens up to which the small model decodes.")] = 4096,
    decode_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are timed.")] = 64,
    as_json: AsJson = False,
) -> None:
    if overrides and config is None:
        raise UserError("--set overrides a key of a recipe: name one with --config")
    if decode_tokens >= decode_context:
        raise UserError(f"--decode-tokens is {decode_tokens}: it must be less than --decode-context ({decode_context})")
    model = load_recipe(config, overrides or []).model if config else ModelConfig()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        say("no CUDA device: the caches lie in main memory and the small model decodes on the CPU")
    plain_model = SMALL_MODEL.replace(window_size=None)
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "the CPU",
        "batch_size": batch_size,
        "model": model.model_dump(include={"n_layers", "n_kv_heads", "head_dim", "window_size"}),
        "cache": [compare_bytes(model, batch_size, length, device) for length in context or CONTEXTS],
        "decode": {
            "n_layers": SMALL_MODEL.n_layers,
            "d_model": SMALL_MODEL.d_model,
            "context": decode_context,
            "plain_tokens_per_s": decode_speed(plain_model, decode_context, decode_tokens, device),
            "alternating_tokens_per_s": decode_speed(SMALL_MODEL, decode_context, decode_tokens, device),
        },
    }
    if as_json:
        print_json(result)
    else:
        _print_table(result)


if __name__ == "__main__":
    sys.exit(run_app(app))
