"""The estimate against what autograd really keeps, and against bytes worked out by hand."""

from pathlib import Path

import pytest
import torch

from gpt_oss_lite.config import ModelConfig, load_recipe
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.layout import Layout
from gpt_oss_lite.training.memory import (
    MemoryEstimate,
    assert_fits_in_available_gpu,
    beside_the_recipe,
    estimate_model_memory_gb,
    estimate_recipe,
    fastest_that_fits,
)

RECIPE = load_recipe(Path(__file__).parents[2] / "configs/pretrain_a100_502m.yaml")
SMALL = ModelConfig(vocab_size=512, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, window_size=32,
                    max_seq_len=128, expert_hidden_size=256)  # fmt: skip


def on_meta(config: ModelConfig) -> GPTOSS:
    with torch.device("meta"):
        return GPTOSS(config)


def saved_bytes(config: ModelConfig, batch_size: int, seq_len: int, checkpoint_every: int | None = None) -> int:
    """Bytes of the tensors that a real forward pass keeps for the backward pass, parameters left out."""
    model = GPTOSS(config)
    if checkpoint_every:
        model.enable_gradient_checkpointing(checkpoint_every)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    ids_BT = torch.randint(config.vocab_size, (batch_size, seq_len))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        h_BTD, stats = model.hidden_states(ids_BT)
        loss = h_BTD.sum() + stats.aux
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def kept_between_passes(estimate: MemoryEstimate) -> int:
    return sum(size for name, size in estimate.items.items() if "saved" in name or "inputs" in name)


def test_state_of_the_502m_model_is_sixteen_bytes_a_parameter():
    items = estimate_model_memory_gb(on_meta(RECIPE.model), seq_len=4096, batch_size=8).items
    state = items["weights (fp32)"] + items["gradients (fp32)"] + items["AdamW moments (2 x fp32)"]
    assert state == 16 * 502_033_248


def test_the_head_holds_one_chunk_and_not_the_whole_logits():
    model = on_meta(RECIPE.model)
    items = estimate_model_memory_gb(model, seq_len=4096, batch_size=8, loss_chunk_size=8192).items
    # One chunk in bf16 that becomes its gradient in place; all logits would be 32,768 x 128,256 x 2 = 8.4 GB.
    assert items["head: chunk of 8,192 tokens"] == 8192 * 128256 * 2
    short = estimate_model_memory_gb(model, seq_len=64, batch_size=1, loss_chunk_size=8192).items
    assert short["head: chunk of 64 tokens"] == 64 * 128256 * 2
    plain = estimate_model_memory_gb(model, seq_len=64, batch_size=1, device_type="cpu").items
    assert plain["head: chunk of 64 tokens"] == 64 * 128256 * 4


# Peaks of torch.cuda.max_memory_allocated on an H200, torch 2.11, 2026-11-30: scripts/microbench_a100.py.
@pytest.mark.parametrize(
    ("batch_size", "checkpoint_every", "chunk", "measured_gb"),
    [(8, None, 8192, 28.17), (8, 3, 8192, 22.91), (16, None, 8192, 44.63), (32, None, 16384, 77.74)],
)
def test_within_three_percent_of_the_peaks_measured_on_an_h200(batch_size, checkpoint_every, chunk, measured_gb):
    estimate = estimate_model_memory_gb(
        on_meta(RECIPE.model), seq_len=4096, batch_size=batch_size, grad_checkpoint=checkpoint_every is not None,
        grad_checkpoint_every=checkpoint_every or 1, loss_chunk_size=chunk,
    )  # fmt: skip
    assert estimate.total_gb == pytest.approx(measured_gb, rel=0.03)


# 2026-12-01, scripts/bench_memory.py with and without --layouts: the loop's own steps, two micro-batches each.
@pytest.mark.parametrize(
    ("name", "ranks", "batch_size", "checkpoint_every", "measured_gb"),
    [
        ("pretrain_a100_502m", 1, 1, 0, 12.66), ("pretrain_a100_502m", 1, 2, 1, 11.01),
        ("pretrain_a100_502m", 1, 4, 0, 19.90), ("pretrain_a100_502m", 1, 8, 3, 22.62),
        ("pretrain_a100_502m", 1, 8, 0, 28.16), ("pretrain_a100_502m", 1, 16, 1, 14.96),
        ("pretrain_a100_502m", 1, 16, 0, 44.61), ("pretrain_gpu_smoke", 1, 2, 0, 0.534),
        ("pretrain_a100_502m", 2, 8, 0, 24.60), ("pretrain_a100_502m", 8, 8, 0, 21.51),
        ("pretrain_a100_502m", 8, 8, 1, 5.55), ("pretrain_1_5b", 8, 4, 0, 30.32), ("pretrain_1_5b", 64, 4, 1, 7.00),
    ],
)  # fmt: skip
def test_within_three_percent_of_the_loops_own_peaks(name, ranks, batch_size, checkpoint_every, measured_gb):
    every = [f"training.grad_checkpoint_every={checkpoint_every}"] if checkpoint_every else []
    recipe = load_recipe(name, [f"training.grad_checkpoint={'true' if every else 'false'}", *every])
    layout = Layout(ranks, "fsdp")
    assert estimate_recipe(recipe, batch_size, layout=layout).total_gb == pytest.approx(measured_gb, rel=0.03)


@pytest.mark.parametrize(
    "changes", [{}, {"d_model": 192, "n_heads": 2, "n_kv_heads": 1, "head_dim": 96, "n_experts": 16,
                     "expert_hidden_size": 384}], ids=["small", "of the 7B recipe's shape"]
)  # fmt: skip
def test_saved_activations_are_what_autograd_keeps(changes):
    batch_size, seq_len = 2, 128
    four = SMALL.replace(**changes)
    two = four.replace(n_layers=2)
    per_two_blocks = saved_bytes(four, batch_size, seq_len) - saved_bytes(two, batch_size, seq_len)
    estimates = [
        estimate_model_memory_gb(on_meta(config), seq_len, batch_size, device_type="cpu") for config in (two, four)
    ]
    assert kept_between_passes(estimates[1]) - kept_between_passes(estimates[0]) == pytest.approx(
        per_two_blocks, rel=0.2
    )


def test_checkpointing_saves_in_the_estimate_what_it_saves_in_autograd():
    batch_size, seq_len = 2, 128
    real = saved_bytes(SMALL, batch_size, seq_len) - saved_bytes(SMALL, batch_size, seq_len, checkpoint_every=2)
    model = on_meta(SMALL)
    plain, checkpointed = (
        kept_between_passes(estimate_model_memory_gb(model, seq_len, batch_size, flag, 2, device_type="cpu"))
        for flag in (False, True)
    )
    assert plain - checkpointed == pytest.approx(real, rel=0.2)


def test_the_estimate_grows_with_batch_and_length_and_the_table_adds_up():
    model = on_meta(SMALL)
    small = estimate_model_memory_gb(model, seq_len=128, batch_size=2)
    assert estimate_model_memory_gb(model, seq_len=128, batch_size=4).total_bytes > small.total_bytes
    assert estimate_model_memory_gb(model, seq_len=256, batch_size=2).total_bytes > small.total_bytes
    figures = [float(line.split()[-2]) for line in small.table().splitlines()]
    assert sum(figures[:-1]) == pytest.approx(figures[-1], abs=0.001 * len(figures))


def test_too_large_a_step_is_one_warning_and_no_stop(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * 10**9, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10**9)
    assert assert_fits_in_available_gpu(MemoryEstimate({"weights": 21 * 10**9}))
    assert capsys.readouterr().err == ""
    assert not assert_fits_in_available_gpu(MemoryEstimate({"weights": 21 * 10**9 + 1}))
    warning = capsys.readouterr().err
    assert warning.startswith("warning: the step is estimated at 21.0 GB, and the GPU has 21.0 GB free")
    assert warning.count("\n") == 1


def test_without_a_gpu_there_is_nothing_to_warn_of(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert assert_fits_in_available_gpu(MemoryEstimate({"weights": 10**15}))


@pytest.mark.parametrize(
    ("gb", "micro_batch", "every"), [(140, 32, None), (80, 16, None), (40, 8, None), (24, 4, None), (13, 1, None)]
)
def test_the_fastest_setting_that_fits_recomputes_as_little_as_it_can(gb, micro_batch, every):
    setting, estimate = fastest_that_fits(RECIPE, int(gb * 1e9))
    assert estimate.total_gb <= 0.95 * gb
    assert (setting.micro_batch_size, setting.grad_checkpoint_every) == (micro_batch, every)
    assert setting.micro_batch_size * setting.gradient_accumulation_steps == 32


def test_a_found_setting_is_the_estimate_of_its_overrides_and_nothing_may_fit():
    setting, estimate = fastest_that_fits(RECIPE, 24 * 10**9)
    again = load_recipe(Path(__file__).parents[2] / "configs/pretrain_a100_502m.yaml", setting.overrides())
    assert estimate_recipe(again).total_bytes == estimate.total_bytes
    assert fastest_that_fits(RECIPE, 5 * 10**9) is None


# Recipes that are not what is fastest on their card, by what was measured: docs/performance.md says why.
@pytest.mark.parametrize(
    ("name", "gb", "own", "fits"),
    [
        ("a100", 80, "8 x 4 windows, one block in 3 recomputed, chunks of 8,192 tokens", "22.6 GB, fits too"),
        ("24gb", 24, "4 x 8 windows, nothing recomputed, chunks of 4,096 tokens", "18.8 GB, fits too"),
        ("h200", 80, "32 x 1 windows, nothing recomputed, chunks of 16,384 tokens", "79.7 GB, does not fit"),
    ],
)  # fmt: skip
def test_a_found_setting_is_held_against_the_recipes_own(name, gb, own, fits):
    recipe, available_bytes = load_recipe(f"pretrain_{name}_502m"), gb * 10**9
    setting, _ = fastest_that_fits(recipe, available_bytes)
    first, second = beside_the_recipe(recipe, setting, available_bytes).splitlines()
    assert first == f"the recipe has {own}: {fits}"
    assert second.startswith("chosen: least recomputed, ")


def test_what_is_found_for_an_h200_is_its_recipe():
    recipe = load_recipe("pretrain_h200_502m")
    setting, _ = fastest_that_fits(recipe, 141 * 10**9)
    assert setting == (32, 1, None, 16384)
    assert beside_the_recipe(recipe, setting, 141 * 10**9) == "as the recipe has it"


# The 7B recipe by hand: a block of 28 has 3 x 1536^2 in projections, 16 x 1536 in the router, 17 experts of
# 3 x 1536 x 3072, 2 x 1536 in norms and 16 sinks; outside are 128,256 rows of 1536 and one norm.
EXPERT_7B = 14_155_776
BLOCK_7B = 7_077_888 + 24_576 + 17 * EXPERT_7B + 3_072 + 16
OUTSIDE_7B = 128_256 * 1536 + 1536
TOTAL_7B = 7_134_107_584
STATE = ("weights (fp32)", "gradients (fp32)", "AdamW moments (2 x fp32)")


RECIPE_7B = load_recipe(Path(__file__).parents[2] / "configs/pretrain_7b.yaml")


def estimate_7b(**changes):
    return estimate_recipe(RECIPE_7B, batch_size=1, **changes)


def test_replicas_keep_the_whole_state():
    assert OUTSIDE_7B + 28 * BLOCK_7B == TOTAL_7B
    assert estimate_7b(layout=Layout(ranks=64)).items == estimate_7b().items
    assert sum(estimate_7b().items[name] for name in STATE) == 16 * TOTAL_7B


def test_sharded_state_is_a_share_beside_two_gathered_blocks_and_the_embedding():
    whole, items = estimate_7b().items, estimate_7b(layout=Layout(ranks=64, parallelism="fsdp")).items
    assert sum(items[name] for name in STATE) == 16 * TOTAL_7B / 64
    assert items["gathered weights: embedding and two blocks (fp32)"] == 4 * (OUTSIDE_7B + 2 * BLOCK_7B)
    # What the passes save and multiply by is a rank's own; in the last block's backward pass, this layout's peak, the
    # head's copy is gone, and its gradient waits.
    assert items["saved activations (28 blocks)"] == whole["saved activations (28 blocks)"]
    assert whole["weights in bf16 for the products"] == 2 * TOTAL_7B
    assert items["weights in bf16 for the products"] == 2 * 28 * BLOCK_7B
    assert items["head: gradient of weight"] == 4 * (OUTSIDE_7B - 1536)
    # A block's fp32 gradient as it is made, as everywhere, and one on its way to its shards.
    assert items["a block's gradients before they are added (fp32)"] == 4 * BLOCK_7B
    assert items["a block's gradients on their way to their ranks (fp32)"] == 4 * BLOCK_7B
    assert items["backward pass of the last block"] == 4096 * 2 * (2 * (2 * 1536 + 3 * 3072) + 3 * 3072 + 2 * 1536)
    assert "backward pass of the last block" not in whole


def test_one_rank_shards_nothing():
    assert estimate_7b(layout=Layout(1, "fsdp")).items == estimate_7b().items


def test_ranks_that_share_the_experts_keep_their_own():
    """Of 16 experts each of 8 ranks has 2, the number that a token uses: the active parameters."""
    items = estimate_7b(layout=Layout(ranks=16, expert_ranks=8)).items
    active = TOTAL_7B - 28 * 14 * EXPERT_7B
    assert active == 1_585_043_392
    assert sum(items[name] for name in STATE) == 16 * active
    assert items["weights in bf16 for the products"] == 2 * active
    assert items["rows between the experts' ranks"] == 2 * 4096 * 2 * 1536 * 2
    # On the reference path, each token's 2 + 1 experts also save silu(gate), the 2 routed ones their outputs, and the
    # norm its input in fp32.
    beyond = items["saved activations (28 blocks)"] - estimate_7b().items["saved activations (28 blocks)"]
    statistics = 4 * (2 + 16 + 4 * 2)
    assert beyond == 28 * 4096 * (2 * (3 * 3072 + 2 * 1536 + 1536) - statistics)


def test_several_gpus_share_a_steps_windows():
    """With 24 GB a GPU takes 4 windows at once; the recipe's key counts the micro-batches of all GPUs."""
    assert fastest_that_fits(RECIPE, 24 * 10**9, Layout(ranks=8))[0][:2] == (4, 8)
    assert fastest_that_fits(RECIPE, 24 * 10**9, Layout(ranks=32))[0][:2] == (1, 32)
    assert fastest_that_fits(RECIPE_7B, 80 * 10**9) is None


def test_recomputed_blocks_have_no_copies_of_their_weights_but_one():
    """All 28 recomputed: in the last one's backward pass, the peak, its own in bf16; between the passes, the head's."""
    every, none = (
        estimate_recipe(RECIPE_7B.replace(training=RECIPE_7B.training.replace(**changes).model_dump())).items
        for changes in ({"grad_checkpoint": True, "grad_checkpoint_every": 1}, {})
    )
    name = "weights in bf16 for the products"
    assert every[name] == 2 * (BLOCK_7B if "backward pass of the last block" in every else OUTSIDE_7B)
    assert none[name] == 2 * TOTAL_7B


def test_muon_keeps_one_tensor_for_each_matrix():
    items = estimate_model_memory_gb(on_meta(RECIPE.model), seq_len=64, batch_size=1, optimizer="muon").items
    matrices = 403_513_344 - 12 * 768 * 8  # all that decays but the routers
    others = 502_033_248 - matrices
    assert items["Muon momentum (fp32)"] == 4 * matrices
    assert items["AdamW moments (2 x fp32)"] == 8 * others


STACK = "Muon's stack beyond the passes' own"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_muons_stack_counts_where_it_is_larger_than_what_the_passes_take(dtype):
    """Of 36 experts' gate and up projections, all in one stack: 6 bytes an element."""
    config = SMALL.replace(dtype=dtype)
    held = ("weights (fp32)", "gradients (fp32)", "AdamW", "Muon momentum", "runtime")
    for seq_len in (1, 128):
        items, plain = (
            estimate_model_memory_gb(on_meta(config), seq_len, batch_size=1, optimizer=optimizer).items
            for optimizer in ("muon", "adamw")
        )
        assert STACK not in plain
        passes = sum(size for name, size in items.items() if not name.startswith(held) and name != STACK)
        assert passes == sum(size for name, size in plain.items() if not name.startswith(held))
        assert passes + items.get(STACK, 0) == max(6 * 4 * 9 * 2 * 128 * 256, passes)
        assert (STACK in items) == (seq_len == 1)


def test_no_recipe_has_muons_stack_in_its_estimate():
    paths = list((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert len(paths) >= 10
    for path in paths:
        recipe = load_recipe(path)
        recipe = recipe.replace(training=recipe.training.replace(optimizer="muon", parallelism="ddp").model_dump())
        assert STACK not in estimate_recipe(recipe).items, path
