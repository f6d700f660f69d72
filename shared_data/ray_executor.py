"""Runs a stage's tasks on Ray: plain tasks, one core each; of Ray's data library nothing.

Without an address a cluster of this machine alone is started, bound to 127.0.0.1, which ends with this process. All
machines of a cluster must see the data folder under the same path.
"""

import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shared_data.commits import Commit
from shared_data.console import say
from shared_data.errors import UserError, require_extra

if TYPE_CHECKING:
    from shared_data.executor import Task

MAX_RETRIES = 3
# Tasks return commit records, a few hundred bytes each: the smallest store that Ray takes.
OBJECT_STORE_BYTES = 80 << 20
# Tasks handed to Ray at a time, per core: enough to keep it busy, few enough to wait for in one call.
TASKS_AHEAD = 4


def connect(workers: int, address: str | None) -> Any:
    """The module ray, connected to the cluster at `address`, or to one of our own; once per process.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    # Ray reads these when it is imported, and so do the processes that it starts.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = require_extra("ray", "scale")
    if ray.is_initialized():
        return ray
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        local = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        ray.init(address="local", _node_ip_address="127.0.0.1", **local, **quiet)
        return ray
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--ray-address is {address!r}: no cluster answers there ({str(error).splitlines()[0]})"
        ) from None
    return ray


def _execute_in(folder: str, task: "Task") -> Commit:
    """Do a task whose paths are relative to `folder`: a worker of a cluster was started elsewhere."""
    from shared_data.executor import execute

    os.chdir(folder)
    return execute(task)


def run_on_ray(pending: Mapping[int, "Task"], workers: int, address: str | None) -> Iterator[tuple[int, Commit]]:
    """Do tasks on Ray; gives each with its commit as it ends.

    A task whose worker or machine is lost is done again, MAX_RETRIES times; an error of a task is raised as it is.

    Raises:
        ChildProcessError: the workers of a task were lost again and again.
    """
    ray = connect(workers, address)
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    say(f"ray: {len(pending)} tasks on {cores} cores of {len(ray.nodes())} machines")
    remote = ray.remote(max_retries=MAX_RETRIES)(_execute_in)
    running: dict[Any, int] = {}
    waiting, folder = iter(pending.items()), os.getcwd()
    try:
        while True:
            for index, task in itertools.islice(waiting, TASKS_AHEAD * cores - len(running)):
                running[remote.remote(folder, task)] = index
            if not running:
                return
            ready, _ = ray.wait(list(running))
            for reference in ready:
                index = running.pop(reference)
                yield index, ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        raise ChildProcessError(
            f"a Ray worker was lost {MAX_RETRIES + 1} times at the same task ({type(error).__name__}; out of memory?); "
            "what is finished is kept, so run the command again"
        ) from None
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
