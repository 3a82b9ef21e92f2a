"""Asking all replicas the same, each on a connection that only the two processes know."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from asyncllm.supervise.front.answers import MERGES, Answer, first, read_answer, refusal
from asyncllm.supervise.front.metrics import Own, Totals
from asyncllm.supervise.front.replica import Parcel, Replica
from asyncllm.supervise.front.request import PROBES
from asyncllm.supervise.poller import Expiring, Poller

log = logging.getLogger(__name__)

#: How long replicas may take, by what is asked. Then what the front knows takes the place of the
#: answer to a probe; and a replica that was late is not asked how it is until it answers a ping.
SECONDS: Final = {"health": 0.03, "ready": 0.03, "live": 1.0}
ASK_SECONDS: Final = 5.0
_HOW_IT_IS: Final = ("health", "ready")


class Question:
    """The answers so far, by the index of the replica.

    Attributes:
        request: what each is sent.
        received: bytes of each answer; None of a replica that has no process that answers.
        open: connections on which more may come.
        silent: replicas that have not answered in time, or could not be asked.
    """

    def __init__(
        self, what: str, request: bytes, tell: Callable[[Answer | None], None], count: int
    ):
        self.what = what
        self.request = request
        self.tell = tell
        self.received: list[bytes | None] = [None] * count
        self.open: dict[int, socket.socket] = {}
        self.silent: set[int] = set()


class Broadcast:
    """Questions to all replicas that are not answered yet, and what is known of all together.

    Attributes:
        own: what the front itself counts.
    """

    def __init__(self, poller: Poller, replicas: Sequence[Replica]):
        self.own = Own()
        self._poller = poller
        self._replicas = replicas
        self._totals = Totals(len(replicas))
        self._questions = {
            seconds: Expiring[Question](seconds) for seconds in (*SECONDS.values(), ASK_SECONDS)
        }

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do."""
        times = (waiting.deadline for waiting in self._questions.values())
        return min((at for at in times if at is not None), default=None)

    def lost(self, replica: int) -> None:
        """Its process has ended."""
        self._totals.lost(replica)
        self.own.deaths += 1

    def ask(self, what: str, request: bytes, tell: Callable[[Answer | None], None]) -> None:
        """
        Args:
            what: how their answers become one: a key of ``MERGES``, or "metrics".
            request: a whole one, on a connection that ends with its answer.
            tell: called with the answer of all; None if there is no replica.
        """
        question = Question(what, request, tell, len(self._replicas))
        for index, replica in enumerate(self._replicas):
            if not replica.is_there:
                continue
            hangs = replica.is_stopped or (what in _HOW_IT_IS and replica.is_silent)
            if hangs and what != "reload":
                question.silent.add(index)
            else:
                self._ask_one(question, index)
        self._questions[SECONDS.get(what, ASK_SECONDS)].add(question)
        self._end_if_answered(question)

    def joins(self, index: int) -> None:
        """This replica takes requests from now on. It was not asked to reload, and is to."""
        for question in self._questions[ASK_SECONDS]:
            if question.what == "reload":
                self._ask_one(question, index)

    def _ask_one(self, question: Question, index: int) -> None:
        try:
            ours, theirs = socket.socketpair()
        except OSError:  # there are no file descriptors
            question.silent.add(index)
            return
        ours.setblocking(False)
        question.received[index] = b""
        question.open[index] = ours
        self._poller.add(ours, partial(self._on_readable, question, index))
        self._replicas[index].hand_over(Parcel(0, theirs, question.request))

    def expire(self) -> None:
        """End what has waited long enough, and what waits for a replica that is stopped."""
        for index, replica in enumerate(self._replicas):
            if replica.is_stopped:
                self._wait_not_for(index)
        for question in [one for waiting in self._questions.values() for one in waiting.due()]:
            for index in list(question.open):
                question.silent.add(index)
                self._replicas[index].is_silent = True
                self._close(question, index)
            self._tell(question)

    def _wait_not_for(self, index: int) -> None:
        for question in [one for waiting in self._questions.values() for one in waiting]:
            if index in question.open and question.what != "reload":
                question.silent.add(index)
                self._close(question, index)
                self._end_if_answered(question)

    def drop(self) -> None:
        for waiting in self._questions.values():
            for question in waiting:
                for connection in question.open.values():
                    connection.close()
            waiting.clear()

    def _on_readable(self, question: Question, index: int) -> None:
        try:
            data = question.open[index].recv(2**18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received = question.received[index]
        if data and received is not None:
            question.received[index] = received + data
            return
        self._close(question, index)
        self._end_if_answered(question)

    def _close(self, question: Question, index: int) -> None:
        connection = question.open.pop(index)
        self._poller.remove(connection)
        connection.close()

    def _end_if_answered(self, question: Question) -> None:
        if not question.open:
            self._questions[SECONDS.get(question.what, ASK_SECONDS)].discard(question)
            self._tell(question)

    def _tell(self, question: Question) -> None:
        answers = [None if data is None else read_answer(data) for data in question.received]
        for index in question.silent:
            answers[index] = self._instead(question.what, index)
        try:
            answer = self._merged(question.what, answers)
        except Exception:  # it must not end the front, and with it all replicas
            log.exception("the answers to %r could not be put together", question.what)
            answer = None
        if question.what == "load" and not any(question.received):
            answer = None  # nobody has looked at the client's key
        question.tell(answer)

    def _merged(self, what: str, answers: Sequence[Answer | None]) -> Answer | None:
        return self._metrics(answers) if what == "metrics" else MERGES[what](answers)

    def _instead(self, what: str, index: int) -> Answer:
        """In the place of the answer of a replica that says nothing."""
        if what in PROBES.values():
            return self._replicas[index].known.instead(what)
        return refusal(f"replica {index} does not answer; try again")

    def _metrics(self, answers: Sequence[Answer | None]) -> Answer | None:
        if (found := first(answers)) is None or found.status != 200:
            return found
        pages = [
            None if answer is None or answer.status != 200 else answer.body.decode()
            for answer in answers
        ]
        self.own.ready = sum(replica.is_ready for replica in self._replicas)
        text = self.own.page() + self._totals.merged(pages)
        return found._replace(body=text.encode())
