"""The two config files of the pipeline: what to mix (mixture.yaml) and how to prepare it (data_config.yaml)."""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shared_data.config.quality import Rules, RuleSetName
from shared_data.yaml_files import ConfigBlock

DEFAULT_SHARD_TOKENS = 50_000_000


class Source(ConfigBlock):
    """One source of a mixture: a data set of the hub, or files."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the source, and of its folders."""
    weight: float = Field(gt=0, le=1)
    """Share of the training tokens; the weights of a mixture add up to 1."""
    files: list[str] | None = Field(default=None, min_length=1)
    """Paths or globs, relative to the working folder, or addresses (https://, s3://, ...): .jsonl and .json (JSON
    lines), each also .gz, .xz or .zst, and .parquet; on this machine also .txt and .html (a document a file)."""
    dataset: str | None = None
    """Data set of the Hugging Face hub, or a local folder that `datasets` can load."""
    config: str | None = None
    """Configuration of the data set."""
    data_dir: str | None = None
    """Folder inside the data set."""
    split: str = "train"
    """Split of the data set."""
    revision: str | None = None
    """Commit or tag of the data set. Null: the newest when it is first read; that commit is kept for later runs."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Bytes of text after which a data set or addresses are not read on. Null: see pipeline.download_margin."""
    text_field: str = "text"
    """Field that holds the text (JSON lines, parquet and data sets)."""
    extra_text_field: str | None = None
    """Field whose text follows that of text_field."""
    separator: str = "\n\n"
    """Text between the two."""
    html: bool = False
    """Whether the field holds HTML, whose text is wanted. Files named .html always do."""
    licence_field: str | None = None
    """Field that names the document's licence, or a list of them."""
    licences: list[str] | None = None
    """Licences allowed; documents that name none, or another, are dropped. Null: all are kept."""
    min_chars: int | None = Field(default=None, ge=1)
    """Shortest document kept, in characters. Null: pipeline.quality.min_chars."""
    max_chars: int | None = Field(default=None, ge=1)
    """Longest document kept, in characters. Null: pipeline.quality.max_chars."""
    rules: RuleSetName | None = None
    """Quality rules that documents are held to: one of pipeline.rules. Null: none."""
    limits: dict[str, Any] = {}
    """Limits of this source's rules that differ from its set's, in the form that pipeline.rules has."""
    lang: str | None = Field(default=None, pattern=r"^[a-z]{2,3}$")
    """Language of the documents kept (ISO 639 code, such as en). Null: all."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if (self.files is None) == (self.dataset is None):
            raise ValueError(f"the source {self.id} must have either files or dataset")
        if self.files is not None:
            for key in ("config", "data_dir", "revision"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is {getattr(self, key)!r}: the source {self.id} has files, not a dataset")
        if (self.licences is None) != (self.licence_field is None):
            raise ValueError(f"the source {self.id} must have both licence_field and licences, or neither")
        if self.limits and self.rules is None:
            raise ValueError(f"the source {self.id} has limits but no rules that they could change")
        return self


class Mixture(ConfigBlock):
    """mixture.yaml: sources and their shares."""

    name: str = Field(min_length=1)
    """Name of the mixture; recipes check it as data_mix."""
    on_shortage: Literal["error", "stop", "repeat"] = "error"
    """When a source has too few tokens: error; stop where the shares can no longer hold; repeat it, newly shuffled."""
    max_epochs: int = Field(default=1, ge=1)
    """With repeat: how often a source may be used in all."""
    sources: list[Source] = Field(min_length=1)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        ids = [source.id for source in self.sources]
        twice = next((name for name in ids if ids.count(name) > 1), None)
        if twice:
            raise ValueError(f"sources: the id {twice!r} is given twice")
        total = math.fsum(source.weight for source in self.sources)
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise ValueError(f"sources: the weights add up to {total:.6g}: it must be 1")
        if (self.on_shortage == "repeat") != (self.max_epochs > 1):
            raise ValueError(
                f"max_epochs is {self.max_epochs} and on_shortage is {self.on_shortage!r}: repeat needs at "
                "least 2, the others need 1"
            )
        return self


class Quality(ConfigBlock):
    """Rules that a document must pass."""

    min_chars: int = Field(default=200, ge=1)
    """Shortest document kept, in characters."""
    max_chars: int = Field(default=1_000_000, ge=1)
    """Longest document kept, in characters."""
    min_language_score: float = Field(default=0.65, ge=0, le=1)
    """Least certainty of the language, where a source has lang."""
    blocked_urls: str | None = None
    """File of hosts and addresses, one a line: documents whose url is on it, or below one of them, are dropped."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_chars > self.max_chars:
            raise ValueError(f"min_chars is {self.min_chars}: it must be at most max_chars ({self.max_chars})")
        return self


class Redact(ConfigBlock):
    """Personal data that is replaced by stand-ins."""

    emails: bool = True
    """E-mail addresses."""
    ips: bool = True
    """IP addresses, other than private and reserved ones."""


class Decontaminate(ConfigBlock):
    """Documents that overlap with the test sets of evaluations are dropped."""

    against: dict[str, list[str]] = {}
    """Name of each test set, and its files (.jsonl or text). Empty: off."""
    ngram_words: int = Field(default=13, ge=5)
    """So many words in a row, in common with a test set, drop a document."""


class Pipeline(ConfigBlock):
    """Cleaning, and the size of a task."""

    quality: Quality = Quality()
    rules: Rules = Rules()
    redact: Redact = Redact()
    decontaminate: Decontaminate = Decontaminate()
    task_bytes: int | None = Field(default=None, ge=1024)
    """Input bytes of a task, the unit that is redone after a kill. Null: a 64th of the source, 1 to 64 MiB."""
    download_margin: float | None = Field(default=1.5, ge=1)
    """Data sets and addresses are read until they have given so many times the text that the mixture needs of them.
    Null: whole."""


class NearDuplicates(ConfigBlock):
    """Removal of documents that nearly equal an earlier one, by MinHash and bands, over all sources."""

    enabled: bool = False
    ngram_words: int = Field(default=5, ge=1)
    """Documents are compared as sets of so many words in a row."""
    bands: int = Field(default=14, ge=1)
    """Parts of a signature; documents that agree in one of them are near duplicates."""
    rows: int = Field(default=8, ge=1)
    """Hashes in each part."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of the hashes."""


class Dedup(ConfigBlock):
    """Exact removal of documents whose normalised text is equal, over all sources."""

    enabled: bool = True
    method: Literal["sha256"] = "sha256"
    """Texts are equal when the SHA-256 of their normalised form is."""
    n_hash_buckets: int = Field(default=256, ge=1, le=65536)
    """Parts that the hashes are compared in, one at a time: memory falls with their number, the result stays."""
    bloom_capacity_per_bucket: int = Field(default=200_000, ge=0)
    """Documents per bucket that the pre-filter is sized for; 0: no pre-filter. It only spares exact comparisons."""
    bloom_error_rate: float = Field(default=0.001, gt=0, lt=1)
    """Share of unique documents that the pre-filter passes on to the exact comparison."""
    near: NearDuplicates = NearDuplicates()


class TokenizerConfig(ConfigBlock):
    """Tokenizer and the ids it must have."""

    name: str = "llama3"
    """llama3; or a tokenizer.json, a tiktoken rank file, or ORG/NAME on the hub, with their vocab_size and ids."""
    revision: str | None = None
    """Commit or tag of a tokenizer on the hub. Null: the newest."""
    pattern: str | None = None
    """Regular expression that splits text before a rank file is applied. Null: LLaMA-3's."""
    encoder: Literal["auto", "tiktoken"] = "auto"
    """auto: the fast encoder where it is installed and proves equal to tiktoken at the start. The ids are the same."""
    vocab_size: int = Field(default=128_000, ge=1)
    """BPE ranks, without control ids."""
    eos_token_id: int = Field(default=128_009, ge=0)
    """Id after each document."""
    pad_token_id: int = Field(default=128_002, ge=0)
    """Id that the loader may pad with; never written."""
    add_eos: Literal[True] = True
    """Documents are told apart by their EOS, so it cannot be left out."""
    batch_size: int = Field(default=1024, ge=1)
    """Documents encoded and written at a time."""
    prefetch: int = Field(default=16, ge=1)
    """Batches that a thread reads ahead of the encoder."""


class LongContext(ConfigBlock):
    """Windows that hold whole documents and are exactly as long as the model's context."""

    share: float = Field(default=0.1, ge=0, le=0.5)
    """Share of the training tokens that lies in such windows; 0: none."""
    window_tokens: int = Field(default=4096, ge=1024)
    """Tokens of a window: the recipe's model.max_seq_len."""


class Pack(ConfigBlock):
    """Packing into shards."""

    long_context: LongContext = LongContext()

    docs_per_shard_target: int | None = Field(default=None, ge=1)
    """Another name of shard_size_tokens: it counts tokens, whatever it says. Null: not given."""
    cross_document_boundary_ok: Literal[False] = False
    """A document never spans two shards."""


class PipelineConfig(ConfigBlock):
    """data_config.yaml."""

    total_tokens: int = Field(default=8_000_000_000, ge=1)
    """Training tokens of the corpus."""
    shard_size_tokens: int = Field(default=DEFAULT_SHARD_TOKENS, ge=1)
    """Tokens of a shard, at most; a document longer than that has a shard of its own."""
    validation_share: float = Field(default=0.001, ge=0, lt=1)
    """Share of the documents, chosen by their hash, that are kept for validation."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Seed of the order of the documents within each source."""
    pipeline: Pipeline = Pipeline()
    dedup: Dedup = Dedup()
    tokenizer: TokenizerConfig = TokenizerConfig()
    pack: Pack = Pack()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        target = self.pack.docs_per_shard_target
        if target is not None and "shard_size_tokens" in self.model_fields_set and target != self.shard_size_tokens:
            raise ValueError(
                f"pack.docs_per_shard_target is {target}, but shard_size_tokens is "
                f"{self.shard_size_tokens}: both count the tokens of a shard and must be equal"
            )
        return self

    @property
    def tokens_per_shard(self) -> int:
        """shard_size_tokens, or what stands for it under its other name."""
        if self.pack.docs_per_shard_target is not None and "shard_size_tokens" not in self.model_fields_set:
            return self.pack.docs_per_shard_target
        return self.shard_size_tokens
