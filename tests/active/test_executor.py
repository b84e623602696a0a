"""Where the jobs of a campaign run."""

from blips.active import executor as executors
from blips.active.config import ExecutorConfig
from blips.active.executor import DaskExecutor


def test_workers_that_were_lost_for_good_are_replaced(monkeypatch):
    """A campaign whose workers had all died as they started waited for ever."""
    monkeypatch.setattr(executors, "LOOK_SECONDS", 0.2)
    config = ExecutorConfig(kind="local", processes=False, workers=1)
    with DaskExecutor(config) as executor:
        assert list(executor.run(abs, [-1])) == [(0, 1)]
        cluster = executor._cluster
        cluster.sync(cluster.workers[0].close)
        assert sorted(executor.run(abs, [-1, -2, -3])) == [(0, 1), (1, 2), (2, 3)]
