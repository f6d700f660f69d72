"""Passkey retrieval: does a model find a number again that stands somewhere in a long text?

A text of exactly so many tokens holds a sentence with a key at some depth and ends with the question for it
(Mohtashami and Jaggi, 2023, "Landmark Attention"). The key counts as found when greedy decoding would write all of its
tokens. One forward pass over text and key tells that, and how likely the model held the key; nothing is decoded.

Shapes: B rows of equal length, T tokens, K tokens of the key, V rows of the embedding.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpt_oss_lite.config import ModelConfig
from gpt_oss_lite.inference.generate import covering_scale, forbidden_ids, prefill
from gpt_oss_lite.model.fused.block import why_not_fused_attention
from gpt_oss_lite.model.kv_cache import KVCache
from gpt_oss_lite.model.layers import compute_dtype
from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.pictures import save_picture
from gpt_oss_lite.training.dataset import PretrainDataset, check_corpus
from gpt_oss_lite.training.evaluation import evaluating
from gpt_oss_lite.training.knobs import autocast
from shared_data.console import ProgressReporter, progress
from shared_data.errors import UserError, require_extra
from shared_data.passkeys import NEEDLE, QUESTION, draw_evaluation_key
from shared_data.tokenizer import Tokenizer

FILLER = (
    "The river runs past the mill. The mill grinds the corn. Wind bends the grass on the hill, and the sheep look up. "
    "The day goes on as the day before. "
)
BATCH_TOKENS = 32_768
"""Tokens of the texts of one forward pass, where several texts fit."""

Filler = Callable[[int, np.random.Generator], Sequence[int]]
"""Makes so many tokens of text without a key."""


@dataclass(frozen=True)
class Cell:
    """The outcome at one length and depth."""

    length: int
    """Tokens of the text, key included."""
    depth: float
    """Where the key stands: 0 at the start of the filler, 1 at its end."""
    trials: int
    found: int
    nats_per_token: float
    """Mean surprise at the key's tokens."""

    @property
    def accuracy(self) -> float:
        """Share of the trials in which the key was found."""
        return self.found / self.trials


def sentence_filler(tokenizer: Tokenizer) -> Filler:
    """The same few sentences over and over."""
    ids = tokenizer.encode(FILLER)
    return lambda n_tokens, rng: (ids * (n_tokens // len(ids) + 1))[:n_tokens]


def corpus_filler(tokens: Callable[[int, int], np.ndarray], n_tokens_in_all: int, eos_token_id: int) -> Filler:
    """Text of a corpus from a place that chance decides, without its ends of documents.

    Args:
        tokens: reads tokens [start, stop) of the corpus.
        n_tokens_in_all: of the corpus; shorter ones are read round and round.
        eos_token_id: left out.
    """

    def fill(n_tokens: int, rng: np.random.Generator) -> list[int]:
        position = int(rng.integers(n_tokens_in_all))
        found: list[int] = []
        while len(found) < n_tokens:
            stop = min(position + n_tokens, n_tokens_in_all)
            part = tokens(position, stop)
            found += part[part != eos_token_id].tolist()
            position = stop % n_tokens_in_all
        return found[:n_tokens]

    return fill


def open_corpus_filler(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> Filler:
    """The filler of a corpus on disk.

    Raises:
        UserError, FileNotFoundError: no corpus, or one of another vocabulary.
    """
    dataset = PretrainDataset(path, 1, config.embedding_rows)
    check_corpus(dataset, config)
    return corpus_filler(dataset.tokens, dataset.total_tokens, tokenizer.eos_token_id)


def passkey_text(
    tokenizer: Tokenizer, length: int, depth: float, key: int, filler: Filler, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """A text with a key in it, that ends just before the answer; and the ids of the answer.

    Args:
        tokenizer: of the model.
        length: tokens of both together.
        depth: of the key, 0 to 1.
        key: the number.
        filler: makes the text around it.
        rng: handed to the filler.

    Raises:
        UserError: the length has no room for the key's sentence and the question.
    """
    needle, question = tokenizer.encode(NEEDLE.format(key=key)), tokenizer.encode(QUESTION)
    answer = tokenizer.encode(str(key))
    room = length - 1 - len(needle) - len(question) - len(answer)
    if room < 0:
        raise UserError(f"a passkey text of {length} tokens is too short: it takes at least {length - room}")
    around = list(filler(room, rng))
    before = round(depth * room)
    return [tokenizer.eos_token_id, *around[:before], *needle, *around[before:], *question], answer


def score_answers(
    model: GPTOSS, texts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[tuple[bool, float]]:
    """Whether greedy decoding would write each answer after its text, and the nats of its tokens.

    Args:
        model: in evaluation mode, under its autocast and at its RoPE scale.
        texts: B of equal length T.
        answers: of equal length K, at least 1.

    Returns:
        For each row (found, nats summed over the K tokens).
    """
    weight = model.embed.weight
    texts_BT, answers_BK = torch.tensor(texts, device=weight.device), torch.tensor(answers, device=weight.device)
    whole = why_not_fused_attention(model.config, weight.device.type, compute_dtype(weight)) is None
    h_BKD = answer_states(model, texts_BT, answers_BK, whole=whole)
    logits_BKV = model.head(h_BKD).float().masked_fill(forbidden_ids(model), float("-inf"))
    found_B = (logits_BKV.argmax(dim=-1) == answers_BK).all(dim=1)
    nats_B: Tensor = -logits_BKV.log_softmax(dim=-1).gather(2, answers_BK[..., None]).sum(dim=(1, 2))
    return list(zip(found_B.tolist(), nats_B.tolist(), strict=True))


def answer_states(model: GPTOSS, texts_BT: Tensor, answers_BK: Tensor, *, whole: bool) -> Tensor:
    """Activations (B, K, D) that each token of the answers is predicted from.

    Args:
        model: as for `score_answers`.
        texts_BT, answers_BK: ids on its device.
        whole: read everything in one pass, which suits the fused attention, whose memory grows with T alone; else in
            parts over a cache, which bounds the activations of other backends.
    """
    n_answer = answers_BK.shape[1]
    if whole:
        h_BND, _ = model.hidden_states(torch.cat((texts_BT, answers_BK[:, :-1]), dim=1))
        return h_BND[:, -n_answer:]
    n_tokens = texts_BT.shape[1] + n_answer - 1
    cache = KVCache(model.config, len(texts_BT), n_tokens, texts_BT.device, compute_dtype(model.embed.weight))
    last_B1D = prefill(model, texts_BT, cache)[:, -1:]
    if n_answer == 1:
        return last_B1D
    rest_BKD, _ = model.hidden_states(answers_BK[:, :-1], cache=cache)
    return torch.cat((last_B1D, rest_BKD), dim=1)


def passkey(
    model: GPTOSS,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trials: int = 10,
    seed: int = 0,
    filler: Filler | None = None,
    rope_scale: float | None = None,
) -> list[Cell]:
    """Measure retrieval by length and depth. The model's mode and RoPE scale are as before afterwards.

    Args:
        model: on any device; on CUDA it runs under autocast in its `dtype`.
        tokenizer: of the model.
        lengths: tokens of the texts, up to the model's eval_max_seq_len.
        depths: each from 0 to 1.
        trials: texts, each with its own key, of every length and depth.
        seed: decides keys and fillers; those of a cell depend on nothing but seed, length and depth.
        filler: None: a few sentences over and over.
        rope_scale: YaRN scale. None: for each length the smallest that covers it.

    Raises:
        UserError: a value out of range.
    """
    _check(model.config, lengths, depths, trials)
    filler = filler or sentence_filler(tokenizer)
    scale_before = model.rotary.scale
    cells = []
    try:
        with progress("passkey", sum(lengths) * len(depths) * trials, "tokens") as report, evaluating(model):
            for length in lengths:
                model.set_rope_scale(covering_scale(model.config, length) if rope_scale is None else rope_scale)
                for depth in depths:
                    rng = np.random.default_rng([seed, length, round(depth * 10**6)])
                    pairs = [
                        passkey_text(tokenizer, length, depth, draw_evaluation_key(rng), filler, rng)
                        for _ in range(trials)
                    ]
                    cells.append(_measure(model, length, depth, pairs, report))
    finally:
        model.set_rope_scale(scale_before)
    return cells


def _measure(
    model: GPTOSS, length: int, depth: float, pairs: list[tuple[list[int], list[int]]], report: ProgressReporter
) -> Cell:
    """Score the texts and answers of one length and depth."""
    outcomes = []
    batch = max(1, BATCH_TOKENS // length)
    with autocast(model.embed.weight.device, model.config.dtype):
        for start in range(0, len(pairs), batch):
            texts, answers = zip(*pairs[start : start + batch], strict=True)
            outcomes += score_answers(model, texts, answers)
            report.advance(length * len(texts))
    found, nats = (sum(column) for column in zip(*outcomes, strict=True))
    return Cell(length, depth, len(pairs), found, nats / sum(len(answer) for _, answer in pairs))


def _check(config: ModelConfig, lengths: Sequence[int], depths: Sequence[float], trials: int) -> None:
    if not lengths or not depths:
        raise UserError("there are no lengths or no depths: name at least one of each")
    for length in lengths:
        if not 1 <= length <= config.eval_context:
            raise UserError(
                f"the length {length} must lie between 1 and {config.eval_context} (model.eval_max_seq_len)"
            )
    for depth in depths:
        if not 0 <= depth <= 1:
            raise UserError(f"the depth {depth:g} must lie between 0 and 1")
    if trials < 1:
        raise UserError(f"trials is {trials}: it must be at least 1")


def default_lengths(config: ModelConfig) -> list[int]:
    """A quarter of the trained context (at least 64), and its doubles up to the longest allowed one."""
    lengths = [min(max(64, config.max_seq_len // 4), config.eval_context)]
    while lengths[-1] * 2 <= config.eval_context:
        lengths.append(lengths[-1] * 2)
    return lengths


LARGEST_NATS = 12.0
"""Where the heat map's colours end: a guess among all ids, of which LLaMA-3 has 128,256, costs 11.8."""

LIGHT_TEXT_FROM = 0.5
"""Share of the colours from which text on them is white: there white (contrast 3.9) and black (5.4) can be read."""
TITLE_LETTERS_AN_INCH = 9


def heat_map(cells: Sequence[Cell], path: Path, title: str) -> None:
    """Draw a PNG or SVG by length and depth: keys found of those asked for, and the surprise at them as a colour.

    Colours mean the same in every picture. They also tell apart cells in which no key is found.

    Args:
        cells: one for each length and depth.
        path: its suffix says which.
        title: above the picture.

    Raises:
        UserError: another suffix, or matplotlib is not installed.
    """
    check_picture(path)
    figure_module = require_extra("matplotlib.figure", "plot")
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    size = (max(5.0, 2.5 + 0.8 * len(lengths)), max(3.4, 1.6 + 0.5 * len(depths)))
    figure = figure_module.Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    nats = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        row, column = depths.index(cell.depth), lengths.index(cell.length)
        nats[row, column] = np.minimum(cell.nats_per_token, LARGEST_NATS)  # an infinite one would have no colour
        axes.text(column, row, f"{cell.found} of {cell.trials}\n{cell.nats_per_token:.1f}", ha="center", va="center",
                  color="white" if cell.nats_per_token >= LIGHT_TEXT_FROM * LARGEST_NATS else "black")  # fmt: skip
    image = axes.imshow(nats, vmin=0, vmax=LARGEST_NATS, cmap="viridis_r", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="context, tokens", ylabel="depth of the key")
    lines = textwrap.wrap(title, int(TITLE_LETTERS_AN_INCH * size[0]))
    figure.suptitle("\n".join(lines), parse_math=False)  # a run's name may have dollar signs
    figure.colorbar(image, label="nats per token of the key")
    save_picture(figure, path)


def check_picture(path: Path) -> None:
    """Refuse a picture's name before hours of measuring, not after.

    Raises:
        UserError: its suffix is neither .png nor .svg, or matplotlib is not installed.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"{path}: a picture's name must end in .png or .svg")
    require_extra("matplotlib", "plot")
