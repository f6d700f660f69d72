"""The commands `export` and `import`. PyTorch is imported inside, so that --help answers at once."""

import math
from pathlib import Path
from typing import Annotated

import typer

from gpt_oss_lite.options import AsJson, Checkpoint, Step, print_json
from shared_data.console import say
from shared_data.errors import UserError


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
