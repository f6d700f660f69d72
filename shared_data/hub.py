"""Sources that the library `datasets` reads: data sets of the Hugging Face hub, streamed, and local folders of one.

A data set's files (its shards, as `datasets` calls them) are the tasks: a finished file is never opened again.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_data.config import Source
from shared_data.errors import UserError, require_extra
from shared_data.records import Document, Fields, document_of


@dataclass(frozen=True)
class DatasetShard:
    """One file of a data set."""

    source: str
    dataset: str
    config: str | None
    data_dir: str | None
    split: str
    revision: str | None
    index: int
    count: int

    def read(self, fields: Fields) -> Iterator[Document]:
        """Its documents, in order."""
        stream = _open(self.source, self.dataset, self.config, self.data_dir, self.split, self.revision)
        for number, record in enumerate(stream.shard(num_shards=self.count, index=self.index)):
            yield document_of(record, f"{self.dataset}/{self.index}#{number}", fields)


def dataset_shards(source: Source) -> list[DatasetShard]:
    """The files of a source's data set.

    Raises:
        UserError: it cannot be opened: offline, unknown, or gated.
    """
    assert source.dataset is not None
    args = (source.id, source.dataset, source.config, source.data_dir, source.split, source.revision)
    count = int(_open(*args).num_shards)
    return [DatasetShard(*args, index=index, count=count) for index in range(count)]


def local_files(source: Source) -> list[Path]:
    """The files of a data set that is a local folder: what its documents depend on. Empty for the hub."""
    assert source.dataset is not None
    folder = Path(source.dataset)
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def _open(source: str, dataset: str, config: str | None, data_dir: str | None, split: str, revision: str | None) -> Any:
    # A stream has no total: the library's bars would only mix with ours.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    datasets = require_extra("datasets", "data")
    try:
        return datasets.load_dataset(dataset, config, data_dir=data_dir, split=split, revision=revision, streaming=True)
    except Exception as error:
        # The library raises its own, the hub client's and the network's errors; each is told in one line.
        raise UserError(f"source {source}: dataset {dataset}: {_explain(dataset, error)}") from None


def _explain(dataset: str, error: Exception) -> str:
    kind = type(error).__name__
    words = " ".join(str(error).split())[:300]
    if "gated" in words.lower() or kind == "GatedRepoError":
        return (
            f"it is gated: accept its terms at https://huggingface.co/datasets/{dataset} and log in with "
            "`hf auth login` (or set HF_TOKEN)"
        )
    return f"cannot be opened ({kind}: {words})"
