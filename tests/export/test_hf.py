"""Exported folders, loaded by transformers itself: the same logits and greedy tokens as our model, and they train."""

import ast
import json
import shutil
from pathlib import Path

import exported
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GptOssForCausalLM

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.export import hf
from gpt_oss_lite.export.hf import export_checkpoint, write_weights
from gpt_oss_lite.export.layouts import layout_of, to_layout
from gpt_oss_lite.inference.generate import generate
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.memory import meta_model
from shared_data.errors import UserError

ROOT = Path(__file__).parents[2]
VARIANTS = {
    "the recipe's": exported.SMALL,
    "YaRN": exported.SMALL.replace(rope_scale=8.0),
    "no windows": exported.SMALL.replace(window_size=None),
    "no sinks": exported.SMALL.replace(sink_bias=False),
    "biases": exported.SMALL.replace(attention_bias=True, router_bias=True, expert_bias=True),
    "own head": exported.SMALL.replace(tie_embeddings=False, padded_vocab_size=None),
    "no shared expert": exported.SMALL.replace(n_shared_experts=0),
    "GPT-OSS's activation, shared expert": exported.SMALL.replace(expert_activation="clamped_swiglu"),
}
STOCK_VARIANTS = {
    "GPT-OSS": exported.GPT_OSS,
    "plain RoPE": exported.GPT_OSS.replace(rope_scale=1.0),
    "tied": exported.GPT_OSS.replace(tie_embeddings=True),
    "no biases": exported.GPT_OSS.replace(attention_bias=False, router_bias=False, expert_bias=False),
    "no windows": exported.GPT_OSS.replace(window_size=None),
}


def load(folder, dtype=torch.float32, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype, **options).eval()


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
    """Our model, and the folder that it was exported to."""
    folder = tmp_path_factory.mktemp("lite")
    model = exported.lively(exported.SMALL)
    export_checkpoint(exported.save(model, folder / "run"), folder / "hf")
    return model, folder / "hf"


def assert_equal_greedy(model, twin, prompt, n_new=40):
    (sample,) = generate(model, [prompt], n_new, temperature=0)
    with torch.no_grad():
        theirs = twin.generate(torch.tensor([prompt]), max_new_tokens=n_new)
    assert theirs[0, len(prompt) :].tolist() == sample.ids


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_shipped_model_computes_what_ours_does(config, tmp_path):
    model = exported.lively(config)
    done = export_checkpoint(exported.save(model, tmp_path / "run"), tmp_path / "hf")
    assert done.layout == "gpt_oss_lite"
    twin = load(tmp_path / "hf")
    tokens = exported.ids(2, 60)
    with torch.no_grad():
        ours, _ = model(tokens)
        theirs = twin(tokens).logits
    assert theirs.dtype == torch.float32
    assert (ours - theirs).abs().max() < 1e-5
    assert ours.abs().max() > 1  # or 1e-5 would say little
    assert_equal_greedy(model, twin, tokens[0, :9].tolist())


@pytest.mark.parametrize("config", STOCK_VARIANTS.values(), ids=STOCK_VARIANTS)
def test_gpt_oss_variants_need_no_remote_code(config, tmp_path):
    model = exported.lively(config)
    done = export_checkpoint(exported.save(model, tmp_path / "run"), tmp_path / "hf")
    assert done.layout == "gpt_oss"
    assert not list((tmp_path / "hf").glob("*.py"))
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(twin) is GptOssForCausalLM
    tokens = exported.ids(2, 60)
    with torch.no_grad():
        ours, _ = model(tokens)
        theirs = twin(tokens).logits
    assert exported.relative_error(ours, theirs) < 1e-5
    assert_equal_greedy(model, twin, tokens[0, :9].tolist())


@pytest.mark.parametrize("config", [exported.SMALL, exported.GPT_OSS], ids=["lite", "stock"])
def test_sinks_are_written_clamped(config, tmp_path):
    export_checkpoint(exported.save(exported.lively(config), tmp_path / "run"), tmp_path / "hf")
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        sinks = file.get_tensor("model.layers.0.self_attn.sinks")
    assert sinks[:2].tolist() == [15.0, -10.0]
    assert sinks.dtype == torch.bfloat16


def test_weights_are_rounded_to_bf16_and_no_further(tmp_path):
    """A model with all bits of fp32: its export is our model with rounded weights, not some other rounding."""
    model = GPTOSS(exported.SMALL).eval()
    export_checkpoint(exported.save(model, tmp_path / "run"), tmp_path / "hf")
    tokens = exported.ids(1, 30)
    with torch.no_grad():
        exact, _ = model(tokens)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        rounded, _ = model(tokens)
        theirs = load(tmp_path / "hf")(tokens).logits
    assert (rounded - theirs).abs().max() < 1e-5
    assert (exact - theirs).abs().max() > 1e-4


def test_the_cache_gives_what_the_whole_sequence_gives(lite):
    _, folder = lite
    twin, tokens = load(folder), exported.ids(2, 30)
    with torch.no_grad():
        whole = twin(tokens).logits
        outputs = twin(tokens[:, :7], use_cache=True)
        parts = [outputs.logits]
        for position in range(7, 30):
            cache = outputs["past_key_values"]  # both names of it work
            outputs = twin(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
            parts.append(outputs.logits)
    assert exported.relative_error(torch.cat(parts, dim=1), whole) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(lite, side):
    _, folder = lite
    twin, tokens = load(folder), exported.ids(1, 20)
    padding = torch.full((1, 9), 7)
    padded = torch.cat((padding, tokens) if side == "left" else (tokens, padding), dim=1)
    mask = torch.ones_like(padded)
    mask[:, slice(0, 9) if side == "left" else slice(20, 29)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = twin(tokens).logits
        beside = twin(padded, attention_mask=mask, position_ids=positions).logits
        beside = beside[:, 9:] if side == "left" else beside[:, :20]
        generated = twin.generate(padded, attention_mask=mask, max_new_tokens=12) if side == "left" else None
        plain = twin.generate(tokens, max_new_tokens=12)
    assert exported.relative_error(beside, alone) < 1e-5
    if generated is not None:
        assert generated[:, 29:].tolist() == plain[:, 20:].tolist()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains_with_our_gradients(lite, checkpointing):
    model, folder = lite
    twin, tokens = load(folder).train(), exported.ids(2, 25)
    if checkpointing:
        twin.gradient_checkpointing_enable()
    # Asked for, the cache gives way to recomputation, which would fill it twice.
    outputs = twin(tokens, labels=tokens, output_router_logits=True, use_cache=checkpointing)
    outputs.loss.backward()
    logits, aux = model(tokens)
    ours = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * aux
    assert outputs.loss.item() == pytest.approx(ours.item(), abs=1e-5)
    assert outputs.aux_loss.item() == pytest.approx(aux.item(), abs=1e-5)
    model.zero_grad()
    ours.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    names = {
        "model.embed_tokens.weight": "embed.weight",
        "model.layers.1.mlp.router.weight": "blocks.1.moe.router.weight",
        "model.layers.2.mlp.experts.3.down_proj.weight": "blocks.2.moe.experts.3.down_proj.weight",
        "model.layers.0.mlp.shared_experts.0.up_proj.weight": "blocks.0.moe.shared_experts.0.up_proj.weight",
        "model.layers.1.self_attn.q_proj.weight": "blocks.1.attn.q_proj.weight",
    }
    for name, our_name in names.items():
        assert exported.relative_error(theirs[name], gradients[our_name]) < 1e-4, name
    assert all(gradient is not None for gradient in theirs.values())
    before = outputs.loss.item()
    torch.optim.SGD(twin.parameters(), lr=0.05).step()
    with torch.no_grad():
        assert twin(tokens, labels=tokens, output_router_logits=True).loss.item() < before


def test_bf16_runs_close_to_fp32(lite):
    _, folder = lite
    tokens = exported.ids(1, 12)
    with torch.no_grad():
        exact, rounded = load(folder)(tokens).logits, load(folder, torch.bfloat16)(tokens).logits
    assert rounded.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(exact.flatten(), rounded.float().flatten(), dim=0) > 0.99


def test_fused_attention_without_sinks_is_refused_not_wrong(lite):
    with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product"):
        load(lite[1], attn_implementation="sdpa")


def test_a_reloaded_model_saves_and_loads_again(lite, tmp_path):
    twin = load(lite[1])
    twin.save_pretrained(tmp_path / "again")
    shutil.copy(lite[1] / "modeling_gpt_oss_lite.py", tmp_path / "again")
    tokens = exported.ids(1, 12)
    with torch.no_grad():
        assert exported.relative_error(load(tmp_path / "again")(tokens).logits, twin(tokens).logits) < 1e-5


def test_the_modelling_file_needs_torch_and_transformers_only():
    tree = ast.parse((ROOT / "gpt_oss_lite/export/modeling_gpt_oss_lite.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in names} == {"torch", "transformers", "math", "dataclasses", "typing"}


def test_several_files_with_an_index(lite, tmp_path):
    model, single = lite
    run = exported.save(model, tmp_path / "run")
    done = export_checkpoint(run, tmp_path / "hf", max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "hf" / name).stat().st_size < 30_000 for name in files)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    with safe_open(single / "model.safetensors", "pt") as file:
        assert sorted(index["weight_map"]) == sorted(file.keys())
    assert done.n_bytes == sum((tmp_path / "hf" / name).stat().st_size for name in files)
    tokens = exported.ids(1, 12)
    with torch.no_grad():
        assert exported.relative_error(load(tmp_path / "hf")(tokens).logits, load(single)(tokens).logits) < 1e-5


def test_a_folder_is_whole_or_not_there(lite, tmp_path, monkeypatch):
    run = exported.save(lite[0], tmp_path / "run")
    monkeypatch.setattr(hf, "model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_checkpoint(run, tmp_path / "out/hf")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "out/hf.tmp").mkdir()  # left by a killed process
    (tmp_path / "out/hf.tmp/junk").touch()
    monkeypatch.undo()
    export_checkpoint(run, tmp_path / "out/hf")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    assert not (tmp_path / "out/hf/junk").exists()


def test_whoever_may_read_the_config_may_read_the_weights(lite):
    modes = {path.name: path.stat().st_mode for path in lite[1].iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_nothing_in_the_folder_is_pickled(lite):
    names = {path.name for path in lite[1].iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors",
                     "modeling_gpt_oss_lite.py"}  # fmt: skip


def test_another_rope_scale(lite, tmp_path):
    """Trained at scale 1, exported at 16: what our model computes at that scale."""
    model, _ = lite
    run = exported.save(model, tmp_path / "run")
    export_checkpoint(run, tmp_path / "hf", rope_scale=16)
    twin, tokens = load(tmp_path / "hf"), exported.ids(1, 40)
    assert twin.config.max_position_embeddings == 16 * 64
    model.set_rope_scale(16.0)
    with torch.no_grad():
        assert (model(tokens)[0] - twin(tokens).logits).abs().max() < 1e-5
    model.set_rope_scale(1.0)
    with pytest.raises(UserError, match=r"the RoPE scale is 33: it must lie between 1 and model\.yarn_scale_factor"):
        export_checkpoint(run, tmp_path / "other", rope_scale=33)


def test_ids_without_a_meaning_are_not_generated(lite, tmp_path):
    """All weight on the padding rows: greedy decoding there would write them, if nothing kept it from that."""
    model = GPTOSS(exported.SMALL)
    with torch.no_grad():
        model.embed.weight.zero_()
        model.embed.weight[:61, 0] = torch.linspace(0, 1, 61)
        model.embed.weight[61:, 0] = 100.0
    export_checkpoint(exported.save(model, tmp_path / "run"), tmp_path / "hf")
    new = load(tmp_path / "hf").generate(torch.tensor([[5]]), max_new_tokens=8)[0, 1:]
    assert new.max() < 61


def test_what_is_refused(lite, tmp_path):
    run = exported.save(lite[0], tmp_path / "run")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there is there already"):
        export_checkpoint(run, tmp_path / "there")
    with pytest.raises(UserError, match="no complete checkpoint of step 4"):
        export_checkpoint(run, tmp_path / "hf", step=4)
    with pytest.raises(UserError, match="the largest file is 0 bytes"):
        export_checkpoint(run, tmp_path / "hf", max_shard_bytes=0)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("name", ["pretrain_a100_502m", "gpt_oss"])
def test_the_502m_recipe_exports_in_1_00e9_bytes(name, tmp_path):
    """Counted on the meta device, name by name; no weight is drawn."""
    recipe = load_recipe(ROOT / "configs/pretrain_a100_502m.yaml").model
    if name == "gpt_oss":
        recipe = recipe.replace(n_shared_experts=0, expert_activation="clamped_swiglu")
    model = meta_model(recipe)
    weights = to_layout(recipe, layout_of(recipe), dict(model.named_parameters(remove_duplicate=False)))
    n_values = sum(value.numel() for value in weights.values())
    if name == "pretrain_a100_502m":
        assert n_values == 502_033_248
        assert 2 * n_values == pytest.approx(1.00e9, rel=0.005)
    else:  # the same without 12 shared experts, and with zeros for 12 x (router 8, gate and up 8 x 3072, down 8 x 768)
        assert n_values == 502_033_248 - 12 * 3 * 768 * 1536 + 12 * (8 + 8 * 3072 + 8 * 768)


def test_a_files_size_is_two_bytes_a_weight_and_a_header(lite):
    _, folder = lite
    with safe_open(folder / "model.safetensors", "pt") as file:
        n_bytes = sum(2 * file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    header = (folder / "model.safetensors").stat().st_size - n_bytes
    assert 0 < header < 150 * len(load(folder).state_dict())


def test_weights_that_share_memory_can_be_written(tmp_path):
    """K and V are halves of one tensor of ours."""
    config = exported.SMALL
    weights = to_layout(config, "gpt_oss_lite", dict(GPTOSS(config).named_parameters()))
    assert write_weights(tmp_path, weights, 10**9) > 0


def test_auto_config_reads_the_folder(lite):
    config = AutoConfig.from_pretrained(lite[1], trust_remote_code=True)
    assert (config.model_type, config.num_hidden_layers, config.sliding_window) == ("gpt_oss_lite", 3, 5)
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.tie_word_embeddings


def test_the_card_says_what_the_run_recorded(tmp_path):
    run = exported.save(exported.lively(exported.SMALL), tmp_path / "run")
    (run / "config.yaml").write_text("model: {n_layers: 3}\n")
    (run / "run.json").write_text(json.dumps({"seed": 1, "corpus": {"total_tokens": 640, "sha256": "abc123"}}))
    rows = [{"step": 1, "ce": 4.0}, {"step": 3, "ce": 3.5}, {"step": 4, "ce": 3.0}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 3, "ce"')
    events = [
        {"event": "eval", "step": 2, "loss": 3.75, "perplexity": 42.521, "bits_per_byte": 1.25},
        {"event": "save"},
    ]
    (run / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    export_checkpoint(run / "checkpoints", tmp_path / "hf")
    card = (tmp_path / "hf/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for cell in (
        "| step | 3 |",
        "| tokens seen | 1,234 |",
        "| corpus, SHA-256 over the manifest's shards | `abc123` |",
        "| training cross-entropy, nats per token | 3.5000 |",
        "| held-out loss at step 2, nats per token | 3.7500 |",
        "| held-out perplexity at step 2 | 42.5210 |",
        "| held-out bits per byte at step 2 | 1.2500 |",
    ):
        assert cell in card
    assert "```yaml\nmodel: {n_layers: 3}\n```" in card
    assert "trust_remote_code=True" in card


def test_a_bare_checkpoint_folder_has_a_card_too(lite):
    card = (lite[1] / "README.md").read_text()
    assert "| step | 3 |" in card
    assert "held-out" not in card
    assert "0.03M parameters" in card
