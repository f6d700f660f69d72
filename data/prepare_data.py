"""`python data/prepare_data.py --stage pretrain`: the pipeline of shared_data, in a checkout without installing it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    try:
        from shared_data.prepare_data import main
    except ModuleNotFoundError as missing:
        from shared_data.errors import leave_without

        leave_without(missing)
    sys.exit(main())
