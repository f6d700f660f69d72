"""Pre-training of a sparse mixture-of-experts language model in the GPT-OSS style."""

__version__ = "0.1.0"
