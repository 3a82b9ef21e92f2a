"""Text to tokens and back: tokenizer, detokenizer, stop strings, chat template. No torch here."""

from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.decoding import Detokenizer
from asyncllm.text.stop import StopStrings
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer"]
