"""Makes a reasoning format of reasoning as a chat template writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from asyncllm.text.parsing.derived.calls import DERIVED
from asyncllm.text.parsing.derived.probe import RenderedReasoning
from asyncllm.text.parsing.formats import ReasoningFormat, is_tag

#: One tag of several, or all up to the next space.
_FIRST_MARKER = re.compile(r"<[^<>\s]*>(?=\s|<|\Z)|\[[^\[\]\n]*\]|\S+")
#: A word between two tags, the second of which ends other markers as well.
_WITH_WORD = re.compile(r"<[^<>\s]*>\w+(<[^<>\s]*>)\Z")


def derive_reasoning(
    rendered: RenderedReasoning, listed: Iterable[ReasoningFormat]
) -> ReasoningFormat | None:
    """The format of this reasoning: one that is listed if the markers are its own."""
    before, between = rendered.before.rstrip(), rendered.between.strip()
    for form in listed:
        end = next((end for end in form.ends if between.startswith(end)), "")
        if end and before.endswith(form.begins):
            return _with_answer(form, between.removeprefix(end), rendered.after, "")
    begin, header, closes = _begin(rendered, before, between)
    end = next(_markers(between, closes), "")
    if not is_tag(begin) or not is_tag(end):
        return None
    if begin == end:
        return None
    rest = between.removeprefix(end).strip()
    prompt = rendered.prompt.rstrip()
    words = prompt.rpartition(begin)[2] if begin in prompt else ""
    if words and end not in words:  # it belongs to the header, and words of its own follow
        begin = prompt.splitlines()[-1]
    ends: tuple[str, ...] = (end,)
    if header and rest.startswith(header):  # which calls follow as well
        ends, rest = (end + header, end), rest.removeprefix(header)
    return _with_answer(ReasoningFormat(DERIVED, (begin,), ends), rest, rendered.after, closes)


def _begin(rendered: RenderedReasoning, before: str, between: str) -> tuple[str, str, str]:
    """The marker that begins reasoning; the header before it that also begins other parts.

    And the tag that ends every marker; "" if there is none.
    """
    prompt = rendered.prompt.rstrip()
    begin = before.removeprefix(prompt).strip() if before.startswith(prompt) else ""
    if begin and len(begin.split()) == 1:
        tags = prompt.rpartition("<")
        return begin, tags[1] + tags[2], ""
    begin = (before.split() or [""])[-1]
    with_word = _WITH_WORD.search(begin)
    if with_word is not None and with_word[1] in between:
        return with_word[0], "", with_word[1]
    return begin, "", ""


def _markers(text: str, closes: str) -> Iterator[str]:
    """The markers with which a text begins: the first, or where a tag ends each, all of these."""
    text = text.lstrip()
    if not closes:
        if found := _FIRST_MARKER.match(text):
            yield found[0]
        return
    while closes in text:
        marker, _, text = text.partition(closes)
        yield marker + closes


def _with_answer(form: ReasoningFormat, between: str, after: str, closes: str) -> ReasoningFormat:
    """The format with the markers around the answer, if there are any."""
    begin, ends = between.strip(), tuple(_markers(after, closes))
    if not is_tag(begin) or not ends or not is_tag(ends[0]):
        return form
    return replace(form, answer=(begin, *ends))
