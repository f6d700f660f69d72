"""Every published figure of the 502M model, counted from a built model (on the meta device: no memory)."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.kv_cache import KVCache
from gpt_oss_lite.model.transformer import GPTOSS, describe_parameters


def build(**changes: object) -> GPTOSS:
    with torch.device("meta"):
        return GPTOSS(ModelConfig(**changes))


@pytest.fixture(scope="module")
def model() -> GPTOSS:
    return build()


@pytest.fixture(scope="module")
def padded() -> GPTOSS:
    return build(padded_vocab_size=128256)


def is_decayed(name: str) -> bool:
    """The published rule: no decay where the name holds bias, norm or embed."""
    return not any(word in name.lower() for word in ("bias", "norm", "embed"))


def count(model: GPTOSS, decayed: bool) -> tuple[int, int]:
    sizes = [parameter.numel() for name, parameter in model.named_parameters() if is_decayed(name) == decayed]
    return len(sizes), sum(sizes)


def test_unpadded_totals(model: GPTOSS) -> None:
    assert model.num_parameters() == 501_836_640
    assert len(list(model.parameters())) == 410
    assert model.num_active_parameters() == 247_032_672


def test_decayed_and_undecayed_tensors(model: GPTOSS) -> None:
    assert count(model, decayed=True) == (372, 403_513_344)
    assert count(model, decayed=False) == (38, 98_323_296)


def test_what_is_not_decayed(model: GPTOSS) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if not is_decayed(name)}
    assert shapes.pop("embed.weight") == (128_000, 768)
    gains = [name for name, shape in shapes.items() if shape == (768,)]
    sinks = [name for name, shape in shapes.items() if shape == (8,)]
    assert len(gains) == 25
    assert len(sinks) == 12
    assert len(gains) + len(sinks) == len(shapes)


def test_padded_totals_and_the_logged_line(padded: GPTOSS) -> None:
    assert padded.num_parameters() == 502_033_248
    assert count(padded, decayed=False) == (38, 98_519_904)
    assert padded.num_active_parameters() == 247_229_280
    assert describe_parameters(padded) == "[model] total params: 502.03M, active: 247.23M"


def test_names_and_shapes_of_a_layer(model: GPTOSS) -> None:
    prefix = "blocks.11."
    shapes = {
        name.removeprefix(prefix): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name.startswith(prefix)
    }
    expected = {
        "attn_norm.weight": (768,),
        "attn.sink_bias": (8,),
        "attn.q_proj.weight": (768, 768),
        "attn.kv_proj.weight": (768, 768),
        "attn.o_proj.weight": (768, 768),
        "moe_norm.weight": (768,),
        "moe.router.weight": (8, 768),
    }
    for expert in [f"moe.experts.{e}" for e in range(8)] + ["moe.shared_experts.0"]:
        expected[f"{expert}.gate_proj.weight"] = (1536, 768)
        expected[f"{expert}.up_proj.weight"] = (1536, 768)
        expected[f"{expert}.down_proj.weight"] = (768, 1536)
    assert shapes == expected


def test_tied_head_is_the_embedding(model: GPTOSS) -> None:
    assert model.head.weight is model.embed.weight


def test_untied_head_adds_one_matrix(model: GPTOSS) -> None:
    untied = build(tie_embeddings=False)
    assert untied.num_parameters() - model.num_parameters() == 128_000 * 768
    assert "head.weight" in dict(untied.named_parameters())


@pytest.mark.parametrize(
    ("key", "value", "difference"),
    [
        ("n_shared_experts", 0, -12 * 3 * 768 * 1536),
        ("attention_bias", True, 12 * 3 * 768),
        ("router_bias", True, 12 * 8),
        ("expert_bias", True, 12 * 9 * (2 * 1536 + 768)),
        ("sink_bias", False, -12 * 8),
        ("window_size", None, 0),
        ("document_mask", True, 0),
    ],
)
def test_variants_change_the_count_by_their_own_tensors(
    model: GPTOSS, key: str, value: object, difference: int
) -> None:
    assert build(**{key: value}).num_parameters() - model.num_parameters() == difference


def test_alternation_starts_with_the_window(model: GPTOSS) -> None:
    assert [block.attn.window for block in model.blocks] == [128, None] * 6
    assert [block.attn.window for block in build(window_size=None).blocks] == [None] * 12


@pytest.mark.parametrize("length", [4096, 131_072])
def test_cache_bytes(length: int) -> None:
    config = ModelConfig()
    plain = KVCache(config.replace(window_size=None), 8, length, "meta", torch.bfloat16)
    alternating = KVCache(config, 8, length, "meta", torch.bfloat16)
    expected = {4096: (0.5625, 1.94), 131_072: (18.0, 1.998)}[length]
    assert plain.nbytes / 2**30 == expected[0]
    assert plain.nbytes / alternating.nbytes == pytest.approx(expected[1], abs=0.0005 if length > 4096 else 0.005)


def test_initialisation() -> None:
    torch.manual_seed(0)
    model = GPTOSS(ModelConfig(vocab_size=4096, n_layers=2, max_seq_len=64, attention_bias=True, expert_bias=True))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif "bias" in name:
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 1e-3, name
        assert parameter.dtype == torch.float32, name


def test_memory_given_to_a_meta_model_makes_it_whole() -> None:
    """Nothing but parameters needs to be loaded: no buffer is left undefined."""
    config = ModelConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, n_experts=4,
                         expert_hidden_size=16, max_seq_len=32)  # fmt: skip
    torch.manual_seed(0)
    original = GPTOSS(config)
    with torch.device("meta"):
        copy = GPTOSS(config)
    copy.to_empty(device="cpu")
    nn.Module.load_state_dict(copy, original.state_dict(), strict=True)
    ids_BT = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(original(ids_BT)[0], copy(ids_BT)[0])


def test_construction_prints_nothing_and_loads_no_extra() -> None:
    code = (
        "import sys, torch\n"
        "from gpt_oss_lite.config import ModelConfig\n"
        "from gpt_oss_lite.model.transformer import GPTOSS\n"
        "with torch.device('meta'): GPTOSS(ModelConfig())\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
