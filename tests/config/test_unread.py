"""Keys that are set and have no effect are named, with what would give them one; all others are not."""

from pathlib import Path

import pytest

from gpt_oss_lite.config import Recipe, load_recipe
from gpt_oss_lite.config.shipped import shipped_recipes
from gpt_oss_lite.config.unread import unread_keys
from shared_data.yaml_files import parse_yaml

MUON = "training.muon_momentum is 0.9, without effect: training.optimizer is adamw, it would have to be muon"


def recipe_of(*settings: str) -> Recipe:
    """Of `block.key=value` each."""
    content = {"model": {}, "training": {}, "data": {"train_data_path": "corpus"}}
    for setting in settings:
        key, _, value = setting.partition("=")
        block, name = key.split(".")
        content[block][name] = parse_yaml(value, setting)
    return Recipe.model_validate(content)


# The key that is set, what switches it off where it is not the defaults that do, and what gives it effect.
PAIRS = [
    ("training.muon_momentum=0.9", (), "training.optimizer=muon"),
    ("training.min_lr_ratio=0.1", ("training.schedule=constant",), "training.schedule=wsd"),
    ("training.gradient_bucket_mb=50", ("training.parallelism=fsdp",), "training.parallelism=ddp"),
    ("training.compile_mode=max-autotune", (), "training.compile=true"),
    ("training.grad_checkpoint_every=2", (), "training.grad_checkpoint=true"),
    ("training.nan_guard_max_consecutive=9", ("training.nan_guard=false",), "training.nan_guard=true"),
    ("training.nan_guard_max_rollbacks=9", ("training.nan_guard=false",), "training.nan_guard=true"),
    ("training.nan_guard_lr_factor=0.5", ("training.nan_guard=false",), "training.nan_guard=true"),
    ("training.nan_guard_lr_factor=0.5", ("training.nan_guard_max_rollbacks=0",), "training.nan_guard_max_rollbacks=3"),
    ("training.nan_guard_lr_steps=9", (), "training.nan_guard_lr_factor=0.5"),
    ("training.spike_window=9", ("training.spike_zscore=0",), "training.spike_zscore=6"),
    ("training.eval_windows=9", (), "training.eval_interval=5"),
    ("data.validation_data_path=held-out", (), "training.eval_interval=5"),
    ("training.wandb_project=mine", (), "training.wandb=offline"),
]


@pytest.mark.parametrize(("setting", "off", "on"), PAIRS)
def test_a_key_without_effect_is_named_with_what_would_give_it_one(setting, off, on):
    (line,) = unread_keys(recipe_of(*off, setting), ranks=2)
    key, _, value = setting.partition("=")
    switch = on.partition("=")[0]
    assert line.startswith(f"{key} is {value}, without effect: {switch} is ")
    assert unread_keys(recipe_of(*off, setting, on), ranks=2) == []
    assert unread_keys(recipe_of(*off), ranks=2) == []


def test_the_line_says_key_value_and_what_is_allowed():
    assert unread_keys(recipe_of("training.muon_momentum=0.9"), ranks=1) == [MUON]


WINDOWS = "training.eval_windows is 9, without effect: training.eval_interval is 0, it would have to be greater than 0"


@pytest.mark.parametrize(
    ("in_file", "overrides", "said"),
    [
        (["eval_windows=9", "eval_interval=5"], ["training.eval_interval=0"], []),  # nobody is misled
        (["eval_windows=9", "eval_interval=5"], ['training={"eval_interval": 0, "eval_windows": 9}'], [WINDOWS]),
        (["eval_windows=9", "eval_interval=5"], ["training.eval_interval=0", "training.eval_windows=9"], [WINDOWS]),
        (["eval_windows=9", "eval_interval=5"], ["training.eval_interval=0", "training.lr=1e-4"], []),
        (["eval_interval=0"], ["training.eval_windows=9"], [WINDOWS]),
        (["eval_interval=0", "eval_windows=9"], ["training.lr=1e-4"], [WINDOWS]),  # the file misleads
    ],
)
def test_a_files_key_that_an_override_switches_off_is_not_named(tmp_path, in_file, overrides, said):
    path = tmp_path / "mine.yaml"
    text = "".join(f"  {setting.replace('=', ': ')}\n" for setting in in_file)
    path.write_text(f"model: {{}}\ntraining:\n{text}data: {{train_data_path: corpus}}\n")
    assert unread_keys(load_recipe(path, overrides), 1, overrides) == said


def test_of_a_runs_own_file_only_what_is_set_anew_is_named():
    """A run writes every key, also those that its own start had switched off."""
    recipe = recipe_of("training.eval_windows=9", "training.muon_momentum=0.9")
    assert unread_keys(recipe, 1, recorded=True) == []
    assert unread_keys(recipe, 1, ["training.muon_momentum=0.9"], recorded=True) == [MUON]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("aux_loss_scope", "ranks"), ("parallelism", "fsdp"), ("expert_parallel_size", "4"), ("gradient_bucket_mb", "50"),
     ("distributed_timeout_s", "30.0")],
)  # fmt: skip
def test_what_is_for_several_ranks_has_no_effect_on_one(setting, value):
    recipe = recipe_of(f"training.{setting}={value}")
    assert unread_keys(recipe, ranks=1) == [
        f"training.{setting} is {value}, without effect: the number of ranks is 1, it would have to be 2 or more"
    ]
    assert unread_keys(recipe, ranks=4) == []


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_sets_nothing_in_vain(name):
    assert unread_keys(load_recipe(Path(name)), ranks=8) == []
