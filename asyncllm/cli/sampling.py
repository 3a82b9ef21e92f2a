"""Sampling options of the commands that generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_type_hints

import msgspec

from asyncllm.cli.options import add_option, config_from_args, given_options
from asyncllm.types import SamplingParams

if TYPE_CHECKING:
    import argparse

_HELP = {
    "max_tokens": "most tokens to generate; by default 256, in chats as many as fit the context",
    "temperature": "randomness; 0 always takes the likeliest token",
    "top_p": "sample from the likeliest tokens that together have this probability; 1 is off",
    "top_k": "sample from this many of the likeliest tokens; 0 is off",
    "min_p": "drop tokens whose probability is below this share of the likeliest token's; 0 is off",
    "presence_penalty": "make tokens less likely that were already generated, -2 to 2; 0 is off",
    "frequency_penalty": "as --presence-penalty, once for each time a token was used; 0 is off",
    "repetition_penalty": "above 1, make tokens of prompt and answer less likely; 1 is off",
    "stop": "text that ends the answer; may be repeated",
    "seed": "number that makes sampling repeatable",
    "ignore_eos": "do not stop at the model's end-of-sequence tokens",
}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options for the fields of SamplingParams that make sense for a whole run."""
    group = parser.add_argument_group("sampling, as the model recommends by default")
    hints = get_type_hints(SamplingParams)
    for name, text in _HELP.items():
        add_option(group, name, hints[name], text)


def check_sampling_options(args: argparse.Namespace) -> None:
    """Leave with a usage error if a value is out of range, before a model is loaded."""
    config_from_args(args, SamplingParams)


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams | None:
    """The options that were given, over ``defaults``; None if none was given."""
    given = given_options(args, SamplingParams)
    return msgspec.structs.replace(defaults, **given) if given else None
