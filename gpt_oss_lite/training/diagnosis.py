"""Where a non-finite value comes from: which windows of which sources, and the first layer and tensor that show it.

The flagged micro-batch is run once more, uncompiled, with a look at every module's output and then at every gradient in
the order in which the backward pass makes them. The weights are those that it met: its own update was skipped.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt_oss_lite.model.transformer import GPTOSS
from gpt_oss_lite.training.data_order import DataOrder
from gpt_oss_lite.training.dataset import PretrainDataset, document_ids_of
from gpt_oss_lite.training.evaluation import TokenSources
from gpt_oss_lite.training.knobs import autocast
from gpt_oss_lite.training.loss import head_cross_entropy
from gpt_oss_lite.training.nan_guard import SkippedStep
from shared_data.errors import UserError
from shared_data.tokenizer import load_tokenizer

TEXT_CHARACTERS = 160
NOT_RUN = "not run again, since the model is in shards: go on in one process to find the first non-finite value"
SHOWN_DOCUMENTS = 8
NOT_AGAIN = "nothing non-finite when run again: look at the hardware, or set training.deterministic to rule out chance"


@dataclass(frozen=True)
class WindowReport:
    """One window of a flagged micro-batch, for a person."""

    window: int
    """Index in the corpus."""
    shard: str
    token: int
    """First token of the window in its shard."""
    sources: dict[str, int]
    """Tokens by source; empty where the shards have no sidecars."""
    documents: list[str]
    """Id or URL of each of its documents, or its place in the source; empty where the sidecars do not tell."""
    text: str
    """Its beginning, decoded; the ids where the tokenizer is not at hand."""


@dataclass(frozen=True)
class Diagnosis:
    """What is known about a skipped step."""

    step: int
    micro_batch: int
    windows: list[WindowReport]
    first_non_finite: str

    def as_dict(self) -> dict[str, Any]:
        """For events.jsonl."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """For the console."""
        yield f"step {self.step}, micro-batch {self.micro_batch}: {self.first_non_finite}"
        for window in self.windows:
            sources = ", ".join(f"{name} {count}" for name, count in window.sources.items()) or "unknown"
            yield (
                f"  window {window.window} ({window.shard} from token {window.token}; tokens by source: {sources}): "
                f"{window.text!r}"
            )
            if window.documents:
                left = len(window.documents) - SHOWN_DOCUMENTS
                more = f" and {left} more" if left > 0 else ""
                yield f"    documents: {', '.join(window.documents[:SHOWN_DOCUMENTS])}{more}"


def diagnose(
    model: GPTOSS | None,
    dataset: PretrainDataset,
    order: DataOrder,
    skip: SkippedStep,
    micro_batch_size: int,
    chunk_size: int,
) -> Diagnosis:
    """Look into the first flagged micro-batch of a skipped step. Gradients are lost; weights stay.

    Args:
        model: None: only the windows are looked at.
    """
    micro_batch = skip.micro_batches[0]
    windows = order.windows(skip.position + micro_batch * micro_batch_size, micro_batch_size).tolist()
    pairs = [dataset[window] for window in windows]
    ids_BT, targets_BT = (torch.stack([pair[part] for pair in pairs]) for part in (0, 1))
    where = NOT_RUN if model is None else first_non_finite(model, dataset, ids_BT, targets_BT, chunk_size)
    return Diagnosis(skip.step, micro_batch, [report_window(dataset, window) for window in windows], where)


def report_window(dataset: PretrainDataset, window: int) -> WindowReport:
    """Where a window lies, what it is of, and how it begins."""
    start = dataset.start_of(window)
    stop = start + dataset.max_seq_len
    shard = dataset.shard_of(start)
    sources = TokenSources(dataset)
    names: Counter[str] = Counter()
    documents: list[str] = []
    if sources.complete:
        names.update(map(str, sources.lookup(start, stop)[0]))
        documents = [f"{source}: {name}" for source, name in sources.documents(start, stop) if name is not None]
    return WindowReport(
        window=window,
        shard=dataset.shards[shard].path.name,
        token=start - int(dataset.shard_starts[shard]),
        sources=dict(names),
        documents=documents,
        text=_decode(dataset, dataset.tokens(start, stop).tolist()),
    )


def _decode(dataset: PretrainDataset, ids: list[int]) -> str:
    try:
        if dataset.manifest is None:
            raise UserError("a corpus in one file names no tokenizer")
        return load_tokenizer(dataset.manifest.tokenizer_name).decode(ids)[:TEXT_CHARACTERS]
    except UserError:
        return f"ids {' '.join(map(str, ids))}"[:TEXT_CHARACTERS]


def first_non_finite(
    model: GPTOSS, dataset: PretrainDataset, ids_BT: Tensor, targets_BT: Tensor, chunk_size: int
) -> str:
    """The first place of a forward and backward pass that holds a value that is not finite, in words."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the weight {name} itself {_describe(parameter)}"
    device = next(model.parameters()).device
    ids_BT, targets_BT = ids_BT.to(device), targets_BT.to(device)
    model.zero_grad()
    with _watching(model) as found:
        with autocast(device, model.config.dtype):
            h_BTD, stats = model.hidden_states(ids_BT, document_ids_BT=document_ids_of(ids_BT, dataset, model.config))
            ce = head_cross_entropy(h_BTD, model.head.weight, targets_BT, chunk_size=chunk_size)
        if not found and not bool(ce.isfinite()):
            found.append(f"the cross-entropy {_describe(ce)}, with finite hidden states")
        if not found and not bool(stats.aux.isfinite()):
            found.append("the load-balancing loss")
        if not found:
            (ce / targets_BT.numel() + stats.aux).backward()
    model.zero_grad()
    return found[0] if found else NOT_AGAIN


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[str]]:
    """Collect, in the order of computation, the outputs and gradients that are not finite."""
    found: list[str] = []

    def look_at_output(name: str, output: Any) -> None:
        tensors = output if isinstance(output, (tuple, list)) else (output,)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                found.append(f"the output of {name} {_describe(tensor)}")
                return

    def look_at_gradient(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            found.append(f"the gradient of {name} {_describe(parameter.grad)}, with a finite loss")

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(lambda _m, _i, out, name=name: look_at_output(name, out))
                hooks.callback(handle.remove)
        for name, parameter in model.named_parameters():
            handle = parameter.register_post_accumulate_grad_hook(lambda p, name=name: look_at_gradient(name, p))
            hooks.callback(handle.remove)
        yield found


def _describe(tensor: Tensor) -> str:
    """How many values are not finite, and which."""
    n_nan, n_inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return f"({n_nan} NaN, {n_inf} infinite of {tensor.numel()})"
