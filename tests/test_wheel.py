"""The wheel, built from a copy of the sources and installed in a fresh environment, away from the repository."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import command_line
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("gpt_oss_lite", "shared_data", "configs")


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that succeeds, in an environment that knows nothing of the repository."""
    variables = {
        "PATH": "/usr/bin:/bin", "HOME": str(cwd), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        # pip would ask the network whether there is a newer one of it.
        "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip
    result = subprocess.run(
        list(map(str, words)), cwd=cwd, env={**variables, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: in the repository a build would leave its folders, and find those of the one before."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    # The setuptools at hand builds it, since an isolated build would download another.
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", "out", cwd=folder)
    (made,) = (folder / "out").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with a fresh environment `venv`: our wheel in it, everything else from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    # A folder named in a .pth file comes last, and its own .pth files (an editable install of ours) are not read.
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def test_the_wheel_holds_every_file_that_the_packages_have(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("gpt_oss_lite", "shared_data"):
        for folder, folders, files in os.walk(ROOT / package, followlinks=True):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for file in files:
                assert str(Path(folder, file).relative_to(ROOT)) in names
    assert not [name for name in names if name.startswith(("tests", "scripts", "training", "data/", "configs"))]


def test_a_user_of_the_wheel_gets_from_text_to_a_page(installed):
    """Recipes by name, the pipeline's own settings, the page's style sheet, the modelling file: all from the wheel."""
    python, command = installed / "venv/bin/python", installed / "venv/bin/gpt-oss-lite"
    place = run(python, "-c", "import gpt_oss_lite, shared_data; print(gpt_oss_lite.__file__)", cwd=installed)
    assert Path(place.strip()).is_relative_to(installed)
    assert "Usage: gpt-oss-lite" in run(command, "--help", cwd=installed)
    recipes = run(command, "recipes", cwd=installed)
    assert re.findall(r"^(\w+)", recipes, re.MULTILINE) == sorted(path.stem for path in ROOT.glob("configs/*.yaml"))

    (installed / "texts").mkdir()
    for number, page in enumerate(sorted(ROOT.glob("docs/*.md"))):
        for part, text in enumerate(re.split(r"\n(?=## )", page.read_text())):
            (installed / f"texts/{number}-{part}.txt").write_text(text)
    (installed / "mine.yaml").write_text(
        "name: mine\non_shortage: stop\nsources:\n  - {id: texts, weight: 1.0, files: [texts/*.txt]}\n"
    )
    (installed / "settings.yaml").write_text("validation_share: 0.1\n")
    run(command, "prepare", "--mixture", "mine.yaml", "--data-config", "settings.yaml", "--data-root", "data",
        "--total-tokens", "30000", "--workers", "1", cwd=installed)  # fmt: skip
    small = command_line.settings(train_data_path="data/pretrain_chinchilla", data_mix="mine")
    run(command, "pretrain", "--config", "quickstart", "--seed", "1", *small, cwd=installed)
    run(command, "report", "runs/quickstart-001", cwd=installed)
    assert "</html>" in (installed / "runs/quickstart-001/report.html").read_text()
    run(command, "export", "--checkpoint", "runs/quickstart-001", "--out", "hf", cwd=installed)
    assert (installed / "hf/modeling_gpt_oss_lite.py").is_file()
