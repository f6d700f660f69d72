"""The GPUs that a plan is for: their names, memory and links."""

import os
import re
from dataclasses import dataclass

from gpt_oss_lite.training.flops import card_name, device_peak_flops
from shared_data.errors import UserError

# Bytes per second of one GPU's links to the others of its node, in one direction: half of the data sheets' figure for
# NVLink; for the others PCIe 4.0 with 16 lanes.
_NVLINK = {r"A100-SXM4.*": 300e9, r"H100( 80GB HBM\de?)?|H100 SXM5.*|H200|GH200.*": 450e9, r"B200|GB200": 900e9}
_PCIE = 32e9

# Memory in 10^9 bytes, from the data sheets, of cards whose name does not say it; an A100's, and some H100's, does.
_MEMORY_GB = {
    r"H[18]00 NVL": 94.0,
    r"H[18]00( PCIe)?|H100 SXM5": 80.0,
    r"GH200 480GB": 96.0,  # the name's figure is the CPU's
    r"H200( NVL)?": 141.0,
    r"B200": 180.0,
    r"GB200": 186.0,
    r"A10|L4|RTX [34]090": 24.0,
    r"RTX 5090": 32.0,
    r"A40|RTX A6000|L40S?": 48.0,
}


def card_memory_gb(name: str) -> float | None:
    """Memory of a device in 10^9 bytes by its CUDA name; None where that is not known."""
    card = card_name(name)
    for pattern, memory_gb in _MEMORY_GB.items():
        if re.fullmatch(pattern, card):
            return memory_gb
    said = re.search(r"\b(\d+)GB\b", card)
    return float(said[1]) if said and not card.startswith("GH200") else None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The GPUs that are there. A name that is not known is a UserError."""

    gpus: int
    gpu: str = "NVIDIA H100 80GB HBM3"
    """Name that CUDA reports."""
    gpu_gb: float | None = None
    """Memory of each, 10^9 bytes; None: what the name says."""
    gpus_per_node: int = 8
    network_gbit: float = 400.0
    """Rate of the network for each GPU of a node, in Gbit/s: NDR InfiniBand, a port a GPU."""

    def __post_init__(self) -> None:
        if device_peak_flops(self.gpu) is None:
            raise UserError(
                f"--gpu is {self.gpu}: its peak is not known; it must be a name as CUDA reports it, such as "
                "'NVIDIA H100 80GB HBM3', 'NVIDIA H200', 'NVIDIA A100-SXM4-80GB' or 'NVIDIA B200'"
            )

        if self.gpu_gb is None and card_memory_gb(self.gpu) is None:
            raise UserError(f"--gpu is {self.gpu}: its memory is not known; it must be given with --gpu-gb")

    @property
    def memory_gb(self) -> float:
        """Memory of a GPU, 10^9 bytes."""
        memory_gb = card_memory_gb(self.gpu) if self.gpu_gb is None else self.gpu_gb
        assert memory_gb is not None
        return memory_gb

    @property
    def peak_flops(self) -> float:
        """Dense bf16 peak of a GPU in FLOP/s."""
        peak = device_peak_flops(self.gpu)
        assert peak is not None
        return peak

    def link_rate(self, ranks: int) -> float:
        """Bytes per second and GPU, in one direction, of an exchange between `ranks` GPUs, of whole nodes where they
        do not fit into one. Every port of a node carries a part of an exchange that leaves it."""
        card = card_name(self.gpu)
        local = next((rate for pattern, rate in _NVLINK.items() if re.fullmatch(pattern, card)), _PCIE)
        if ranks <= self.gpus_per_node:
            return local
        return min(local, self.gpus_per_node * self.network_gbit / 8 * 1e9)


def start_line(ranks: int, per_node: int, options: str = "") -> str:
    """The words before `pretrain`'s own options: with several ranks torchrun's, on each node.

    Args:
        per_node: ranks of a node.
        options: further ones of torchrun.
    """
    if ranks == 1:
        return "gpt-oss-lite pretrain"
    meeting = "--standalone"
    if ranks > per_node:
        nodes = ranks // per_node
        meeting = f'--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "$FIRST_NODE:29500" --rdzv-id "$JOB"'
    return " ".join(
        filter(None, [f"torchrun {meeting} --nproc-per-node {per_node}", options, "-m gpt_oss_lite pretrain"])
    )


def start_line_of_this_job(ranks: int) -> str:
    """`start_line` as torchrun started this process, one of some ranks."""
    return start_line(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
