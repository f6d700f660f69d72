"""One HTML page about a corpus: what is in it, what became of the text, and samples of what each rule dropped.

The page is one file without scripts, fonts or pictures from elsewhere, and a function of the data folder alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from shared_data import options
from shared_data.console import say
from shared_data.dropped import Sample, dropped_samples
from shared_data.files import write_if_changed
from shared_data.layout import Layout
from shared_data.manifest import Manifest, read_sidecar
from shared_data.page_parts import PAGE, bar_with_target, drop_bar, histogram, table, tiles
from shared_data.stage import Context

PAGE_NAME = "corpus.html"
MAX_LENGTH_LOG2 = 24


@dataclass(frozen=True)
class CorpusFacts:
    """What the page shows."""

    manifest: Manifest
    validation: Manifest | None
    reports: Mapping[str, dict[str, Any]]
    """The stages' reports that are there."""
    lengths: Mapping[str, np.ndarray]
    """Per source: documents of 2^k to 2^(k+1) - 1 tokens, int64 (MAX_LENGTH_LOG2,)."""
    samples: Mapping[str, Mapping[str, list[Sample]]]


def gather(context: Context) -> CorpusFacts:
    """Read manifests, sidecars and reports, and filter the beginning of the raw text again for samples.

    Raises:
        UserError: there is no packed corpus.
    """
    corpus = context.layout.corpus
    manifest = Manifest.load(corpus)
    lengths = {source: np.zeros(MAX_LENGTH_LOG2, np.int64) for source in manifest.sources}
    for path in manifest.shard_paths(corpus):
        sidecar = read_sidecar(path)
        is_text = np.ones(len(sidecar.starts), bool)
        is_text[sidecar.inserts] = False
        bins = np.minimum(np.log2(sidecar.lengths).astype(np.int64), MAX_LENGTH_LOG2 - 1)
        for index, source in enumerate(sidecar.sources):
            lengths[source] += np.bincount(bins[is_text & (sidecar.source_index == index)], minlength=MAX_LENGTH_LOG2)
    names = ("download", "clean", "tokenize", "pack")
    paths = {name: context.layout.reports / f"{name}.json" for name in names}
    has_validation = (corpus / "validation").is_dir()
    return CorpusFacts(
        manifest=manifest,
        validation=Manifest.load(corpus / "validation") if has_validation else None,
        reports={name: json.loads(path.read_bytes()) for name, path in paths.items() if path.is_file()},
        lengths=lengths,
        samples={source.id: dropped_samples(context, source) for source in context.sources},
    )


def render(facts: CorpusFacts) -> str:
    """The page."""
    name = escape(facts.manifest.mixture or "corpus")
    sections = (
        ("Training tokens by source", "The mark is the mixture's target.", _sources(facts)),
        (
            "Training and validation",
            "In all are what packing kept: a document of training counts once, however often it is repeated.",
            _splits(facts),
        ),
        ("What became of the documents", _road_note(facts), _road(facts)),
        (
            "Document lengths",
            "Training documents by tokens; each bar begins at twice the length of the one before (1k is 1,024).",
            _lengths(facts),
        ),
        (
            "What the rules dropped",
            "Out of the first megabytes of each source, at most three documents a reason, cut off.",
            _samples(facts),
        ),
    )
    shown = "\n".join(
        f"<section><h2>{title}</h2><p class=note>{note}</p>{content}</section>"
        for title, note, content in sections
        if content
    )
    return PAGE.format(title=f"{name}: corpus", name=name, sections=_overview(facts) + shown)


def _overview(facts: CorpusFacts) -> str:
    manifest, long = facts.manifest, facts.manifest.long_context
    found = [
        ("training tokens", f"{manifest.total_tokens:,}"),
        ("training documents", f"{manifest.total_documents - (long.inserts if long else 0):,}"),
        ("shards", f"{manifest.shard_count:,}"),
        ("validation tokens", f"{facts.validation.total_tokens:,}" if facts.validation else "none"),
        ("validation documents", f"{facts.validation.total_documents:,}" if facts.validation else "none"),
        (
            f"windows of {long.window_tokens:,} tokens" if long else "long-context windows",
            f"{long.windows:,}" if long else "none",
        ),
        _duplicate_rate(facts),
    ]
    return tiles(found)


def _duplicate_rate(facts: CorpusFacts) -> tuple[str, str]:
    sources = facts.reports.get("clean", {}).get("sources", {}).values()
    dropped = sum(own["dropped"].get(reason, 0) for own in sources for reason in ("duplicate", "near_duplicate"))
    passed = sum(own["kept"] for own in sources) + dropped
    return f"duplicates among {passed:,}", f"{dropped / passed:.2%}" if passed else "not known"


def _sources(facts: CorpusFacts) -> str:
    total = facts.manifest.total_tokens
    largest = max(max(own.tokens / total, own.weight) for own in facts.manifest.sources.values())
    packed = facts.reports.get("pack", {}).get("sources", {})
    rows = []
    for source, own in facts.manifest.sources.items():
        share = own.tokens / total
        about = packed.get(source, {})
        rows.append([
            escape(source), bar_with_target(share / largest, own.weight / largest), f"{own.tokens:,}", f"{share:.2%}",
            f"{own.weight:.2%}", f"{own.documents - own.inserts:,}", f"{about.get('long_context_tokens', 0):,}",
            f"{about.get('repeated_documents', 0):,}", f"{own.bytes / max(own.tokens, 1):.2f}",
        ])  # fmt: skip
    head = ["source", "", "tokens", "share", "target", "documents", "long-context tokens", "repeated", "bytes a token"]
    return table(head, rows, text_columns=2)


def _splits(facts: CorpusFacts) -> str:
    """Documents and tokens of each source in training, validation and both, with a last row that sums the sources."""
    packed = facts.reports.get("pack", {}).get("sources", {})
    held_out = facts.validation.sources if facts.validation else {}
    counts = []
    for source, own in facts.manifest.sources.items():
        once = own.documents - own.inserts - packed.get(source, {}).get("repeated_documents", 0)
        other = held_out.get(source)
        documents, tokens = (other.documents, other.tokens) if other else (0, 0)
        counts.append([once, documents, once + documents, own.tokens, tokens, own.tokens + tokens])
    rows = [[escape(source), *map(_grouped, own)] for source, own in zip(facts.manifest.sources, counts, strict=True)]
    rows.append(["<b>all</b>", *(f"<b>{_grouped(sum(column))}</b>" for column in zip(*counts, strict=True))])
    head = ["source", "training documents", "+ validation", "= in all", "training tokens", "+ validation", "= in all"]
    return table(head, rows, text_columns=1)


def _grouped(count: int) -> str:
    return f"{count:,}"


def _road_note(facts: CorpusFacts) -> str:
    clean = facts.reports.get("clean", {}).get("sources", {}).values()
    read, kept = sum(own["read"] for own in clean), sum(own["kept"] for own in clean)
    share = f" Cleaning kept {kept:,} of {read:,} documents ({kept / read:.1%})." if read else ""
    return f"Documents read are those kept and those dropped, at every stage.{share}"


def _road(facts: CorpusFacts) -> str:
    rows = []
    for stage, report in facts.reports.items():
        for source, own in report["sources"].items():
            dropped = dict(sorted(own["dropped"].items(), key=lambda item: -item[1]))
            reasons = ", ".join(f"{escape(reason)} {count:,}" for reason, count in dropped.items() if count) or "–"
            share = own["kept"] / own["read"] if own["read"] else 0.0
            first = f"<b>{stage}</b>" if source == next(iter(report["sources"])) else ""
            rows.append(
                [
                    first,
                    escape(source),
                    f"{own['read']:,}",
                    f"{own['kept']:,}",
                    f"{share:.1%}",
                    drop_bar(share),
                    reasons,
                ]
            )
    return table(["stage", "source", "read", "kept", "share", "", "dropped"], rows, text_columns=2, last_is_text=True)


def _lengths(facts: CorpusFacts) -> str:
    filled = np.flatnonzero(sum(facts.lengths.values()))
    if not len(filled):
        return ""
    bins = range(int(filled[0]), int(filled[-1]) + 1)
    labels = [str(1 << k) if k < 10 else f"{1 << k - 10}k" for k in bins]
    charts = [histogram(escape(source), own[bins.start : bins.stop].tolist(), labels)
              for source, own in facts.lengths.items()]  # fmt: skip
    return f"<div class=charts>{''.join(charts)}</div>"


def _samples(facts: CorpusFacts) -> str:
    found: list[str] = []
    for source, reasons in facts.samples.items():
        dropped = facts.reports.get("clean", {}).get("sources", {}).get(source, {}).get("dropped", {})
        for reason, samples in reasons.items():
            total = f" <span class=note>{dropped[reason]:,} in all</span>" if reason in dropped else ""
            title = f"<summary><b>{escape(reason)}</b> · {escape(source)}{total}</summary>"
            texts = "".join(_sample(sample) for sample in samples)
            found.append(f"<details{'' if found else ' open'}>{title}{texts}</details>")
    return "".join(found)


def _sample(sample: Sample) -> str:
    more = " …" if sample.n_chars > len(sample.text) else ""
    caption = f"<figcaption>{escape(sample.id)}, {sample.n_chars:,} characters</figcaption>"
    return f"<figure>{caption}<pre>{escape(_visible(sample.text)) or '(no text)'}{more}</pre></figure>"


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def write_page(context: Context, out: Path | None = None) -> Path:
    """Write the page, by default to state/reports/corpus.html; returns its path."""
    path = out or context.layout.reports / PAGE_NAME
    write_if_changed(path, render(gather(context)))
    return path


def corpus(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="The same as --data-root; or the corpus in it.", show_default=False),
    ] = None,
    mixture: options.MixtureOption = None,
    data_config: options.DataConfigOption = None,
    data_root: options.DataRootOption = Path("data"),
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: state/reports/corpus.html.")] = None,
) -> None:
    """Write a page about a prepared corpus: tokens by source, drops by reason, lengths, samples of what was dropped."""
    if folder is not None:
        data_root = folder.parent if folder.name == Layout(folder).corpus.name else folder
    context = options.StageOptions(mixture=mixture, data_config=data_config, data_root=data_root).context()
    say(f"page: {write_page(context, out)}")
