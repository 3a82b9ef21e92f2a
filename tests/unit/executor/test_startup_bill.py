"""The start-up bill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncllm.executor.startup_bill import ProcessBill, StartupBill, StartupItem, process_seconds

GIB = 2**30


def test_phases_are_timed_in_order_with_the_memory_they_take() -> None:
    bill = StartupBill()
    free = iter([8 * GIB, 5 * GIB])
    with bill.phase("import"):
        time.sleep(0.01)
    with bill.phase("weights", free.__next__):
        pass
    imported, weights = bill.items
    assert imported.name == "import"
    assert imported.seconds >= 0.01
    assert imported.bytes == 0
    assert (weights.name, weights.bytes) == ("weights", 3 * GIB)
    assert bill.seconds == imported.seconds + weights.seconds
    assert bill.bytes == 3 * GIB


def test_memory_that_others_gave_back_is_nobodys() -> None:
    bill = StartupBill()
    free = iter([GIB, 2 * GIB])
    with bill.phase("profile", free.__next__):
        pass
    assert bill.items[0].bytes == 0


def test_a_phase_that_fails_is_not_entered() -> None:
    bill = StartupBill()
    with pytest.raises(RuntimeError), bill.phase("weights"):
        raise RuntimeError
    assert bill.items == []


def test_the_bill_has_a_line_for_each_phase_that_took_something_and_the_sum() -> None:
    bill = StartupBill()
    bill.items += [StartupItem("import", 1.234, 0), StartupItem("attention", 0.004, GIB // 300)]
    bill.items += [StartupItem("KV cache", 0.5, 3 * GIB), StartupItem("graphs", 0.0, 0)]
    assert str(bill).splitlines() == [
        "import       1.23 s     0.00 GiB",
        "KV cache     0.50 s     3.00 GiB",
        "in all       1.74 s     3.00 GiB",
    ]
    assert str(StartupBill()) == "in all     0.00 s     0.00 GiB"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux tells, others may not")
def test_a_process_knows_its_age() -> None:
    code = (
        "import time; time.sleep(0.3)\n"
        "from asyncllm.executor.startup_bill import process_seconds\nprint(process_seconds())"
    )
    begun = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.25 <= float(run.stdout) <= time.perf_counter() - begun + 0.05
    age = process_seconds()
    assert age is not None
    assert age > float(run.stdout)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux tells, others may not")
@pytest.mark.parametrize("pid", [None, os.getppid()], ids=["own", "parent"])
def test_the_bill_of_a_server_accounts_for_all_of_its_time(pid: int | None) -> None:
    before = process_seconds(pid)
    whole = ProcessBill(pid)
    bill = StartupBill()
    bill.items.append(StartupItem("weights", 0.01, GIB))
    time.sleep(0.1)
    server, weights, rest = whole.whole(bill).items
    assert before is not None
    assert (server.name, weights.name, rest.name) == ("server", "weights", "rest")
    assert server.seconds == pytest.approx(before, abs=0.05)
    assert rest.seconds >= 0.08
    age = process_seconds(pid)
    assert age is not None
    assert age - 0.05 <= whole.whole(bill).seconds + 0.02
    assert bill.items == [weights]


def test_the_bill_of_a_standby_begins_when_it_takes_over() -> None:
    whole = ProcessBill(since=time.monotonic() - 2.0)
    server, rest = whole.whole(StartupBill()).items
    assert 2.0 <= server.seconds < 2.5
    assert rest.seconds < 0.5


def test_the_bill_of_a_server_without_proc_is_that_of_loading() -> None:
    bill = StartupBill()
    assert ProcessBill(2**30).whole(bill) is bill
