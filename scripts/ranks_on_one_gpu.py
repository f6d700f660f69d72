"""Several ranks on one GPU: sharded runs, exchanges and lost ranks tried for real where there is no second GPU.

    python scripts/ranks_on_one_gpu.py --ranks 2 -- training/pretrain.py --config FILE --set training.parallelism=fsdp

Each rank is a torchrun node of its own with one process, and they meet by torchrun's rendezvous on 127.0.0.1. NCCL
refuses two ranks on one GPU of one host (https://github.com/NVIDIA/nccl/issues/418), so each names another host
(NCCL_HOSTID), and they talk through sockets, as nodes without faster links do. The code that runs is that of a job on
several nodes; its speed says nothing, since the ranks take turns on the GPU. Without CUDA they talk through gloo.
"""

import os
import signal
import socket
import subprocess
import sys
from typing import Annotated, Any

import needs_packages  # noqa: F401
import typer

from shared_data.console import run_app

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def launch(
    words: Annotated[list[str], typer.Argument(help="What torchrun is to start: a script with its options, or -m.")],
    ranks: Annotated[int, typer.Option(min=2, help="Ranks.")] = 2,
    max_restarts: Annotated[int, typer.Option(min=0, help="Times that torchrun may start them again.")] = 0,
) -> int:
    """Start a training command on several ranks of one GPU, and wait for them."""
    nodes = start(ranks, words, max_restarts)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the nodes themselves, which save before they end
    return max(abs(node.wait()) for node in nodes)


def start(ranks: int, words: list[str], max_restarts: int = 0, **options: Any) -> list["subprocess.Popen[str]"]:
    """Start the nodes of a job; their processes.

    Args:
        ranks: one node each.
        words: what torchrun is to start.
        max_restarts: times that torchrun may start the ranks again.
        options: of subprocess.Popen; `env` is added to.
    """
    launcher = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={ranks}", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1",
        f"--max-restarts={max_restarts}",
    ]  # fmt: skip
    environment = options.pop("env", os.environ)
    sockets = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return [
        subprocess.Popen(
            [*launcher, *words], env={**environment, **sockets, "NCCL_HOSTID": f"node-{number}"}, text=True, **options
        )
        for number in range(ranks)
    ]


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


if __name__ == "__main__":
    sys.exit(run_app(app, prog_name="ranks_on_one_gpu.py"))
