"""The same numbers on 1, 2 and 4 ranks, and one decision on all of them."""

import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks
import tiny_run
import torch
from ranks import Job
from safetensors.torch import load_file
from small_models import SMALL
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_oss_lite.config import DataConfig, Recipe, TrainingConfig, load_recipe
from gpt_oss_lite.model.transformer import Block
from gpt_oss_lite.training.checkpoint import CheckpointManager
from gpt_oss_lite.training.checkpoint_commands import app
from gpt_oss_lite.training.data_order import DataOrder, MicroBatchSampler, MixedOrder
from gpt_oss_lite.training.distributed import Ranks, _fresh_store, whole
from gpt_oss_lite.training.expert_parallel import ExpertGroup
from gpt_oss_lite.training.layout import Layout, check_split
from gpt_oss_lite.training.optimizer import gradient_norm, update_unless
from gpt_oss_lite.training.parallel import make_shared_model
from gpt_oss_lite.training.run import fallbacks
from gpt_oss_lite.training.weights import load_model
from shared_data.console import run_app
from shared_data.errors import UserError

EXACT = ("step", "tokens", "epoch", "position", "lr")
CLOSE = ("ce", "aux", "grad_norm", "expert_load", "expert_imbalance", "router_entropy", "sink_mean")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A corpus, and a recipe of 4 micro-batches of 2 windows a step."""
    folder = tmp_path_factory.mktemp("ranks")
    corpus = tiny_run.make_corpus(folder / "corpus")
    recipe = tiny_run.write_recipe(
        folder / "tiny.yaml", corpus, gradient_accumulation_steps=4, eval_interval=10, grad_clip=0.5, save_interval=10
    )
    return folder, recipe


def flat(value):
    return [x for item in value for x in flat(item)] if isinstance(value, list) else [value]


def assert_same_rows(run, other, bound):
    """Every row equal: counters and rates exactly, what is computed within a relative bound."""
    rows, others = tiny_run.rows(run), tiny_run.rows(other)
    assert len(rows) == len(others) == 20
    for row, expected in zip(rows, others, strict=True):
        assert {key: row[key] for key in EXACT} == {key: expected[key] for key in EXACT}
        for key in CLOSE:
            found, wanted = flat(row[key]), flat(expected[key])
            assert [x is None for x in found] == [x is None for x in wanted]  # of a step that was skipped
            pairs = [(x, y) for x, y in zip(found, wanted, strict=True) if y is not None]
            assert [x for x, _ in pairs] == pytest.approx([y for _, y in pairs], rel=bound, abs=bound), (row, key)


WORDS = {
    "ddp": [],
    "fsdp": ["training.parallelism=fsdp"],
    "experts": ["training.expert_parallel_size=2"],  # on 4 ranks two groups, each with all experts
}


@pytest.mark.parametrize(("float64", "bound"), [(False, 1e-6), (True, 1e-10)], ids=["fp32", "float64"])
def test_20_steps_on_2_and_4_ranks_are_those_of_one_process(setting, float64, bound):
    folder, recipe = setting
    # Micro-batches 1 and 3 of step 2 are not finite: on one of two ranks alone, or on two of four. All skip that step.
    poison = {1: {0: [5, 7]}, 2: {1: [2, 3]}, 4: {1: [1], 3: [1]}}
    kinds = [(1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp"), (2, "experts"), (4, "experts")]
    runs = {kind: folder / f"{kind[0]}-{kind[1]}-{float64}" for kind in kinds}
    jobs = [
        Job(n, str(recipe), str(run), WORDS[p], seed=3, float64=float64, poison=poison[n])
        for (n, p), run in runs.items()
    ]
    assert ranks.run(*jobs) == [[0] * n for n, _ in kinds]
    for run in runs.values():
        assert_same_rows(run, runs[1, "ddp"], bound)
        assert [(e["step"], e["micro_batches"]) for e in tiny_run.events(run, "skip")] == [(2, [1, 3])]
        losses = [e["loss"] for e in tiny_run.events(run, "eval")]
        assert losses == pytest.approx([e["loss"] for e in tiny_run.events(runs[1, "ddp"], "eval")], rel=bound)


def test_muons_steps_on_2_and_4_ranks_are_those_of_one_process(setting, tmp_path):
    """In float64: directions are rounded to bf16, which fp32's last bits decide now and then."""
    _, recipe = setting
    poison = {1: {0: [5, 7]}, 2: {1: [2, 3]}, 4: {1: [1], 3: [1]}}
    kinds = [(1, "ddp"), (2, "ddp"), (4, "ddp"), (2, "experts")]
    runs = {kind: tmp_path / f"{kind[0]}-{kind[1]}" for kind in kinds}
    jobs = [
        Job(n, str(recipe), str(run), ["training.optimizer=muon", *WORDS[p]], seed=3, float64=True, poison=poison[n])
        for (n, p), run in runs.items()
    ]
    assert ranks.run(*jobs) == [[0] * n for n, _ in kinds]
    for run in runs.values():
        assert_same_rows(run, runs[1, "ddp"], 1e-10)
        assert [(e["step"], e["micro_batches"]) for e in tiny_run.events(run, "skip")] == [(2, [1, 3])]


def test_experts_of_several_ranks_are_computed_as_the_recipe_says(setting, tmp_path):
    """By PyTorch's grouped products, which are for 16 bits."""
    _, recipe = setting
    words = ["model.moe_dispatch=grouped", "model.expert_bias=true"]
    one, two, four = (tmp_path / str(n) for n in (1, 2, 4))
    jobs = [
        Job(n, str(recipe), str(run), [*words, f"training.expert_parallel_size={n}"], seed=3, bf16=True)
        for n, run in ((1, one), (2, two), (4, four))
    ]
    assert ranks.run(*jobs) == [[0], [0, 0], [0] * 4]
    losses = [[row["ce"] for row in tiny_run.rows(run)] for run in (one, two, four)]
    # Sums of bf16 in another order: 0.016 were seen. Rows that take another expert's bias make it 0.27.
    assert losses[1] == pytest.approx(losses[0], abs=0.05)
    assert losses[2] == pytest.approx(losses[0], abs=0.05)


def test_experts_that_ranks_share_are_not_said_to_be_fused():
    cuda, config = torch.device("cuda"), load_recipe("pretrain_a100_502m").model
    assert fallbacks(config, Layout(4), cuda) == (None, None)
    assert fallbacks(config, Layout(4, expert_ranks=2), cuda) == (None, "groups of 2 ranks share them")


class Operations(TorchDispatchMode):
    """The names of the operations that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("n_tokens", [24, 0])
def test_an_expert_group_runs_what_moe_dispatch_names_and_gives_idle_experts_gradients(n_tokens, tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        block = Block(SMALL.replace(moe_dispatch="grouped"), 0)
        x = torch.randn(1, n_tokens, SMALL.d_model).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            expected, _ = block.moe(x)
            ExpertGroup(1, 1, "cpu").take_part(block)
            with Operations() as operations:
                out, _ = block.moe(x)
        assert torch.equal(out, expected)
        assert ("_grouped_mm.default" in operations.names) == (n_tokens > 0)
        out.sum().backward()
        assert all(parameter.grad is not None for parameter in block.moe.experts.parameters())
    finally:
        distributed.destroy_process_group()


def test_a_run_goes_from_1_rank_to_2_to_4_and_back(setting, tmp_path):
    _, recipe = setting
    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    chain = [(1, "ddp"), (2, "fsdp"), (4, "fsdp"), (4, "experts"), (1, "ddp")]
    jobs = [
        Job(n, str(recipe), str(run), WORDS[p], 4 * (place + 1), resume_latest=place > 0, seed=3,
            dump=str(tmp_path / f"{place}.pt"))
        for place, (n, p) in enumerate(chain)
    ]  # fmt: skip
    codes = ranks.run(Job(1, str(recipe), str(unbroken), seed=3), *jobs)
    assert codes == [[0], *([0] * n for n, _ in chain)]
    assert_same_rows(run, unbroken, 1e-6)
    for place in range(1, len(chain)):
        step, found = 4 * place, torch.load(tmp_path / f"{place}.pt")
        saved = saved_state(run / "checkpoints", step)
        assert found.keys() == saved.keys()
        for name, tensors in saved.items():
            assert all(torch.equal(a, b) for a, b in zip(found[name], tensors, strict=True)), (step, name)
    check_consolidation(run, 8)
    check_consolidation(run, 16)


def check_consolidation(run, step):
    """A step in shards, and one file of it: the same tensors, which a model loads; a flipped byte is found before."""
    before = saved_state(run / "checkpoints", step)
    weights = dict(load_model(run, step)[0].named_parameters())
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], tensors[0]) for name, tensors in before.items())
    shard = next((run / "checkpoints" / f"shards_step_{step}").glob("shard-00002-*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    manager = CheckpointManager(run / "checkpoints")
    assert manager.newest_good(at_most=step) == step - 4
    shard.write_bytes(content)
    assert run_app(app, ["consolidate", str(run), "--step", str(step)]) == 0
    assert not shard.exists()
    manager.verify(step)
    after = saved_state(run / "checkpoints", step)
    for name, tensors in before.items():
        assert [torch.equal(a, b) for a, b in zip(tensors, after[name], strict=True)] == [True] * 4, name
    assert load_model(run, step)[1]["state"]["step"] == step


def saved_state(checkpoints, step):
    """Weights, step count and moments of a checkpoint of either form by name, read without the code under test."""
    if shards := sorted((checkpoints / f"shards_step_{step}").glob("*.safetensors")):
        pieces = {}
        for path in shards:  # the first dimension is shared out in the order of the ranks, or one rank has all
            for name, tensor in load_file(path).items():
                pieces.setdefault(name, []).append(tensor)
        whole = {name: torch.cat(tensors) for name, tensors in pieces.items()}
        counts = torch.load(checkpoints / f"counts_step_{step}.pt")["state"]
        return {
            name: [whole[f"model.{name}"], count["step"], whole[f"exp_avg.{name}"], whole[f"exp_avg_sq.{name}"]]
            for name, count in counts.items()
        }
    weights = load_file(checkpoints / f"model_step_{step}.safetensors")
    moments = torch.load(checkpoints / f"optim_step_{step}.pt")["state"]
    keys = ("step", "exp_avg", "exp_avg_sq")
    return {name: [weights[name], *(moments[name][key] for key in keys)] for name in weights}


def test_rollbacks_and_stops_are_the_same_on_all_ranks(setting, tmp_path, capsys):
    _, recipe = setting
    one, two, stopped = (tmp_path / name for name in ("one", "two", "stopped"))
    words = ["training.save_interval=5", "training.eval_interval=0"]
    # Micro-batches 24 to 28, from step 7 on, are not finite: five in a row.
    codes = ranks.run(
        Job(1, str(recipe), str(one), words, seed=3, poison={0: list(range(24, 29))}),
        Job(2, str(recipe), str(two), words, seed=3, poison={0: [12, 13, 14], 1: [12, 13]}),
        Job(2, str(recipe), str(stopped), [*words, "training.total_steps=500"], seed=3, signal_after={1: 8}),
        Job(2, str(recipe), str(stopped), words, seed=3),
    )
    assert codes == [[0], [0, 0], [3, 3], [2, 1]]  # the last one is refused: a run is there already
    assert_same_rows(two, one, 1e-6)
    (rollback,), (expected,) = tiny_run.events(two, "rollback"), tiny_run.events(one, "rollback")
    assert (rollback["step"], rollback["position"]) == (expected["step"], expected["position"]) == (5, 58)
    (stop,) = tiny_run.events(stopped, "stop")
    assert stop["reason"] == "SIGTERM"
    assert 4 <= stop["step"] <= 7  # its rank was in step 4
    again = f"torchrun --standalone --nproc-per-node 2 -m gpt_oss_lite pretrain --config {stopped}/config.yaml --resume"
    assert f"after step {stop['step']}; go on with: {again} latest\n" in capsys.readouterr().err
    assert CheckpointManager(stopped / "checkpoints").newest_good() == stop["step"]


def test_a_rollback_to_before_the_first_checkpoint_draws_the_same_weights_in_every_layout(setting, tmp_path):
    _, recipe = setting
    kinds = [(1, "ddp"), (2, "fsdp"), (2, "experts")]
    # Micro-batches 14 to 18, in steps 4 and 5, are not finite; weights have moved by then, and nothing is saved.
    poison = {1: {0: [14, 15, 16, 17, 18]}, 2: {0: [7, 8, 9], 1: [7, 8]}}
    jobs = [
        Job(n, str(recipe), str(tmp_path / p), WORDS[p], seed=3, poison=poison[n], dump=str(tmp_path / f"{p}.pt"))
        for n, p in kinds
    ]
    assert ranks.run(*jobs) == [[0] * n for n, _ in kinds]
    start = torch.load(tmp_path / "ddp.pt")
    for _, name in kinds:
        (rollback,) = tiny_run.events(tmp_path / name, "rollback")
        assert (rollback["step"], rollback["position"]) == (0, 38)
        assert_same_rows(tmp_path / name, tmp_path / "ddp", 1e-6)
        for again in (torch.load(tmp_path / f"{name}.pt"), torch.load(tmp_path / f"{name}.pt.again")):
            assert again.keys() == start.keys()
            assert all(torch.equal(*pair) for key in start for pair in zip(again[key], start[key], strict=True))


@pytest.mark.parametrize("name", ["fsdp", "experts"])
def test_a_rank_that_keeps_a_part_never_holds_more_than_one_whole_block(name):
    """Counted in parameters of which this rank has all, while it makes the model and when it makes its part anew."""
    config = SMALL.replace(n_layers=6, n_experts=8)
    words = {"fsdp": {"parallelism": "fsdp"}, "experts": {"expert_parallel_size": 4}}[name]
    training = TrainingConfig(gradient_accumulation_steps=4, **words)
    recipe = Recipe(model=config, training=training, data=DataConfig(train_data_path="unread"))
    made: list[weakref.ref[nn.Parameter]] = []
    peak = 0

    def count(module, name, parameter):
        nonlocal peak
        made.append(weakref.ref(parameter))
        alive = {id(one): one for one in (ref() for ref in made) if one is not None and not one.is_meta}
        peak = max(peak, sum(one.numel() for one in alive.values() if not hasattr(one, "device_mesh")))

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    hook = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        model, shared = make_shared_model(recipe, Ranks(size=4), lambda forward: forward)
        kept = sum(p.numel() for p in model.parameters() if not hasattr(p, "device_mesh"))
        block = sum(p.numel() for p in Block(config, 0).parameters())
        ends = config.embedding_rows * config.d_model + config.d_model
        assert peak <= kept + ends + block
        before, peak = model.state_dict(), 0
        fresh = shared.fresh_part().state_dict()
        assert peak <= 2 * kept + ends + block
        assert {key: value.shape for key, value in fresh.items()} == {key: value.shape for key, value in before.items()}
    finally:
        hook.remove()
        distributed.destroy_process_group()


def test_a_checkpoint_in_shards_that_cannot_be_written_stops_no_rank(setting, tmp_path):
    _, recipe = setting
    run = tmp_path / "run"
    words = [*WORDS["fsdp"], "training.save_interval=5", "training.keep_last_n=1"]
    job = Job(2, str(recipe), str(run), words, seed=3, blocked="checkpoints/counts_step_10.pt")
    assert ranks.run(job) == [[0, 0]]
    assert [event["step"] for event in tiny_run.events(run, "save_failed")] == [10]
    assert [event["step"] for event in tiny_run.events(run, "save")] == [5, 15, 20]
    assert CheckpointManager(run / "checkpoints").list_checkpoints() == [20]


def test_global_routing_statistics_make_the_split_of_a_micro_batch_nothing_to_the_aux_loss(setting, tmp_path):
    _, recipe = setting
    scope = ["training.aux_loss_scope=ranks", "training.aux_loss_alpha=1.0"]
    whole = [*scope, "training.micro_batch_size=8", "training.gradient_accumulation_steps=1"]
    apart = ["training.aux_loss_alpha=1.0"]
    paths = [tmp_path / name for name in ("one", "four", "apart")]
    jobs = [
        Job(n, str(recipe), str(path), words, seed=3, float64=True)
        for n, path, words in zip((1, 4, 4), paths, (whole, scope, apart), strict=True)
    ]
    assert ranks.run(*jobs) == [[0], [0] * 4, [0] * 4]
    assert_same_rows(paths[1], paths[0], 1e-10)
    auxes = [[row["aux"] for row in tiny_run.rows(path)] for path in paths]
    assert auxes[2] != pytest.approx(auxes[0], rel=1e-4)  # a micro-batch's own statistics are another loss


@pytest.mark.parametrize(
    ("n_ranks", "sizes", "said"),
    [
        (3, (8, 4), "3 ranks cannot share a step's micro-batches evenly; ranks that can: 1, 2, 4"),
        (8, (8, 4), "on 8 ranks: micro_batch_size x gradient_accumulation_steps 4 x 8, 2 x 16, 1 x 32"),
        (64, (8, 4), "ranks that can: 1, 2, 4"),
    ],
)
def test_an_impossible_split_names_the_possible_ones(n_ranks, sizes, said):
    training = TrainingConfig(micro_batch_size=sizes[0], gradient_accumulation_steps=sizes[1])
    with pytest.raises(UserError) as refused:
        check_split(training, n_ranks)
    assert said in str(refused.value)
    assert "training.micro_batch_size 8 x training.gradient_accumulation_steps 4" in str(refused.value)


@pytest.mark.parametrize("order", [DataOrder(10, 42), MixedOrder(13, 42, (10, 3), (7, 3))], ids=["one", "mixed"])
def test_d25_the_ranks_windows_of_a_step_are_together_those_of_one_process(order):
    for n_ranks in (1, 2, 4):
        check_split(TrainingConfig(micro_batch_size=2, gradient_accumulation_steps=4), n_ranks)
        samplers = [iter(MicroBatchSampler(order, 5, 2, rank, n_ranks)) for rank in range(n_ranks)]
        for step in range(3):
            dealt = [next(sampler) for _ in range(4 // n_ranks) for sampler in samplers]
            assert list(itertools.chain(*dealt)) == order.windows(5 + 8 * step, 8).tolist()


def test_a_restart_finds_no_fault_of_the_attempt_before(monkeypatch):
    """NCCL's group sets such a key in the launcher's store, which outlives a restart, and every rank looks for it."""
    launcher = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    faults = ["exception_dump", "remote_error"]
    for key in faults:
        launcher.set(key, "1234")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(launcher.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ThreadPoolExecutor(2) as ranks_of_job:
        stores = list(ranks_of_job.map(lambda rank: _fresh_store(rank, 2), range(2)))
    assert not any(launcher.check([key]) for key in faults)
    stores[0].set("word", "a")
    assert stores[1].get("word") == b"a"


@pytest.mark.parametrize("megabytes", [1, 4, 25])
def test_gradients_are_exchanged_in_buckets_of_the_size_asked_for(megabytes, tmp_path):
    """Of 11.4 MB; a bucket is full when it holds as much as asked for, and the embedding of 1.6 MB comes last."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        config = SMALL.replace(vocab_size=512, d_model=768, expert_hidden_size=64)
        training = TrainingConfig(gradient_bucket_mb=megabytes)
        recipe = Recipe(model=config, training=training, data=DataConfig(train_data_path="unread"))
        model, shared = make_shared_model(recipe, Ranks(size=2), lambda forward: forward)
        for _ in range(2):  # the first backward pass finds the order in which gradients are ready
            shared.forward(torch.arange(64)[None])[0].sum().backward()
        shared.forward(torch.arange(64)[None])
        sizes = [int(size) for size in shared.forward._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")]
        limit, embedding = megabytes * 2**20, 4 * 512 * 768
        assert all(limit <= size < limit + embedding for size in sizes[:-1])
        assert sizes[-1] < limit + embedding
        assert sum(sizes) == 4 * model.num_parameters()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("skip", [True, False])
def test_the_fused_optimizer_skips_and_steps_shards_as_it_does_whole_parameters(skip, tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        start, gradient = torch.arange(6.0).view(3, 2), torch.ones(3, 2)
        plain = nn.Parameter(start.clone())
        shard = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        plain.grad, shard.grad = gradient.clone(), distribute_tensor(gradient.clone(), mesh, [Shard(0)])
        results = []
        for parameter in (plain, shard):
            optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
            update_unless(torch.tensor(False), optimizer)
            norm = gradient_norm([parameter])
            update_unless(torch.tensor(skip), optimizer, norm, 0.5)
            state = optimizer.state[parameter]
            results.append([whole(t).detach() for t in (parameter, norm, state["step"], *moments_of(state))])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert results[0][2].item() == (1.0 if skip else 2.0)
        assert results[0][1].item() == pytest.approx(6**0.5)
    finally:
        distributed.destroy_process_group()


def moments_of(state):
    return state["exp_avg"], state["exp_avg_sq"]
