"""Every error a caller can meet, with the HTTP status the server answers it with."""

from __future__ import annotations

from typing import Literal


class AsyncLLMError(Exception):
    """Base of all errors asyncllm raises on purpose.

    ``status`` is the HTTP status; ``type`` and ``code`` fill OpenAI's error body.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class BadRequest(AsyncLLMError, ValueError):
    """The request can never be served as it stands; ``param`` names the offending field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """Prompt and answer together are longer than the context.

    The message has OpenAI's words for completions: LiteLLM, LangChain and others search for them.
    """

    code = "context_length_exceeded"

    def __init__(self, context: int, prompt: int, completion: int = 0, *, at_least: bool = False):
        """All in tokens.

        Args:
            completion: the least that is to be generated.
            at_least: the prompt was not tokenized; it has ``prompt`` tokens or more.
        """
        param = "prompt" if prompt >= context else "max_tokens"
        super().__init__("", param=param, code=self.code)
        self._context, self._prompt, self._completion = context, prompt, completion
        self._bound = "at least " if at_least else ""
        self.reword("completion")

    def reword(self, kind: Literal["completion", "chat", "anthropic"]) -> None:
        """Say it as OpenAI does of completions or of chats, or as Anthropic does."""
        context, prompt, completion = self._context, self._prompt, self._completion
        known = f"This model's maximum context length is {context} tokens"
        total = f"you requested {self._bound}{prompt + completion} tokens"
        if kind == "completion":
            self.message = (
                f"{known}, however {total} ({prompt} in your prompt; {completion} for the "
                "completion). Please reduce your prompt; or completion length."
            )
        elif kind == "chat" and prompt > context:
            self.message = (
                f"{known}. However, your messages resulted in {self._bound}{prompt} tokens. "
                "Please reduce the length of the messages."
            )
        elif kind == "chat":
            self.message = (
                f"{known}. However, {total} ({prompt} in the messages, {completion} in the "
                "completion). Please reduce the length of the messages or completion."
            )
        else:
            most = context if prompt > context else context - 1  # one token must be generated
            self.message = f"prompt is too long: {self._bound}{prompt} tokens > {most} maximum"
        self.args = (self.message,)


class KernelError(AsyncLLMError):
    """Kernels cannot be built here; the message says what is missing."""


class Unauthorized(AsyncLLMError):
    """The API key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(AsyncLLMError):
    """An unknown model or route."""

    status = 404
    type = "invalid_request_error"


class TooLarge(AsyncLLMError):
    """The HTTP body exceeds the server's limit."""

    status = 413
    type = "invalid_request_error"


class QueueFull(AsyncLLMError):
    """The engine has no room for another waiting request; ``retry_after`` is in seconds.

    ``cause`` is what is full: the queue's "requests" or "tokens", or its tenant's "share" of them.
    """

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float, cause: str = "requests"):
        super().__init__(message)
        self.retry_after = retry_after
        self.cause = cause


class RateLimited(AsyncLLMError):
    """A client has used what it may in a minute; ``retry_after`` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(AsyncLLMError):
    """The request's deadline has passed, or is too near to be met."""

    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"


class NotReady(AsyncLLMError):
    """The model is still loading, or the server is draining."""

    status = 503
    type = "server_error"
    code = "not_ready"


class Crowded(AsyncLLMError):
    """There are as many connections as the server may have."""

    status = 503
    type = "server_error"
    code = "too_many_connections"


class StepError(AsyncLLMError):
    """The model could not compute this request; the engine itself goes on."""

    code = "step_failed"


class PolicyError(AsyncLLMError):
    """The scheduling policy raised an exception for this request; the others go on."""

    code = "policy_failed"


class ConstraintError(AsyncLLMError):
    """What was asked of the output left no token to go on with; asking again would be no better."""

    status = 400
    type = "invalid_request_error"
    code = "constraint_failed"


class EngineDead(AsyncLLMError):
    """The executor is gone; no request can be served any more."""

    status = 503
    code = "engine_dead"


class ModelError(AsyncLLMError, ValueError):
    """A model folder cannot be served: unknown architecture, missing tensor, wrong shape..."""
