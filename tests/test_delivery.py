"""Containerfile and hosted CI, as far as they can be checked without a builder and a runner."""

import fnmatch
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUPPORTED = {"3.11", "3.12"}


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of the Containerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], " ".join(line.split(None, 1)[1].split())) for line in text.splitlines() if line]


def copied() -> list[str]:
    words = [rest.split() for keyword, rest in instructions() if keyword == "COPY" and not rest.startswith("--from")]
    return [source for *sources, _ in words for source in sources]


def test_the_container_copies_files_that_are_there_and_all_that_the_wheel_needs():
    assert all((ROOT / source).exists() for source in copied())
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    link = Path(ROOT / "gpt_oss_lite/recipes").readlink()
    assert packages | {link.name, "pyproject.toml", PROJECT["project"]["readme"], "LICENSE"} <= set(copied())


def test_what_the_container_copies_is_not_ignored():
    rules = [line for line in (ROOT / ".containerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert kept == set(copied())
    assert not any(fnmatch.fnmatch(name, rule) for name in copied() for rule in rules[1:] if rule[0] != "!")


def test_the_container_installs_known_extras_pinned_and_runs_as_a_user():
    (install,) = [rest for keyword, rest in instructions() if keyword == "RUN" and "pip install" in rest]
    assert "--constraint /tmp/constraints.txt" in install
    extras = re.search(r"\.whl\)\[([\w,-]+)\]", install).group(1).split(",")
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    keywords = [keyword for keyword, _ in instructions()]
    (user,) = [rest for keyword, rest in instructions() if keyword == "USER"]
    assert user != "root"
    assert any(
        rest.startswith("useradd") and f" {user}" in rest for keyword, rest in instructions() if keyword == "RUN"
    )
    assert "RUN" not in keywords[keywords.index("USER") :]
    entry = dict(instructions())["ENTRYPOINT"]
    assert yaml.safe_load(entry)[0] in PROJECT["project"]["scripts"]
    bases = {rest.split()[0] for keyword, rest in instructions() if keyword == "FROM"}
    assert {re.search(r":(\d\.\d+)", base).group(1) for base in bases} <= SUPPORTED


def workflow() -> dict:
    """The hosted workflow; YAML 1.1 reads the key `on` as true."""
    return yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def test_hosted_ci_runs_the_readmes_commands_on_every_supported_python():
    (job,) = workflow()["jobs"].values()
    assert set(job["strategy"]["matrix"]["python"]) == SUPPORTED
    runs = [step["run"] for step in job["steps"] if "run" in step]
    readme = (ROOT / "README.md").read_text()
    assert [run for run in runs if run.startswith("make")] == re.findall(r"^\$ (make \w+)", readme, re.MULTILINE)
    assert job["timeout-minutes"] <= 90
    assert workflow()["permissions"] == {"contents": "read"}


def test_hosted_ci_caches_by_files_that_are_there():
    (job,) = workflow()["jobs"].values()
    (setup,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@")]
    assert setup["with"]["cache"] == "pip"
    assert all((ROOT / path).exists() for path in setup["with"]["cache-dependency-path"].split())
    assert setup["with"]["python-version"] == "${{ matrix.python }}"
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
