"""Where the jobs of a campaign run: here, on a local Dask cluster, or on a batch system's.

Jobs are functions of their arguments alone and results are taken with their numbers, so that the
number of workers and the order in which they finish change nothing.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from blips.active.config import ExecutorConfig
from blips.active.database import CampaignError
from blips.active.labeller import THREADS
from blips.errors import BlipsError, require

Work = Callable[[Any], Any]
PIP_LINE = "pip install 'blips-mlip[active]'"
DASHBOARD = "127.0.0.1:0"  # Dask's own page: a free port, seen from this machine alone
LOOK_SECONDS = 5.0  # between looks for workers that were lost for good


class JobLost(BlipsError):
    """A worker was lost with the job, more often than Dask tries again."""


class InlineExecutor:
    """Jobs one after the other in this process."""

    def run(self, work: Work, jobs: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Return an iterator of numbers and results of jobs, as they finish."""
        return enumerate(map(work, jobs))


class DaskExecutor:
    """Jobs on the workers of a Dask cluster, a few more in flight than there are workers."""

    def __init__(self, cluster: Any, client: Any, workers: int) -> None:
        self._cluster, self._client, self.workers = cluster, client, workers

    def run(self, work: Work, jobs: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yield numbers and results (or `JobLost`) as jobs finish; jobs are read as needed."""
        from distributed import wait
        from distributed.scheduler import KilledWorker

        numbered = enumerate(jobs)
        numbers: dict[Any, int] = {}

        def submit(count: int) -> None:
            for number, job in islice(numbered, count):
                numbers[self._client.submit(work, job, pure=False)] = number

        submit(2 * self.workers)
        looked = time.monotonic()
        while numbers:
            if time.monotonic() - looked > LOOK_SECONDS:
                self._replace_lost_workers()
                looked = time.monotonic()
            try:
                found: Any = wait(list(numbers), LOOK_SECONDS, "FIRST_COMPLETED")
            except TimeoutError:
                continue
            for future in found.done:
                try:
                    result = future.result(LOOK_SECONDS)
                except KilledWorker as error:
                    result = JobLost(f"a worker was lost with its job ({error}); start again")
                except TimeoutError:
                    if future.status == "error":
                        raise  # of the job itself
                    break  # the worker died with the result; look for lost workers, wait again
                number = numbers.pop(future)
                future.release()
                submit(1)
                yield number, result

    def _replace_lost_workers(self) -> None:
        """Start workers for those that Dask has given up, as it does if they die as they start."""
        from distributed.core import Status

        started = self._cluster.workers
        for name, worker in list(started.items()):
            if worker.status in (Status.closed, Status.failed):
                started.pop(name, None)
        self._cluster.scale(self.workers)


Executor = InlineExecutor | DaskExecutor


@contextmanager
def make_executor(config: ExecutorConfig) -> Iterator[Executor]:
    """Run the executor that a configuration describes within the block."""
    if config.kind == "inline":
        yield InlineExecutor()
        return
    distributed = require("distributed", f"{PIP_LINE}, or set executor.kind to inline")
    with make_cluster(config) as cluster, distributed.Client(cluster) as client:
        yield DaskExecutor(cluster, client, config.workers)


def make_cluster(config: ExecutorConfig) -> Any:
    """Start a Dask cluster; connections between processes are encrypted with keys of this run."""
    from distributed import LocalCluster, Security

    if config.kind == "local":
        logging.getLogger("distributed.nanny").setLevel(logging.ERROR)  # slow machines are no news
        try:
            return LocalCluster(
                n_workers=config.workers,
                threads_per_worker=1,
                memory_limit=0,
                processes=config.processes,
                dashboard_address=DASHBOARD,
                security=Security.temporary() if config.processes else None,
            )
        except (OSError, RuntimeError) as error:
            raise CampaignError(f"no local Dask cluster could be started: {error}") from error
    jobqueue = require("dask_jobqueue", PIP_LINE)
    threads = [f"export {name}={config.threads}" for name in THREADS]
    make = {"slurm": jobqueue.SLURMCluster, "pbs": jobqueue.PBSCluster}[config.kind]
    cluster = make(
        cores=config.threads,
        processes=1,
        memory=config.memory,
        walltime=config.walltime,
        queue=config.queue,
        account=config.account,
        interface=config.interface,
        job_script_prologue=[*threads, *config.prologue],
        job_extra_directives=config.extra,
        worker_extra_args=["--nthreads", "1"],
        security=Security.temporary(),
        shared_temp_directory=str(Path(config.shared_folder).expanduser()),
        scheduler_options={"dashboard_address": DASHBOARD},
    )
    cluster.scale(jobs=config.workers)
    return cluster
