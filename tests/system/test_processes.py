import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from qtool.system import processes
from qtool.system.launcher import launch


def test_alone_every_answer_is_ones_own():
    assert (processes.rank(), processes.size(), processes.launched()) == (0, 1, False)
    assert processes.gather("a") == ["a"]
    assert processes.from_first(3) == 3
    assert processes.total(2.5) == 2.5
    tensor = torch.ones(2)
    assert processes.total(tensor) is tensor
    assert processes.local(tensor) is tensor
    processes.wait()


@pytest.mark.parametrize("count", [1, 3, 4, 10])
def test_shares_cover_all_samples_once(count, monkeypatch):
    monkeypatch.setattr(processes, "size", lambda: 4)
    shares = []
    for rank in range(4):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        shares.append(processes.share(count))
    assert [i for share in shares for i in range(share.start, share.stop)] == list(range(count))
    assert {share.largest for share in shares} == {max(share.count for share in shares)}
    assert max(share.count for share in shares) - min(share.count for share in shares) <= 1


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)])
def test_running_statistics_are_averaged_and_other_buffers_taken_from_the_first(monkeypatch, norm):
    norm.running_mean.fill_(3.0)
    norm.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
    taken = []
    monkeypatch.setattr(processes, "size", lambda: 2)
    monkeypatch.setattr(processes, "total", lambda value: value + 1.0)
    monkeypatch.setattr(processes.dist, "broadcast", lambda value, rank: taken.append((value, rank)))
    processes.agree_on_buffers(norm)
    assert norm.running_mean.tolist() == [2.0, 2.0]
    assert taken == [(norm.num_batches_tracked, 0)]


def _threads() -> int:
    names = (Path("/proc/self/task") / task / "comm" for task in os.listdir("/proc/self/task"))
    return sum("gloo" in name.read_text() for name in names)


def _left(count: int) -> int:
    """How many threads more than ``count`` stay: the system lists one that has ended for a moment longer."""
    end = time.monotonic() + 5
    while (more := _threads() - count) > 0 and time.monotonic() < end:
        time.sleep(0.02)
    return more


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted as Linux lists them")
def test_no_thread_of_a_group_outlives_it():
    """One that gives back a tensor while the interpreter ends aborts the process."""
    with processes.joined(torch.device("cpu")):
        pass  # lets go of groups whose block ended with an error, in tests before this one
    before = max(_left(0), 0)
    with processes.joined(torch.device("cpu")):
        kept = distribute_tensor(torch.ones(4), processes.mesh(torch.device("cpu")), [Shard(0)])
        assert _threads() > before
    assert _left(before) <= 0
    del kept


LATE = """
import torch
from torch import distributed, nn
from qtool.system import processes
from qtool.system.launcher import launch

with processes.joined(torch.device("cpu")):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    model.itself = model
    tensor = torch.zeros(20_000_000)
    distributed.all_gather([torch.zeros_like(tensor)], tensor, async_op=True)
    del tensor, model
"""


def test_a_group_ends_although_a_thread_has_a_tensor_to_give_back():
    """The thread needs the interpreter for that, which what DDP keeps of the group does not let go of."""
    done = subprocess.run([sys.executable, "-c", LATE], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "count", "left"), [("cuda", 2, False), ("cuda", 1, True), ("cpu", 2, True)])
def test_one_of_several_on_gpus_that_fails_waits_for_none(kind, count, left, monkeypatch):
    """The end of NCCL's group is an exchange, and the others are in another one."""
    ended = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(processes, "size", lambda: count)
    monkeypatch.setattr(processes.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(processes.dist, "destroy_process_group", lambda: ended.append(kind))
    with pytest.raises(MemoryError), processes.joined(torch.device(kind, 0)):
        raise MemoryError
    assert ended == [kind] * left
    ended.clear()
    with processes.joined(torch.device(kind, 0)):
        pass
    assert ended == [kind]


def test_a_group_of_one_is_left_again():
    with processes.joined(torch.device("cpu")):
        assert processes.dist.is_initialized()
        assert processes.size() == 1
    assert not processes.dist.is_initialized()


def _join_twice(folder: Path) -> None:
    for seconds in (0.0, 0.5):
        time.sleep(seconds * int(os.environ["RANK"]))
        with processes.joined(torch.device("cpu")):
            (folder / str(processes.rank())).write_text(str(processes.gather(processes.rank())))


@pytest.mark.usefixtures("warm_launches")
def test_processes_may_join_again_though_one_is_late(tmp_path: Path) -> None:
    """A script may train twice. What the first group left in the store is no address of the second's."""
    launch(_join_twice, 2, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["[0, 1]"] * 2
