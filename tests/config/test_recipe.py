"""Recipes: what loads, what is refused, and in which words."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_oss_lite.config import ModelConfig, Recipe, TrainingConfig, dump_recipe, load_recipe
from gpt_oss_lite.config.other_names import OTHER_NAMES
from shared_data.errors import UserError
from shared_data.yaml_files import dump_yaml, known_keys, parse_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = "model: {}\ntraining: {}\ndata: {train_data_path: corpus}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        load_recipe(path, overrides)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_the_502m_recipe_is_the_described_one():
    recipe = load_recipe(CONFIGS / "pretrain_a100_502m.yaml")
    model, training = recipe.model, recipe.training
    assert (model.n_layers, model.d_model, model.n_heads, model.n_kv_heads, model.head_dim) == (12, 768, 8, 4, 96)
    assert (model.vocab_size, model.padded_vocab_size, model.window_size, model.max_seq_len) == (
        128000,
        128256,
        128,
        4096,
    )
    assert (model.n_experts, model.experts_per_token, model.n_shared_experts, model.expert_hidden_size) == (
        8,
        2,
        1,
        1536,
    )
    assert (model.rope_theta, model.rope_scale, model.yarn_scale_factor, model.dtype) == (150000, 1, 32, "bf16")
    assert (model.yarn_original_max_seq_len, model.yarn_target_seq_len, model.eval_max_seq_len) == (
        4096,
        131072,
        131072,
    )
    assert (training.lr, training.betas, training.eps, training.weight_decay) == (4e-4, (0.9, 0.95), 1e-6, 0.1)
    assert (training.schedule, training.warmup_steps, training.min_lr_ratio) == ("cosine", 3000, 0.05)
    tokens_per_step = training.micro_batch_size * training.gradient_accumulation_steps * model.max_seq_len
    assert tokens_per_step == 131_072
    assert training.total_steps * tokens_per_step == 7_995_392_000
    assert (training.log_interval, training.save_interval, training.keep_last_n) == (50, 2000, 3)
    assert (training.grad_clip, training.aux_loss_alpha, training.loss_chunk_size) == (1.0, 0.01, 8192)
    assert (training.grad_checkpoint, training.grad_checkpoint_every, training.nan_guard_max_consecutive) == (
        True,
        3,
        5,
    )
    assert (recipe.data.train_data_path, recipe.data.data_mix) == ("data/pretrain_chinchilla", "gptoss-default")


def test_the_smoke_recipe_takes_640_tokens_through_the_same_structure():
    recipe = load_recipe(CONFIGS / "pretrain_gpu_smoke.yaml")
    model, training = recipe.model, recipe.training
    assert (training.micro_batch_size, training.gradient_accumulation_steps, model.max_seq_len) == (2, 1, 64)
    assert training.total_steps * 2 * 64 == 640
    assert model.window_size < model.max_seq_len
    assert model.n_layers >= 2
    assert model.rope_scale == model.yarn_scale_factor > 1
    assert (model.n_experts, model.experts_per_token, model.sink_bias) == (8, 2, True)


def test_the_quickstart_recipe_keeps_to_what_the_demo_promises():
    recipe = load_recipe(CONFIGS / "quickstart.yaml")
    assert recipe.model.d_model <= 128
    assert recipe.model.embedding_rows == 128256
    assert recipe.training.gradient_accumulation_steps % 4 == 0


@pytest.mark.parametrize("name", ["pretrain_a100_502m", "pretrain_gpu_smoke", "quickstart"])
def test_every_recipe_survives_a_dump(name, tmp_path):
    recipe = load_recipe(CONFIGS / f"{name}.yaml")
    assert load_recipe(write(tmp_path, dump_recipe(recipe))) == recipe


@settings(deadline=None)
@given(path=st.text(min_size=1), mix=st.none() | st.text(), lr=st.floats(min_value=1e-300, max_value=1e300))
def test_any_text_and_number_survives_a_dump(path, mix, lr):
    recipe = Recipe.model_validate(
        {"model": {}, "training": {"lr": lr}, "data": {"train_data_path": path, "data_mix": mix}}
    )
    assert Recipe.model_validate(parse_yaml(dump_recipe(recipe), "dump")) == recipe


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))  # fmt: skip
def test_any_value_survives_yaml(value):
    assert parse_yaml(dump_yaml(value), "dump") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("4e-4", 4e-4), ("1E3", 1000.0), ("-1.5e+2", -150.0), ("61_000", 61000), ("null", None), ("", None),
     ("true", True), ("yes", "yes"), ("1:30", "1:30"), ("2026-11-30", "2026-11-30"),
     ("0x10", 16), (".5", 0.5), ("e4", "e4")],
)  # fmt: skip
def test_scalars_mean_what_people_mean(text, value):
    assert parse_yaml(text, "text") == value
    assert type(parse_yaml(text, "text")) is type(value)


def test_a_file_value_and_a_later_override_win_in_that_order(tmp_path):
    path = write(tmp_path, "model: {}\ntraining: {lr: 1e-3}\ndata: {train_data_path: a}\n")
    assert load_recipe(path).training.lr == 1e-3
    recipe = load_recipe(path, ["training.lr=2e-3", "training.lr=3e-3", "data.train_data_path=b c=d"])
    assert (recipe.training.lr, recipe.data.train_data_path) == (3e-3, "b c=d")
    assert load_recipe(path, ["model.window_size=null", "training.betas=[0.8, 0.9]"]).training.betas == (0.8, 0.9)


def training(block: str) -> str:
    return MINIMAL.replace("training: {}", f"training: {block}")


# What is wrong with the file -> the words after its name.
WRONG_FILES = [
    (training("{lr: -1}"), "training.lr is -1: it must be greater than 0"),
    (training("{lr: .nan}"), "training.lr is nan: it must be a finite number"),
    (training("{lr: .inf}"), "training.lr is inf: it must be a finite number"),
    (training("{lr: fast}"), "training.lr is fast: it must be a number"),
    (training("{lr: true}"), "training.lr is true: it must be a number"),
    (training("{log_interval: 1.5}"), "training.log_interval is 1.5: it must be an integer"),
    (training("{compile: yes}"), "training.compile is yes: it must be true or false"),
    (training("{schedule: linear}"),
     "training.schedule is linear: it must be cosine, constant or wsd"),
    (training("{betas: [0.9]}"), "training.betas.1 is missing"),
    (training("{betas: [0.9, 1.0]}"),
     "training.betas is [0.9, 1.0]: both must be at least 0 and less than 1"),
    (training("{warmup_steps: 100, total_steps: 100}"),
     "training.warmup_steps is 100: it must be less than total_steps (100)"),
    (training("{decay_steps: 9}"),
     "training.decay_steps is 9: only schedule: wsd has it, not cosine"),
    (training("{schedule: wsd, total_steps: 100, warmup_steps: 60, decay_steps: 50}"),
     "training.decay_steps is 50: with warmup_steps (60) it must fit into total_steps (100)"),
    (MINIMAL.replace("model: {}", "model: {dtype: fp16}"), "model.dtype is fp16: training takes bf16 or fp32"),
    (training("{warmup_step: 9}"),
     "training.warmup_step is not a known key; the nearest known key is warmup_steps"),
    (training("{learning_rate: 3e-4}"), "training.learning_rate is not a known key; the nearest known key is lr"),
    (training("{batch_size: 4}"), "training.batch_size is not a known key; the nearest known key is micro_batch_size"),
    (MINIMAL.replace("model: {}", "model: {hidden_size: 8}"),
     "model.hidden_size is not a known key; the nearest known key is d_model"),
    (MINIMAL.replace("training", "trainin"),
     "trainin is not a known key; the nearest known key is training (and 1 more)"),
    (MINIMAL.replace("model: {}", "model: {zzz: 1}"), "model.zzz is not a known key; the known keys are vocab_size, "),
    ("model: {}\ntraining: {}\n", "data is missing"),
    (MINIMAL.replace("model: {}", "model: 3"), "model is 3: it must be a mapping of keys to values"),
    (MINIMAL.replace("corpus", "''"), "data.train_data_path is '': it must be text that is not empty"),
    ("", "the file is empty: it must hold keys and values"),
    ("# nothing\n", "the file is empty: it must hold keys and values"),
    ("- 1\n- 2\n", "it holds [1, 2]: it must hold keys and values"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), WRONG_FILES)
def test_a_wrong_recipe_is_one_line_with_file_key_value_and_what_is_allowed(text, words, tmp_path):
    path = write(tmp_path, text)
    assert refusal(path).startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {}\nmodel: {}\n", "line 2: the key model is there twice"),
        ("model:\n  d_model: 1\n  d_model: 2\n", "line 3: the key d_model is there twice"),
        ("a: &x [1]\nb: *x\n", "line 2: aliases are not allowed here"),
        ("model: !!python/object/apply:os.system ['true']\n", "line 1: could not determine a constructor"),
        ("model: [1\n", "line 2: "),
        ("1: 2\n", "line 1: a key must be text, not 1"),
        ("[a]: 2\n", "line 1: a key must be text"),
        ("a: 1\n---\nb: 2\n", "line 2: but found another document"),
    ],
)
def test_bad_yaml_names_the_line(text, words, tmp_path):
    path = write(tmp_path, text)
    assert refusal(path).startswith(f"{path}, {words}")


@pytest.mark.parametrize("content", [b"\xff\xfe\xff", b"a: \x00", b"[" * 5000, b"a: " + b"9" * 5000, b"a: !!int x"])
def test_bytes_that_are_no_yaml_are_one_line(content, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert refusal(path).startswith(str(path))


def test_nested_aliases_cost_nothing(tmp_path):
    lines = ["a0: &a0 [lol]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "aliases are not allowed" in refusal(write(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lr=-1", "training.lr is -1: it must be greater than 0"),
        ("training.lrr=1", "training.lrr is not a known key; the nearest known key is lr"),
        ("training.init_std=1", "training.init_std is not a known key; the nearest known key is model.init_std"),
        ("model.optimizer=muon", "model.optimizer is not a known key; the nearest known key is training.optimizer"),
        ("trainin.lr=1", "trainin is not a known key; the nearest known key is training"),
        ("training.lr.x=1", "training.lr is a mapping: it must be a number"),
        ("training.lr", "it must have the form block.key=value"),
        ("training..lr=1", "it must have the form block.key=value"),
        ("=1", "it must have the form block.key=value"),
        ("lr=1", "lr is not a known key"),
        ("learning_rate=1", "learning_rate is not a known key; the nearest known key is training.lr"),
        ("seq_len=1", "seq_len is not a known key; the nearest known key is model.max_seq_len"),
        ("training.warmup_steps=70000", "training.warmup_steps is 70000: it must be less than total_steps (61000)"),
        ("training=3", "training is 3: it must be a mapping"),
    ],
)
def test_a_wrong_override_names_the_option(override, words, tmp_path):
    assert refusal(write(tmp_path, MINIMAL), override).startswith(f"--set {override}: {words}")


def test_an_override_that_breaks_a_pair_is_named_beside_the_file(tmp_path):
    path = write(tmp_path, MINIMAL)
    expected = f"{path} with --set training.total_steps=100: training.warmup_steps is 3000: it must be less than"
    assert refusal(path, "training.total_steps=100").startswith(expected)


def test_other_programs_names_mean_keys_that_are_there_and_are_none_themselves():
    keys = {key for block in Recipe.model_fields for key in known_keys(Recipe, [block])}
    assert set(OTHER_NAMES.values()) <= keys
    assert not keys & set(OTHER_NAMES)


def test_a_changed_copy_is_checked_like_a_new_one():
    assert TrainingConfig().replace(lr=1e-3).lr == 1e-3
    with pytest.raises(ValueError, match="warmup_steps is 3000"):
        TrainingConfig().replace(total_steps=10)
    with pytest.raises(ValueError, match="frozen"):
        ModelConfig().d_model = 1


def test_the_final_decay_is_a_tenth_unless_stated():
    assert TrainingConfig(schedule="wsd").resolved_decay_steps == 6100
    assert TrainingConfig(schedule="wsd", decay_steps=5).resolved_decay_steps == 5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[{path: a, weight: 0.7}, {path: b, weigt: 0.3}]",
         "data.train_data_path.1.weigt is not a known key; the nearest known key is weight"),
        ("[{path: a, weight: x}, {path: b, weight: 0.3}]", "data.train_data_path.0.weight is x: it must be a number"),
        ("[a, b]", "data.train_data_path.0 is a: it must be a mapping of keys to values"),
        ("3", "data.train_data_path is 3: it must be text"),
    ],
)  # fmt: skip
def test_a_key_of_two_kinds_is_named_without_its_kind(tmp_path, value, message):
    with pytest.raises(UserError) as refused:
        load_recipe(write(tmp_path, MINIMAL), [f"data.train_data_path={value}"])
    assert str(refused.value).startswith(f"--set data.train_data_path={value}: {message}")


def test_a_list_of_corpora_is_read_back_as_it_was(tmp_path):
    recipe = load_recipe(
        write(tmp_path, MINIMAL), ["data.train_data_path=[{path: a, weight: 0.7}, {path: b, weight: 0.3}]"]
    )
    assert load_recipe(write(tmp_path, dump_recipe(recipe))) == recipe
    assert [part.path for part in recipe.data.train_data_path] == ["a", "b"]
