import gc
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from qtool.cli import main
from qtool.system import allocator

PROBE = """
import ctypes, sys
libc = ctypes.CDLL(None)
class Info(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p
if "tune" in sys.argv:
    from qtool.system import allocator
    print(allocator.tune())
    import gc, os
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == (None if os.environ.get("QTOOL_MALLOC") == "0" else "1")
    assert (gc.get_threshold()[2] >= 100) is (os.environ.get("QTOOL_MALLOC") != "0")
elif "import" in sys.argv:
    import os, qtool
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
    print(False)
before = libc.mallinfo2().hblks  # blocks that came from mmap
pointer = libc.malloc(ctypes.c_size_t(64 << 20))
print(libc.mallinfo2().hblks - before)
"""


def probe(*arguments, **environment):
    untouched = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        capture_output=True, text=True, check=True, env=untouched | environment,
    )  # fmt: skip
    tuned, mapped = done.stdout.split()
    return tuned == "True", int(mapped)


glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's mallopt")


@glibc
def test_large_blocks_come_from_the_heap_after_tuning():
    assert probe("tune") == (True, 0)


HUGE = """
import ctypes, sys
from qtool.system import allocator
allocator.tune(huge_pages=sys.argv[1] == "True")
import torch
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10
before, blocks = peak(), 24
for step in range(4):
    kept, small = [], []
    for i in range(blocks):  # as a forward pass keeps them, with small ones between
        kept.append(torch.ones(2**21))
        small.append(torch.ones(2**14))
    gradient = torch.ones(2**21)
    for i in range(blocks):  # as a backward pass lets go of them
        gradient = gradient + kept.pop()
print((peak() - before) / (8 * (blocks + 2)))
"""


@glibc
def test_without_huge_pages_blocks_that_are_kept_and_freed_in_turn_leave_no_gaps():
    """The heap's growth over what is in use, for blocks of 8 MiB."""
    fresh = {key: value for key, value in os.environ.items() if key != allocator._HUGE_PAGES}  # another test's setting
    without = subprocess.run(
        [sys.executable, "-c", HUGE, "False"], capture_output=True, text=True, check=True, env=fresh
    )  # fmt: skip
    assert float(without.stdout) < 1.6


@pytest.mark.parametrize(("words", "wanted"), [(["train", "--data", "none:x"], False), (["inspect"], True)])
def test_training_does_without_huge_pages(words, wanted, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(allocator, "tune", lambda huge_pages=True: told.append(huge_pages))
    more = ["--model", "resnet", "--out", str(tmp_path / "run")] if words[0] == "train" else [str(tmp_path / "none")]
    assert CliRunner().invoke(main, [*words, *more]).exit_code
    assert told == [wanted]


@glibc
def test_the_environment_switches_it_off():
    tuned, mapped = probe("tune", QTOOL_MALLOC="0")
    assert not tuned
    assert mapped >= 1


@glibc
def test_importing_qtool_leaves_the_process_alone():
    assert probe("import")[1] >= 1


def test_other_platforms_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert allocator.tune() is False


def test_other_c_libraries_are_left_alone(monkeypatch):
    class Musl:
        pass

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Musl())
    assert allocator.tune() is False


RELEASE = """
import ctypes, resource, sys
from qtool.system import allocator
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
if "tune" in sys.argv:
    allocator.tune()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
block, top = (ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size))) for size in (64 << 20, 1 << 20))
ctypes.memset(block, 1, 64 << 20)
libc.free(block)
kept = resident()
print(allocator.release(), (kept - resident()) >> 20)
"""


@glibc
def test_what_is_kept_can_be_given_back_where_it_is_kept():
    run = [sys.executable, "-c", RELEASE]
    tuned, plain = (
        subprocess.run([*run, *words], capture_output=True, text=True, check=True).stdout.split()
        for words in (["tune"], [])
    )
    assert tuned[0] == "True"
    assert int(tuned[1]) >= 60
    assert plain[0] == "False"


def test_what_is_settled_is_passed_over_by_the_collector_for_the_block(monkeypatch):
    gc.unfreeze()  # what the tests have frozen
    before = gc.get_freeze_count()  # Python 3.12 freezes a few objects of its own as it starts
    monkeypatch.setattr(allocator, "_tuned", False)
    with allocator.settled():
        assert gc.get_freeze_count() == before  # only the command line tunes
    monkeypatch.setattr(allocator, "_tuned", True)
    with allocator.settled():
        assert gc.get_freeze_count() > before + 1000
    assert gc.get_freeze_count() == 0


def test_the_collector_waits_for_the_end_of_a_block_and_stays_off_where_it_was_off():
    with allocator.uncollected():
        assert not gc.isenabled()
        with allocator.uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
