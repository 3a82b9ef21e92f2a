"""A summary in place of a conversation, as OpenAI's clients ask for it when one gets too long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncllm.server.http.answer import encode
from asyncllm.server.responses import item_schemas as items
from asyncllm.server.responses import schemas
from asyncllm.server.responses.items import item_id
from asyncllm.server.responses.reply import ResponseReply
from asyncllm.server.responses.sealed import seal
from asyncllm.text.parsing import Content, Reasoning
from asyncllm.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.types import TokenDelta

#: What the model is asked at the end of the conversation, whose cached prefix serves it.
_ASKED: Final = (
    "Summarize this conversation. The summary replaces it: you will go on with nothing else. Say "
    "what the user wants and has said about how, what was decided and why, what was done and found "
    "(with the names of files, commands and functions that matter, and errors word by word), and "
    "what is left to do. Call no tools. Write the summary and nothing else."
)
#: Most tokens of a summary, unless the request says otherwise.
_MOST: Final = 4096


def ask_for_summary(chat: ChatRequest, context: int) -> None:
    """Make a chat end with the question for a summary.

    Args:
        context: tokens of prompt and answer together.
    """
    chat.messages = [*chat.messages, {"role": "user", "content": _ASKED}]
    chat.response_format = None
    if chat.tools:
        chat.tool_choice = "auto"  # the prompt keeps the tools, for the cache
    chat.max_tokens = chat.max_tokens or max(1, min(_MOST, context // 4))


class CompactionReply(ResponseReply):
    """A response whose only item is a compaction."""

    def __init__(self, *parts: Any, kept: Sequence[items.Item] | None = None, **options: Any):
        """
        Args:
            kept: items, whose messages of users the answer repeats; None for an answer that is a
                response.
        """
        super().__init__(*parts, **options)
        self._kept = kept
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        for event in self.read(delta):
            match event:
                case Content(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._thoughts.append(text)
        if delta.finish_reason is None:
            return b""
        if delta.finish_reason is FinishReason.LENGTH:
            self.finish_reason = FinishReason.STOP  # a long summary serves as well
        summary = "".join(self._texts).strip() or "".join(self._thoughts).strip()
        sealed = seal(summary or "(There is none.)")
        item = items.CompactionItem(id=item_id("cmp_", self.id, 0), encrypted_content=sealed)
        self.response.output.append(item)
        added = self._events.write(schemas.OutputItemAdded, output_index=0, item=item)
        return added + self._events.write(schemas.OutputItemDone, output_index=0, item=item)

    def body(self, outputs: list[TokenDelta]) -> bytes:
        whole = super().body(outputs)
        if self._kept is None:
            return whole
        response = self.response
        assert response.usage is not None
        [*_, compaction] = response.output
        assert isinstance(compaction, items.CompactionItem)
        said = [each for each in self._kept if isinstance(each, items.MessageItem)]
        return encode(
            schemas.CompactedResponse(
                id=response.id,
                created_at=response.created_at,
                output=[*(each for each in said if each.role == "user"), compaction],
                usage=response.usage,
            )
        )
