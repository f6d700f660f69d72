"""Completion in bash: the script that the command prints, in a real shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASH = shutil.which("bash") or "bash"


def in_bash(script: str, home: Path) -> str:
    """What a script prints, with the command on the path; the shell is found by looking at the parent process."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT),
                   "HOME": str(home)}  # fmt: skip
    result = subprocess.run(
        [BASH, "--norc", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pretr"], {"pretrain"}),
        (["ch"], {"checkpoints"}),
        (["checkpoints", "d"], {"delete", "diff"}),
        (["pretrain", "--res"], {"--resume-from", "--resume"}),
        (["eval", "--st"], {"--step"}),
    ],
)
def test_the_printed_script_completes(words, expected, tmp_path):
    script = (
        'eval "$(gpt-oss-lite --show-completion)"\n'
        f"COMP_WORDS=(gpt-oss-lite {' '.join(words)}); COMP_CWORD={len(words)}\n"
        '_gpt_oss_lite_completion gpt-oss-lite; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert set(in_bash(script, tmp_path).split()) == expected


def test_installing_writes_for_the_shell_that_asked(tmp_path):
    assert "bash completion installed in" in in_bash("gpt-oss-lite --install-completion; true", tmp_path)
    assert "gpt-oss-lite" in (tmp_path / ".bashrc").read_text()
    (installed,) = (tmp_path / ".bash_completions").iterdir()
    assert "_GPT_OSS_LITE_COMPLETE=complete_bash" in installed.read_text()
