"""Stage 1, its tasks: from a source, as it comes, to raw/SOURCE/data.jsonl with an id and a text on each line."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared_data.executor import Result
from shared_data.files import atomic_writer
from shared_data.hub import DatasetShard
from shared_data.records import Document, Fields, Span, json_library, read_documents


@dataclass(frozen=True)
class ReadFiles:
    """Read pieces of files into one raw part."""

    spans: tuple[Span, ...]
    fields: Fields
    output: Path

    def run(self) -> Result:
        """Write the part."""
        return write_raw(read_documents(self.spans, self.fields), self.output)


@dataclass(frozen=True)
class ReadDataset:
    """Read one file of a data set into one raw part."""

    shard: DatasetShard
    fields: Fields
    output: Path

    def run(self) -> Result:
        """Write the part."""
        return write_raw(self.shard.read(self.fields), self.output)


def write_raw(documents: Iterable[Document], output: Path) -> Result:
    """Write documents as JSON lines; those without text are dropped and counted by reason."""
    counts: Counter[str] = Counter()
    digest = hashlib.sha256()
    dumps = json_library().dumps
    with atomic_writer(output) as file:
        for document in documents:
            counts["read"] += 1
            if document.text is None:
                counts[f"dropped.{document.reason}"] += 1
                continue
            counts["kept"] += 1
            counts.update({f"changed.{name}": count for name, count in (document.repairs or {}).items()})
            url = {"url": document.url} if document.url else {}
            line = dumps({"id": document.id, **url, "text": document.text}) + b"\n"
            digest.update(line)
            file.write(line)
            counts["bytes"] += len(line)
    return Result({output: digest.hexdigest()}, counts)
