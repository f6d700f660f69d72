"""Configuration of the pipeline, and the two files that hold its defaults: mixture.yaml and data_config.yaml."""

from pathlib import Path

from shared_data.config.schema import Mixture, PipelineConfig, Source
from shared_data.yaml_files import load_config

PIPELINE_VERSION = "1.0.0"
UNIVERSAL_TOTAL_TOKENS = 8_000_000_000

DEFAULT_MIXTURE = Path(__file__).with_name("mixture.yaml")
DEFAULT_DATA_CONFIG = Path(__file__).with_name("data_config.yaml")

__all__ = [
    "DEFAULT_DATA_CONFIG",
    "DEFAULT_MIXTURE",
    "PIPELINE_VERSION",
    "UNIVERSAL_TOTAL_TOKENS",
    "Mixture",
    "PipelineConfig",
    "Source",
    "load_mixture",
    "load_universal_data_config",
]


def load_universal_data_config(path: Path | str | None = None) -> PipelineConfig:
    """Read data_config.yaml; without a path, the one that ships. Raises UserError or OSError."""
    return load_config(PipelineConfig, Path(path) if path else DEFAULT_DATA_CONFIG)


def load_mixture(path: Path | str | None = None) -> Mixture:
    """Read mixture.yaml; without a path, the one that ships (gptoss-default). Raises UserError or OSError."""
    return load_config(Mixture, Path(path) if path else DEFAULT_MIXTURE)
