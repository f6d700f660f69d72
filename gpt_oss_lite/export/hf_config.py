"""config.json and generation_config.json, from a ModelConfig; and a ModelConfig from stock gpt-oss's config.json."""

from typing import Any

from pydantic import ValidationError

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.export.layouts import Layout
from gpt_oss_lite.model.moe import CLAMP_ALPHA, CLAMP_LIMIT
from shared_data.errors import UserError

MODELING_FILE = "modeling_gpt_oss_lite.py"


def exported_context(config: ModelConfig) -> int:
    """Longest context, in tokens, that the model's own RoPE scale covers."""
    return max(config.max_seq_len, int(config.rope_scale * config.original_context))


def layer_types(config: ModelConfig) -> list[str]:
    """transformers' name for what each layer sees."""
    windows = (config.layer_window(layer) for layer in range(config.n_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """The rotary positions at the model's scale: plain at 1, else YaRN."""
    if config.rope_scale == 1.0:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "rope_type": "yarn",
        "rope_theta": config.rope_theta,
        "factor": config.rope_scale,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
        "truncate": False,
        "original_max_position_embeddings": config.original_context,
    }


def model_json(config: ModelConfig, layout: Layout, special_ids: dict[str, int]) -> dict[str, Any]:
    """The content of config.json.

    Args:
        config: of the model.
        layout: that of the weights.
        special_ids: bos_token_id, eos_token_id and pad_token_id, where the model has them.
    """
    stock = layout == "gpt_oss"
    content: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM" if stock else "GPTOSSLiteForCausalLM"],
        "model_type": layout,
        "dtype": "bfloat16",
        "vocab_size": config.embedding_rows,
        "hidden_size": config.d_model,
        "intermediate_size": config.expert_hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.window_size,
        "layer_types": layer_types(config),
        "max_position_embeddings": exported_context(config),
        "rope_parameters": rope_parameters(config),
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "attention_bias": config.attention_bias,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.experts_per_token,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        **special_ids,
    }
    if stock:
        return {
            **content,
            # Stock code makes the windowed layers' mask even where there is no such layer.
            "sliding_window": config.window_size or exported_context(config),
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "swiglu_alpha": CLAMP_ALPHA,
            "swiglu_limit": CLAMP_LIMIT,
        }
    return content | _keys_of_our_own(config)


def _keys_of_our_own(config: ModelConfig) -> dict[str, Any]:
    """What config.json has besides where the model is not stock gpt-oss: the file with its code, and its choices."""
    module = MODELING_FILE.removesuffix(".py")
    return {
        "auto_map": {
            "AutoConfig": f"{module}.GPTOSSLiteConfig",
            "AutoModel": f"{module}.GPTOSSLiteModel",
            "AutoModelForCausalLM": f"{module}.GPTOSSLiteForCausalLM",
        },
        "attention_sinks": config.sink_bias,
        "n_shared_experts": config.n_shared_experts,
        "expert_activation": config.expert_activation,
        "router_bias": config.router_bias,
        "expert_bias": config.expert_bias,
    }


def generation_json(config: ModelConfig, special_ids: dict[str, int]) -> dict[str, Any]:
    """The content of generation_config.json: greedy unless told otherwise, and never an id without a meaning.

    Rows above vocab_size are padding but for the end-of-document id: `gpt_oss_lite.inference.generate` does not draw
    them either.
    """
    stop = special_ids.get("eos_token_id")
    suppressed = [token for token in range(config.vocab_size, config.embedding_rows) if token != stop]
    return {**special_ids, "do_sample": False, **({"suppress_tokens": suppressed} if suppressed else {})}


def config_from_stock(content: dict[str, Any], path: str, vocab_size: int | None = None) -> ModelConfig:
    """The ModelConfig that computes what stock gpt-oss with this config.json does.

    Args:
        content: of config.json.
        path: for messages.
        vocab_size: ids that may be generated. None: every row.

    Raises:
        UserError: another architecture, or a choice that this model does not have; it names key and value.
    """
    _check_stock(content, path)
    rope = _rope_of(content, path)
    try:
        config = ModelConfig.model_validate(_keys_from_stock(content, rope, vocab_size))
    except KeyError as missing:
        raise UserError(f"{path}: the key {missing} is missing") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: a value has another type than transformers writes ({error})") from None
    if content.get("layer_types", layer_types(config)) != layer_types(config):
        raise UserError(f"{path}: layer_types must alternate sliding_attention, full_attention from the first layer on")
    return config


def _keys_from_stock(content: dict[str, Any], rope: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Our keys and what they are in a stock config.json; a missing or odd one is the caller's to name."""
    scale = float(rope.get("factor", 1.0)) if rope["rope_type"] == "yarn" else 1.0
    context = int(content.get("max_position_embeddings", 131072))
    original = int(rope.get("original_max_position_embeddings", context / scale)) if scale > 1 else context
    windowed = "sliding_attention" in content.get("layer_types", ["sliding_attention"])
    rows = content["vocab_size"]
    return {
        "vocab_size": vocab_size or rows,
        "padded_vocab_size": rows if vocab_size and vocab_size < rows else None,
        "d_model": content["hidden_size"],
        "n_layers": content["num_hidden_layers"],
        "n_heads": content["num_attention_heads"],
        "n_kv_heads": content["num_key_value_heads"],
        "head_dim": content["head_dim"],
        "norm_eps": content.get("rms_norm_eps", 1e-5),
        "init_std": content.get("initializer_range", 0.02),
        "tie_embeddings": content.get("tie_word_embeddings", False),
        "max_seq_len": original,
        "window_size": content["sliding_window"] if windowed else None,
        "attention_bias": content.get("attention_bias", True),
        "rope_theta": float(rope.get("rope_theta", 150000.0)),
        "rope_scale": scale,
        "yarn_scale_factor": scale if scale > 1 else 32.0,
        "yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
        "n_experts": content["num_local_experts"],
        "experts_per_token": content["num_experts_per_tok"],
        "n_shared_experts": 0,
        "expert_hidden_size": content["intermediate_size"],
        "expert_activation": "clamped_swiglu",
        "router_bias": True,
        "expert_bias": True,
    }


def _check_stock(content: dict[str, Any], path: str) -> None:
    if content.get("model_type") != "gpt_oss":
        raise UserError(f"{path}: model_type is {content.get('model_type')!r}: it must be 'gpt_oss'")
    if content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method")
        raise UserError(f"{path}: the weights are quantised ({method}): save them dequantised first, in bf16 or fp32")
    allowed = {"hidden_act": "silu", "swiglu_alpha": CLAMP_ALPHA, "swiglu_limit": CLAMP_LIMIT}
    for key, value in allowed.items():
        if content.get(key, value) != value:
            raise UserError(f"{path}: {key} is {content[key]}: this model has {value}")


def _rope_of(content: dict[str, Any], path: str) -> dict[str, Any]:
    """rope_parameters, or the two keys that transformers 4 wrote instead."""
    rope = content.get("rope_parameters")
    if rope is None:
        scaling = content.get("rope_scaling") or {"rope_type": "default"}
        rope = {"rope_theta": content.get("rope_theta", 150000.0), **scaling}
    if not isinstance(rope, dict):
        raise UserError(f"{path}: rope_parameters is {rope!r}: it must be an object")
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ("default", "yarn"):
        raise UserError(f"{path}: rope_type is {kind!r}: it must be 'default' or 'yarn'")
    if kind == "yarn" and rope.get("truncate", True):
        raise UserError(f"{path}: rope_parameters.truncate is true: this model does not round the ramp's bounds")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(key) is not None:
            raise UserError(f"{path}: rope_parameters.{key} is {rope[key]}: this model derives it from the factor")
    return {**rope, "rope_type": kind}
