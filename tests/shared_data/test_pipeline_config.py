"""The pipeline's config files: what ships, and one line for each mistake."""

from pathlib import Path

import pytest
import yaml

from shared_data.config import (
    DEFAULT_DATA_CONFIG,
    DEFAULT_MIXTURE,
    PIPELINE_VERSION,
    UNIVERSAL_TOTAL_TOKENS,
    PipelineConfig,
    load_mixture,
    load_universal_data_config,
)
from shared_data.config.schema import Source
from shared_data.errors import UserError


def test_the_shipped_config_states_every_default():
    config = load_universal_data_config()
    assert config == PipelineConfig(shard_size_tokens=50_000_000)
    assert (config.total_tokens, config.shard_size_tokens) == (UNIVERSAL_TOTAL_TOKENS, 50_000_000)
    assert PIPELINE_VERSION == "1.0.0"
    written = yaml.safe_load(DEFAULT_DATA_CONFIG.read_text())
    assert set(written) == set(PipelineConfig.model_fields)
    for name, block in written.items():
        if isinstance(block, dict):
            assert set(block) == set(type(getattr(config, name)).model_fields)


def test_the_default_mixture_is_the_recipes():
    mixture = load_mixture()
    assert mixture.name == "gptoss-default"
    assert {source.id: source.weight for source in mixture.sources} == {
        "fineweb-edu": 0.50, "fineweb": 0.20, "the-stack-python": 0.15, "openmath": 0.10, "arxiv": 0.05
    }  # fmt: skip
    openmath = mixture.sources[3]
    assert (openmath.text_field, openmath.extra_text_field) == ("problem", "generated_solution")
    assert openmath.separator == "\n\n### Solution\n\n"
    assert mixture.sources[2].data_dir == "data/python"


@pytest.mark.parametrize("path", [DEFAULT_MIXTURE, DEFAULT_DATA_CONFIG], ids=lambda path: path.name)
def test_every_key_is_commented(path):
    lines = path.read_text().splitlines()
    commented = {line.split(":")[0].strip(" -") for line in lines if "#" in line.partition(":")[2]}
    written = {line.split(":")[0].strip(" -") for line in lines if ":" in line and not line.lstrip().startswith("#")}
    blocks = {line.strip(" :") for line in lines if line.rstrip().endswith(":")}
    assert written - commented - blocks == set()


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data_config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("total_token: 3", "total_token is not a known key; the nearest known key is total_tokens"),
        (
            "dedup: {n_hash_buckts: 3}",
            "dedup.n_hash_buckts is not a known key; the nearest known key is n_hash_buckets",
        ),
        (
            "pipeline: {quality: {minchars: 3}}",
            "pipeline.quality.minchars is not a known key; the nearest known key is min_chars",
        ),
        ("seed: 1\nseed: 2", "line 2: the key seed is there twice"),
        ("total_tokens: 1.5", "total_tokens is 1.5: it must be an integer"),
        ("total_tokens: '8'", "total_tokens is '8': it must be an integer"),
        ("total_tokens: true", "total_tokens is true: it must be an integer"),
        ("validation_share: .nan", "validation_share is nan: it must be a finite number"),
        ("validation_share: .inf", "validation_share is inf: it must be"),
        ("validation_share: 1.0", "validation_share is 1.0: it must be less than 1"),
        ("seed: -1", "seed is -1: it must be at least 0"),
        ("dedup: {method: md5}", "dedup.method is md5: it must be sha256"),
        ("dedup: {n_hash_buckets: 0}", "dedup.n_hash_buckets is 0: it must be at least 1"),
        ("dedup: {bloom_error_rate: 1.0}", "dedup.bloom_error_rate is 1.0: it must be less than 1"),
        ("tokenizer: {add_eos: false}", "tokenizer.add_eos is false: it must be true"),
        ("pack: {cross_document_boundary_ok: true}", "pack.cross_document_boundary_ok is true: it must be false"),
        (
            "shard_size_tokens: 7\npack: {docs_per_shard_target: 8}",
            "pack.docs_per_shard_target is 8, but shard_size_tokens",
        ),
        ("pipeline: {quality: {min_chars: 9, max_chars: 3}}", r"pipeline.quality.min_chars is 9: it must be at most"),
        ("pack: 3", "pack is 3: it must be"),
        (
            "pipeline: {rules: {web: {fineweb: {max_short_line: 1}}}}",
            "pipeline.rules.web.fineweb.max_short_line is not a known key; the nearest known key is max_short_lines",
        ),
        ("pipeline: {rules: {web: {c4: {min_sentences: -1}}}}", "min_sentences is -1: it must be at least 0"),
        (
            "pipeline: {rules: {prose: {gopher_repetition: {max_top_ngram_chars: [0.1]}}}}",
            r"max_top_ngram_chars is \[0.1\]: it must be a list of at least 3",
        ),
        ("pipeline: {download_margin: 0.5}", "pipeline.download_margin is 0.5: it must be at least 1"),
        ("dedup: {near: {bands: 0}}", "dedup.near.bands is 0: it must be at least 1"),
        ("tokenizer: {encoder: fast}", "tokenizer.encoder is fast: it must be auto or tiktoken"),
        ("", "the file is empty"),
        ("- 1", r"it holds \[1\]: it must hold keys and values"),
        ("a: [", "line 1: "),
        ("\t", "line 1: "),
    ],
)
def test_a_mistake_is_one_line_with_file_key_value_and_what_is_allowed(tmp_path, text, message):
    path = config(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        load_universal_data_config(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


SOURCE = "{id: a, weight: 1, files: [x.jsonl]}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: [{id: a, weight: 1}]", "sources.0: the source a must have either files or dataset"),
        ("sources: [{id: a, weight: 1, files: [x], dataset: y}]", "must have either files or dataset"),
        ("sources: [{id: a, weight: 1, files: [x], config: y}]", "config is 'y': the source a has files"),
        ("sources: [{id: a, weight: 0.5, files: [x]}]", "the weights add up to 0.5: it must be 1"),
        ("sources: [{id: a, weight: 0, files: [x]}]", "sources.0.weight is 0: it must be greater than 0"),
        ("sources: [{id: a, weight: .nan, files: [x]}]", "sources.0.weight is nan"),
        ("sources: [{id: a, files: [x]}]", "sources.0.weight is missing"),
        ("sources: [{id: ../a, weight: 1, files: [x]}]", "sources.0.id is ../a: it must be text of the form"),
        ("sources: [{id: a, weight: 1, files: [x], txt_field: y}]", "the nearest known key is text_field"),
        ("sources: [{id: a, weight: .5, files: [x]}, {id: a, weight: .5, files: [y]}]", "the id 'a' is given twice"),
        ("sources: [{id: a, weight: 1, files: [x], rules: wob}]", "sources.0.rules is wob: it must be web, code, math"),
        ("sources: [{id: a, weight: 1, files: [x], limits: {c4: null}}]", "the source a has limits but no rules"),
        ("sources: [{id: a, weight: 1, files: [x], licences: [MIT]}]", "must have both licence_field and licences"),
        ("sources: [{id: a, weight: 1, files: [x], lang: English}]", "sources.0.lang is English: it must be text of"),
        ("sources: []", r"sources is \[\]"),
        (f"sources: [{SOURCE}]\non_shortage: go", "on_shortage is go: it must be error, stop or repeat"),
        (f"sources: [{SOURCE}]\non_shortage: repeat", "max_epochs is 1 and on_shortage is 'repeat'"),
        (f"sources: [{SOURCE}]\nmax_epochs: 3", "max_epochs is 3 and on_shortage is 'error'"),
    ],
)
def test_a_mistake_in_the_mixture_is_one_line(tmp_path, text, message):
    path = tmp_path / "mixture.yaml"
    path.write_text(f"name: m\n{text}\n")
    with pytest.raises(UserError, match=message) as caught:
        load_mixture(path)
    assert "mixture.yaml" in str(caught.value)


def test_numbers_without_a_dot_and_the_shards_other_name(tmp_path):
    loaded = load_universal_data_config(config(tmp_path, "validation_share: 1e-2\npack: {docs_per_shard_target: 77}"))
    assert loaded.validation_share == 0.01
    assert loaded.tokens_per_shard == 77


def test_a_source_of_the_hub_may_name_its_revision():
    assert Source(id="a", weight=1.0, dataset="x/y", revision="abc").revision == "abc"
