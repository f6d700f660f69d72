"""Stock gpt-oss checkpoints, saved by transformers itself, read as ours; and what cannot be read is refused."""

import json

import exported
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import lively
from transformers import GptOssConfig, GptOssForCausalLM

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.export.hf import export_checkpoint
from gpt_oss_lite.export.importing import import_checkpoint
from gpt_oss_lite.inference.generate import generate
from gpt_oss_lite.training.weights import load_model
from shared_data.errors import UserError

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 64}  # fmt: skip


def stock(**changes) -> GptOssForCausalLM:
    """A small stock model with large weights."""
    fields = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 512, "rope_parameters": YARN, "tie_word_embeddings": False, "pad_token_id": None,
    }  # fmt: skip
    return lively(GptOssForCausalLM(GptOssConfig(**{**fields, **changes}))).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "max_position_embeddings": 128},
        {"attention_bias": False, "tie_word_embeddings": True},
        {"layer_types": ["full_attention"] * 4},
        {"num_hidden_layers": 3, "num_key_value_heads": 4, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3},
    ],
    ids=["yarn", "plain RoPE", "tied", "no windows", "sizes"],
)
def test_a_stock_model_computes_the_same_here(changes, tmp_path):
    twin = stock(**changes)
    twin.save_pretrained(tmp_path / "stock")
    import_checkpoint(tmp_path / "stock", tmp_path / "run")
    model, meta = load_model(tmp_path / "run")
    assert meta["imported_from"] == str(tmp_path / "stock")
    tokens = exported.ids(2, 60)
    with torch.no_grad():
        theirs = twin(tokens).logits
        ours, _ = model(tokens)
        prompt = tokens[0, :9]
        generated = twin.generate(prompt[None], max_new_tokens=40)[0, 9:].tolist()
    assert exported.relative_error(ours, theirs) < 1e-5
    assert theirs.abs().max() > 1
    (sample,) = generate(model, [prompt.tolist()], 40, temperature=0, rope_scale=model.config.rope_scale)
    assert sample.ids == generated


def test_there_and_back_again_is_the_same_to_the_last_bit(tmp_path):
    twin = stock().bfloat16()
    twin.save_pretrained(tmp_path / "stock", max_shard_size="20KB")
    assert (tmp_path / "stock/model.safetensors.index.json").exists()
    import_checkpoint(tmp_path / "stock", tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    state = twin.state_dict()
    assert sorted(again) == sorted(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "again"))
    different = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    assert not different
    assert before.keys() - after.keys() <= {"transformers_version", "bos_token_id", "eos_token_id", "pad_token_id",
                                            "output_router_logits", "router_aux_loss_coef"}  # fmt: skip


def test_the_recipe_beside_it_is_of_the_same_model(tmp_path):
    stock(vocab_size=64).save_pretrained(tmp_path / "stock")
    import_checkpoint(tmp_path / "stock", tmp_path / "run", vocab_size=61)
    model, _ = load_model(tmp_path / "run")
    assert load_recipe(tmp_path / "run/config.yaml").model == model.config
    assert (model.config.vocab_size, model.config.embedding_rows) == (61, 64)


def change(folder, **changes):
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral': it must be 'gpt_oss'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "the weights are quantised (mxfp4)"),
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0: this model has 7.0"),
        ({"rope_parameters": {**YARN, "rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_parameters": {**YARN, "truncate": True}}, "rope_parameters.truncate is true"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.0}}, "rope_parameters.attention_factor is 1.0"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types must alternate"),
        ({"rope_parameters": {**YARN, "factor": "big"}}, "a value has another type than transformers writes"),
        ({"rope_parameters": 8}, "rope_parameters is 8: it must be an object"),
        ({"max_position_embeddings": None}, "a value has another type than transformers writes"),
        ({"hidden_size": "32"}, "d_model: Input should be a valid integer"),
        ({"hidden_size": "absent"}, "the key 'hidden_size' is missing"),
        ({"num_attention_heads": 3}, "n_heads is 3: it must be a multiple of n_kv_heads (2)"),
        ({"hidden_size": 31}, "model.embed_tokens.weight is (61, 32): by config.json it must be (61, 31)"),
        (
            {"num_hidden_layers": 3, "layer_types": "absent"},
            "a tensor that this model has no place for: model.layers.3",
        ),
        ({"num_hidden_layers": 5, "layer_types": "absent"}, "the checkpoint has no tensor model.layers.4"),
    ],
)
def test_what_ours_cannot_compute_is_refused(changes, message, tmp_path):
    stock().save_pretrained(tmp_path / "stock")
    change(tmp_path / "stock", **changes)
    with pytest.raises(UserError) as refused:
        import_checkpoint(tmp_path / "stock", tmp_path / "run")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_sinks_beyond_our_clamp_are_refused(tmp_path):
    stock().save_pretrained(tmp_path / "stock")
    path = tmp_path / "stock/model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.sinks"][2] = 15.5
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"a sink of 15.5: this model clamps sinks to \[-10, 15\]"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run")


def test_damaged_files_are_named(tmp_path):
    stock().save_pretrained(tmp_path / "stock")
    weights = tmp_path / "stock/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run")
    weights.unlink()
    with pytest.raises(FileNotFoundError):
        import_checkpoint(tmp_path / "stock", tmp_path / "run")
    (tmp_path / "stock/config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not a JSON object"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="run is there already"):
        import_checkpoint(tmp_path / "stock", tmp_path / "run")
