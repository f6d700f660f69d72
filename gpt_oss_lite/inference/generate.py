"""Sampling: batched decoding with the key/value cache.

Shapes: B rows of equal length, T tokens of the prompt, V rows of the embedding.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.model.kv_cache import KVCache
from gpt_oss_lite.model.layers import compute_dtype
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.evaluation import evaluating
from gpt_oss_lite.training.knobs import autocast
from shared_data.console import ProgressReporter, progress
from shared_data.errors import UserError

PREFILL_TOKENS = 2048
"""Prompt tokens of one forward pass: bounds the activations of a long prompt."""


@dataclass(frozen=True)
class Sample:
    """A continuation of one prompt."""

    ids: list[int]
    """New token ids, without the stop id."""
    stopped: bool
    """Whether a stop id ended it, rather than max_new_tokens."""


@dataclass(frozen=True)
class Sampler:
    """How the next token is drawn."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only. None: all."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens that have this probability together (Holtzman et al., 2020). None: all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: it must be a finite number of at least 0 (0: greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1")

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """What the next token is drawn from, (B, V) fp32: temperature first, then top_k, then top_p of what is left."""
        logits_BV = logits_BV.float()
        if self.temperature == 0:
            return torch.zeros_like(logits_BV).scatter_(1, logits_BV.argmax(dim=-1, keepdim=True), 1.0)
        # From the largest down, so that a tiny temperature does not overflow.
        logits_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / self.temperature
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            sorted_BV[:, self.top_k :] = float("-inf")
        probs_BV = sorted_BV.softmax(dim=-1)
        if self.top_p is not None:
            before_BV = probs_BV.cumsum(dim=-1) - probs_BV
            probs_BV = probs_BV.masked_fill(before_BV >= self.top_p, 0.0)
            probs_BV /= probs_BV.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probs_BV).scatter_(1, order_BV, probs_BV)


def covering_scale(config: ModelConfig, n_tokens: int) -> float:
    """The smallest RoPE scale that covers a context: the trained one as far as it reaches, then as much as needed."""
    if n_tokens <= max(config.max_seq_len, config.rope_scale * config.original_context):
        return config.rope_scale
    return max(config.rope_scale, n_tokens / config.original_context)


def generate(
    model: GPTOSS,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_ids: Sequence[int] = (),
    rope_scale: float | None = None,
) -> list[Sample]:
    """Continue prompts.

    Prompts of equal length are decoded as one batch. A row draws from its own stream of random numbers, a function of
    seed and row number, so that its continuation does not depend on the others. Ids of vocab_size and above are never
    drawn, except those that stop. The model's mode and RoPE scale are as before afterwards.

    Args:
        model: on any device; on CUDA it runs under autocast in its `dtype`.
        prompts: token ids of each prompt, at least one. In the shards that a model is trained on, documents follow the
            end-of-document id.
        max_new_tokens: most tokens to add to each prompt.
        temperature: see `Sampler`, as top_k and top_p.
        seed: None: another outcome every time.
        stop_ids: ids that end a continuation, e.g. the tokenizer's end-of-document id.
        rope_scale: YaRN scale to decode at. None: the smallest that covers the longest prompt and max_new_tokens.

    Returns:
        One sample for each prompt, in order.

    Raises:
        UserError: a value out of range, an empty prompt, an id that the model has no row for, or a context longer than
            the model's eval_max_seq_len.
    """
    config = model.config
    sampler = Sampler(temperature, top_k, top_p)
    _check(config, prompts, max_new_tokens, stop_ids)
    longest = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens
    rows_by_length: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_by_length[len(prompt)].append(row)
    device = model.embed.weight.device
    generators = _generators(device, seed, len(prompts))
    samples: dict[int, Sample] = {}
    scale_before = model.rotary.scale
    model.set_rope_scale(covering_scale(config, longest) if rope_scale is None else rope_scale)
    try:
        with (
            evaluating(model),
            autocast(device, config.dtype),
            progress("generate", max_new_tokens * len(rows_by_length), "steps") as report,
        ):
            for rows in rows_by_length.values():
                ids_BT = torch.tensor([list(prompts[row]) for row in rows], device=device)
                decoder = _Decoder(model, sampler, [generators[row] for row in rows], stop_ids)
                samples |= zip(rows, decoder.run(ids_BT, max_new_tokens, report), strict=True)
    finally:
        model.set_rope_scale(scale_before)
    return [samples[row] for row in range(len(prompts))]


class _Decoder:
    """Decodes one batch of prompts of equal length."""

    def __init__(
        self, model: GPTOSS, sampler: Sampler, generators: list[torch.Generator], stop_ids: Sequence[int]
    ) -> None:
        self.model, self.sampler, self.generators = model, sampler, generators
        self.stop_ids = frozenset(stop_ids)
        self.forbidden_V = torch.arange(model.config.embedding_rows, device=model.embed.weight.device)
        self.forbidden_V = self.forbidden_V >= model.config.vocab_size
        self.forbidden_V[list(self.stop_ids)] = False

    def run(self, ids_BT: Tensor, max_new_tokens: int, report: ProgressReporter) -> list[Sample]:
        """Prefill, then one token of each row at a time until all have stopped."""
        n_rows, n_prompt = ids_BT.shape
        new: list[list[int]] = [[] for _ in range(n_rows)]
        stopped = [False] * n_rows
        if max_new_tokens == 0:
            return [Sample([], False) for _ in range(n_rows)]
        dtype = compute_dtype(self.model.embed.weight)
        cache = KVCache(self.model.config, n_rows, n_prompt + max_new_tokens, ids_BT.device, dtype)
        for part_BT in ids_BT.split(PREFILL_TOKENS, dim=1):
            h_BTD, _ = self.model.hidden_states(part_BT, cache=cache)
        for step in range(max_new_tokens):
            tokens_B = self._draw(self.model.head(h_BTD[:, -1]))
            for row, token in enumerate(tokens_B.tolist()):
                if stopped[row]:
                    continue
                stopped[row] = token in self.stop_ids
                if not stopped[row]:
                    new[row].append(token)
            report.advance(1)
            if all(stopped) or step == max_new_tokens - 1:
                break
            h_BTD, _ = self.model.hidden_states(tokens_B[:, None], cache=cache)
        return [Sample(ids, stop) for ids, stop in zip(new, stopped, strict=True)]

    def _draw(self, logits_BV: Tensor) -> Tensor:
        probs_BV = self.sampler.probabilities(logits_BV.masked_fill(self.forbidden_V, float("-inf")))
        if self.sampler.temperature == 0:
            return probs_BV.argmax(dim=-1)
        drawn = [
            torch.multinomial(probs_V, 1, generator=generator)
            for probs_V, generator in zip(probs_BV, self.generators, strict=True)
        ]
        return torch.cat(drawn)


def _generators(device: torch.device, seed: int | None, n_rows: int) -> list[torch.Generator]:
    """One stream of random numbers for each row."""
    seeds = torch.Generator()
    if seed is None:
        seeds.seed()
    else:
        seeds.manual_seed(seed)
    row_seeds = torch.randint(2**62, (n_rows,), generator=seeds).tolist()
    return [torch.Generator(device).manual_seed(row_seed) for row_seed in row_seeds]


def _check(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> None:
    rows = config.embedding_rows
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {max_new_tokens}: it must be at least 0")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(
                f"prompt {number} is empty: it must hold at least one token (the end-of-document id will do)"
            )
        wrong = next((token for token in prompt if not 0 <= token < rows), None)
        if wrong is not None:
            raise UserError(f"prompt {number} holds the id {wrong}: the model has rows 0 to {rows - 1}")
        if len(prompt) + max_new_tokens > config.eval_context:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}: together they may "
                f"be at most {config.eval_context} (model.eval_max_seq_len)"
            )
    for token in stop_ids:
        if not 0 <= token < rows:
            raise UserError(
                f"stop id {token}: the model has rows 0 to {rows - 1} (model.vocab_size, model.padded_vocab_size)"
            )
