"""The stages killed at their renames, and the orchestrator at any moment: the same bytes, and no manifest that lies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline_corpus import (
    context_of,
    edit_yaml,
    hashes,
    prepare,
    run_all,
)

from shared_data.manifest import Manifest
from shared_data.scripts import pack_shards

KILLER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pipeline_corpus import context_of, run_all
countdown, when = int(sys.argv[3]), sys.argv[4]
plain = os.replace
def replace(*paths):
    global countdown
    countdown -= 1
    if countdown == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    plain(*paths)
    if countdown == 0:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
run_all(context_of(Path(sys.argv[2]), root=sys.argv[5]))
"""


def test_killed_at_any_rename_and_run_again_gives_the_same_bytes(done, tmp_path):
    """Every file appears by a rename: right before and right after them are all the states a kill can leave."""
    folder, context, _ = done
    script = tmp_path / "killer.py"
    script.write_text(KILLER)
    kills = 0
    for step, when in ((3, "before"), (5, "after"), (16, "before"), (17, "after"), (9, "before"), (30, "after"),
                       (14, "before"), (21, "after"), (11, "before"), (8, "after")):  # fmt: skip
        arguments = [Path(__file__).parent, folder, step, when, tmp_path / "killed"]
        ran = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True)
        kills += ran.returncode == -9
    assert kills >= 8, ran.stderr
    subprocess.run([sys.executable, script, *map(str, arguments[:2]), "0", "", str(tmp_path / "killed")], check=True)
    assert hashes(tmp_path / "killed") == hashes(context.layout.root)


def test_packing_anew_and_killed_never_leaves_a_manifest_that_lies(fresh):
    run_all(context_of(fresh))
    edit_yaml(fresh / "data_config.yaml", total_tokens=15000, shard_size_tokens=3000)
    context = context_of(fresh, allow_changed=True)
    folders = [root / split for root in (context.layout.shards, context.layout.corpus) for split in ("", "validation")]
    folders.append(context.layout.shards / "long")
    seen = set()
    for countdown in range(1, 60, 4):
        child = os.fork()
        if child == 0:
            pack_and_die(context, countdown)
        _, status = os.waitpid(child, 0)
        there = [folder for folder in folders if (folder / "manifest.json").is_file()]
        seen.add(len(there))
        for folder in there:
            Manifest.load(folder, check_hashes=True)
        if os.WIFEXITED(status):
            break
    assert os.WIFEXITED(status)
    assert len(seen) > 1, "some were killed while a manifest was away"
    run_all(context_of(fresh, root="clean-start"))
    assert hashes(fresh / "data") == hashes(fresh / "clean-start")


def pack_and_die(context, countdown: int) -> None:
    """In a forked child: pack, and be killed right after the given rename or link."""
    plain = {name: getattr(os, name) for name in ("replace", "unlink")}

    def counted(name):
        def call(*arguments, **keywords):
            nonlocal countdown
            plain[name](*arguments, **keywords)
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    try:
        for name in plain:
            setattr(os, name, counted(name))
        pack_shards.run(context)
        os._exit(0)
    finally:
        os._exit(1)


def test_the_orchestrator_killed_takes_its_stage_along_and_a_new_run_goes_on(done, tmp_path):
    folder, context, _ = done
    files = ("--mixture", folder / "mixture.yaml", "--data-config", folder / "data_config.yaml")
    command = [
        sys.executable,
        "-m",
        "shared_data.prepare_data",
        *map(str, files),
        "--data-root",
        str(tmp_path / "data"),
    ]
    for patience in (0.9, 1.6, 2.5):
        with subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.DEVNULL) as running:
            try:
                running.wait(patience)
            except subprocess.TimeoutExpired:
                running.kill()
    prepare(folder, tmp_path / "data", "--workers", "2")
    assert hashes(tmp_path / "data") == hashes(context.layout.root)
