"""The short form of `make torture`: kills at every kind of place, and the run is the unbroken one."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_run_that_is_killed_again_and_again_is_the_unbroken_one(tmp_path):
    memory = Path("/dev/shm")  # a kill is the same on a disk, whose fsync takes a hundred times as long
    folder = memory if os.access(memory, os.W_OK) else tmp_path
    command = [sys.executable, "scripts/torture.py", "--kills", "6", "--fuzz", "0", "--no-faults", "--json"]
    command += ["--folder", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    kills = json.loads(result.stdout)["kills"]
    assert kills["kills"] == 6
    assert len(kills["by_place"]) == 6
    assert kills["losses"] == []
