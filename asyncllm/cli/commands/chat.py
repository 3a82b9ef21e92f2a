"""``asyncllm chat``: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from asyncllm.cli import options
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, BadRequest, EngineDead
from asyncllm.system.terminal import LoadingBar
from asyncllm.types import SamplingParams, TokenDelta

if TYPE_CHECKING:
    from asyncllm.llm.client.client import Client

Messages = list[dict[str, Any]]

_COMMANDS = """\
/reset          forget the conversation
/system TEXT    the same, and go on with another system prompt
/exit           leave, as Ctrl-D does; Ctrl-C stops an answer"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talk to a model, loaded here or served elsewhere.\nFrom a pipe, each line is a message."
    )
    parser.epilog = _COMMANDS
    options.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--url", help="talk to this server instead of loading a model; MODEL is then its name there"
    )
    parser.add_argument("--api-key", metavar="TEXT", help="key for that server")
    options.add_sampling_options(parser)
    options.add_config_options(parser, EngineConfig)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    options.check_sampling_options(args)
    config = options.config_from_args(args, EngineConfig)

    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.llm.loop_thread import LoopThread

    llm = _client(args) if args.url else AsyncLLM(config=config, progress=LoadingBar())
    with closing(LoopThread(llm)) as thread:
        if isinstance(llm, AsyncLLM) and llm.chat_template is None:
            raise BadRequest(
                f"{llm.model_name} has no chat template; give it one by --chat-template"
            )
        defaults = llm.default_params if isinstance(llm, AsyncLLM) else SamplingParams()
        params = options.sampling_params(args, defaults)
        return talk(
            Conversation(lambda messages: thread.iterate(llm.stream(messages, params)), args.system)
        )


def _client(args: argparse.Namespace) -> Client:
    from asyncllm.llm.client.client import Client

    options.refuse_engine_options(args)
    return Client(args.url, api_key=args.api_key, model=getattr(args, "model", None))


class Conversation:
    """The messages so far; ``answer`` streams the reply to them."""

    def __init__(
        self,
        answer: Callable[[Messages], Generator[TokenDelta, None, None]],
        system: str | None = None,
    ):
        self._answer = answer
        self._system = system
        self.messages: Messages = []
        self.reset()

    def reset(self, system: str | None = None) -> None:
        """Start over, with a new system prompt or the one before."""
        self._system = system or self._system
        self.messages = []
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

    def say(self, text: str) -> None:
        """Print the answer to a message as it arrives; Ctrl-C stops it and keeps the text so far.

        Raises:
            AsyncLLMError, OSError: there is no answer; the message is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        try:
            # Closing the generator cancels the request after a Ctrl-C.
            with suppress(KeyboardInterrupt), closing(self._answer(self.messages)) as deltas:
                for delta in deltas:
                    parts.append(delta.text)
                    print(delta.text, end="", flush=True)
        finally:
            print()
            if parts:
                self.messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                self.messages.pop()


def talk(conversation: Conversation) -> int:
    """Read messages and commands from stdin until its end; returns the exit code.

    Raises:
        EngineDead: no message can be answered any more.
    """
    typing = sys.stdin.isatty()
    if typing:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() editing and history
        print(_COMMANDS)
    failed = False
    while True:
        try:
            line = input("> " if typing else "").strip()
        except EOFError:
            return 1 if failed and not typing else 0
        except KeyboardInterrupt:
            if not typing:
                raise
            print()
            continue
        command, _, argument = line.partition(" ")
        if command == "/exit":
            return 0
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.reset(argument)
        elif line.startswith("/"):
            print(_COMMANDS)
        elif line:
            failed |= not _answered(conversation, line)


def _answered(conversation: Conversation, text: str) -> bool:
    try:
        conversation.say(text)
    except EngineDead:
        raise
    except (AsyncLLMError, OSError) as error:
        print(f"asyncllm: error: {error}", file=sys.stderr)
        return False
    return True
