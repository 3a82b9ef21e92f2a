"""A fake ``asyncllm.executor.startup.compile_kernels``; the job's dtype says what it does."""

from __future__ import annotations

import os
import sys
import time

import msgspec

from asyncllm.executor.startup.compile_job import CompileJob, CompileReport
from asyncllm.system.child_process import die_with


def send(report: CompileReport) -> None:
    print(msgspec.json.encode(report).decode(), flush=True)


def main(parent: int) -> int:
    die_with(parent)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
    send(CompileReport(1))
    if job.dtype == "dies":
        os._exit(3)
    if job.dtype == "fails":
        send(CompileReport(error="no compiler here"))
        return 1
    if job.dtype == "hangs":
        if os.fork() == 0:
            die_with(os.getppid())
        time.sleep(600)
    for ready in range(2, 6):
        time.sleep(0.05)
        send(CompileReport(ready))
    send(CompileReport(5, done=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
