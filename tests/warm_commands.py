"""Runs many commands for the price of one start: a server that has imported the packages forks a process for each.

Each command still is a process of its own, with its own working folder, environment, signals and open files, and runs
through the same `main` as the installed command; only the imports, most of a small command's time, are made once.
The server has a single thread and has run no operation of PyTorch, so that a fork of it is whole.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]


class WarmCommands:
    """The server as a context; `run` gives what `subprocess.run` would."""

    def __enter__(self) -> "WarmCommands":
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait()

    def run(self, words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command: `gpt-oss-lite ...`, `python FILE ...`, or `python -c CODE`."""
        assert self._server.stdin
        assert self._server.stdout
        with tempfile.TemporaryDirectory() as folder:
            request = {"words": words, "cwd": str(cwd), "out": f"{folder}/out", "err": f"{folder}/err"}
            print(json.dumps(request), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(words, code, out, err)


def serve() -> None:
    """Read requests, one a line, until there are no more; answer each with the exit code."""

    import gpt_oss_lite.cli
    import gpt_oss_lite.inference.text
    import gpt_oss_lite.training.pretrain  # noqa: F401

    # Building a model or an optimizer imports it, which takes seconds.
    importlib.import_module("torch._dynamo")

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_in_child(**request))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _in_child(words: list[str], cwd: str, out: str, err: str) -> int:
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        os.dup2(os.open(path, flags | os.O_CREAT), number)
    os.chdir(cwd)
    code: int | str | None = 1
    try:
        _run(words)
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else 0 if code is None else 1


def _run(words: list[str]) -> None:
    program, *rest = words
    if program == "gpt-oss-lite":
        sys.argv = words
        from gpt_oss_lite.cli import main

        main()
    assert program == "python", words
    sys.argv = rest
    if rest[0] == "-c":
        exec(compile(rest[1], "<code>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    serve()
