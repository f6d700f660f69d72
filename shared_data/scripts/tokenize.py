"""Stage 3: clean text -> tokens/SOURCE/tokens.bin. Run as `python -m shared_data.scripts.tokenize`.

Run as a script by its path it would hide the standard library's `tokenize` from everything that it imports.
"""

import sys
from typing import Any

from shared_data.commits import fingerprint
from shared_data.config import PIPELINE_VERSION, PipelineConfig, Source
from shared_data.console import say
from shared_data.errors import UserError
from shared_data.executor import Task
from shared_data.options import stage_main
from shared_data.stage import (
    Context,
    finish_source,
    part_path,
    read_parts,
    run_parts,
    source_counts,
    spans_of_parts,
    stage_record,
    write_report,
)
from shared_data.tokenizer import Tokenizer
from shared_data.tokenizing import INDEX_VERSION, STREAM_VERSION, TokenizeSpan, tokenizer_of

STAGE = "tokenize"


def check_tokenizer(config: PipelineConfig, config_name: str) -> Tokenizer:
    """Load the tokenizer; refuse settings that are not its own.

    Raises:
        UserError: names the key and both values.
    """
    try:
        tokenizer = tokenizer_of(config.tokenizer)
    except UserError as error:
        raise UserError(f"{config_name}: {error}") from None
    for key in ("vocab_size", "eos_token_id", "pad_token_id"):
        given, actual = getattr(config.tokenizer, key), getattr(tokenizer, key)
        if given != actual:
            raise UserError(
                f"{config_name}: tokenizer.{key} is {given}, but the tokenizer {tokenizer.name} has {actual}"
            )
    return tokenizer


def plan_tasks(context: Context, source: Source, tokenizer: Tokenizer) -> list[Task]:
    """The tasks that encode one source."""
    parts = read_parts(context.layout, "clean", source.id)
    spans = spans_of_parts(parts, context.task_bytes(sum(part.bytes for part in parts)))
    settings = context.config.tokenizer
    folder = stage_record(context.layout, STAGE, source.id).parent
    tasks = []
    for index, (part, span) in enumerate(spans):
        output = part_path(context.layout, STAGE, source.id, index, len(spans))
        versions = [PIPELINE_VERSION, STREAM_VERSION, INDEX_VERSION]
        ids = [tokenizer.identity, tokenizer.eos_token_id]
        key = fingerprint(versions, STAGE, ids, part.sha256, span.start, span.end, output.name)
        work = TokenizeSpan(span, settings, settings.batch_size, settings.prefetch, output)
        tasks.append(Task(folder / f"task-{index:05d}.json", key, span.end - span.start, work))
    return tasks


def run(context: Context) -> dict[str, Any]:
    """Encode every source; returns the stage's report."""
    tokenizer = check_tokenizer(context.config, context.config_name)
    say(f"{STAGE}: {tokenizer.name} with {tokenizer.about_encoder}")
    plans = {source.id: plan_tasks(context, source, tokenizer) for source in context.sources}
    commits = run_parts(context, STAGE, plans)
    for source, own in commits.items():
        finish_source(context.layout, STAGE, source, own)
    return write_report(context, STAGE, {source: source_counts(own) for source, own in commits.items()})


if __name__ == "__main__":
    sys.exit(stage_main(run, "tokenize"))
