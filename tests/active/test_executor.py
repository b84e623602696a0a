"""Where the jobs of a campaign run."""

import time

import pytest

from blips.active import executor as executors
from blips.active.config import ExecutorConfig
from blips.active.executor import make_executor


def test_workers_that_were_lost_for_good_are_replaced(monkeypatch):
    """A campaign whose workers had all died as they started waited for ever."""
    monkeypatch.setattr(executors, "LOOK_SECONDS", 0.2)
    config = ExecutorConfig(kind="local", processes=False, workers=1)
    with make_executor(config) as executor:
        assert list(executor.run(abs, [-1])) == [(0, 1)]
        cluster = executor._cluster
        cluster.sync(cluster.workers[0].close)
        assert sorted(executor.run(abs, [-1, -2, -3])) == [(0, 1), (1, 2), (2, 3)]


def test_results_that_were_lost_with_all_workers_are_computed_again(monkeypatch, tmp_path):
    """A campaign waited for ever for a result that had died with the last of its workers."""
    monkeypatch.setattr(executors, "LOOK_SECONDS", 0.2)

    def work(job: int) -> int:
        with (tmp_path / "done.txt").open("a") as file:
            file.write(f"{job}\n")
        return -job

    with make_executor(ExecutorConfig(kind="local", processes=False, workers=2)) as executor:
        results = executor.run(work, range(4))
        found = [next(results)]
        while len((tmp_path / "done.txt").read_text().splitlines()) < 4:
            time.sleep(0.01)
        time.sleep(0.5)  # until all are known to be done
        found.append(next(results))
        cluster = executor._cluster
        for worker in list(cluster.workers.values()):
            cluster.sync(worker.close)
        assert sorted([*found, *results]) == [(k, -k) for k in range(4)]
    assert len((tmp_path / "done.txt").read_text().splitlines()) > 4


def test_a_job_that_ran_out_of_time_says_so():
    def work(job: int) -> None:
        raise TimeoutError(f"job {job} took too long")

    config = ExecutorConfig(kind="local", processes=False, workers=1)
    with make_executor(config) as executor, pytest.raises(TimeoutError, match="job 0 took"):
        list(executor.run(work, range(1)))


def test_two_campaigns_on_one_machine_share_no_port_and_show_nothing_to_the_network():
    config = ExecutorConfig(kind="local", processes=False, workers=1)
    with make_executor(config) as first, make_executor(config) as second:
        servers = [one._cluster.scheduler.http_server for one in (first, second)]
        sockets = [s.getsockname() for server in servers for s in server._sockets.values()]
    assert {host for host, *_ in sockets} == {"127.0.0.1"}
    assert len({port for _, port, *_ in sockets}) == 2
