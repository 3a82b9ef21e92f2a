"""Sampling options of the commands that generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_type_hints

import msgspec

from asyncllm.cli.options import add_option, config_from_args, given_options
from asyncllm.types import SamplingParams

if TYPE_CHECKING:
    import argparse

_HELP = {
    "max_tokens": "most tokens to generate; by default 256, and in chats what fits the context",
    "temperature": "randomness; 0 always takes the likeliest token",
    "top_p": "sample from the likeliest tokens that together have this probability; 1 is off",
    "top_k": "sample from this many of the likeliest tokens; 0 is off",
    "min_p": "drop tokens less likely than this share of the likeliest; 0 is off",
    "presence_penalty": "make tokens that were generated before less likely, -2 to 2; 0 is off",
    "frequency_penalty": "the same, once for each time they were generated; 0 is off",
    "repetition_penalty": "above 1, make tokens of prompt and answer less likely; 1 is off",
    "stop": "text that ends the answer; may be repeated",
    "seed": "number that makes sampling repeatable",
    "ignore_eos": "go on after the model's end-of-sequence tokens",
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
