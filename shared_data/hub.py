"""Data sets of the Hugging Face hub, and local folders of one: which files they are made of, and at which commit.

The library `datasets` says which files belong to a configuration and split. They are read here, one by one (`remote`):
its own streams cannot go on inside a file, or without opening the finished ones again.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shared_data.config import Source
from shared_data.errors import UserError, require_extra
from shared_data.files import write_if_changed
from shared_data.records import check_suffixes
from shared_data.remote import Patience, RemoteFile, find_remote_files, may_pass, refuse_offline


class Revision(BaseModel):
    """What a source of the hub was when it was first looked up: kept, so that a later run reads the same."""

    model_config = ConfigDict(frozen=True)

    asked: list[str | None]
    """dataset, config, data_dir, split and revision of the source."""
    commit: str
    files: list[dict[str, Any]]


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set: on the hub, at a commit, or in a local folder."""

    local: list[Path]
    remote: list[RemoteFile]
    commit: str | None


def data_files(source: Source, record: Path) -> DataFiles:
    """The files of a source's data set.

    Args:
        source: a source with `dataset`.
        record: where the commit and the files of a data set of the hub are kept.

    Raises:
        UserError: it cannot be opened: offline, unknown, gated, or of another commit than its revision says.
    """
    assert source.dataset is not None
    asked = [source.dataset, source.config, source.data_dir, source.split, source.revision]
    try:
        known = Revision.model_validate_json(record.read_bytes())
    except (OSError, ValidationError):
        known = None
    if known and known.asked == asked:
        return DataFiles([], [RemoteFile(**file) for file in known.files], known.commit)
    names, commit = _look_up(source)
    if commit is None:
        return DataFiles(check_suffixes([Path(name) for name in names], source.id), [], None)
    files = [file for name in names for file in find_remote_files(name, source.id)]
    files = [RemoteFile(file.url, file.name.partition(commit)[2].strip("/"), file.size, commit) for file in files]
    kept = Revision(asked=asked, commit=commit, files=[asdict(file) for file in files])
    write_if_changed(record, kept.model_dump_json(indent=1))
    return DataFiles([], files, commit)


def _look_up(source: Source) -> tuple[list[str], str | None]:
    """Names of a data set's files, and its commit; None for a local folder."""
    # The library's bars would only mix with ours.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    datasets = require_extra("datasets", "data")
    if not Path(str(source.dataset)).exists():
        refuse_offline(f"source {source.id}: dataset {source.dataset}")

    def build() -> Any:
        try:
            return datasets.load_dataset_builder(
                source.dataset, source.config, data_dir=source.data_dir, revision=source.revision
            )
        except Exception as error:
            # The library raises its own, the hub client's and the network's errors; each is told in one line.
            if may_pass(error) and not Path(str(source.dataset)).is_absolute():
                raise
            raise UserError(f"source {source.id}: dataset {source.dataset}: {explain(source, error)}") from None

    config = Patience(f"source {source.id}: dataset {source.dataset}").until_it_works(build).config
    splits = {str(split): [str(name) for name in names] for split, names in (config.data_files or {}).items()}
    if source.split not in splits:
        raise UserError(
            f"source {source.id}: dataset {source.dataset} has no split {source.split!r}; it has: {', '.join(splits)}"
        )
    names = splits[source.split]
    commits = {name.partition("@")[2].partition("/")[0] for name in names if name.startswith("hf://")}
    if not commits:
        return names, None
    (commit,) = commits
    wanted = source.revision
    if wanted and len(wanted) == 40 and wanted != commit:
        raise UserError(f"source {source.id}: revision is {wanted}, but the hub has the commit {commit} under it")
    return names, commit


def explain(source: Source, error: Exception) -> str:
    """The reason why a data set cannot be opened, and what to do where we know it."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    words = " ".join(str(error).split())[:300]
    if "gated" in words.lower() or "GatedRepoError" in kinds or ("DatasetNotFoundError" in kinds and "log" in words):
        return (
            f"it is gated: accept its terms at https://huggingface.co/datasets/{source.dataset} and log in with "
            "`hf auth login` (or set HF_TOKEN)"
        )
    return f"cannot be opened ({type(error).__name__}: {words})"
