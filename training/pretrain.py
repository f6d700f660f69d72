#!/usr/bin/env python3
"""`python training/pretrain.py --config FILE ...`: the same as `gpt-oss-lite pretrain`, and its parts under one
name."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run from a checkout that is not installed: the packages lie beside this folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from gpt_oss_lite.training.dataset import PretrainDataset
    from gpt_oss_lite.training.loss import chunked_cross_entropy
    from gpt_oss_lite.training.schedule import make_warmup_cosine_lambda
    from gpt_oss_lite.training.seeding import seed_everything
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    from shared_data.errors import leave_without

    leave_without(missing)

__all__ = ["PretrainDataset", "chunked_cross_entropy", "main", "make_warmup_cosine_lambda", "seed_everything"]


def main() -> None:
    """Run `gpt-oss-lite pretrain` with this process's arguments, and exit with its code."""
    from gpt_oss_lite import cli

    cli.main(["pretrain", *sys.argv[1:]])


if __name__ == "__main__":
    main()
