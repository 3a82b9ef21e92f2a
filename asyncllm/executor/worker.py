"""The executor thread's loop: plans in, results out, with one step queued behind another."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Final

import msgspec
import torch

from asyncllm.config import EngineLimits
from asyncllm.executor.compile_watch import CompileWatch
from asyncllm.executor.device import Device, DeviceLost
from asyncllm.executor.runner import ModelRunner, Ticket
from asyncllm.parallel.ranks import Alone, Ranks, RanksBroken
from asyncllm.wire.channel import CAPTURE, FLUSH, Channel
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import StepPlan, StepResult, decode_plan, decode_plan_head

log = logging.getLogger(__name__)

#: Errors after which no other step can run.
_FATAL: Final = (DeviceLost, RanksBroken)


class Worker:
    """Answers every plan with exactly one result, in order.

    With two steps in flight, the newest step is collected only after the next plan is launched
    behind it, so the device never idles. FLUSH announces that no such plan comes.

    CAPTURE calls ``capture_next``, which improves later steps, until it has returned False.

    A step that fails, or a plan that cannot be decoded, gives a result with an error, if it fails
    on all ranks. A failed page copy ends the worker, because the loop would wait for it forever.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: EngineLimits,
        device: Device,
        capture_next: Callable[[], bool] | None = None,
        watch: CompileWatch | None = None,
        ranks: Ranks | None = None,
    ):
        """
        Args:
            watch: says when a kernel is being compiled.
        """
        self.limits = limits
        self._watch = watch
        self._heartbeat = Heartbeat()
        self._runner: ModelRunner | None = runner
        self._device = device
        self._capture_next = capture_next
        self._ranks = ranks or Alone()

    @property
    def has_captures(self) -> bool:
        """Whether CAPTURE would do anything."""
        return self._capture_next is not None

    def run(self, channel: Channel) -> None:
        """Serve the channel until it closes, then release the device's memory."""
        assert self._runner is not None, "a worker runs once"
        self._heartbeat = channel.heartbeat
        if self._watch is not None:
            self._watch.report_to(channel.heartbeat)
        try:
            with torch.inference_mode():
                self._serve(self._runner, channel)
        except BaseException as error:
            _clear_frames(error)
            raise
        finally:
            with suppress(RuntimeError):  # of a lost device: the error itself says more
                self._device.check()  # no kernel may still use memory that is released
            self._runner = self._capture_next = None
            gc.collect()
            with suppress(RuntimeError):
                self._device.release()

    def _serve(self, runner: ModelRunner, channel: Channel) -> None:
        launched: deque[Ticket | StepResult] = deque()
        is_alone = self._ranks.size == 1

        def post(keep: int) -> None:
            """Post results of all but the newest ``keep`` steps, and of those that are done.

            Several ranks take no notice of what is done, as it may be done on one alone: rank 0
            would wait for a peer's report while the peer waits for the next message.
            """
            while launched and (len(launched) > keep or (is_alone and _done(launched[0]))):
                channel.post(self._collect(runner, launched.popleft()))

        while (message := self._receive(channel, is_idle=not launched)) is not None:
            if message == FLUSH:
                post(keep=0)
            elif message == CAPTURE:
                self._capture()
            else:
                post(keep=len(launched))
                launched.append(self._launch(runner, message))
                channel.launched()
                post(keep=self.limits.steps_in_flight - 1)
        post(keep=0)

    def _receive(self, channel: Channel, *, is_idle: bool) -> bytes | None:
        """The next message; None once the channel is closed."""
        self._heartbeat.enter("idle" if is_idle else "next plan")
        return channel.receive()

    def _capture(self) -> None:
        if self._capture_next is not None:
            self._heartbeat.enter("capture")
            if not self._capture_next():
                self._capture_next = None

    def _launch(self, runner: ModelRunner, message: bytes) -> Ticket | StepResult:
        """A launched step, or the result of one that could not be launched."""
        started = time.perf_counter()
        try:
            plan = decode_plan(message)
            self._heartbeat.enter("launch", plan.step)
        except msgspec.MsgspecError as error:
            head = decode_plan_head(message)
            # Its pages and copies do not come from requests, and later steps rely on them.
            kept = head.new_pages, (), head.copies
            runner.launch(StepPlan(head.step, b"", *kept, state_copies=head.state_copies))
            return self._failed(head.step, started, error)
        try:
            return runner.launch(plan)
        except _FATAL:
            raise
        except Exception as error:
            return self._failed(plan.step, started, error)

    def _collect(self, runner: ModelRunner, step: Ticket | StepResult) -> StepResult:
        if isinstance(step, StepResult):
            return step
        try:
            self._heartbeat.enter("wait" if step.num_rows else "copy", step.step)
            step.wait()
            self._heartbeat.enter("collect", step.step)
            return runner.collect(step)
        except _FATAL:
            raise
        except Exception as error:
            return self._failed(step.step, step.t_launch, error)

    def _failed(self, step: int, t_launch: float, error: Exception) -> StepResult:
        """Fail the step's requests and go on, unless the device or another rank is lost."""
        log.error("step %d failed", step, exc_info=error)
        self._ranks.agree(step)
        self._device.check()
        return StepResult(step, b"", (), repr(error), t_launch, time.perf_counter())


def _done(step: Ticket | StepResult) -> bool:
    return isinstance(step, StepResult) or step.done()


def _clear_frames(error: BaseException) -> None:
    """Drop the locals of failed frames, which hold the runner and so the device's memory."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


#: Without a plan for this long, the engine is idle.
IDLE_SECONDS: Final = 0.01
#: Beside streams, something is captured this often. A capture holds up all streams for 20 to 40 ms,
#: so fewer than one in a hundred of their tokens may be late: at most 250 tokens come meanwhile.
BUSY_SECONDS: Final = 4.0


class CapturePace:
    """A ``Channel`` that also gives CAPTURE: when the engine is idle, and at times behind a plan.

    Args:
        missing: whether something is left to capture.
    """

    def __init__(self, channel: Channel, missing: Callable[[], bool]):
        self.heartbeat = channel.heartbeat
        self._channel = channel
        self._missing = missing
        self._in_flight = 0
        self._behind_plan = False
        self._last = time.perf_counter()

    def receive(self, timeout: float | None = None) -> bytes | None:
        if self._missing():
            if self._behind_plan and time.perf_counter() - self._last > BUSY_SECONDS:
                return self._capture()
            if self._in_flight == 0:
                timeout = IDLE_SECONDS
        try:
            message = self._channel.receive(timeout)
        except Empty:
            return self._capture()
        self._behind_plan = message is not None and message != FLUSH
        self._in_flight += self._behind_plan
        return message

    def launched(self) -> None:
        self._channel.launched()

    def post(self, result: StepResult) -> None:
        self._in_flight -= 1
        self._channel.post(result)

    def _capture(self) -> bytes:
        self._behind_plan = False
        self._last = time.perf_counter()
        return CAPTURE
