"""A signal while the compiler works: FlexAttention's first step compiles for longer than a tiny run takes."""

import signal
import time

import pytest
import tiny_run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_compilation_finishes_the_step_and_saves(tmp_path, monkeypatch, sent):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # so that there is something to compile
    corpus = tiny_run.make_corpus(tmp_path / "data")
    model = {"attention_backend": "flex", "moe_dispatch": "auto", "expert_bias": True}  # neither half is fused
    recipe = tiny_run.write_recipe(tmp_path / "tiny.yaml", corpus, compile=True, model=model)
    run = tmp_path / "run"
    process = tiny_run.start_run(config=recipe, out=run, seed=0)
    assert process.stderr is not None
    heard = []
    while not any("a step is estimated" in line for line in heard):
        heard.append(process.stderr.readline())
        assert heard[-1], heard
    time.sleep(3)  # into the compilation of the first step
    assert not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text()
    process.send_signal(sent)
    code, stderr = tiny_run.finish(process)
    assert code == 3, stderr
    assert "stopped by" in stderr
    assert (run / "checkpoints" / "meta_step_1.json").exists()
    code, stderr = tiny_run.finish(tiny_run.start_run(config=recipe, out=run, resume_latest=True, max_steps=3))
    assert code == 0, stderr
