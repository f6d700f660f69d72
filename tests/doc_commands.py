"""The commands of README.md and docs/: found, made small where they are long, and run for real.

A fenced block has one of five languages. `bash`: each line is a command. `console`: lines that begin with `$ ` are.
`python` and `yaml` run and load. `text` is what something prints or looks like, and holds no command. A command that
cannot run here stands in NOT_RUN word by word, with the reason; its options are looked up all the same.
"""

import importlib
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
import typer
from warm_commands import WarmCommands

from gpt_oss_lite.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"bash", "console", "python", "yaml", "text"}
COMMAND_WORDS = r"(?:\$ )?(?:gpt-oss-lite|python3?|pip|make|torchrun|lm_eval|sbatch|docker|podman|tensorboard|git) "

CORPUS = "data/quickstart/pretrain_chinchilla"
OTHER_SIZES = command_line.settings(train_data_path=CORPUS, data_mix="null")

# What a long command is shortened by: the structure of its recipe stays, its sizes do not. The longest start counts.
SMALLER: dict[str, list[str]] = {
    "gpt-oss-lite pretrain": command_line.settings(),
    "gpt-oss-lite pretrain --config configs/pretrain_": OTHER_SIZES,
    "gpt-oss-lite doctor": OTHER_SIZES,
    "python training/pretrain.py": OTHER_SIZES,
    "python data/prepare_data.py": ["--dry-run"],  # the whole mixture is 8 B tokens of the hub's
    "python scripts/kv_cache_benchmark.py": [
        "--context",
        "64",
        "--decode-context",
        "8",
        "--decode-tokens",
        "2",
        "--batch-size",
        "1",
    ],
}  # fmt: skip

# What a page says of the demo's run of 240 steps, for the 4 steps that it has here.
STEPS = {"210": "2", "240": "4"}

# Commands whose answer is an exit code: 1 where two checkpoints differ.
EXIT_CODES = {"gpt-oss-lite checkpoints diff runs/demo 210 240": 1}

# What cannot run here, word by word, and why.
_INSTALLS = "installs from the network; its extras are looked up"
_TORCHRUN = "torchrun --standalone --nproc-per-node"
_RANKS = "wants several GPUs; tests/training has runs of two and more ranks on the CPU"
_PODMAN = "podman run --rm --device nvidia.com/gpu=all"
_LEARNING = "minutes of a GPU; test_learning.py has the comparison in miniature"
_LEARN_DATA = ".bench/learn-data/pretrain_chinchilla"
NOT_RUN: dict[str, str] = {
    "python scripts/learning_corpus.py fetch --folder /tmp/debian-docs": "downloads packages of 330 MB",
    "python scripts/learning_corpus.py make --folder /tmp/debian-docs --out .bench/learn": "reads what fetch brings",
    "gpt-oss-lite prepare --mixture .bench/learn/mixture.yaml --data-config .bench/learn/data_config.yaml "
    "--data-root .bench/learn-data": "reads what fetch brings",
    "gpt-oss-lite prepare --mixture .bench/learn/mixture.yaml --data-config .bench/learn/long_config.yaml "
    "--data-root .bench/learn-long": "reads what fetch brings",
    f"python scripts/learning.py run --data {_LEARN_DATA} --out .bench/learning --only parity": _LEARNING,
    f"python scripts/learning.py run --data {_LEARN_DATA} --out .bench/learning --only real --real-steps 720": (
        _LEARNING
    ),
    f"python scripts/learning.py run --data {_LEARN_DATA} --out .bench/learning --only ablations": _LEARNING,
    f"python scripts/learning.py run --data {_LEARN_DATA} --out .bench/learning --only winners --winners-steps 440": (
        _LEARNING
    ),
    f"python scripts/learning.py run --data {_LEARN_DATA} --long-data .bench/learn-long/pretrain_chinchilla "
    "--out .bench/learning --only winners-recipe,long --winners-steps 440 --long-from winners-recipe --long-steps 60": (
        _LEARNING
    ),
    "pip install 'gpt-oss-lite[track]'": _INSTALLS,
    "podman build --tag gpt-oss-lite .": "wants a builder and the base image; test_delivery.py reads the Containerfile",
    f'{_PODMAN} --volume "$PWD/work:/work" gpt-oss-lite pretrain --config quickstart': "wants the image of that line",
    "lm_eval --model hf --model_args pretrained=hf-demo,trust_remote_code=True --tasks hellaswag,arc_easy "
    "--batch_size 8": "downloads its tasks; test_lm_eval.py runs the harness on local ones",
    "python scripts/torture_pipeline.py --kills 20": "minutes of kills; test_kills.py has some of each",
    "python scripts/bench_pipeline.py --make-corpus bench": "downloads packages of 180 MB",
    "python scripts/bench_pipeline.py --corpus bench/web.jsonl --datatrove dt/bin/python": "wants the corpus of the "
    "line above and an environment with datatrove",
    f"{_TORCHRUN} 4 training/pretrain.py --config configs/pretrain_a100_502m.yaml --auto-resume": _RANKS,
    f"{_TORCHRUN} 8 -m gpt_oss_lite pretrain --config configs/pretrain_24gb_502m.yaml": _RANKS,
    f"{_TORCHRUN} 8 training/pretrain.py --config configs/pretrain_1_5b.yaml --set training.parallelism=fsdp "
    "--auto-resume": _RANKS,
    f"{_TORCHRUN} 8 training/pretrain.py --config configs/pretrain_1_5b.yaml --set training.expert_parallel_size=8 "
    "--auto-resume": _RANKS,
    "python scripts/bench_scaling.py --ranks 2 --at-least 1.93": "wants two GPUs; test_scripts.py runs it on the CPU",
    "torchrun --standalone --nproc-per-node 8 --max-restarts 3 training/pretrain.py --config configs/pretrain_1_5b.yaml"
    " --out runs/1_5b --seed 0 --auto-resume": "wants eight GPUs; test_scaling_page.py parses it",
    """for round in 1 2 3 4 5 6 7; do
  previous=$(sbatch --parsable ${previous:+--dependency=afterok:$previous} --array=0-63 --wrap \\
    'gpt-oss-lite prepare --workers 8 --task-index $SLURM_ARRAY_TASK_ID --task-count 64')
done""": "wants Slurm; tests/shared_data/test_scale.py runs the tasks of such an array",
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    language: str
    text: str

    def commands(self) -> list[str]:
        """Its commands, each on one line; a shell loop is one command."""
        if self.language == "console":
            return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]
        if self.language != "bash":
            return []
        if self.text.startswith("for "):
            return [self.text.rstrip()]
        lines = self.text.replace("\\\n", " ").splitlines()
        return [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(page.name, language, text) for language, text in found]


def in_words(command: str) -> list[str]:
    """A command's words, without its comment."""
    return shlex.split(command, comments=True)


def bare(command: str) -> str:
    """A command without its comment, as NOT_RUN and SMALLER name it."""
    return re.sub(r"\s+# .*", "", command)


def all_commands() -> list[str]:
    """Every command of every page, without comments."""
    return [bare(command) for page in PAGES for block in blocks(page) for command in block.commands()]


def inline_commands(page: Path) -> list[str]:
    """Commands inside a sentence: they are not run, but their names and options are looked up."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [span for span in spans if re.match(r"(?:gpt-oss-lite|python scripts/\S+|make) ", span)]


def unknown_parts(command: str) -> Iterator[str]:
    """What a command names that is not there: a subcommand, an option, a script, a target, an extra."""
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    for target in re.findall(r"(?:^|[:;&$] ?)make ([a-z][a-z-]*)", command):
        if not re.search(rf"^{target}:", makefile, re.MULTILINE):
            yield f"make {target}"
    for extras in re.findall(r"gpt-oss-lite\[([\w,-]+)\]", command):
        yield from (f"extra {name}" for name in extras.split(",") if not re.search(rf"^{name} = \[", project, re.M))
    for script, words in re.findall(r"\b((?:scripts|training|data)/\w+\.py)([^|;&>\n]*)", command):
        yield from _unknown_to_script(script, words.split())
    for words in re.findall(r"\b(?:gpt-oss-lite|-m gpt_oss_lite) ((?![\[.])[^|;&>'\n]+)", command):
        yield from _unknown_words(app, words.split())


def _unknown_to_script(script: str, words: list[str]) -> Iterator[str]:
    path = ROOT / script
    if not path.exists():
        yield script
    elif script in ("training/pretrain.py", "data/prepare_data.py"):
        yield from _unknown_words(app, [{"pretrain": "pretrain", "prepare_data": "prepare"}[path.stem], *words])
    elif (module := importlib.import_module(path.stem)) and hasattr(module, "app"):
        yield from _unknown_words(module.app, words)
    else:
        yield from (word for word in words if word.startswith("--") and f'"{word}"' not in path.read_text())


def _unknown_words(application: typer.Typer, words: list[str]) -> Iterator[str]:
    command: Any = typer.main.get_command(application)
    while words and getattr(command, "commands", None) and not words[0].startswith("-"):
        word = words.pop(0)
        if word == "COMMAND":
            return
        if word not in command.commands:
            yield f"no command {word}"
            return
        command = command.commands[word]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--debug"}
    yield from (word for word in words if word.startswith("--") and word.split("=")[0] not in known)


class Scene:
    """A folder as after `make demo`, small: the repository's commands, a corpus, runs, and what the pages take for
    granted besides."""

    def __init__(self, folder: Path, commands: WarmCommands) -> None:
        self.folder, self._commands = folder, commands
        for name in ("configs", "training", "scripts", "shared_data", "gpt_oss_lite"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "data").mkdir()
        (folder / "data/prepare_data.py").symlink_to(ROOT / "data/prepare_data.py")
        command_line.write_text_corpus(folder / CORPUS, mixture="quickstart")
        self.run("gpt-oss-lite pretrain --config configs/quickstart.yaml --out runs/demo --seed 0")

    def add_own_text(self) -> None:
        """The folder texts/ and the mixture file of the README."""
        (mixture,) = [block.text for block in blocks(ROOT / "README.md") if block.language == "yaml"]
        (self.folder / "mine.yaml").write_text(mixture)
        (self.folder / "texts").mkdir()
        for number, page in enumerate(PAGES):
            for part, text in enumerate(re.split(r"\n(?=## )", page.read_text())):
                (self.folder / f"texts/{number}-{part}.txt").write_text(text)

    def add_other_runs(self) -> None:
        """More runs beside runs/demo."""
        shutil.copytree(self.folder / "runs/demo", self.folder / "runs/other")

    def add_stock_model(self) -> None:
        """A stock gpt_oss folder, as transformers saves it."""
        command_line.write_stock_model(self.folder / "stock-gpt-oss")

    def run(self, command: str) -> str:
        """Run a command as printed, or made small; its standard output, which `> FILE` also writes."""
        words = [STEPS.get(word, word) for word in in_words(command)]
        assert words[0] in ("gpt-oss-lite", "python"), f"{command}: only NOT_RUN can name another program's command"
        file = words[-1] if words[-2:-1] == [">"] else None
        words = words[:-2] if file else words
        starts = [start for start in SMALLER if bare(command).startswith(start)]
        words += SMALLER[max(starts, key=len)] if starts else []
        output = self._succeed(words, command)
        if file:
            (self.folder / file).write_text(output)
        return output

    def run_python(self, code: str) -> str:
        """Run a block of Python."""
        return self._succeed(["python", "-c", code], code)

    def _succeed(self, words: list[str], shown: str) -> str:
        result = self._commands.run(words, self.folder)
        expected = [code for start, code in EXIT_CODES.items() if shown.startswith(start)] or [0]
        assert [result.returncode] == expected, f"{shown}\n{result.stderr[-3000:]}"
        assert "Traceback" not in result.stderr, f"{shown}\n{result.stderr[-3000:]}"
        return result.stdout

    def run_page(self, page: Path) -> dict[str, str]:
        """Run every block of a page in order, and say how long each took; command -> standard output."""
        outputs = {}
        for block in blocks(page):
            if block.language == "python" and ">>>" not in block.text:
                outputs[block.text] = self._timed(self.run_python, block.text)
            for command in block.commands():
                if block.language == "bash" and bare(command) not in NOT_RUN:
                    outputs[command] = self._timed(self.run, command)
        return outputs

    @staticmethod
    def _timed(run: Callable[[str], str], text: str) -> str:
        started = time.perf_counter()
        output = run(text)
        print(f"{time.perf_counter() - started:6.2f} s  {text.splitlines()[0]}")
        return output
