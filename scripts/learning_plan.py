"""The experiments of docs/learning.md: which recipes are trained, at which sizes, and what is asked of them afterwards.

Everything is the shipped recipe of 502M parameters with `--set` words. `mini` is the same plan at a size that a CPU
runs in a minute: it proves the plan, and its figures mean nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs/pretrain_h200_502m.yaml"
EXTENSION = ROOT / "configs/extend_128k.yaml"

Size = Literal["full", "mini"]
Base = Literal["real", "winners-recipe", "real-muon-wsd"]
"""Runs that the long-context part can start from."""
Sets = Mapping[str, object]


@dataclass(frozen=True)
class Experiment:
    """One training run, and the questions to its last checkpoint."""

    name: str
    group: str
    sets: Sets
    seed: int = 0
    recipe: Path = RECIPE
    seconds: float = 60.0
    """What it is expected to take, by itself: it is not begun when less time is left."""
    peer: bool = False
    """transformers' model instead of ours."""
    init_from: str | None = None
    """The experiment whose weights it starts from."""
    questions: Mapping[str, object] = field(default_factory=dict)
    """Arguments of scripts/learning_questions.py; empty: none are asked, and the checkpoint is not kept."""
    trains: bool = True
    """False: the questions go to the checkpoint of init_from."""

    def words(self) -> list[str]:
        """The `--set` words."""
        return [
            word for key, value in self.sets.items() for word in ("--set", f"{key}={json.dumps(value, default=str)}")
        ]


@dataclass(frozen=True)
class Plan:
    """Sizes and lengths of the experiments."""

    data: Path
    """Corpus, in windows of 4,096 tokens."""
    long_data: Path | None = None
    """The same text with long-context windows of 32,768 tokens. None: data."""
    size: Size = "full"
    tokens_per_s: float = 280_000
    """Of the 502M recipe on the machine, for the expected seconds."""
    muon_seconds: float = 0.035
    """That Muon adds to a step of the 502M recipe, whatever its tokens."""
    real_steps: int = 900
    winners_steps: int = 440
    parity_steps: int = 300
    parity_micro_batch: int = 2
    ablation_steps: int = 300
    long_steps: int = 40
    long_window: int = 32_768
    passkey_length: int = 131_072
    """Longest text that passkeys are looked for in."""
    long_from: Base = "real"
    """The experiment that the long-context part starts from."""

    def experiments(self) -> list[Experiment]:
        """All of them, in order."""
        return [*self.real(), *self.winners(), *self.parity(), *self.ablations(), *self.long()]

    # The parts that all share

    def _common(self, steps: int, micro_batch: int, warmup: int, log_interval: int) -> dict[str, object]:
        mini: Sets = {} if self.size == "full" else MINI
        return {
            **mini,
            "data.train_data_path": self.data,
            "data.data_mix": None,
            "training.total_steps": steps,
            "training.warmup_steps": min(warmup, steps - 1),
            "training.micro_batch_size": micro_batch,
            "training.log_interval": log_interval,
            "training.save_interval": 10**9,
            "training.keep_last_n": 1,
            "training.eval_interval": steps,
            "training.eval_windows": 128 if self.size == "full" else 2,
            "training.num_workers": 2 if self.size == "full" else 0,
        }

    def _seconds(self, steps: int, windows: int, start_up: float, speed: float = 1.0) -> float:
        return start_up + steps * windows * 4096 / (self.tokens_per_s * speed)

    def _context(self) -> int:
        """Tokens of a window of the recipe; of mini, of a text that a key fits in."""
        return 4096 if self.size == "full" else 512

    # 1. The real run, and the winners of the ablations beside the recipe

    def real(self) -> list[Experiment]:
        """The 502M recipe, its schedule scaled to the steps."""
        return [self._whole_run("real", "real", self.real_steps, {}, samples=2)]

    def winners(self) -> list[Experiment]:
        """The recipe in steps of their own, and the same with the two changes that won the ablations together."""
        steps = self.winners_steps
        change = {**ABLATIONS["muon"], **ABLATIONS["wsd"], "training.decay_steps": max(steps // 5, 1)}
        return [
            self._whole_run("winners-recipe", "winners", steps, {}, samples=1),
            self._whole_run("real-muon-wsd", "winners", steps, change, samples=1),
        ]

    def _whole_run(self, name: str, group: str, steps: int, change: Sets, samples: int) -> Experiment:
        sets = {
            **self._common(steps, 32 if self.size == "full" else 2, warmup=max(steps // 10, 1), log_interval=10),
            "training.eval_interval": max(steps // 6, 1),
            **change,
        }
        questions = {
            "data": self.data / "validation", "samples": samples, "export": True, "report": True,
            "positions": self._context(), "passkey_lengths": [self._context() // part for part in (8, 4, 2, 1)],
            "trials": 20,
        }  # fmt: skip
        # Compiling, seven evaluations and 40 s of questions; samples are decoded one by one.
        seconds = self._seconds(steps, 32, start_up=100 + 18 * samples)
        if sets.get("training.optimizer") == "muon":
            seconds += steps * self.muon_seconds
        return Experiment(name, group, sets, seconds=seconds, questions=questions)

    # 2. Parity

    def parity(self) -> list[Experiment]:
        """transformers' GptOss, our GPT-OSS variant and our recipe: two seeds each, on the same windows.

        The variant also with an fp32 residual stream, as transformers' is; the fused path does not take it.
        """
        steps, windows = self.parity_steps, self.parity_micro_batch
        common = self._common(steps, windows, warmup=steps // 10, log_interval=1)
        variant = {**common, **GPT_OSS}
        runs = []
        for seed in (0, 1):
            seconds = self._seconds(steps, windows, start_up=45, speed=0.1)
            runs.append(Experiment(f"transformers-{seed}", "parity", variant, seed, seconds=seconds, peer=True))
            seconds = self._seconds(steps, windows, start_up=45, speed=0.7)
            runs.append(Experiment(f"gpt-oss-{seed}", "parity", variant, seed, seconds=seconds))
            runs.append(Experiment(f"recipe-{seed}", "parity", common, seed, seconds=seconds))
            fp32 = {**variant, "model.residual_dtype": "fp32"}
            runs.append(Experiment(f"gpt-oss-fp32-{seed}", "parity", fp32, seed, seconds=2 * seconds))
        return runs

    # 3. What pays

    def ablations(self) -> list[Experiment]:
        """One change to the recipe each, at a smaller size, two seeds."""
        steps = self.ablation_steps
        common = {
            **self._common(steps, 8 if self.size == "full" else 2, warmup=steps // 10, log_interval=20),
            **(SMALL if self.size == "full" else {}),
        }
        runs = []
        for name, change in ABLATIONS.items():
            slow = 2.5 if name in ("document-mask", "dense", "muon") else 1.0
            seconds = 30 + slow * steps * 8 * 4096 / (2.5 * self.tokens_per_s)
            sets = {**common, **change}
            if "model.expert_hidden_size" in change:
                sets["model.expert_hidden_size"] = self._active_hidden()
            if "training.decay_steps" in change:
                sets["training.decay_steps"] = max(steps // 5, 1)
            runs += [Experiment(f"{name}-{seed}", "ablations", sets, seed, seconds=seconds) for seed in (0, 1)]
        return runs

    def _active_hidden(self) -> int:
        """Hidden width of a dense layer with the active parameters of two routed experts and a shared one."""
        size = SMALL if self.size == "full" else MINI
        return 3 * int(str(size["model.expert_hidden_size"]))

    # 4. Long context

    def long(self) -> list[Experiment]:
        """Passkeys and loss by position before the extension, after it, and for rope_scale 32 from the start."""
        lengths: list[int] = []
        length = self.passkey_length
        while length >= self._context():
            lengths.insert(0, length)
            length //= 2
        long_data = self.long_data or self.data
        questions = {
            "data": long_data / "validation", "positions": min(self.long_window, self.passkey_length),
            "passkey_lengths": lengths, "trials": 3,
        }  # fmt: skip
        (base,) = (one for one in (*self.real(), *self.winners()) if one.name == self.long_from)
        extended = self._extension(long_data)
        seconds = {"questions": 75.0, "extended": self._seconds(self.long_steps, 32, 120, speed=0.5)}
        return [
            Experiment("long-before", "long", {}, init_from=base.name, trains=False, questions=questions,
                       seconds=seconds["questions"]),
            Experiment("long-extended", "long", extended, recipe=EXTENSION, init_from=base.name, questions=questions,
                       seconds=seconds["extended"]),
            Experiment("long-scale-32", "long", {**base.sets, "model.rope_scale": 32},
                       questions={**questions, "rope_scale": 32}, seconds=base.seconds),
        ]  # fmt: skip

    def _extension(self, long_data: Path) -> dict[str, object]:
        """The recipe of the extension with fewer and shorter windows, as many tokens a step.

        Its warm-up is a quarter of the steps: AdamW's moments start from nothing, and the second one looks back over
        20 steps.
        """
        window, steps, full = self.long_window, self.long_steps, self.size == "full"
        return {
            **self._common(steps, max(131_072 // window, 1) if full else 1, max(steps // 4, 1), log_interval=5),
            "data.train_data_path": long_data,
            "model.max_seq_len": window,
            "training.eval_windows": 16 if full else 1,
        }


GPT_OSS: Sets = {
    "model.n_experts": 9,
    "model.experts_per_token": 3,
    "model.n_shared_experts": 0,
    "model.expert_activation": "clamped_swiglu",
}
"""GPT-OSS's choices at our sizes: the shared expert becomes a ninth routed one, so that compute is equal. Biases are
left out on both sides, since only without them do the fused kernels compute all of it."""

SMALL: Sets = {
    "model.d_model": 512, "model.n_layers": 6, "model.n_heads": 4, "model.n_kv_heads": 2,
    "model.expert_hidden_size": 768, "training.lr": 1e-3,
}  # fmt: skip
"""Model of the ablations: 133M parameters, 90M active, of which the embedding has 66M. Heads keep their 96."""

MINI: Sets = {
    "model.d_model": 16, "model.n_layers": 2, "model.n_heads": 2, "model.n_kv_heads": 1, "model.head_dim": 8,
    "model.expert_hidden_size": 16, "model.max_seq_len": 64, "model.window_size": 16,
    "model.yarn_original_max_seq_len": 64, "model.yarn_target_seq_len": 2048, "model.eval_max_seq_len": 2048,
    "training.gradient_accumulation_steps": 1, "training.lr": 1e-2, "training.pin_memory": False,
}  # fmt: skip

ABLATIONS: dict[str, Sets] = {
    "baseline": {},
    "no-shared-expert": {"model.n_experts": 9, "model.experts_per_token": 3, "model.n_shared_experts": 0},
    "no-sinks": {"model.sink_bias": False},
    "all-full-attention": {"model.window_size": None},
    "aux-0.001": {"training.aux_loss_alpha": 0.001},
    "aux-0.1": {"training.aux_loss_alpha": 0.1},
    "router-z-loss": {"training.router_z_loss": 0.001},
    "wsd": {"training.schedule": "wsd", "training.decay_steps": None},
    "muon": {"training.optimizer": "muon"},
    "fp8-head": {"training.fp8_head": True},
    "fp8-experts": {"model.moe_dispatch": "grouped_fp8"},
    "dense": {"model.n_experts": 1, "model.experts_per_token": 1, "model.n_shared_experts": 0,
              "model.expert_hidden_size": None, "model.moe_dispatch": "reference", "training.aux_loss_alpha": 0},
    "document-mask": {"model.document_mask": True},
}  # fmt: skip
"""Changes to the recipe. A null here is filled in from the size."""


def choose(experiments: Sequence[Experiment], only: Sequence[str]) -> list[Experiment]:
    """The experiments that are named, or whose group is; all without names.

    Raises:
        ValueError: nothing has such a name.
    """
    known = {name for experiment in experiments for name in (experiment.name, experiment.group)}
    if wrong := [name for name in only if name not in known]:
        raise ValueError(f"{wrong[0]} is no experiment and no group; there are: {', '.join(sorted(known))}")
    return [one for one in experiments if not only or {one.name, one.group} & set(only)]
