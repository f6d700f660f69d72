"""A profile of the loop's steps, and the advice when one does not fit."""

import gzip
import json
from pathlib import Path

import torch

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.training.layout import Layout
from gpt_oss_lite.training.out_of_memory import advice
from gpt_oss_lite.training.profiling import WARMUP_STEPS, StepProfiler

RECIPE = load_recipe(Path(__file__).parents[2] / "configs/pretrain_a100_502m.yaml")


def test_profile_records_the_asked_steps_and_no_more(tmp_path, capfd):
    profiler = StepProfiler(tmp_path / "profile", n_steps=2)
    for step in range(WARMUP_STEPS + 5):
        with torch.profiler.record_function(f"step-{step}"):
            torch.randn(8, 8) @ torch.randn(8, 8)
        profiler.step()
    trace = json.loads(gzip.decompress((tmp_path / "profile/trace.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("step-")}
    assert names == {f"step-{WARMUP_STEPS}", f"step-{WARMUP_STEPS + 1}"}
    assert "aten::mm" in (tmp_path / "profile/kernels.txt").read_text()
    assert "[profile]" in capfd.readouterr().err


def test_advice_names_a_setting_that_loads_and_fits():
    line = advice(RECIPE, 24 * 10**9)
    overrides = line.split("--set ")[1:]
    fitting = load_recipe(
        Path(__file__).parents[2] / "configs/pretrain_a100_502m.yaml", [word.strip() for word in overrides]
    )
    assert fitting.training.micro_batch_size == 4
    assert "of 24.0 GB" in line
    assert advice(RECIPE, 10**9).startswith("no setting of this recipe fits in 1.0 GB")


def test_advice_is_for_as_many_gpus_as_the_run_has():
    """One GPU takes 8 x 4, whose micro-batches 8 cannot share; and 16 bytes of state a parameter are shared by FSDP."""
    assert "micro_batch_size=8 --set training.gradient_accumulation_steps=4 " in advice(RECIPE, 41 * 10**9)
    line = advice(RECIPE, 41 * 10**9, Layout(8))
    assert "micro_batch_size=4 --set training.gradient_accumulation_steps=8 " in line
    large = load_recipe(Path(__file__).parents[2] / "configs/pretrain_7b.yaml")
    assert advice(large, 80 * 10**9).startswith("no setting")
    assert "of 80.0 GB" in advice(large, 80 * 10**9, Layout(8, "fsdp"))
