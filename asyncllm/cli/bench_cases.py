"""The cases of ``asyncllm bench`` that its options choose."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Final, TypeVar

from asyncllm.cli.answer_file import say
from asyncllm.cli.given_prompts import CLIENTS, GivenPrompts
from asyncllm.cli.options import usage_error
from asyncllm.lab.bench import cases

#: Tokens of prompts and of answers by default.
LENGTHS: Final = (512, 128)

C = TypeVar("C", cases.OfflineCase, cases.OnlineCase)


def read_prompts(args: argparse.Namespace) -> GivenPrompts | None:
    """The prompts of the file of --prompts, if it is given.

    Raises:
        BadRequest, OSError: the file is wrong; the message has the line.
    """
    if args.prompts is None:
        if args.column is not None:
            usage_error(args, "--column is one of the file of --prompts")
        return None
    if args.cases or args.input_len:
        usage_error(args, "--prompts are run instead of --cases, and have their own --input-len")
    max_tokens = args.output_len or LENGTHS[1]
    return GivenPrompts(args.prompts, args.column, args.num_prompts, max_tokens)


def offline_cases(args: argparse.Namespace) -> list[cases.OfflineCase] | None:
    """The cases that the options name; None if that depends on the device."""
    lengths = _given_lengths(args)
    if lengths or args.num_prompts:
        return [cases.own_offline(*(lengths or LENGTHS), args.num_prompts or CLIENTS)]
    return _named(args, cases.OFFLINE) if args.cases else None


def default_cases(device: str) -> list[cases.OfflineCase]:
    """The offline cases of a device, if the options name none."""
    if device != "cpu":
        return list(cases.OFFLINE)
    names = ",".join(case.name for case in cases.OFFLINE)
    say(f"on a CPU, two small cases are run; for all: --cases {names}")
    return list(cases.OFFLINE_CPU)


def online_cases(args: argparse.Namespace) -> list[cases.OnlineCase]:
    """The cases that are named, or those of the given loads, lengths or prompts."""
    prompts, lengths = read_prompts(args), _given_lengths(args)
    if prompts is not None:
        return prompts.online_cases(args.clients, args.rates)
    if not (args.clients or args.rates or lengths or args.num_prompts):
        return _named(args, cases.online(args.seed))
    if args.cases:
        usage_error(args, "--cases are not run beside --clients or --rates")
    num_in, num_out = cases.PROMPT_TOKENS, cases.OUTPUT_TOKENS
    if lengths:
        num_in, num_out = ((n, n) for n in lengths)
    clients = args.clients or ([] if args.rates else [CLIENTS])
    swept = cases.sweep(clients, args.rates, args.seed, num_in, num_out, args.num_prompts)
    return list(swept)


def fitting_cases(
    chosen: Iterable[cases.OnlineCase], max_model_len: int | None
) -> list[cases.OnlineCase]:
    """The cases that fit the context, as far as the server tells its length."""
    fitting = []
    for case in chosen:
        if max_model_len is None or case.longest <= max_model_len:
            fitting.append(case)
        else:
            say(f"{case.name}: skipped, the context is too short for it")
    return fitting


def _given_lengths(args: argparse.Namespace) -> tuple[int, int] | None:
    """Tokens of prompts and answers, if the options say so."""
    if args.cases and (args.input_len or args.output_len or args.num_prompts):
        usage_error(args, "--cases have lengths and numbers of prompts of their own")
    if not (args.input_len or args.output_len):
        return None
    return args.input_len or LENGTHS[0], args.output_len or LENGTHS[1]


def _named(args: argparse.Namespace, known: Iterable[C]) -> list[C]:
    """The cases of --cases, in that order, or all."""
    by_name = {case.name: case for case in known}
    names = args.cases or list(by_name)
    for name in names:
        if name not in by_name:
            usage_error(args, f"no case {name!r} among {', '.join(by_name)}")
    return [by_name[name] for name in names]
