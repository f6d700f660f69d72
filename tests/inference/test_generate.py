"""Sampling: cached decoding against the full forward pass, filters against their definitions, and what is refused."""

import math

import pytest
import torch
from small_models import SMALL, lively

from gpt_oss_lite.inference import generate as generate_module
from gpt_oss_lite.inference.generate import Sampler, Speed, covering_scale, generate
from gpt_oss_lite.model.transformer import GPTOSS
from shared_data.errors import UserError

EOS = 63
CONFIG = SMALL.replace(padded_vocab_size=64, n_layers=4, window_size=6)


@pytest.fixture(scope="module")
def model() -> GPTOSS:
    return lively(GPTOSS(CONFIG))


def greedy_by_full_forward(model: GPTOSS, prompt: list[int], n_new: int) -> list[int]:
    """No cache: the whole sequence again for every token."""
    ids = list(prompt)
    for _ in range(n_new):
        with torch.no_grad():
            logits, _ = model(torch.tensor([ids]))
        ids.append(int(logits[0, -1, : CONFIG.vocab_size].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("n_prompt", [1, 5, 6, 7, 20])
def test_greedy_decoding_equals_the_full_forward_across_the_windows_edge(model: GPTOSS, n_prompt: int) -> None:
    prompt = torch.randint(0, 61, (n_prompt,), generator=torch.Generator().manual_seed(n_prompt)).tolist()
    (sample,) = generate(model, [prompt], 25, temperature=0)
    assert sample.ids == greedy_by_full_forward(model, prompt, 25)
    assert not sample.stopped


def test_long_prompts_are_read_in_parts(model: GPTOSS, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    monkeypatch.setattr(generate_module, "PREFILL_TOKENS", 7)
    (sample,) = generate(model, [prompt], 10, temperature=0)
    assert sample.ids == greedy_by_full_forward(model, prompt, 10)


def test_prompts_of_several_lengths_give_what_each_gives_alone(model: GPTOSS) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16]]
    together = generate(model, prompts, 12, temperature=0)
    assert [sample.ids for sample in together] == [greedy_by_full_forward(model, prompt, 12) for prompt in prompts]


def test_seed_decides_the_sample(model: GPTOSS) -> None:
    prompts = [[1, 2, 3]] * 3
    first = generate(model, prompts, 20, seed=1)
    assert first == generate(model, prompts, 20, seed=1)
    assert first != generate(model, prompts, 20, seed=2)
    assert generate(model, prompts, 20) != generate(model, prompts, 20)
    assert len({tuple(sample.ids) for sample in first}) == 3  # rows draw from streams of their own


def test_a_row_does_not_depend_on_the_others(model: GPTOSS) -> None:
    alone = generate(model, [[1, 2, 3]], 15, seed=4)[0]
    assert generate(model, [[1, 2, 3], [9, 9, 9], [7]], 15, seed=4)[0] == alone


def test_global_random_state_mode_and_scale_are_left_alone(model: GPTOSS) -> None:
    model.train()
    state = torch.get_rng_state()
    generate(model, [[1]], 5, seed=3, rope_scale=4.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.rotary.scale == 1.0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_padding_ids_are_never_drawn_but_the_stop_id_is(model: GPTOSS) -> None:
    """All weight lies on ids 61, 62 and 63: only 63 may come, and only where it stops."""
    biased = GPTOSS(CONFIG)
    with torch.no_grad():
        biased.embed.weight.zero_()
        biased.embed.weight[:61, 0] = torch.linspace(0, 1, 61)
        biased.embed.weight[61:, 0] = 100.0
    without = generate(biased, [[5]] * 4, 30, seed=0, temperature=5.0)
    assert all(0 <= token < 61 for sample in without for token in sample.ids)
    assert not any(sample.stopped for sample in without)
    with_stop = generate(biased, [[5]] * 4, 30, seed=0, stop_ids=[EOS])
    assert [sample.ids for sample in with_stop] == [[]] * 4
    assert all(sample.stopped for sample in with_stop)


def test_a_row_that_stops_leaves_the_others_running(model: GPTOSS) -> None:
    prompts = [[n] for n in range(6)]
    free = generate(model, prompts, 12, temperature=0)
    stop = free[0].ids[4]
    stopped = generate(model, prompts, 12, temperature=0, stop_ids=[stop])
    for before, after in zip(free, stopped, strict=True):
        cut = before.ids.index(stop) if stop in before.ids else None
        assert after.ids == before.ids[:cut]
        assert after.stopped == (cut is not None)
    assert stopped[0].stopped


def test_nothing_to_do(model: GPTOSS) -> None:
    assert generate(model, [], 5) == []
    assert [sample.ids for sample in generate(model, [[1]], 0)] == [[]]


def test_temperature_divides_the_logits() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    for temperature in (0.3, 1.0, 2.5):
        assert torch.allclose(Sampler(temperature).probabilities(logits), (logits / temperature).softmax(-1))
    assert torch.equal(Sampler(0).probabilities(logits).argmax(-1), logits.argmax(-1))
    assert torch.equal(Sampler(0).probabilities(logits).amax(-1), torch.ones(3))
    assert torch.isfinite(Sampler(1e-30).probabilities(logits)).all()


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    probs = Sampler(1.0, top_k=3).probabilities(logits)
    for row, kept in zip(logits, probs, strict=True):
        best = row.argsort(descending=True)[:3]
        assert sorted(kept.nonzero().flatten().tolist()) == sorted(best.tolist())
        assert torch.allclose(kept[best], row[best].softmax(-1))
    assert (Sampler(1.0, top_k=2).probabilities(torch.zeros(1, 9)) > 0).sum() == 2  # ties too
    assert torch.allclose(Sampler(1.0, top_k=100).probabilities(logits), logits.softmax(-1))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.95, 3), (0.96, 4), (1.0, 4)]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    probs = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64)
    result = Sampler(1.0, top_p=top_p).probabilities(probs.log()[None])[0]
    best = probs.argsort(descending=True)[:kept]
    assert result.count_nonzero() == kept
    assert torch.allclose(result[best].double(), probs[best] / probs[best].sum(), atol=1e-6)


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.09, 4), (0.11, 3), (0.31, 2), (0.61, 1), (1.0, 1)])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(min_p: float, kept: int) -> None:
    probs = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64)
    result = Sampler(1.0, min_p=min_p).probabilities(probs.log()[None])[0]
    best = probs.argsort(descending=True)[:kept]
    assert result.count_nonzero() == kept
    assert torch.allclose(result[best].double(), probs[best] / probs[best].sum(), atol=1e-6)


def test_filters_together_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(6, 50, generator=generator) * 3, torch.randint(0, 50, (6, 12), generator=generator)
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    warpers = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.3),
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(20),
            transformers.TopPLogitsWarper(0.95),
            transformers.MinPLogitsWarper(0.02),
        ]
    )
    sampler = Sampler(0.7, top_k=20, top_p=0.95, min_p=0.02, repetition_penalty=1.3)
    theirs = warpers(ids, logits).softmax(-1)
    assert torch.allclose(sampler.probabilities(logits, seen), theirs, atol=1e-6)
    without = Sampler(0.7, top_k=20, top_p=0.95, min_p=0.02).probabilities(logits)
    assert not torch.allclose(without, theirs, atol=1e-3)


def test_a_repetition_penalty_counts_prompt_and_new_tokens(model: GPTOSS) -> None:
    """So large a penalty that greedy decoding never repeats a token while there is another."""
    (free,) = generate(model, [[1, 2, 3]], 40, temperature=0)
    assert len(set(free.ids)) < 40
    (penalised,) = generate(model, [[1, 2, 3]], 40, temperature=0, repetition_penalty=1e9)
    assert len({1, 2, 3, *penalised.ids}) == 43
    alone = generate(model, [[4, 5, 6]], 20, temperature=0, repetition_penalty=1.5)
    together = generate(model, [[1, 2, 3], [4, 5, 6]], 20, temperature=0, repetition_penalty=1.5)
    assert together[1] == alone[0]


def test_tokens_are_handed_out_as_they_come(model: GPTOSS, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [[1, 2], [3], [5, 6]]
    free = generate(model, prompts, 12, temperature=0)
    stop = free[1].ids[5]
    came: list[tuple[int, int]] = []
    samples = generate(
        model, prompts, 12, temperature=0, stop_ids=[stop], on_token=lambda row, token: came.append((row, token))
    )
    assert samples[1].stopped
    for row, sample in enumerate(samples):
        assert [token for number, token in came if number == row] == sample.ids
    assert [row for row, _ in came[:4]] == [0, 2, 0, 2]  # step by step, not row by row
    assert capsys.readouterr().err == ""


def test_speed_counts_prompts_and_the_tokens_after_the_first(model: GPTOSS) -> None:
    speed = Speed()
    assert speed.decode_tokens_per_s is None
    generate(model, [[1, 2, 3], [4, 5, 6], [7]], 9, temperature=0, speed=speed)
    assert (speed.prefill_tokens, speed.decode_tokens) == (7, 3 * 8)
    assert speed.prefill_s > 0
    assert speed.decode_tokens_per_s == speed.decode_tokens / speed.decode_s
    generate(model, [[1]], 1, speed=speed)
    assert (speed.prefill_tokens, speed.decode_tokens) == (8, 24)


def test_drawn_tokens_follow_the_probabilities() -> None:
    probs = torch.tensor([0.1, 0.2, 0.7])
    model = GPTOSS(CONFIG.replace(vocab_size=3, padded_vocab_size=None))
    decoder = generate_module._Decoder(model, Sampler(), {0: torch.Generator().manual_seed(0)}, [])
    drawn = torch.cat([decoder._draw(probs.log()[None]) for _ in range(4000)])
    assert torch.allclose(drawn.bincount(minlength=3) / 4000, probs, atol=0.03)


@pytest.mark.parametrize(
    ("trained_scale", "n_tokens", "expected"),
    [
        (1.0, 10, 1.0),
        (1.0, 64, 1.0),
        (1.0, 65, 65 / 64),
        (1.0, 256, 4.0),
        (8.0, 10, 8.0),
        (8.0, 512, 8.0),
        (8.0, 1024, 16.0),
    ],
)
def test_the_smallest_scale_that_covers_the_context(trained_scale: float, n_tokens: int, expected: float) -> None:
    assert covering_scale(CONFIG.replace(rope_scale=trained_scale), n_tokens) == expected


def test_beyond_the_trained_length_the_scale_follows_the_context(model: GPTOSS) -> None:
    scales = []
    hook = model.blocks[0].register_forward_pre_hook(lambda *_: scales.append(model.rotary.scale))
    try:
        prompt = [1] * 60
        within = generate(model, [prompt], 4, temperature=0)
        beyond = generate(model, [prompt], 68, temperature=0)
        told = generate(model, [prompt], 68, temperature=0, rope_scale=1.0)
    finally:
        hook.remove()
    assert set(scales[:4]) == {1.0}
    assert set(scales[4:72]) == {2.0}
    assert set(scales[72:]) == {1.0}
    assert told[0].ids[:4] == within[0].ids
    assert beyond[0].ids != told[0].ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0: it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1: it must lie between 0 and 1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: it must be finite and above 0 (1: off)"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[64]]}, "prompt 0 holds the id 64: the model has rows 0 to 63"),
        ({"prompts": [[-1]]}, "prompt 0 holds the id -1"),
        ({"stop_ids": [128009]}, "stop id 128009: the model has rows 0 to 63"),
        ({"max_new_tokens": 2048}, "at most 2048 (model.eval_max_seq_len)"),
        ({"rope_scale": 0.5}, "the RoPE scale is 0.5"),
    ],
)
def test_what_is_refused(model: GPTOSS, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refused:
        generate(model, **{"prompts": [[1]], "max_new_tokens": 3, **arguments})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
