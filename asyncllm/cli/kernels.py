"""``asyncllm kernels build``: compile attention kernels ahead of time."""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

from asyncllm.cli.options import usage_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.attention.prebuild import KernelModule
    from asyncllm.cli.options import Commands

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = ("64", "128", "256")


def add_command(commands: Commands) -> None:
    kernels = commands.add_parser(
        "kernels", help="compile attention kernels ahead of time", allow_abbrev=False
    )
    actions = kernels.add_subparsers(title="actions", metavar="ACTION", required=True)
    parser = actions.add_parser(
        "build",
        help="compile FlashInfer's kernels",
        description="Compile FlashInfer's kernels, which would otherwise be compiled when a model "
        "that needs them is first served. Needs nvcc, but no GPU; serving then needs neither nvcc "
        "nor ninja.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="CAPABILITY",
        help="compute capability to compile for, such as 8.0 (A100), 8.9 (L4, RTX 40) or 9.0a "
        "(H100, H200); may be repeated; this machine's GPUs by default",
    )
    parser.add_argument(
        "--model", metavar="TEXT", help="folder or hub id of a model: what its layers need"
    )
    parser.add_argument(
        "--head-dim",
        type=_list_of(_HEAD_DIMS),
        metavar="LIST",
        help="without --model: head sizes, among 64, 128 and 256 (default: 64,128)",
    )
    parser.add_argument(
        "--dtype",
        type=_list_of(_DTYPES),
        default=["bfloat16"],
        metavar="LIST",
        help="compute types, among bfloat16 and float16 (default: bfloat16)",
    )
    parser.add_argument(
        "--window",
        action="store_true",
        help="without --model: also for layers with a sliding window",
    )
    parser.add_argument(
        "--softcap",
        action="store_true",
        help="without --model: also for layers that cap their scores",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="compile again what is there; needed for another --arch",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    by_shape = args.head_dim is not None or args.window or args.softcap
    if args.model is not None and by_shape:
        usage_error(args, "--model says what --head-dim, --window and --softcap would")

    from asyncllm.attention import prebuild

    prebuild.prepare(args.arch)
    modules = _named_modules(args) if args.model is None else _model_modules(args)
    size = 0
    for module in modules:
        print(f"{module}: ", end="", flush=True)
        built = prebuild.build(module, force=args.force)
        took = "was there" if built.seconds is None else f"{built.seconds:.1f} s"
        print(f"{took}, {built.size / 2**20:.2f} MiB")
        size += built.size
    print(f"{len(modules)} libraries, {size / 2**20:.2f} MiB, in {built.path.parents[1]}")
    return 0


def _named_modules(args: argparse.Namespace) -> list[KernelModule]:
    import torch

    from asyncllm.attention.prebuild import KINDS, KernelModule

    windows = (False, True) if args.window else (False,)
    softcaps = (False, True) if args.softcap else (False,)
    return [
        KernelModule(kind, getattr(torch, dtype), int(head_dim), window, softcap)
        for dtype, head_dim, window, softcap, kind in itertools.product(
            args.dtype, args.head_dim or ["64", "128"], windows, softcaps, KINDS
        )
    ]


def _model_modules(args: argparse.Namespace) -> list[KernelModule]:
    import torch

    from asyncllm.attention.flashinfer import unsupported
    from asyncllm.attention.prebuild import KernelError, modules_for
    from asyncllm.models.hub import resolve_folder
    from asyncllm.models.registry import model_class
    from asyncllm.models.spec import read_spec

    spec = read_spec(resolve_folder(args.model))
    model_type = model_class(spec.architecture)
    modules = []
    for name in args.dtype:
        dtype = getattr(torch, name)
        layers = model_type(spec.config, dtype, torch.device("meta"), 1).attention_specs
        problem = unsupported(layers, dtype)
        if problem is not None:
            raise KernelError(f"{args.model} does not run on FlashInfer: {problem}")
        modules += modules_for(layers, dtype)
    return modules


def _list_of(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    """An argparse type: comma-separated values, each among ``choices``."""

    def parse(text: str) -> list[str]:
        values = text.split(",")
        for value in values:
            if value not in choices:
                raise argparse.ArgumentTypeError(f"{value!r} is not among {', '.join(choices)}")
        return values

    return parse
