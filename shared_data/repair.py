"""Rebuilds what is bad of a packed corpus, and nothing else, from the token streams and the plan that it was made with.

A rebuilt shard is held against the SHA-256 in the manifest before it takes the bad one's place: what the streams no
longer give is never put in.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared_data.commits import fingerprint
from shared_data.config.schema import TokenizerConfig
from shared_data.errors import UserError
from shared_data.layout import Layout
from shared_data.links import share_file
from shared_data.manifest import MANIFEST_NAME, CorpusInfo, Manifest, Position, sidecar_path
from shared_data.manifest_builder import build_manifest
from shared_data.packing import PackShard
from shared_data.shard_writer import shard_name

PLAN_RECORD = Path("pack", "plan.json")


def packed_split(layout: Layout, split: str) -> Path:
    """Where packing puts the shards of a split."""
    return layout.shards if split == "train" else layout.shards / split


@dataclass(frozen=True)
class Origin:
    """What a folder of shards was made of."""

    layout: Layout
    folder: Path
    info: CorpusInfo
    streams: tuple[Path, ...]
    tokenizer: TokenizerConfig
    bounds: dict[str, list[list[int]]]
    """Per split and shard: its slice of the plan, and its tokens."""

    @classmethod
    def find(cls, folder: Path) -> "Origin":
        """Look for the plan beside shards/ or pretrain_chinchilla/, or a folder in one of the two.

        Raises:
            UserError: there is none.
        """
        for root in (folder.absolute().parent, folder.absolute().parent.parent):
            layout = Layout(root)
            record = layout.state / PLAN_RECORD
            if record.is_file() and {layout.shards, layout.corpus} & {folder.absolute(), folder.absolute().parent}:
                known = json.loads(record.read_bytes())
                streams = tuple(root / path for path in known["streams"])
                tokenizer = TokenizerConfig.model_validate(known["tokenizer"])
                info = CorpusInfo.model_validate(known["info"])
                return cls(layout, folder.absolute(), info, streams, tokenizer, known["bounds"])
        raise UserError(
            f"{folder}: the plan of its packing (state/{PLAN_RECORD}) is not beside it, so that no shard can be "
            "rebuilt; prepare the corpus again, or copy the bad files from where it came"
        )

    def shards(self) -> list[tuple[str, int]]:
        """(split, number in the split) of the folder's shards."""
        if self.folder == self.layout.corpus:
            splits = ["long", "train"]
        else:
            splits = ["train" if self.folder == self.layout.shards else self.folder.name]
        return [(split, index) for split in splits for index in range(len(self.bounds.get(split, [])))]

    def published(self, split: str, index: int) -> Path:
        """The name of a shard in pretrain_chinchilla/."""
        if split == "validation":
            return self.layout.corpus / split / shard_name(index)
        return self.layout.corpus / shard_name(index + (len(self.bounds.get("long", [])) if split == "train" else 0))

    def rebuild(self, split: str, index: int, sha256: str) -> None:
        """Make one shard and its sidecar again, and give them all names that they had.

        Raises:
            UserError: the streams give other bytes, or are gone.
        """
        begin, end, _ = self.bounds[split][index]
        folder = self.layout.state / "pack"
        position = Position.model_validate({"split": split, "index": index, "count": len(self.bounds[split])})
        made = folder / "repair" / shard_name(index)
        plan = folder / f"plan-{split}.idx"
        key = fingerprint("repair", self.info.corpus, split, index)
        try:
            work = PackShard(plan, begin, end, self.streams, self.tokenizer, self.info, position, key, made)
            result = work.run()
        except (OSError, ValueError) as error:
            raise UserError(
                f"{made.name} cannot be rebuilt ({error}); run the tokenize and pack stages again"
            ) from None
        if result.outputs[made] != sha256:
            raise UserError(
                f"{split} {made.name}: the token streams no longer give the bytes that {MANIFEST_NAME} names; run the "
                "tokenize and pack stages again"
            )
        packed = packed_split(self.layout, split) / made.name
        for of in (lambda path: path, sidecar_path):
            share_file(of(made), of(packed), symbolic=False)
            of(made).unlink()
            if (self.published(split, index).parent / MANIFEST_NAME).is_file():
                share_file(of(packed), of(self.published(split, index)), symbolic=True)


def repair_shards(folder: Path, manifest: Manifest, numbers: Iterable[int]) -> list[Path]:
    """Rebuild some shards of a folder; returns their paths.

    Raises:
        UserError: the plan or the streams are not there, or are of another packing.
    """
    origin = Origin.find(folder)
    if origin.info.corpus != manifest.corpus:
        raise UserError(f"{folder} is of another packing than the plan in {origin.layout.state / PLAN_RECORD.parent}")
    paths, shards = manifest.shard_paths(folder), origin.shards()
    rebuilt = []
    with origin.layout.locked():
        for number in numbers:
            origin.rebuild(*shards[number], manifest.shards[number].sha256)
            rebuilt.append(paths[number])
    return rebuilt


def repair_manifest(folder: Path) -> bool:
    """Write a missing or damaged manifest, from the shards and sidecars; returns whether it was.

    Raises:
        UserError: they do not say all that it needs.
    """
    try:
        Manifest.load(folder, check_sizes=False)
    except UserError:
        build_manifest(folder).write(folder)
        return True
    return False
