"""`checkpoints consolidate`, killed at each call that changes the file system in turn, each time in a copy of a run.

This file as a program imports everything once, and forks a process for each kill. It leaves the copies as the kills
left them, numbered from 001 on; the last one has seen all of the calls, and is whole.
"""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from killing import die_at_call, in_child
from ranks import import_before_the_fork

ROOT = Path(__file__).parents[2]


def killed_copies(run: Path, step: int, folder: Path) -> list[Path]:
    """The copies that the program below leaves in a folder."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, str(run), str(step), str(folder)]
    subprocess.run(words, env=environment, check=True, timeout=240)
    return sorted(folder.iterdir())


def _kill_at_each_call(run: Path, step: int, folder: Path) -> None:
    from gpt_oss_lite.training.checkpoint_commands import consolidate

    for number in itertools.count(1):
        copy = folder / f"{number:03d}"
        shutil.copytree(run, copy)

        def killed(copy: Path = copy, number: int = number) -> None:
            die_at_call(number)
            consolidate(copy, step)

        status = in_child(killed)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return


if __name__ == "__main__":
    import_before_the_fork()
    _kill_at_each_call(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
