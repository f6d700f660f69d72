"""Train transformers' GptOss on the windows, in the order and from the weights that `pretrain` would have taken.

    python scripts/learning_peer.py --config RECIPE --seed 0 --set model.n_shared_experts=0 ... --out peer.json

The recipe is one of GPT-OSS's form without biases (`n_shared_experts: 0`, `expert_activation: clamped_swiglu`). What
transformers' model has besides, biases of experts and router, starts at zero and stays there. The loop is the usual
one: bf16 autocast over fp32 parameters, AdamW with the same groups, schedule and clipping, and the load-balancing loss
as this project defines it (transformers' own sums over the chosen experts, and takes all layers as one). Only the
model's code is theirs: eager, with FlexAttention and grouped products where there is a GPU.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import needs_packages  # noqa: F401
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gpt_oss_lite.config import ModelConfig, Recipe, load_recipe
from gpt_oss_lite.export.hf_config import model_json
from gpt_oss_lite.export.layouts import from_stock, layout_of, to_layout
from gpt_oss_lite.model.routing import count_slots
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.dataset import PretrainDataset, resolve_data_path
from gpt_oss_lite.training.evaluation import evaluate
from gpt_oss_lite.training.knobs import autocast, set_knobs
from gpt_oss_lite.training.schedule import make_multiplier
from gpt_oss_lite.training.seeding import seed_everything
from shared_data.console import run_app, say
from shared_data.errors import UserError
from shared_data.files import write_atomic

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def peer_model(config: ModelConfig, ours: GPTOSS, device: torch.device) -> Any:
    """transformers' GptOssForCausalLM with our weights, fp32, its biases frozen at zero."""
    from transformers import GptOssConfig, GptOssForCausalLM

    if layout_of(config) != "gpt_oss" or config.attention_bias or config.router_bias or config.expert_bias:
        raise UserError("the recipe must have n_shared_experts: 0, expert_activation: clamped_swiglu and no biases")
    content = model_json(config, "gpt_oss", {})
    stock = GptOssConfig(**{key: value for key, value in content.items() if key not in ("dtype", "architectures")})
    stock.use_cache = False
    stock._attn_implementation = "flex_attention" if device.type == "cuda" else "eager"
    stock._experts_implementation = "grouped_mm" if device.type == "cuda" else "eager"
    with torch.device(device):
        model = GptOssForCausalLM(stock).float()
    weights = to_layout(config, "gpt_oss", dict(ours.named_parameters()))
    missing, unexpected = model.load_state_dict({name: w.detach() for name, w in weights.items()}, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    for name, parameter in model.named_parameters():
        if name.endswith(("router.bias", "proj_bias")):
            assert not parameter.any(), name
            parameter.requires_grad_(False)
    return model


def peer_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decayed matrices, and the rest: our groups, by transformers' names."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = [
        p for name, p in trained.items() if p.dim() >= 2 and "embed_tokens" not in name and "lm_head" not in name
    ]
    ids = {id(parameter) for parameter in decayed}
    others = [parameter for parameter in trained.values() if id(parameter) not in ids]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def balancing_loss(router_logits: tuple[Tensor, ...], experts_per_token: int) -> Tensor:
    """This project's auxiliary loss from transformers' router logits: 1.0 where balanced, mean over layers."""
    losses = []
    for logits_TE in router_logits:
        n_experts = logits_TE.shape[-1]
        probs_TE = logits_TE.float().softmax(dim=-1)
        experts_TK = probs_TE.topk(experts_per_token, dim=-1).indices
        load_E = count_slots(experts_TK, n_experts).float() / experts_TK.numel()
        losses.append(n_experts * (load_E * probs_TE.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def train_peer(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train for the recipe's steps; rows by step, and the held-out figures that `pretrain` takes at its end."""
    config, training = recipe.model, recipe.training
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    set_knobs(deterministic=False)
    seed_everything(seed)
    ours = GPTOSS(config).to(device)
    model = peer_model(config, ours, device)
    optimizer = torch.optim.AdamW(
        peer_groups(model, training.weight_decay),
        lr=training.lr, betas=training.betas, eps=training.eps, fused=device.type == "cuda",
    )  # fmt: skip
    scheduler = LambdaLR(optimizer, make_multiplier(training))
    if not isinstance(recipe.data.train_data_path, str):
        raise UserError("data.train_data_path names several corpora: the peer reads one")
    path = resolve_data_path(recipe.data.train_data_path)
    dataset = PretrainDataset(path, config.max_seq_len, config.embedding_rows)
    order = dataset.order(seed)
    width = training.windows_per_step
    rows: list[dict[str, float]] = []
    for step in range(1, training.total_steps + 1):
        started = time.perf_counter()
        windows = [dataset[int(index)] for index in order.windows((step - 1) * width, width)]
        sums = torch.zeros(2, device=device)
        for start in range(0, width, training.micro_batch_size):
            pairs = windows[start : start + training.micro_batch_size]
            ids_BT, targets_BT = (torch.stack(column).to(device) for column in zip(*pairs, strict=True))
            with autocast(device, config.dtype):
                output = model(input_ids=ids_BT, output_router_logits=True)
                aux = balancing_loss(output.router_logits, config.experts_per_token)
            ce = F.cross_entropy(output.logits.flatten(0, 1).float(), targets_BT.flatten())
            ((ce + training.aux_loss_alpha * aux) / training.gradient_accumulation_steps).backward()
            sums += torch.stack([ce.detach(), aux.detach()]) / training.gradient_accumulation_steps
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip, foreach=True)
        rate = float(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        ce_now, aux_now = sums.tolist()
        tokens_per_s = width * config.max_seq_len / (time.perf_counter() - started)
        rows.append({"step": step, "ce": ce_now, "aux": aux_now, "grad_norm": float(norm), "lr": rate,
                     "tokens_per_s": tokens_per_s})  # fmt: skip
        if step == 1 or step % 10 == 0:
            say(f"peer {step:>6} | ce {ce_now:.4f} | {tokens_per_s:,.0f} tok/s")
    return {"rows": rows, "final": held_out(recipe, ours, model, path)}


def held_out(recipe: Recipe, ours: GPTOSS, model: Any, corpus: Path) -> dict[str, Any]:
    """Score the peer's weights in our model on the windows that `pretrain` evaluates on."""
    config, training = recipe.model, recipe.training
    biased = config.model_copy(update={"router_bias": True, "expert_bias": True})
    weights = from_stock(biased, {name: w.detach() for name, w in model.state_dict().items()})
    ours.load_state_dict({name: w for name, w in weights.items() if not name.endswith(".bias")}, strict=True)
    validation = PretrainDataset(corpus / "validation", config.max_seq_len, config.embedding_rows)
    return evaluate(
        ours, validation, max_windows=training.eval_windows, micro_batch_size=training.micro_batch_size,
        chunk_size=training.loss_chunk_size,
    ).as_dict()  # fmt: skip


@app.command()
def peer(
    config: Annotated[Path, typer.Option(metavar="FILE", help="Recipe.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the figures go.", show_default=False)],
    seed: Annotated[int, typer.Option(help="As pretrain's.")] = 0,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="As pretrain's.")] = None,
) -> None:
    """Train transformers' model as a recipe says."""
    recipe = load_recipe(config, overrides or ())
    write_atomic(out, json.dumps(train_peer(recipe, seed)))


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="learning_peer.py"))
