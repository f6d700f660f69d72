"""Decoding with the cache equals the full forward pass at every position, whatever the size of the steps."""

import pytest
import torch
from small_models import SMALL, lively, relative_error

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.kv_cache import KVCache
from gpt_oss_lite.model.transformer import GPTOSS

N_TOKENS = 30


@pytest.mark.parametrize("window", [1, 2, 5, 29, 30, 100, None])
@pytest.mark.parametrize(
    "steps",
    [[1] * 30, [30], [4] + [1] * 26, [5] + [1] * 25, [6] + [1] * 24, [7, 3, 1, 1, 12, 1, 2, 1, 2], [29, 1]],
    ids=lambda steps: "-".join(map(str, steps[:5])),
)
def test_cached_steps_equal_the_full_forward(window: int | None, steps: list[int]) -> None:
    config = SMALL.replace(window_size=window)
    model = lively(GPTOSS(config))
    ids = torch.randint(0, 61, (2, N_TOKENS), generator=torch.Generator().manual_seed(0))
    cache = KVCache(config, 2, N_TOKENS, "cpu", torch.float32)
    with torch.no_grad():
        full, _ = model(ids)
        parts = [model(part, cache=cache)[0] for part in ids.split(steps, dim=1)]
    assert cache.length == N_TOKENS
    assert relative_error(torch.cat(parts, dim=1), full) < 1e-5


def test_slots_and_bytes() -> None:
    config = ModelConfig(n_layers=4, window_size=128)
    cache = KVCache(config, 3, 1000, "cpu", torch.bfloat16)
    per_token = 2 * config.n_kv_heads * config.head_dim * 2
    assert per_token == 1536
    assert cache.nbytes == 3 * per_token * (2 * 128 + 2 * 1000)
    assert KVCache(config, 3, 100, "cpu", torch.bfloat16).nbytes == 3 * per_token * 4 * 100


def test_a_full_cache_says_so() -> None:
    model = GPTOSS(SMALL)
    cache = KVCache(SMALL, 1, 10, "cpu", torch.float32)
    with torch.no_grad():
        model(torch.zeros(1, 9, dtype=torch.long), cache=cache)
        with pytest.raises(ValueError, match="the cache holds 9 of at most 10 tokens: 2 more do not fit"):
            model(torch.zeros(1, 2, dtype=torch.long), cache=cache)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_empty_sizes_are_refused(batch: int, length: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KVCache(SMALL, batch, length, "cpu", torch.float32)


def test_documents_and_cache_exclude_each_other() -> None:
    config = SMALL.replace(document_mask=True)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="one document per row"):
        GPTOSS(config)(ids, document_ids_BT=ids, cache=KVCache(config, 1, 10, "cpu", torch.float32))
