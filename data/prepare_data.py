"""`python data/prepare_data.py --stage pretrain`: the pipeline of shared_data, in a checkout without installing it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared_data.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
