"""The training loop.

    windows -> model.hidden_states -> head_cross_entropy -> backward, x accumulation
            -> finite check on the device -> clip -> optimizer -> schedule -> log, evaluate, save when due

A step is a function of the run's state and the data alone. All that a run can be stopped and gone on with is in
`RunState` and in what a checkpoint holds; all that it records lies in one folder (`run_folder`).

Shapes: B micro-batch, T positions, D width, A micro-batches of a step.
"""

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt_oss_lite.config.recipe import load_recipe
from gpt_oss_lite.model.transformer import RouterStats
from gpt_oss_lite.training.cluster import start_line_of_this_job
from gpt_oss_lite.training.dataset import document_ids_of
from gpt_oss_lite.training.diagnosis import diagnose
from gpt_oss_lite.training.distributed import MainRankFailed, Ranks, joined_ranks, mute_all_but_the_first
from gpt_oss_lite.training.evaluation import evaluate
from gpt_oss_lite.training.figures import StepFigures, of_all_micro_batches, peak_memory_gib, sink_means
from gpt_oss_lite.training.flops import mfu
from gpt_oss_lite.training.knobs import autocast
from gpt_oss_lite.training.layout import layout_of
from gpt_oss_lite.training.loss import IGNORE_INDEX, head_cross_entropy
from gpt_oss_lite.training.nan_guard import SkippedStep, micro_batch_flags
from gpt_oss_lite.training.optimizer import update_unless
from gpt_oss_lite.training.out_of_memory import report_out_of_memory
from gpt_oss_lite.training.plan import Plan, PretrainOptions, follow_plan, plan_run, words_of_plan
from gpt_oss_lite.training.run import Run, open_run, restore_checkpoint, restore_start
from gpt_oss_lite.training.run_folder import CONFIG_NAME, words_to_go_on
from gpt_oss_lite.training.run_lock import locked
from gpt_oss_lite.training.run_saves import report_end_of_saving, report_saves, save, wait_for_last_save
from gpt_oss_lite.training.spikes import Spike
from gpt_oss_lite.training.stop import AgreedStop, StopRequest
from gpt_oss_lite.training.stream import MicroBatch, next_micro_batches
from shared_data.console import EXIT_FAILED, EXIT_KEYBOARD, ProgressReporter, count_of, progress, say

__all__ = ["EXIT_DONE", "EXIT_NAN_GUARD", "EXIT_STOPPED", "PretrainOptions", "pretrain"]

EXIT_DONE = 0
EXIT_STOPPED = 3
EXIT_NAN_GUARD = 4


def pretrain(options: PretrainOptions) -> int:
    """Train as a recipe says.

    Returns:
        0 done, 1 out of memory, or the first rank failed (which has been said), 3 stopped by a signal or the time
        limit after a save, 4 given up by the NaN guard.

    Raises:
        UserError, OSError: bad input; nothing has been written then.
    """
    mute_all_but_the_first()
    try:
        with joined_ranks(lambda: load_recipe(options.config, options.overrides).training) as ranks:
            return pretrain_on(ranks, options)
    except MainRankFailed:
        return EXIT_FAILED


def pretrain_on(ranks: Ranks, options: PretrainOptions) -> int:
    """`pretrain`, on one rank of a job."""
    with planned(options, ranks) as plan, StopRequest(options.max_hours) as stop:
        if plan.is_done:  # nothing is recorded: the log goes on saying how the run ended
            say(f"step {plan.resume_step} is done already, the run was to stop at {plan.stop_step}: nothing to do")
            return EXIT_DONE
        try:
            return _open_and_train(plan, stop)
        except torch.cuda.OutOfMemoryError:
            report_out_of_memory(plan.recipe, plan.folder, layout_of(plan.recipe.training, ranks.size))
            ranks.fail("the GPU is out of memory")
            return EXIT_FAILED
        except Exception as error:  # of whatever kind a broken operation is; it goes on up
            ranks.find_the_missing(error)
            raise


def _open_and_train(plan: Plan, stop: StopRequest) -> int:
    run = open_run(plan)
    try:
        return train(run, stop)
    except KeyboardInterrupt:
        if run.saver.busy:
            # The interpreter would tear down around a thread that writes. Nothing needs it: each line of the log is
            # written and closed, and a checkpoint without its meta is none.
            say("stopped by the keyboard")
            os._exit(EXIT_KEYBOARD)
        raise
    finally:
        run.logger.finish()


@contextmanager
def planned(options: PretrainOptions, ranks: Ranks) -> Iterator[Plan]:
    """The plan of a command, made by the first rank, which holds the run's folder."""
    plans: list[Plan] = []
    with ExitStack() as lock:

        def plan_and_lock() -> dict[str, Any]:
            plans.append(plan_run(options, ranks))
            mark = lock.enter_context(locked(plans[0].folder))
            return words_of_plan(plans[0], mark)

        words = ranks.from_main(plan_and_lock)
        # Before anything is written of a run that not all ranks can go on with.
        yield ranks.all_or_none(lambda: plans[0] if plans else follow_plan(options, ranks, words))


def train(run: Run, stop: StopRequest) -> int:
    """Step until the run's last step, a request to stop, or the NaN guard ends it; the exit code."""
    if run.ranks.is_main and not run.parallel.sharded:
        run.saver.reserve(run.model, run.optimizer)
    try:
        # The log has a line every so often; in a terminal a bar goes on below it.
        with progress("train", run.stop_step - run.state.step, "steps", lines=False) as bar:
            return step_until_the_end(run, stop, bar)
    except Exception:  # whatever ended the run, the newest checkpoint is what the next process goes on from
        report_end_of_saving(run)
        raise


def step_until_the_end(run: Run, stop: StopRequest, bar: ProgressReporter) -> int:
    """The loop of `train`."""
    training, agreed = run.recipe.training, AgreedStop(stop, run.ranks)
    if run.state.step == 0:
        evaluate_now(run)
    run.throughput.read()
    while run.state.step < run.stop_step:
        figures = train_step(run)
        step = run.state.step
        bar.advance(1)
        if run.profiler is not None:
            run.profiler.step()
        reason = agreed.reason()
        last = step == run.stop_step
        saving = last or reason is not None or step % training.save_interval == 0

        report_saves(run, run.saver.outcomes())
        report_spikes(run, run.spikes.read(everything=saving))
        verdict = run.guard.read(everything=saving)
        report_skips(run, verdict.skipped)
        if verdict.resume_position is not None:
            # A checkpoint that is being written may be the one to go back to.
            run.ranks.from_main(partial(report_end_of_saving, run), share=False)
            if run.state.rollbacks >= training.nan_guard_max_rollbacks:
                return int(run.ranks.from_main(partial(give_up, run, verdict.skipped)))
            roll_back(run, verdict.resume_position)
            bar.advance(run.state.step - step)
            continue
        run.state.streak = run.guard.streak

        if step == 1 or last or step % training.log_interval == 0:
            log_step(run, figures)
        if training.eval_interval and (last or step % training.eval_interval == 0):
            evaluate_now(run)
        if saving:
            save(run)
        if reason is not None and not last:
            wait_for_last_save(run)
            say(f"stopped by {reason} after step {step}; go on with: {resume_line(run)}")
            run.logger.event("stop", step, reason=reason)
            return EXIT_STOPPED
    wait_for_last_save(run)
    run.logger.event("done", run.state.step)
    say(f"done: {count_of(run.state.step, 'step')} in {run.folder}")
    return EXIT_DONE


def resume_line(run: Run) -> str:
    """The command that goes on with a run on as many ranks, as it was gone on with this time."""
    more = words_to_go_on(run.files[CONFIG_NAME], run.recipe, run.stop_step)
    words = ["--config", str(run.folder / CONFIG_NAME), "--resume", "latest", *more]
    return f"{start_line_of_this_job(run.ranks.size)} {shlex.join(words)}"


def train_step(run: Run) -> StepFigures:
    """One optimizer step over A micro-batches: their gradients, the finite check, clipping, the update, the
    schedule."""
    training, state = run.recipe.training, run.state
    batches = next_micro_batches(run)
    # Known before the first backward pass, so that accumulation gives the gradient of the step's mean, whatever its
    # parts.
    n_valid = count_valid_targets(run, batches)
    figures = of_all_micro_batches(
        run.ranks, [micro_batch(run, batch, n_valid, last=batch is batches[-1]) for batch in batches]
    )
    run.parallel.after_backward()
    norm = run.parallel.norm(list(run.model.parameters()))
    ce = figures.ces_A.sum()
    flags_A = run.ranks.any(micro_batch_flags(figures.losses_A, norm))
    spike = run.spikes.observe(state.step + 1, run.position, torch.stack([ce, norm]))
    lr = set_rate(run)
    if training.nan_guard:
        skip = flags_A.any()
        if training.skip_spikes:
            skip = skip | run.ranks.any(spike)
        update_unless(skip, run.optimizer, norm, training.grad_clip)
        run.guard.record(state.step + 1, run.position, flags_A)
    else:
        update_unless(None, run.optimizer, norm, training.grad_clip)
    run.scheduler.step()
    run.optimizer.zero_grad(set_to_none=not run.parallel.keeps_gradients)
    state.step += 1
    run.throughput.count(run.windows_per_step * run.recipe.model.max_seq_len)
    return StepFigures(
        ce=ce,
        aux=figures.auxes_A.mean(),
        grad_norm=norm,
        lr=lr,
        expert_load=figures.expert_loads_ALE.mean(dim=0),
        router_entropy=figures.entropies_AL.mean(dim=0),
    )


def count_valid_targets(run: Run, batches: list[MicroBatch]) -> int | Tensor:
    """Valid targets of the step, on all ranks, at least 1."""
    count = sum(int((targets_BT != IGNORE_INDEX).sum()) for _, targets_BT in batches)
    if run.ranks.size == 1:
        return max(1, count)
    return run.ranks.sum(torch.tensor(count, device=run.device)).clamp(min=1)


def set_rate(run: Run) -> float:
    """The rate of the coming update: the schedule's, lowered for a while after a rollback where the recipe says so."""
    lr = float(run.scheduler.get_last_lr()[0])
    if run.state.step < run.state.slow_until:
        lr *= run.recipe.training.nan_guard_lr_factor
        for group in run.optimizer.param_groups:
            group["lr"] = lr  # until the schedule's next tick
    return lr


def micro_batch(
    run: Run, batch: MicroBatch, n_valid: int | Tensor, last: bool = True
) -> tuple[Tensor, Tensor, RouterStats]:
    """Forward and backward pass of one micro-batch; gradients add up in the parameters.

    Args:
        batch: input and target, each (B, T) int64.
        n_valid: valid targets of the whole step.
        last: whether it is this rank's last one of the step, after which the ranks' gradients are added up.

    Returns:
        Its share of the step's loss and of its cross-entropy, and the RouterStats, all detached.
    """
    training = run.recipe.training
    ids_BT, targets_BT = (tensor.to(run.device, non_blocking=True) for tensor in batch)
    document_ids_BT = document_ids_of(ids_BT, run.dataset, run.recipe.model)
    with nullcontext() if last else run.parallel.apart():
        with autocast(run.device, run.recipe.model.dtype):
            h_BTD, stats = run.parallel.forward(ids_BT, document_ids_BT=document_ids_BT)
            ce_sum = head_cross_entropy(
                h_BTD, run.model.head.weight, targets_BT, chunk_size=training.loss_chunk_size, fp8=training.fp8_head
            )
        ce = ce_sum / n_valid
        routing = training.aux_loss_alpha * stats.aux + training.router_z_loss * stats.z_loss
        loss = ce + routing / training.gradient_accumulation_steps
        (loss if run.ranks.size == 1 else loss * run.parallel.loss_factor).backward()
    return loss.detach(), ce.detach(), stats.detached()


def log_step(run: Run, figures: StepFigures) -> None:
    """Write the row of the last step; the only place where the host waits for a step's figures."""
    recipe, step = run.recipe, run.state.step
    ce, aux, grad_norm = torch.stack([figures.ce, figures.aux, figures.grad_norm]).tolist()
    tokens_per_s, steps_per_s, data_wait_s = run.throughput.read()
    memory_gib = peak_memory_gib(run.device)
    if run.ranks.size > 1:
        data_wait_s, memory_gib = run.ranks.max(torch.tensor([data_wait_s, memory_gib], device=run.device)).tolist()
    row = {
        "step": step,
        "tokens": step * run.windows_per_step * recipe.model.max_seq_len,
        "ce": ce,
        "aux": aux,
        "grad_norm": grad_norm,
        "lr": figures.lr,
        "tokens_per_s": tokens_per_s,
        "mfu": mfu(tokens_per_s, recipe.model, recipe.model.max_seq_len, run.peak_flops),
        "memory_gib": memory_gib,
        "data_wait_s": data_wait_s,
        "epoch": run.order.epoch(run.position - 1),
        "position": run.position,
        "time": time.time(),
        "expert_load": figures.expert_load.tolist(),
        "expert_imbalance": (figures.expert_load.amax(dim=1) / figures.expert_load.mean(dim=1)).tolist(),
        "router_entropy": figures.router_entropy.tolist(),
        "sink_mean": sink_means(run.model),
    }
    run.logger.log(row, run.stop_step, (run.stop_step - step) / steps_per_s)


def evaluate_now(run: Run) -> None:
    """Score the validation corpus, where the recipe has one, and record it as an event."""
    if run.validation is None:
        return
    training, step = run.recipe.training, run.state.step
    with run.throughput.paused():
        evaluation = evaluate(
            run.model,
            run.validation,
            max_windows=training.eval_windows,
            micro_batch_size=training.micro_batch_size,
            chunk_size=training.loss_chunk_size,
            label=f"evaluate step {step}",
            ranks=run.ranks,
        )
        run.parallel.after_evaluation()
    run.logger.event("eval", step, **evaluation.as_dict())
    bpb = evaluation.total.bits_per_byte
    say(f"eval {step:>6} | loss {evaluation.total.loss:.4f} | bits per byte {'n/a' if bpb is None else f'{bpb:.4f}'}")


def report_spikes(run: Run, spikes: list[Spike]) -> None:
    """Record steps whose loss or gradient norm stands out."""
    skipped = run.recipe.training.skip_spikes
    for spike in spikes:
        run.logger.event(
            "spike", spike.step, skipped=skipped, **{k: v for k, v in asdict(spike).items() if k != "step"}
        )
        say(
            f"warning: step {spike.step}: {spike.signal} is {spike.value:.4g}, {spike.zscore:.1f} standard deviations "
            f"above its mean{'; update skipped' if skipped else ''}"
        )


def report_skips(run: Run, skipped: list[SkippedStep]) -> None:
    """Record the steps that the NaN guard skipped."""
    for skip in skipped:
        run.logger.event("skip", skip.step, position=skip.position, micro_batches=skip.micro_batches)
        say(f"warning: step {skip.step} skipped: non-finite loss or gradient in micro-batches {skip.micro_batches}")


def roll_back(run: Run, resume_position: int) -> None:
    """Go back to the newest good checkpoint, or the start, and pass over the windows up to `resume_position`."""
    from_step, rollbacks = run.state.step, run.state.rollbacks + 1
    good = run.ranks.from_main(partial(run.checkpoints.newest_good, at_most=from_step))
    if good is None:
        restore_start(run)
    else:
        restore_checkpoint(run, good)
    run.state.offset = resume_position - run.state.step * run.windows_per_step
    run.state.rollbacks = rollbacks
    run.state.streak = 0
    if run.recipe.training.nan_guard_lr_factor < 1:
        run.state.slow_until = run.state.step + run.recipe.training.nan_guard_lr_steps
    run.guard.reset(0)
    run.logger.cut(run.state.step)
    run.logger.event("rollback", run.state.step, from_step=from_step, position=run.position, rollbacks=rollbacks)
    say(f"warning: too many non-finite micro-batches: back to step {run.state.step}, on from window {run.position:,}")
    run.open_stream()


def give_up(run: Run, skipped: list[SkippedStep]) -> int:
    """Record that the NaN guard has no rollback left, with a diagnosis; the exit code."""
    last, training = skipped[-1], run.recipe.training
    run.model.average_expert_load_by(None)  # this rank looks alone
    # A sharded model runs on all ranks or on none: then only the windows are looked at.
    model = None if run.parallel.sharded else run.model
    diagnosis = diagnose(model, run.dataset, run.order, last, training.micro_batch_size, training.loss_chunk_size)
    run.logger.event(
        "give_up", run.state.step, rollbacks=run.state.rollbacks, position=last.position, diagnosis=diagnosis.as_dict()
    )
    for line in diagnosis.lines():
        say(line)
    say(
        f"error: non-finite losses again at step {last.step}, from window {last.position} of the stream, after "
        f"{run.state.rollbacks} rollbacks (training.nan_guard_max_rollbacks); see {run.checkpoints.folder}"
    )
    return EXIT_NAN_GUARD
