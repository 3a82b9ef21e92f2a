"""Stop strings: cuts a text, and holds back text that may begin a stop string."""

from __future__ import annotations


class StopStrings:
    """Cuts one sequence's text at the first stop string, however the text is cut into pieces.

    The stop string that is complete first wins; of several that end at the same character, the
    longest. So a sequence ends with the token that completes a stop string.

    Attributes:
        matched: the stop string that ended the text; None so far. Nothing is delivered after it.
    """

    __slots__ = ("_first_chars", "_include", "_partial", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], include: bool = False):
        """``include`` keeps the stop string itself at the end of the text. Stops are not empty."""
        self._stops = stops
        self._include = include
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._partial = ""  # the longest end of the text so far that may grow into a stop string
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece of text; return what can be delivered now."""
        if self.matched is not None:
            return ""
        if not self._partial and self._first_chars.isdisjoint(text):
            return text
        # With include the partial match was shown already: it is text in any case.
        held = len(self._partial)
        shown = held if self._include else 0
        text = self._partial + text
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            # Stop strings that are complete in the held text have been passed over.
            if (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        if found:
            end, start, self.matched = min(found)
            self._partial = ""
            return text[shown : end if self._include else start]
        return self._hold(text, shown)

    def pass_over(self, text: str) -> str:
        """Take text without ending at a stop string that is complete in it.

        Later text may complete a stop string that begins in it.
        """
        shown = len(self._partial) if self._include else 0
        return self._hold(self._partial + text, shown)

    def _hold(self, text: str, shown: int) -> str:
        """Hold the end of the text that may begin a stop string; ``shown`` of it was shown."""
        partial_at = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._partial = text[partial_at:]
        return text[shown:] if self._include else text[:partial_at]

    def finish(self) -> str:
        """The text has ended: return the text held back."""
        held, self._partial = self._partial, ""
        return "" if self._include else held


class LateStopStrings(StopStrings):
    """Stop strings that count only once they are complete after a number of pieces of text."""

    __slots__ = ("_num_early",)

    def __init__(self, stops: tuple[str, ...], include: bool, num_early: int):
        super().__init__(stops, include)
        self._num_early = num_early

    def push(self, text: str) -> str:
        if self._num_early:
            self._num_early -= 1
            return self.pass_over(text)
        return super().push(text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
