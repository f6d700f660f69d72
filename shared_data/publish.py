"""The last step: pretrain_chinchilla/, what training reads, made of the packed shards without a second copy of them."""

from collections.abc import Sequence
from pathlib import Path

from shared_data.files import write_if_changed
from shared_data.links import share_file
from shared_data.manifest import MANIFEST_NAME, Manifest, shard_files, sidecar_path
from shared_data.manifest_builder import build_manifest
from shared_data.shard_writer import shard_name


def publish(folders: Sequence[Path], target: Path) -> Manifest:
    """Give the shards of some packed folders a common home, numbered through, with a manifest of its own.

    The manifest goes first and comes back last, so that what is half made is never taken for a corpus.

    Args:
        folders: packed corpora of one packing, in the order of their shards.
        target: the folder to make; shards of an earlier corpus in it are removed.
    """
    paths = [path for folder in folders for path in Manifest.load(folder).shard_paths(folder)]
    names = [shard_name(index) for index in range(len(paths))]
    if not _is_published(paths, names, target):
        (target / MANIFEST_NAME).unlink(missing_ok=True)
        for path, name in zip(paths, names, strict=True):
            share_file(path, target / name, symbolic=True)
            share_file(sidecar_path(path), sidecar_path(target / name), symbolic=True)
        remove_strays(target, names)
    manifest = build_manifest(target)
    write_if_changed(target / MANIFEST_NAME, manifest.to_json())
    return manifest


def _is_published(paths: Sequence[Path], names: Sequence[str], target: Path) -> bool:
    """Whether every shard and sidecar is already the same file as its source (or, copied, looks like it)."""
    if [path.name for path in shard_files(target)] != list(names) or not (target / MANIFEST_NAME).is_file():
        return False
    pairs = list(zip(paths, (target / name for name in names), strict=True))
    pairs += [(sidecar_path(source), sidecar_path(own)) for source, own in pairs]
    return all(own.is_file() and own.samefile(source) for source, own in pairs)


def remove_strays(folder: Path, names: Sequence[str]) -> None:
    """Remove shards, sidecars and unfinished files that do not belong to the corpus."""
    kept = {name for shard in names for name in (shard, sidecar_path(Path(shard)).name)}
    for path in folder.glob("shard_*"):
        if path.name not in kept and path.suffix in (".bin", ".idx", ".tmp", ".progress"):
            path.unlink()


def remove_corpus(folder: Path) -> None:
    """Remove a packed corpus: its manifest first, then its shards; the folder too if nothing else is in it."""
    if folder.is_dir():
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        remove_strays(folder, [])
        if not any(folder.iterdir()):
            folder.rmdir()
