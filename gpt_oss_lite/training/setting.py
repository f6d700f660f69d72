"""How a recipe's step is cut to fit into a memory: the keys that change its memory and speed, and not its tokens."""

from typing import NamedTuple

from gpt_oss_lite.config import Recipe


class Setting(NamedTuple):
    """How a recipe's step is cut to fit."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    """Micro-batches of a step, over all GPUs."""
    grad_checkpoint_every: int | None
    """Recompute every n-th block; None: none."""
    loss_chunk_size: int

    @classmethod
    def of(cls, recipe: Recipe) -> "Setting":
        """The one in a recipe's own keys."""
        training = recipe.training
        every = training.grad_checkpoint_every if training.grad_checkpoint else None
        return cls(training.micro_batch_size, training.gradient_accumulation_steps, every, training.loss_chunk_size)

    def words(self) -> str:
        """For a person, in a few words."""
        every = self.grad_checkpoint_every
        recomputed = "nothing" if every is None else "every block" if every == 1 else f"one block in {every}"
        return (
            f"{self.micro_batch_size} x {self.gradient_accumulation_steps} windows, {recomputed} recomputed, chunks of "
            f"{self.loss_chunk_size:,} tokens"
        )

    def overrides(self) -> list[str]:
        """The setting as `--set` words."""
        every = self.grad_checkpoint_every
        return [
            f"training.micro_batch_size={self.micro_batch_size}",
            f"training.gradient_accumulation_steps={self.gradient_accumulation_steps}",
            f"training.grad_checkpoint={'false' if every is None else 'true'}",
            *([] if every is None else [f"training.grad_checkpoint_every={every}"]),
            f"training.loss_chunk_size={self.loss_chunk_size}",
        ]
