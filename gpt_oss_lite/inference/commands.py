"""The commands `generate`, `eval` and `passkey`. PyTorch is imported inside, so that --help answers at once."""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpt_oss_lite.options import AsJson, Checkpoint, Step, print_json
from shared_data.errors import UserError


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue; may be empty. Without it, each line of the input is one.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 64,
    step: Step = None,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the likeliest tokens of this share only.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw among tokens of this share of the likeliest one's probability only.")
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that are there already are rarer.")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Continuations to draw.")] = 1,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same continuations.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print each token as soon as it is drawn.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text with a trained model; without --prompt, one text after another from the standard input."""
    from gpt_oss_lite.inference import text

    settings = text.Settings(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed)
    if (stream or prompt is None) and (as_json or samples > 1):
        option = "--stream" if stream else "the standard input"
        raise UserError(f"{option} goes with neither --json nor --samples {samples}: it prints one text as it comes")
    model, tokenizer = text.load_with_tokenizer(checkpoint, step, _device())
    if prompt is None:
        text.repl(model, tokenizer, settings, sys.stdin, sys.stdout)
        return
    with _naming_options(vars(settings)):
        if stream:
            text.say_speed(text.stream_text(model, tokenizer, prompt, settings, sys.stdout))
            return
        drawn, speed = text.complete(model, tokenizer, prompt, settings, n_samples=samples)
    texts = [tokenizer.decode(sample.ids) for sample in drawn]
    if as_json:
        rows = zip(texts, drawn, strict=True)
        results = [{"text": text, "tokens": len(sample.ids), "stopped": sample.stopped} for text, sample in rows]
        print_json({"prompt": prompt, "samples": results, "tokens_per_s": speed.decode_tokens_per_s})
        return
    for continuation in texts:
        print(prompt + continuation)
    text.say_speed(speed)


def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Corpus to score, e.g. .../validation.", show_default=False)
    ],
    step: Step = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of one forward pass.")] = 8,
    positions: Annotated[
        int | None,
        typer.Option(metavar="T", min=2, help="Instead: loss by position in windows of T tokens, at the scale for T."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on a corpus: loss, perplexity and bits per byte, overall and per source."""
    from gpt_oss_lite.inference.perplexity import by_position
    from gpt_oss_lite.inference.perplexity import evaluate as score
    from gpt_oss_lite.training.dataset import PretrainDataset, check_corpus
    from gpt_oss_lite.training.weights import load_model

    model, _ = load_model(checkpoint, step, _device())
    dataset = PretrainDataset(data, positions or model.config.max_seq_len, model.config.embedding_rows)
    check_corpus(dataset, model.config)
    if positions is not None:
        if positions > model.config.eval_context:
            raise UserError(
                f"--positions is {positions}: it must be at most {model.config.eval_context} (eval_max_seq_len)"
            )
        spans = by_position(model, dataset, micro_batch_size=batch_size)
        if as_json:
            print_json([vars(span) for span in spans])
            return
        print(f"{'positions':>16} {'loss':>8} {'tokens':>12}")
        for span in spans:
            print(f"{f'{span.start:,}-{span.stop:,}':>16} {span.loss:8.4f} {span.tokens:12,}")
        return
    result = score(model, dataset, micro_batch_size=batch_size)
    if as_json:
        print_json(result.as_dict())
        return
    print(f"{'source':<20} {'loss':>8} {'perplexity':>12} {'bits/byte':>10} {'tokens':>12}")
    for name, part in [*result.by_source.items(), ("all", result.total)]:
        bits = "n/a" if part.bits_per_byte is None else f"{part.bits_per_byte:.4f}"
        print(f"{name:<20} {part.loss:8.4f} {part.perplexity:12.5g} {bits:>10} {part.tokens:12,}")


def passkey(
    checkpoint: Checkpoint,
    step: Step = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a text; repeatable. Default: a quarter of the window, doubled up to the longest."),
    ] = None,
    depths: Annotated[int, typer.Option(min=1, help="Depths of the key, evenly from the start to the end.")] = 5,
    trials: Annotated[int, typer.Option(min=1, help="Texts of each length and depth.")] = 10,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Corpus to hide the keys in. Default: a few plain sentences.")
    ] = None,
    rope_scale: Annotated[
        float | None, typer.Option(help="YaRN scale. Default: for each length the smallest that covers it.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides keys and texts.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the heat map: .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find out how far back a model still reads: a number hidden in long texts, by their length and its depth."""
    from gpt_oss_lite.inference import passkey as keys
    from gpt_oss_lite.inference.text import load_with_tokenizer

    if plot is not None:
        keys.check_picture(plot)
    model, tokenizer = load_with_tokenizer(checkpoint, step, _device())
    filler = None if data is None else keys.open_corpus_filler(data, model.config, tokenizer)
    lengths = length or keys.default_lengths(model.config)
    shares = [index / max(depths - 1, 1) for index in range(depths)]
    cells = keys.passkey(
        model, tokenizer, lengths, shares, trials=trials, seed=seed, filler=filler, rope_scale=rope_scale
    )
    if plot is not None:
        keys.heat_map(cells, plot, f"Passkeys found: {checkpoint.name}")
    if as_json:
        print_json([{**vars(cell), "accuracy": cell.accuracy} for cell in cells])
        return
    print(f"{'length':>9} {'depth':>6} {'found':>12} {'nats/token':>11}")
    for cell in cells:
        found = f"{cell.found} of {cell.trials}"
        print(f"{cell.length:9,} {cell.depth:6.0%} {found:>12} {cell.nats_per_token:11.4f}")


@contextmanager
def _naming_options(names: Iterable[str]) -> Iterator[None]:
    """Errors about arguments name the options that they came from, and the one prompt without its number."""
    try:
        yield
    except UserError as error:
        message = str(error).replace("prompt 0 ", "the prompt ")
        for name in names:
            message = re.sub(rf"\b{name} is ", f"--{name.replace('_', '-')} is ", message)
        raise UserError(message) from None


def _device() -> Literal["cuda", "cpu"]:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
