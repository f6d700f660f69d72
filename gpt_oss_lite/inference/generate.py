"""Sampling: batched decoding with the key/value cache.

Shapes: B rows of equal length, T tokens of the prompt, V rows of the embedding.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
    min_p: float | None = None
    """Draw among tokens of at least this share of the likeliest one's probability (Nguyen et al., 2024). None: all."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that the row holds already (Keskar et al., 2019,
    CTRL); 1: off."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: it must be a finite number of at least 0 (0: greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}: it must lie between 0 and 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"repetition_penalty is {self.repetition_penalty}: it must be finite and above 0 (1: off)")

    def probabilities(self, logits_BV: Tensor, seen_BV: Tensor | None = None) -> Tensor:
        """What the next token is drawn from, (B, V) fp32.

        The order is transformers': repetition penalty, temperature, top_k, top_p of what is left, min_p.

        Args:
            logits_BV: the model's.
            seen_BV: bool, which tokens each row holds; needed with a repetition penalty.
        """
        logits_BV = logits_BV.float()
        if self.repetition_penalty != 1:
            assert seen_BV is not None
            penalty = self.repetition_penalty
            penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
            logits_BV = torch.where(seen_BV, penalised_BV, logits_BV)
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
        if self.min_p is not None:
            probs_BV = probs_BV.masked_fill(probs_BV < self.min_p * probs_BV[:, :1], 0.0)
        probs_BV /= probs_BV.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probs_BV).scatter_(1, order_BV, probs_BV)


@dataclass
class Speed:
    """How long `generate` took; its calls add up."""

    prefill_tokens: int = 0
    """Prompt tokens read."""
    prefill_s: float = 0.0
    """Seconds until the first new token, summed over batches."""
    decode_tokens: int = 0
    """New tokens after the first of each row."""
    decode_s: float = 0.0
    """Seconds that these took."""

    @property
    def decode_tokens_per_s(self) -> float | None:
        """New tokens per second of all rows together, reading the prompt not counted; None: too few to say."""
        return self.decode_tokens / self.decode_s if self.decode_tokens else None


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
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop_ids: Sequence[int] = (),
    rope_scale: float | None = None,
    on_token: Callable[[int, int], None] | None = None,
    speed: Speed | None = None,
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
        temperature: see `Sampler`, as top_k, top_p, min_p and repetition_penalty.
        seed: None: another outcome every time.
        stop_ids: ids that end a continuation, e.g. the tokenizer's end-of-document id.
        rope_scale: YaRN scale to decode at. None: the smallest that covers the longest prompt and max_new_tokens.
        on_token: called with the number of the prompt and each of its new tokens as soon as that is drawn; the stop id
            is not among them. There is no progress line then.
        speed: is added to.

    Returns:
        One sample for each prompt, in order.

    Raises:
        UserError: a value out of range, an empty prompt, an id that the model has no row for, or a context longer than
            the model's eval_max_seq_len.
    """
    config = model.config
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
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
    steps = max_new_tokens * len(rows_by_length)
    reporting = nullcontext() if on_token else progress("generate", steps, "steps")
    try:
        with evaluating(model), autocast(device, config.dtype), reporting as report:
            for rows in rows_by_length.values():
                ids_BT = torch.tensor([list(prompts[row]) for row in rows], device=device)
                decoder = _Decoder(model, sampler, {row: generators[row] for row in rows}, stop_ids)
                drawn = decoder.run(ids_BT, max_new_tokens, report, on_token, speed or Speed())
                samples |= zip(rows, drawn, strict=True)
            if report:
                report.finish()  # a stop id may have ended it early
    finally:
        model.set_rope_scale(scale_before)
    return [samples[row] for row in range(len(prompts))]


class _Decoder:
    """Decodes one batch of prompts of equal length; a row's number is that of its prompt."""

    def __init__(
        self, model: GPTOSS, sampler: Sampler, generators: dict[int, torch.Generator], stop_ids: Sequence[int]
    ) -> None:
        self.model, self.sampler, self.generators = model, sampler, generators
        self.stop_ids = frozenset(stop_ids)
        self.forbidden_V = forbidden_ids(model, stop_ids)

    def run(
        self,
        ids_BT: Tensor,
        max_new_tokens: int,
        report: ProgressReporter | None,
        on_token: Callable[[int, int], None] | None,
        speed: Speed,
    ) -> list[Sample]:
        """Prefill, then one token of each row at a time until all have stopped."""
        rows = list(self.generators)
        new: dict[int, list[int]] = {row: [] for row in rows}
        stopped = dict.fromkeys(rows, False)
        if max_new_tokens == 0:
            return [Sample([], False) for _ in rows]
        started = time.perf_counter()
        dtype = compute_dtype(self.model.embed.weight)
        cache = KVCache(self.model.config, len(rows), ids_BT.shape[1] + max_new_tokens, ids_BT.device, dtype)
        h_BTD = prefill(self.model, ids_BT, cache)
        seen_BV = self._seen(ids_BT)
        for step in range(max_new_tokens):
            tokens_B = self._draw(self.model.head(h_BTD[:, -1]), seen_BV)
            going = [row for row in rows if not stopped[row]]
            for row, token in zip(rows, tokens_B.tolist(), strict=True):
                if stopped[row] or token in self.stop_ids:
                    stopped[row] = True
                    continue
                new[row].append(token)
                if on_token:
                    on_token(row, token)
            if step == 0:
                first_token = time.perf_counter()
            else:
                speed.decode_tokens += len(going)
            if report:
                report.advance(1)
            if all(stopped.values()) or step == max_new_tokens - 1:
                break
            if seen_BV is not None:
                seen_BV.scatter_(1, tokens_B[:, None], True)
            h_BTD, _ = self.model.hidden_states(tokens_B[:, None], cache=cache)
        speed.prefill_tokens += ids_BT.numel()
        speed.prefill_s += first_token - started
        speed.decode_s += time.perf_counter() - first_token
        return [Sample(new[row], stopped[row]) for row in rows]

    def _seen(self, ids_BT: Tensor) -> Tensor | None:
        """Which tokens each row holds, where the sampler asks."""
        if self.sampler.repetition_penalty == 1:
            return None
        seen_BV = torch.zeros(len(ids_BT), len(self.forbidden_V), dtype=torch.bool, device=ids_BT.device)
        return seen_BV.scatter_(1, ids_BT, True)

    def _draw(self, logits_BV: Tensor, seen_BV: Tensor | None = None) -> Tensor:
        probs_BV = self.sampler.probabilities(logits_BV.masked_fill(self.forbidden_V, float("-inf")), seen_BV)
        if self.sampler.temperature == 0:
            return probs_BV.argmax(dim=-1)
        drawn = [
            torch.multinomial(probs_V, 1, generator=generator)
            for probs_V, generator in zip(probs_BV, self.generators.values(), strict=True)
        ]
        return torch.cat(drawn)


def prefill(model: GPTOSS, ids_BT: Tensor, cache: KVCache) -> Tensor:
    """Read a prompt into the cache, in parts; the activations (B, T', D) of the last part."""
    for part_BT in ids_BT.split(PREFILL_TOKENS, dim=1):
        h_BTD, _ = model.hidden_states(part_BT, cache=cache)
    return h_BTD


def forbidden_ids(model: GPTOSS, stop_ids: Sequence[int] = ()) -> Tensor:
    """Rows of the embedding that are never drawn, (V,) bool: those of vocab_size and above that do not stop."""
    forbidden_V = torch.arange(model.config.embedding_rows, device=model.embed.weight.device) >= model.config.vocab_size
    forbidden_V[list(stop_ids)] = False
    return forbidden_V


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
