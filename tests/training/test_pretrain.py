"""The loop: gradients of a step, what is logged, skipped steps, rollbacks, stopping. On the real model and real
shards."""

import dataclasses
import shlex
import signal

import pytest
import tiny_run
import torch
import torch.nn.functional as F

from gpt_oss_lite.config import load_recipe
from gpt_oss_lite.report.run_log import read_run
from gpt_oss_lite.training import pretrain as loop
from gpt_oss_lite.training.distributed import Ranks
from gpt_oss_lite.training.layout import Layout
from gpt_oss_lite.training.memory import estimate_recipe
from gpt_oss_lite.training.nan_guard import LAG_STEPS
from gpt_oss_lite.training.pretrain import PretrainOptions, micro_batch, pretrain, train, train_step
from gpt_oss_lite.training.run import open_run, plan_run
from gpt_oss_lite.training.run_lock import LOCK_NAME
from gpt_oss_lite.training.stop import StopRequest
from shared_data.errors import UserError


@pytest.fixture
def corpus(tmp_path):
    return tiny_run.make_corpus(tmp_path / "corpus")


def options_for(tmp_path, corpus, *, out="run", seed=1, model=None, **training):
    recipe = tiny_run.write_recipe(tmp_path / f"{out}.yaml", corpus, model=model or {}, **training)
    return PretrainOptions(config=recipe, out=tmp_path / out, seed=seed)


def open_for(tmp_path, corpus, **changes):
    return open_run(plan_run(options_for(tmp_path, corpus, **changes)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU says itself that it has no memory left")
def test_a_step_that_cannot_fit_into_the_machine_is_refused_before_anything_is_written(tmp_path, corpus):
    options = options_for(tmp_path, corpus, micro_batch_size=10**9)
    said = r"estimated at [\d.]+ GB on the CPU, in fp32, and the machine has [\d.]+ GB; it needs a GPU, or a smaller"
    with pytest.raises(UserError, match=said):
        plan_run(options)
    assert not options.out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks have GPUs")
def test_ranks_of_one_machine_share_its_memory(tmp_path, corpus, monkeypatch):
    """One of them fits, two do not; on two machines both do."""
    options = options_for(tmp_path, corpus, gradient_accumulation_steps=2)
    need = estimate_recipe(load_recipe(options.config), device_type="cpu", layout=Layout(2)).total_bytes
    monkeypatch.setattr("gpt_oss_lite.training.plan.ram_bytes", lambda: int(1.5 * need))
    plan_run(options, Ranks(size=2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="in fp32 by the ranks of this machine, and the machine has"):
        plan_run(options, Ranks(size=2))


def gradients(run, batches, n_valid):
    """Gradients of some micro-batches, and their losses, as the loop adds them up."""
    run.model.zero_grad()
    results = [micro_batch(run, batch, n_valid) for batch in batches]
    return {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}, results


def masked_batch(rows=8):
    """Windows with very unequal numbers of valid targets."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, tiny_run.VOCAB, (rows, tiny_run.WINDOW), generator=generator)
    targets = torch.randint(0, tiny_run.VOCAB, (rows, tiny_run.WINDOW), generator=generator)
    for row in range(rows):
        targets[row, : 2 * row] = -100
    return ids, targets


def test_accumulation_1_2_4_gives_the_gradient_of_the_mean_over_the_steps_valid_targets(tmp_path, corpus):
    ids, targets = masked_batch()
    n_valid = int((targets != -100).sum())
    expected = None
    for parts in (1, 2, 4):
        run = open_for(
            tmp_path, corpus, out=f"run{parts}", gradient_accumulation_steps=parts, micro_batch_size=8 // parts,
            aux_loss_alpha=0.0,
        )  # fmt: skip
        batches = list(zip(ids.chunk(parts), targets.chunk(parts), strict=True))
        found, results = gradients(run, batches, n_valid)
        if expected is None:
            run.model.zero_grad()
            logits, _ = run.model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            expected = {name: parameter.grad.clone() for name, parameter in run.model.named_parameters()}
        assert sum(ce for _, ce, _ in results).item() == pytest.approx(loss.item(), rel=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def router_gradients(tmp_path, corpus, parts, alpha, n_valid=None):
    run = open_for(tmp_path, corpus, out=f"r{parts}-{alpha}", gradient_accumulation_steps=parts, aux_loss_alpha=alpha)
    ids, targets = masked_batch(2)
    found, _ = gradients(run, [(ids, targets)] * parts, parts * int((targets != -100).sum()))
    return torch.cat([gradient.flatten() for name, gradient in found.items() if "router" in name])


def test_aux_gradient_does_not_scale_with_identical_micro_batches(tmp_path, corpus):
    one, two, four = (router_gradients(tmp_path, corpus, parts, alpha=1.0) for parts in (1, 2, 4))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(four, one, rtol=1e-5, atol=1e-8)


def test_aux_gradient_flows_in_proportion_to_its_weight(tmp_path, corpus):
    none, some, twice = (router_gradients(tmp_path, corpus, 1, alpha) for alpha in (0.0, 0.5, 1.0))
    assert (some - none).norm() > 1e-4
    torch.testing.assert_close(twice - none, 2 * (some - none), rtol=1e-3, atol=1e-7)


def test_checkpointing_gives_the_same_gradients(tmp_path, corpus):
    batch = masked_batch(4)
    plain, _ = gradients(open_for(tmp_path, corpus, out="a"), [batch], 30)
    recomputed, _ = gradients(
        open_for(tmp_path, corpus, out="b", grad_checkpoint=True, grad_checkpoint_every=1), [batch], 30
    )
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_logged_loss_is_the_mean_over_the_step_not_the_last_micro_batch(tmp_path, corpus):
    run = open_for(tmp_path, corpus)
    windows = run.order.windows(0, 4)
    ids, targets = (torch.stack([run.dataset[int(w)][i] for w in windows]) for i in (0, 1))
    with torch.no_grad():
        losses = F.cross_entropy(run.model(ids)[0].flatten(0, 1), targets.flatten(), reduction="none").view(4, -1)
    figures = train_step(run)
    assert figures.ce.item() == pytest.approx(losses.mean().item(), rel=1e-5)
    assert abs(losses.mean() - losses[2:].mean()) > 1e-3  # the last micro-batch alone would be another number


def test_router_z_loss_reaches_the_router(tmp_path, corpus):
    batch = masked_batch(2)
    off, _ = gradients(open_for(tmp_path, corpus, out="a"), [batch], 10)
    on, _ = gradients(open_for(tmp_path, corpus, out="b", router_z_loss=1.0), [batch], 10)
    assert not torch.equal(off["blocks.0.moe.router.weight"], on["blocks.0.moe.router.weight"])


def test_two_deterministic_runs_are_bitwise_equal(tmp_path, corpus):
    for out in ("a", "b"):
        pretrain(options_for(tmp_path, corpus, out=out, total_steps=6, deterministic=True))
    torch.use_deterministic_algorithms(False)
    assert tiny_run.rows(tmp_path / "a") == tiny_run.rows(tmp_path / "b")
    assert tiny_run.digests(tmp_path / "a", 6) == tiny_run.digests(tmp_path / "b", 6)


def test_document_mask_trains_on_documents_numbered_by_eos(tmp_path, corpus):
    run = open_for(tmp_path, corpus, model={"document_mask": True})
    seen = []
    forward = run.parallel.forward

    def watching(ids, *, document_ids_BT):
        seen.append((ids, document_ids_BT))
        return forward(ids, document_ids_BT=document_ids_BT)

    tiny_run.replace_forward(run, watching)
    train_step(run)
    ids, documents = (torch.cat(parts) for parts in zip(*seen, strict=True))
    assert (documents.diff(dim=1) == (ids[:, :-1] == tiny_run.EOS)).all()
    assert documents.max() > 0


def run_poisoned(tmp_path, corpus, calls, **training):
    run = open_for(tmp_path, corpus, **training)
    tiny_run.blow_up(run, calls)
    with StopRequest() as stop:
        return run, train(run, stop)


def test_a_poisoned_step_is_skipped_whole_and_consumes_its_number_data_and_rate(tmp_path, corpus):
    run, code = run_poisoned(tmp_path, corpus, calls=[9], total_steps=8, save_interval=1)  # step 5, second micro-batch
    assert code == 0
    before, after = (tiny_run.digests(tmp_path / "run", step) for step in (4, 5))
    assert before["model_step_4.safetensors"] == after["model_step_5.safetensors"]
    moments = [torch.load(run.checkpoints.folder / f"optim_step_{step}.pt")["state"] for step in (4, 5)]
    assert all(torch.equal(moments[0][n][k], moments[1][n][k]) for n in moments[0] for k in moments[0][n])
    rows = tiny_run.rows(tmp_path / "run")
    assert [row["position"] for row in rows] == [4 * step for step in range(1, 9)]
    assert len({row["lr"] for row in rows[3:]}) == 5
    assert [row["ce"] is None for row in rows] == [False] * 4 + [True] + [False] * 3
    (skip,) = tiny_run.events(tmp_path / "run", "skip")
    assert (skip["step"], skip["position"], skip["micro_batches"]) == (5, 16, [1])
    assert not tiny_run.events(tmp_path / "run", "rollback")


def test_five_in_a_row_go_back_to_the_newest_good_checkpoint_and_pass_over_the_span(tmp_path, corpus):
    # Micro-batches 13 to 17 (of 2 windows): step 7's second one to step 9's second one. The newest checkpoint is step
    # 5's.
    run, code = run_poisoned(tmp_path, corpus, calls=range(13, 18), total_steps=12)
    assert code == 0
    (rollback,) = tiny_run.events(tmp_path / "run", "rollback")
    assert (rollback["step"], rollback["position"], rollback["rollbacks"]) == (5, 36, 1)
    rows = tiny_run.rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["position"] for row in rows[4:7]] == [20, 40, 44]  # step 6 draws the windows from 36 on
    clean = open_for(tmp_path, corpus, out="clean", total_steps=12)
    assert [row["lr"] for row in rows] == pytest.approx(
        [clean.recipe.training.lr * clean.scheduler.lr_lambdas[0](step) for step in range(12)]
    )
    assert run.checkpoints.meta(12)["state"] == {"step": 12, "offset": 16, "rollbacks": 1, "streak": 0, "slow_until": 0}


def test_a_damaged_newest_checkpoint_is_passed_over_by_a_rollback(tmp_path, corpus, capsys, monkeypatch):
    run = open_for(tmp_path, corpus, total_steps=14, save_interval=4)
    tiny_run.blow_up(run, range(16, 21))  # steps 9 to 11
    real_save = loop.save

    def save_and_damage_step_8(run):
        real_save(run)
        if run.state.step == 8:
            loop.report_saves(run, run.saver.drain())
            path = run.checkpoints.folder / "optim_step_8.pt"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr(loop, "save", save_and_damage_step_8)
    with StopRequest() as stop:
        assert train(run, stop) == 0
    (rollback,) = tiny_run.events(tmp_path / "run", "rollback")
    assert (rollback["step"], rollback["position"]) == (4, 42)
    assert "optim_step_8.pt is damaged" in capsys.readouterr().err


def test_before_the_first_checkpoint_the_run_goes_back_to_its_start(tmp_path, corpus):
    run, code = run_poisoned(tmp_path, corpus, calls=range(3, 8), total_steps=6, save_interval=6)
    assert code == 0
    (rollback,) = tiny_run.events(tmp_path / "run", "rollback")
    assert (rollback["step"], rollback["position"]) == (0, 16)
    other = open_for(tmp_path, corpus, out="other", total_steps=6, save_interval=6)
    other.state.offset = 16
    other.open_stream()
    with StopRequest() as stop:
        train(other, stop)
    assert tiny_run.rows(tmp_path / "run") == tiny_run.rows(tmp_path / "other")
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("stop_at", "left"),
    [(8, [0, 1]), (12, [])],
    ids=["in the middle of a count", "after a rollback"],
)
def test_stopping_and_going_on_changes_nothing_about_the_guard(tmp_path, corpus, stop_at, left):
    """Micro-batches 13 to 17 are poisoned; the run goes back to step 8, saved when three of the five were counted."""
    unbroken, _ = run_poisoned(tmp_path, corpus, out="unbroken", calls=range(13, 18), total_steps=16, save_interval=4)
    options = options_for(tmp_path, corpus, total_steps=16, save_interval=4)
    run = open_run(plan_run(dataclasses.replace(options, max_steps=stop_at)))
    tiny_run.blow_up(run, range(13, 18))
    with StopRequest() as stop:
        assert train(run, stop) == 0
        run = open_run(plan_run(dataclasses.replace(options, resume_latest=True)))
        tiny_run.blow_up(run, left)
        assert train(run, stop) == 0
    assert run.state == unbroken.state
    assert run.state.offset == 4
    assert tiny_run.rows(tmp_path / "run") == tiny_run.rows(tmp_path / "unbroken")
    assert tiny_run.digests(tmp_path / "run", 16) == tiny_run.digests(tmp_path / "unbroken", 16)


def test_after_the_last_rollback_the_run_gives_up_with_exit_code_4(tmp_path, corpus, capsys):
    run, code = run_poisoned(tmp_path, corpus, calls=range(8, 1000), total_steps=20, nan_guard_max_rollbacks=2)
    assert code == 4
    assert len(tiny_run.events(tmp_path / "run", "rollback")) == 2
    assert len(tiny_run.events(tmp_path / "run", "give_up")) == 1
    assert "nan_guard_max_rollbacks" in capsys.readouterr().err
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_without_the_guard_every_line_says_so_and_nothing_is_skipped(tmp_path, corpus, capsys):
    options = options_for(tmp_path, corpus, total_steps=4, nan_guard=False)
    run = open_run(plan_run(dataclasses.replace(options, accept_no_nan_guard=True)))
    tiny_run.blow_up(run, [2])
    with StopRequest() as stop:
        assert train(run, stop) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert all("NaN guard OFF" in line for line in lines)
    assert not run.model.norm.weight.isfinite().all()


def test_logged_rows_are_those_of_the_interval_the_first_and_the_last(tmp_path, corpus):
    pretrain(options_for(tmp_path, corpus, total_steps=11, log_interval=4))
    assert [row["step"] for row in tiny_run.rows(tmp_path / "run")] == [1, 4, 8, 11]


def test_max_steps_stops_below_and_above_total_steps_and_keeps_the_schedule(tmp_path, corpus):
    options = options_for(tmp_path, corpus, total_steps=6, save_interval=100)
    assert pretrain(dataclasses.replace(options, max_steps=3)) == 0
    assert pretrain(dataclasses.replace(options, max_steps=9, resume_latest=True)) == 0
    rows = tiny_run.rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 10))
    multipliers = [row["lr"] / 1e-2 for row in rows]
    assert multipliers[:4] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert multipliers[6:] == pytest.approx([0.05] * 3)
    assert [event["step"] for event in tiny_run.events(tmp_path / "run", "save")] == [3, 9]


@pytest.mark.parametrize(
    "again", [{"max_steps": 2, "resume_latest": True}, {"resume_latest": True}, {"auto_resume": True}]
)
def test_a_resume_with_nothing_to_do_says_so_and_leaves_the_log_as_it_was(tmp_path, corpus, capsys, again):
    options = options_for(tmp_path, corpus, total_steps=4, save_interval=2)
    assert pretrain(options) == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.name != LOCK_NAME and path.is_file()]
    before = {path: path.read_bytes() for path in files}
    capsys.readouterr()
    assert pretrain(dataclasses.replace(options, **again)) == 0
    stop_step = again.get("max_steps", 4)
    assert capsys.readouterr().err == f"step 4 is done already, the run was to stop at {stop_step}: nothing to do\n"
    assert {path: path.read_bytes() for path in before} == before
    assert read_run(tmp_path / "run").status == "done at step 4"


def test_a_runs_own_recipe_goes_on_in_its_folder(tmp_path, corpus, monkeypatch):
    assert pretrain(dataclasses.replace(options_for(tmp_path, corpus, total_steps=4), max_steps=2)) == 0
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run" / "config.yaml"
    assert pretrain(PretrainOptions(config=config, resume_latest=True)) == 0
    assert [row["step"] for row in tiny_run.rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert not (tmp_path / "runs").exists()
    assert pretrain(PretrainOptions(config=config, max_steps=1)) == 0  # nothing says to go on: a new run
    assert (tmp_path / "runs" / "config-001").is_dir()


def test_the_line_to_go_on_with_keeps_what_was_changed_on_the_way(tmp_path, corpus, monkeypatch, capsys):
    options = options_for(tmp_path, corpus, total_steps=4, save_interval=2)
    assert pretrain(options) == 0
    step = loop.train_step

    def interrupted(run):
        if run.state.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(run)

    monkeypatch.setattr(loop, "train_step", interrupted)
    overrides = ["training.total_steps=9", "training.lr=3e-5", "training.decay_steps=null", "training.pin_memory=true"]
    changed = dataclasses.replace(options, resume_from=2, max_steps=8, allow_changed=True, overrides=overrides)
    capsys.readouterr()
    assert pretrain(changed) == 3
    said = capsys.readouterr().err
    assert f"{tmp_path}/run/checkpoints keeps what came after (4): until this run is past it, --resume latest" in said
    line = said.splitlines()[-1].split("--resume latest ")[1]
    assert line == (
        "--set training.lr=3e-05 --set training.total_steps=9 --set training.pin_memory=true --max-steps 8 "
        "--allow-changed"
    )
    monkeypatch.undo()
    words = shlex.split(line)
    given = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    again = dataclasses.replace(changed, resume_from=3, overrides=given)
    assert pretrain(again) == 0
    assert [row["lr"] for row in tiny_run.rows(tmp_path / "run")][-1] < 3e-5
    assert tiny_run.rows(tmp_path / "run")[-1]["step"] == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_exits_3(tmp_path, corpus, monkeypatch, capsys, number):
    options = options_for(tmp_path, corpus, total_steps=1000, save_interval=1000)
    before, step = signal.signal(number, signal.default_int_handler), loop.train_step

    def interrupted(run):
        if run.state.step == 4:
            signal.raise_signal(number)
        return step(run)

    monkeypatch.setattr(loop, "train_step", interrupted)
    try:
        assert pretrain(options) == 3
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, before)
    again = f"gpt-oss-lite pretrain --config {tmp_path}/run/config.yaml --resume latest"
    assert capsys.readouterr().err.endswith(f"after step 5; go on with: {again}\n")
    (stop,) = tiny_run.events(tmp_path / "run", "stop")
    assert (stop["reason"], stop["step"]) == (number.name, 5)
    assert tiny_run.digests(tmp_path / "run", stop["step"])
    assert tiny_run.rows(tmp_path / "run")[-1]["step"] == stop["step"]


def test_a_closed_terminal_does_not_stop_a_run_under_nohup(tmp_path, corpus, monkeypatch):
    step = loop.train_step

    def hung_up(run):
        signal.raise_signal(signal.SIGHUP)
        return step(run)

    monkeypatch.setattr(loop, "train_step", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert pretrain(options_for(tmp_path, corpus, total_steps=4)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_max_hours_exits_3_after_a_save(tmp_path, corpus):
    options = options_for(tmp_path, corpus, total_steps=1000)
    assert pretrain(dataclasses.replace(options, max_hours=1e-6)) == 3
    assert tiny_run.digests(tmp_path / "run", 1)


def test_init_from_takes_the_weights_and_nothing_else(tmp_path, corpus):
    pretrain(options_for(tmp_path, corpus, out="first", total_steps=6))
    options = options_for(tmp_path, corpus, out="second", seed=2, total_steps=9)
    run = open_run(plan_run(dataclasses.replace(options, init_from=tmp_path / "first")))
    saved = open_for(tmp_path, corpus, out="third")
    saved.checkpoints.folder = tmp_path / "first" / "checkpoints"
    saved.checkpoints.load(saved.model, 6)
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), saved.model.parameters(), strict=True))
    assert run.state.step == run.position == 0
    assert run.optimizer.state == {}
    assert run.order.seed == 2


def test_init_from_another_model_is_refused_before_anything_is_written(tmp_path, corpus):
    pretrain(options_for(tmp_path, corpus, out="first", total_steps=6))
    options = options_for(tmp_path, corpus, out="second", model={"expert_hidden_size": 8})
    with pytest.raises(UserError, match=r"is of another model: blocks\.0\.moe\.experts\.0\.down_proj"):
        pretrain(dataclasses.replace(options, init_from=tmp_path / "first"))
    assert not (tmp_path / "second").exists()


def test_evaluation_changes_nothing_in_training(tmp_path, corpus):
    for out, interval in (("with", 2), ("without", 0)):
        pretrain(options_for(tmp_path, corpus, out=out, total_steps=6, eval_interval=interval))
    assert tiny_run.rows(tmp_path / "with") == tiny_run.rows(tmp_path / "without")
    assert [event["step"] for event in tiny_run.events(tmp_path / "with", "eval")] == [0, 2, 4, 6]


def test_the_guard_reads_late_but_before_every_save(tmp_path, corpus):
    assert LAG_STEPS >= 1
    run, _ = run_poisoned(tmp_path, corpus, calls=[10, 11, 12], total_steps=6, save_interval=1)
    # Steps 6 and half of 7 are poisoned; step 6's checkpoint holds its count though flags are read late otherwise.
    assert run.checkpoints.meta(6)["state"]["streak"] == 2
