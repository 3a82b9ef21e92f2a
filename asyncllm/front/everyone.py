"""Asking all replicas the same, each on a connection that only the two processes know."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncllm.front.answers import Answer, read_answer
from asyncllm.front.expiring import Expiring
from asyncllm.front.replica import Parcel, able
from asyncllm.front.request import closing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncllm.front.replica import Replica
    from asyncllm.supervise.poller import Poller

#: How long all of them may take; a replica without an answer by then has none.
ASK_SECONDS: Final = 5.0


class Question:
    """The answers so far, by the index of the replica."""

    def __init__(self, tell: Callable[[list[Answer | None]], None], count: int):
        self.tell = tell
        self.received: list[bytes | None] = [None] * count
        self.open: dict[int, socket.socket] = {}


class Everyone:
    """Questions that are not answered yet."""

    def __init__(self, poller: Poller):
        self._poller = poller
        self._questions: Expiring[Question] = Expiring(ASK_SECONDS)

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do."""
        return self._questions.deadline

    def ask(
        self,
        replicas: Sequence[Replica],
        request: bytes,
        tell: Callable[[list[Answer | None]], None],
    ) -> None:
        """
        Args:
            request: a whole one.
            tell: called with the answers: one for each replica, None of those that gave none.
        """
        question = Question(tell, len(replicas))
        for index in able(replicas):
            try:
                ours, theirs = socket.socketpair()
            except OSError:  # there are no file descriptors
                continue
            ours.setblocking(False)
            question.received[index] = b""
            question.open[index] = ours
            self._poller.add(ours, partial(self._on_readable, question, index))
            replicas[index].hand_over(Parcel(0, theirs, closing(request)))
        self._questions.add(question)
        self._end_if_answered(question)

    def expire(self) -> None:
        for question in self._questions.due():
            for index in list(question.open):
                question.received[index] = None
                self._close(question, index)
            self._tell(question)

    def drop(self) -> None:
        for question in self._questions:
            for connection in question.open.values():
                connection.close()
        self._questions.clear()

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
            self._questions.discard(question)
            self._tell(question)

    def _tell(self, question: Question) -> None:
        question.tell([None if data is None else read_answer(data) for data in question.received])
