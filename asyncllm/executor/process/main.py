"""The executor's process: rank 0, with a worker as the executor thread has it.

The main thread runs the worker. Other threads load the tokenizer and serve ``Control``.
"""

from __future__ import annotations

import gc
import logging
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.executor.process.control import Control
from asyncllm.executor.process.reports import Failed, Progress, Started
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.executor.team.machines import Machines
from asyncllm.executor.team.peer_main import enter_team
from asyncllm.executor.team.status import PeerHeartbeat, PeerStatus
from asyncllm.models.spec import read_spec
from asyncllm.text.structured import StructuredOutput
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.wire.channel import LeaderChannel
from asyncllm.wire.socket_channel import SocketChannel

log = logging.getLogger(__name__)


class ExecutorSettings(msgspec.Struct, frozen=True):
    """What the process starts with.

    Attributes:
        folder: of the model.
        text_folder: of the tokenizer.
        plans, control: descriptors of sockets.
        log_level: as a number.
        machines: as ``build_leader`` takes it.
    """

    config: EngineConfig
    folder: str
    text_folder: str
    plans: int
    control: int
    log_level: int
    machines: Machines | None


def main() -> None:
    settings, status = enter_team(ExecutorSettings)
    logging.getLogger().setLevel(settings.log_level)
    structured = StructuredOutput()
    control = Control(socket.socket(fileno=settings.control), structured)
    try:
        run = _load(settings, status, control, structured)
        status.set("idle", -1)
        run(SocketChannel(socket.socket(fileno=settings.plans), PeerHeartbeat(status)))
    except BaseException as error:
        failed = Failed.of(error)
        if failed.kind == "other":
            log.exception("the executor ends")
        control.tell(failed)
        sys.exit(1)
    finally:
        structured.close()


def _load(
    settings: ExecutorSettings, status: PeerStatus, control: Control, structured: StructuredOutput
) -> Callable[[LeaderChannel], None]:
    """What serves a channel, once the model is loaded."""
    config, folder, bill = settings.config, Path(settings.folder), StartupBill()
    spec = read_spec(folder, config.hf_overrides)
    status.set("importing", -1)
    with bill.phase("import"):
        from asyncllm.executor.leader import build_leader

    status.set("loading", -1)
    with ThreadPoolExecutor(1) as threads:
        # It needs the GIL all the time, as imports do; reading weights does not.
        tokenizer = threads.submit(Tokenizer.from_folder, Path(settings.text_folder))
        leader = build_leader(
            config,
            folder,
            spec,
            lambda done, total: control.tell(Progress(done, total)),
            bill,
            structured,
            control.await_kernels,
            settings.machines,
        )
    limits = leader.limits
    structured.open(tokenizer.result(), limits.vocab_size, limits.eos_token_ids)
    # As in the server: a full collection would hold up a step.
    gc.freeze()
    control.tell(Started(limits, tuple(bill.items)))
    return leader.run


if __name__ == "__main__":
    main()
