"""The product beside what one would use instead, on this machine's GPU, in one run: tokens/s, MFU and peak memory.

    python scripts/bench_peers.py                                   everything, a process for each
    python scripts/bench_peers.py --only h200,plain --json          some of it

Rows: the shipped 502M recipes through the real loop (scripts/microbench_a100.py), the plain build of
scripts/plain_build.py, transformers' GptOss of the same sizes (9 experts, top 3, FlexAttention, compiled), and the
card's own ceilings. All but the ceilings train on random tokens, 131,072 a step, T = 4,096.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import torch
import typer
from timing import time_steps

from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.options import AsJson, print_json
from gpt_oss_lite.training.flops import device_peak_flops, format_mfu, mfu
from gpt_oss_lite.training.knobs import set_knobs
from shared_data.console import run_app
from shared_data.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
ROOT = Path(__file__).resolve().parents[1]
A100 = ROOT / "configs/pretrain_a100_502m.yaml"
T, TOKENS = 4096, 131_072
WARMUP, STEPS = 3, 8

PRODUCT = {
    "h200": ["--config", str(ROOT / "configs/pretrain_h200_502m.yaml")],
    "h200-fp8-head": ["--config", str(ROOT / "configs/pretrain_h200_502m.yaml"), "--set", "training.fp8_head=true"],
    "h200-fp8": ["--config", str(ROOT / "configs/pretrain_h200_502m_fp8.yaml")],
    "a100": ["--config", str(A100)],
    "a100-no-checkpoint": ["--config", str(A100), "--set", "training.grad_checkpoint=false"],
    "24gb": ["--config", str(ROOT / "configs/pretrain_24gb_502m.yaml")],
    "triton-grouped": [
        "--config", str(ROOT / "configs/pretrain_h200_502m.yaml"), "--set", "model.moe_dispatch=triton_grouped",
    ],
}  # fmt: skip


def timed(step: Callable[[], Any]) -> dict[str, float]:
    """Speed and peak memory of a step."""
    seconds, peak = time_steps(step, WARMUP, STEPS)
    return {"tokens_per_s": TOKENS / seconds, "peak_gb": peak / 1e9}


def adamw_step(model: torch.nn.Module, micro_batch: Callable[[int], torch.Tensor], accumulation: int) -> Any:
    """A training step in the usual form."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), eps=1e-6, fused=True)

    def step() -> None:
        for index in range(accumulation):
            (micro_batch(index) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain(batch_size: int) -> dict[str, float]:
    """The plain build, compiled."""
    from plain_build import ChunkedHead, PlainBuild

    set_knobs(deterministic=False)
    config = load_recipe(A100).model
    with torch.device("cuda"):
        model = PlainBuild(config)
    masks = model.masks(T, torch.device("cuda"))
    cos, sin = model.rotary.tables(torch.arange(T, device="cuda"))
    forward = torch.compile(model)
    accumulation = TOKENS // (batch_size * T)
    ids = torch.randint(config.vocab_size, (accumulation, batch_size, T + 1), device="cuda")

    def micro_batch(index: int) -> torch.Tensor:
        h, aux = forward(ids[index, :, :-1], cos, sin, masks)
        ce = ChunkedHead.apply(h.flatten(0, 1), model.embed.weight, ids[index, :, 1:].flatten(), 8192)
        return ce + 0.01 * aux

    return timed(adamw_step(model, micro_batch, accumulation))


def transformers_gpt_oss(batch_size: int) -> dict[str, float]:
    """transformers' GptOss, compiled: the shared expert becomes a ninth routed one, so that compute is equal."""
    from transformers import GptOssConfig, GptOssForCausalLM

    set_knobs(deterministic=False)
    ours = load_recipe(A100).model
    config = GptOssConfig(
        vocab_size=ours.embedding_rows, hidden_size=ours.d_model, intermediate_size=ours.expert_hidden_size,
        num_hidden_layers=ours.n_layers, num_attention_heads=ours.n_heads, num_key_value_heads=ours.n_kv_heads,
        head_dim=ours.head_dim, num_local_experts=ours.n_experts + 1, num_experts_per_tok=ours.experts_per_token + 1,
        sliding_window=ours.window_size, max_position_embeddings=T, tie_word_embeddings=True, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta}, output_router_logits=True,
    )  # fmt: skip
    config._attn_implementation = "flex_attention"
    config._experts_implementation = "grouped_mm"
    model: torch.nn.Module = GptOssForCausalLM(config)
    model = model.to("cuda").float()
    forward = torch.compile(model)
    accumulation = TOKENS // (batch_size * T)
    ids = torch.randint(ours.vocab_size, (accumulation, batch_size, T), device="cuda")

    def micro_batch(index: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return forward(input_ids=ids[index], labels=ids[index]).loss

    return timed(adamw_step(model, micro_batch, accumulation))


def ceilings() -> dict[str, float]:
    """What the card gives to the largest operations alone, on random numbers: TFLOP/s, and TB/s for a copy."""
    from triton.testing import do_bench

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def tflops(operation: Callable[[], Any], flop: float) -> float:
        return flop / do_bench(operation, return_mode="median") / 1e9

    square_a, square_b = random(8192, 8192), random(8192, 8192)
    result = {"product 8192^3": tflops(lambda: square_a @ square_b, 2 * 8192**3)}
    h, w, g = random(8192, 768), random(128256, 768), random(8192, 128256)
    head = 2 * 8192 * 768 * 128256
    result["head"] = tflops(lambda: h @ w.t(), head)
    result["head dH"] = tflops(lambda: g @ w, head)
    result["head dW"] = tflops(lambda: g.t() @ h, head)
    rows, gate_up = random(65536, 768), random(8, 3072, 768)
    ends = torch.arange(1, 9, device="cuda", dtype=torch.int32) * 8192
    grouped = 2 * 65536 * 768 * 3072
    result["grouped"] = tflops(lambda: torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends), grouped)
    source = torch.empty(2**31, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    result["copy TB/s"] = 4 * 2**31 / do_bench(lambda: target.copy_(source), return_mode="median") / 1e9
    return result


PEERS: dict[str, Callable[[], dict[str, float]]] = {
    "plain": lambda: plain(8),
    "transformers": lambda: transformers_gpt_oss(4),
    "ceilings": ceilings,
}


def run_one(name: str) -> dict[str, Any]:
    """One row, in a process of its own so that none finds another's memory or caches."""
    if name in PRODUCT:
        script = str(Path(__file__).with_name("microbench_a100.py"))
        command = [sys.executable, script, *PRODUCT[name], "--threshold-gb", "1000", "--json"]
    else:
        command = [sys.executable, __file__, "--worker", name]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        lines = finished.stderr.strip().splitlines() or ["no output"]
        # Compilers say what went wrong somewhere above their last words.
        telling = [at for at, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Unsupported)\b", line)]
        said = lines[telling[-1] :] if telling else lines[-1:]
        return {"error": " | ".join(line.strip() for line in said if line.strip())[:500]}
    return dict(json.loads(finished.stdout[finished.stdout.index("{") :]))


@app.command()
def bench(
    only: Annotated[str, typer.Option(help="Rows, separated by commas.")] = ",".join([*PRODUCT, *PEERS]),
    as_json: AsJson = False,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> int:
    """Measure the product, its peers and the card."""
    if not torch.cuda.is_available():
        raise UserError("no CUDA device: there is nothing to measure here")
    if worker is not None:
        print(json.dumps(PEERS[worker]()))
        return 0
    names = only.split(",")
    for name in names:
        if name not in PRODUCT and name not in PEERS:
            raise UserError(f"--only has {name}: it must be of {', '.join([*PRODUCT, *PEERS])}")
    results = {}
    for name in names:
        results[name] = run_one(name)
        if not as_json:
            print_row(name, results[name])
    if as_json:
        print_json(results)
    return 1 if any("error" in result for result in results.values()) else 0


def print_row(name: str, result: dict[str, Any]) -> None:
    """One line."""
    if "tokens_per_s" in result:
        device = torch.cuda.get_device_name()
        share = mfu(result["tokens_per_s"], load_recipe(A100).model, T, device_peak_flops(device))
        print(
            f"{name:<20} {result['tokens_per_s']:>9,.0f} tok/s  MFU {format_mfu(share):>6}  {result['peak_gb']:6.2f} GB"
        )
    else:
        print(f"{name:<20} " + "  ".join(f"{key} {value:.4g}" if value != str(value) else value
                                         for key, value in result.items()), flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="bench_peers.py"))
