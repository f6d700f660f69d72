"""The command line, `gpt-oss-lite COMMAND`; the table in README.md has all of them.

A command reads its options, hands them to the one function that does the work, and prints its result; heavy modules
are imported inside, so that --help answers at once. Results go to standard output, everything else to standard error.
"""

import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from gpt_oss_lite.report.commands import monitor, report
from gpt_oss_lite.training import checkpoint_commands
from gpt_oss_lite.training.doctor import doctor
from gpt_oss_lite.training.ladder import plan
from shared_data.console import run_app, say
from shared_data.errors import UserError
from shared_data.inspection import inspect
from shared_data.page import corpus
from shared_data.prepare_data import prepare
from shared_data.verify import verify

if TYPE_CHECKING:
    from gpt_oss_lite.model.transformer import GPTOSS
    from shared_data.tokenizer import Tokenizer

app = typer.Typer(
    help="GPT-OSS-Lite: pre-train a sparse mixture-of-experts language model, from raw text to samples.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad input or usage, 3 stopped by a signal or time limit after a good "
    "save, 4 stopped by the NaN guard. --debug anywhere shows the traceback of an error.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(prepare)
app.command()(verify)
app.command()(doctor)
app.command()(plan)
app.add_typer(checkpoint_commands.app, name="checkpoints")
app.command()(report)
app.command()(monitor)
app.command()(inspect)
app.command()(corpus)

Config = Annotated[Path, typer.Option("--config", help="Recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe (training.lr=3e-4); repeatable."),
]
Checkpoint = Annotated[
    Path, typer.Option("--checkpoint", metavar="RUN", help="Run folder, or its checkpoints/.", show_default=False)
]
Step = Annotated[
    int | None, typer.Option("--step", min=0, help="Step of the checkpoint. Default: the newest complete one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class _SayHandler(logging.Handler):
    """Log lines go where standard error goes at the time, so also above a progress bar that owns it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """GPT-OSS-Lite: pre-train a sparse mixture-of-experts language model, from raw text to samples."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_SayHandler()])
    if show_version:
        print(version("gpt-oss-lite"))
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def pretrain(
    config: Config,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Run folder. Default: the next free runs/<config>-NNN.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything. Default: a fresh one, recorded.")] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Step to stop at. The schedule keeps training.total_steps.")
    ] = None,
    max_hours: Annotated[float | None, typer.Option(help="Hours after which to save and stop (exit code 3).")] = None,
    overrides: Overrides = None,
    resume_from: Annotated[int | None, typer.Option(metavar="N", help="Go on from the checkpoint of step N.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="latest", help="Go on from the newest good checkpoint.")] = None,
    auto_resume: Annotated[bool, typer.Option("--auto-resume", help="Go on where there is a run, else start.")] = False,
    init_from: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Start a new run from another's newest weights.")
    ] = None,
    profile: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Write a trace and a kernel table of N steps.")
    ] = None,
    accept_no_nan_guard: Annotated[
        bool, typer.Option("--i-accept-no-nan-guard", help="Needed with training.nan_guard: false.")
    ] = False,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Go on although recipe, seed or corpus differ.")
    ] = False,
) -> int:
    """Train a model. Without --out, --resume-from, --resume and --auto-resume take the newest run of the recipe."""
    from gpt_oss_lite.training.pretrain import PretrainOptions
    from gpt_oss_lite.training.pretrain import pretrain as train

    if resume not in (None, "latest"):
        raise UserError(f"--resume is {resume}: it must be latest (or name a step with --resume-from)")
    options = PretrainOptions(
        config=config,
        out=out,
        seed=seed,
        max_steps=max_steps,
        max_hours=max_hours,
        overrides=overrides or (),
        resume_from=resume_from,
        resume_latest=resume is not None,
        auto_resume=auto_resume,
        init_from=init_from,
        profile=profile,
        accept_no_nan_guard=accept_no_nan_guard,
        allow_changed=allow_changed,
    )
    return train(options)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue; may be empty. Without it, each line of the input is one.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = 64,
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
    model, tokenizer = _load(checkpoint, step)
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


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Corpus to score, e.g. .../validation.", show_default=False)
    ],
    step: Step = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of one forward pass.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Score a model on a corpus: loss, perplexity and bits per byte, overall and per source."""
    from gpt_oss_lite.inference.perplexity import evaluate as score
    from gpt_oss_lite.training.checkpoint import load_model
    from gpt_oss_lite.training.dataset import PretrainDataset, check_corpus

    model, _ = load_model(checkpoint, step, _device())
    dataset = PretrainDataset(data, model.config.max_seq_len, model.config.embedding_rows)
    check_corpus(dataset, model.config)
    result = score(model, dataset, micro_batch_size=batch_size)
    if as_json:
        print_json(result.as_dict())
        return
    print(f"{'source':<20} {'loss':>8} {'perplexity':>12} {'bits/byte':>10} {'tokens':>12}")
    for name, part in [*result.by_source.items(), ("all", result.total)]:
        bits = "n/a" if part.bits_per_byte is None else f"{part.bits_per_byte:.4f}"
        print(f"{name:<20} {part.loss:8.4f} {part.perplexity:12.5g} {bits:>10} {part.tokens:12,}")


@app.command()
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

    if plot is not None:
        keys.check_picture(plot)
    model, tokenizer = _load(checkpoint, step)
    filler = None if data is None else keys.open_corpus_filler(data, model.config, tokenizer)
    lengths = length or keys.default_lengths(model.config)
    shares = [index / max(depths - 1, 1) for index in range(depths)]
    cells = keys.passkey(
        model, tokenizer, lengths, shares, trials=trials, seed=seed, filler=filler, rope_scale=rope_scale
    )
    if plot is not None:
        keys.heat_map(cells, plot, f"Passkeys found: {checkpoint.name}, {trials} texts a cell")
    if as_json:
        print_json([{**vars(cell), "accuracy": cell.accuracy} for cell in cells])
        return
    print(f"{'length':>9} {'depth':>6} {'found':>12} {'nats/token':>11}")
    for cell in cells:
        found = f"{cell.found} of {cell.trials}"
        print(f"{cell.length:9,} {cell.depth:6.0%} {found:>12} {cell.nats_per_token:11.4f}")


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; not there yet.", show_default=False)],
    step: Step = None,
    rope_scale: Annotated[
        float | None, typer.Option(help="YaRN scale of the exported model. Default: the checkpoint's.")
    ] = None,
    max_shard_gb: Annotated[float, typer.Option(help="Largest file of weights, in 1e9 bytes.")] = 5.0,
    plain_tokenizer: Annotated[
        bool, typer.Option("--plain-tokenizer", help="The tokenizer puts no end-of-document id before a text.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a folder that Hugging Face transformers loads."""
    from gpt_oss_lite.export.hf import export_checkpoint

    if not 0 < max_shard_gb < math.inf:
        raise UserError(f"--max-shard-gb is {max_shard_gb:g}: it must be finite and above 0")
    done = export_checkpoint(
        checkpoint,
        out,
        step=step,
        rope_scale=rope_scale,
        max_shard_bytes=int(max_shard_gb * 1e9),
        document_start=not plain_tokenizer,
    )
    if as_json:
        print_json({**vars(done), "folder": str(done.folder)})
        return
    remote = "" if done.layout == "gpt_oss" else ", trust_remote_code=True"
    print(f"{done.folder}: {', '.join(done.files)}; weights {done.n_bytes:,} B")
    print(f'load it: AutoModelForCausalLM.from_pretrained("{done.folder}"{remote})')
    if not done.has_tokenizer:
        say("no tokenizer files: the model's vocabulary is not the LLaMA-3 tokenizer's")


@app.command("import")
def import_stock(
    source: Annotated[
        Path, typer.Option("--from", metavar="DIR", help="Folder of a stock gpt-oss model.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Run folder to write; not there yet.", show_default=False)],
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Ids that may be generated, where rows above them are padding.")
    ] = None,
) -> None:
    """Read a stock gpt-oss model, as transformers saves it, as a checkpoint to generate with or to train on from."""
    from gpt_oss_lite.export.importing import import_checkpoint
    from gpt_oss_lite.model.transformer import describe_parameters

    model = import_checkpoint(source, out, vocab_size=vocab_size)
    say(describe_parameters(model))
    print(f"{out}: step 0; train on from it: gpt-oss-lite pretrain --config {out}/config.yaml --init-from {out}")


@app.command()
def estimate(
    config: Config,
    overrides: Overrides = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Windows. Default: training.micro_batch_size.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a window. Default: model.max_seq_len.")] = None,
    gpu_gb: Annotated[
        float | None, typer.Option(min=0, help="Find the fastest setting that fits in so many GB (10^9 bytes).")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="GPUs that share a step, by training.parallelism.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Estimate a recipe's memory on a GPU, its parameters and operations, without building it."""
    from gpt_oss_lite.config import load_recipe
    from gpt_oss_lite.training.flops import flops_per_token
    from gpt_oss_lite.training.memory import estimate_recipe, fastest_that_fits, layout_of, meta_model, step_windows

    recipe = load_recipe(config, overrides or ())
    if step_windows(recipe) % ranks:
        raise UserError(f"--ranks is {ranks}: it must divide the {step_windows(recipe)} windows of the recipe's step")
    layout = layout_of(recipe.training, ranks)
    if gpu_gb is not None:
        if batch_size is not None or seq_len is not None:
            raise UserError("--gpu-gb chooses the micro-batch itself; it does not go with --batch-size or --seq-len")
        found = fastest_that_fits(recipe, int(gpu_gb * 1e9), layout)
        if found is None:
            raise UserError(f"--gpu-gb is {gpu_gb:g}: nothing fits; a smaller model.max_seq_len or model needs less")
        setting, fitting = found
        if as_json:
            print_json({**setting._asdict(), "bytes": fitting.items, "total_bytes": fitting.total_bytes})
            return
        print(" ".join(f"--set {word}" for word in setting.overrides()))
        print(fitting.table())
        return
    result = estimate_recipe(recipe, batch_size, seq_len, layout=layout)
    model = meta_model(recipe.model)
    total, active = model.num_parameters(), model.num_active_parameters()
    flops = flops_per_token(recipe.model, seq_len or recipe.model.max_seq_len)
    if as_json:
        figures = {"parameters": total, "active_parameters": active, "flops_per_token": flops}
        print_json({**figures, "bytes": result.items, "total_bytes": result.total_bytes})
        return
    print(f"parameters: {total:,}, active per token: {active:,}; {flops:,} FLOP/token, forward and backward")
    print(result.table())


def _device() -> Literal["cuda", "cpu"]:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _load(checkpoint: Path, step: int | None) -> "tuple[GPTOSS, Tokenizer]":
    """A model and the tokenizer that its corpus was made with.

    Raises:
        UserError: the model has another vocabulary.
    """
    from gpt_oss_lite.training.checkpoint import load_model
    from shared_data.tokenizer import load_tokenizer

    model, _ = load_model(checkpoint, step, _device())
    tokenizer = load_tokenizer()
    rows = model.config.embedding_rows
    if model.config.vocab_size != tokenizer.vocab_size or tokenizer.eos_token_id >= rows:
        raise UserError(
            f"{checkpoint}: the model has vocab_size {model.config.vocab_size} and {rows} rows, but the tokenizer "
            f"{tokenizer.name} has vocab_size {tokenizer.vocab_size} and EOS {tokenizer.eos_token_id}"
        )
    return model, tokenizer


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


def print_json(value: Any) -> None:
    """Print a result on standard output for other programs. JSON has no infinity and no NaN: they become null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code.

    Args:
        arguments: None: those of the process.
    """
    sys.exit(run_app(app, arguments, prog_name="gpt-oss-lite"))
