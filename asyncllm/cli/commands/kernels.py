"""``asyncllm kernels build``: compile GPU kernels ahead of time."""

from __future__ import annotations

import argparse
import itertools
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from asyncllm.cli.options import add_options, config_from_args, usage_error
from asyncllm.cli.parser import CommandParser, list_of, one_of
from asyncllm.config import EngineConfig
from asyncllm.executor.startup.compile_job import OPTIONS

if TYPE_CHECKING:
    import torch

    from asyncllm.attention.flashinfer.library import Capability, Library
    from asyncllm.models.spec import ModelSpec

_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = ("64", "128", "256")


def configure(kernels: CommandParser) -> None:
    """Add the actions of the command."""
    actions = kernels.add_subparsers(title="actions", metavar="ACTION", required=True)
    parser = actions.add_parser(
        "build",
        help="compile the kernels of a model",
        description="Compile GPU kernels ahead of time. Otherwise they are compiled when a model "
        "that needs them is first served. With a MODEL, these are our own kernels, "
        "which Triton compiles for the model's sizes, and with --attention flashinfer "
        "FlashInfer's as well. Without a MODEL, they are only FlashInfer's. It needs "
        "no GPU, but gcc for our kernels and nvcc for FlashInfer's. Serving then "
        "needs no compiler.",
    )
    parser.add_argument(
        "named",
        nargs="*",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="folder or hub id of a model to be served; its weights are not needed",
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
        "--model",
        dest="models",
        action="append",
        default=[],
        metavar="MODEL",
        help="another way to name a MODEL; may be repeated",
    )
    parser.add_argument(
        "--head-dim",
        type=list_of(one_of(_HEAD_DIMS)),
        metavar="LIST",
        help="without a MODEL: head sizes, among 64, 128 and 256 (default: 64,128)",
    )
    parser.add_argument(
        "--dtype",
        dest="dtypes",  # EngineConfig.dtype is a single one
        type=list_of(one_of(_DTYPES)),
        default=["bfloat16"],
        metavar="LIST",
        help="compute types, among bfloat16 and float16 (default: bfloat16)",
    )
    parser.add_argument(
        "--window",
        action="store_true",
        help="without a MODEL: also compile for layers with a sliding window",
    )
    parser.add_argument(
        "--softcap",
        action="store_true",
        help="without a MODEL: also compile for layers that cap their scores",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="compile FlashInfer's kernels again even if they exist; needed for another --arch",
    )
    add_options(parser, EngineConfig, (*OPTIONS, "kernel_cache"), "as the model will be served")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    by_shape = args.head_dim is not None or args.window or args.softcap
    models = models_of(args)
    if models and by_shape:
        usage_error(args, "--head-dim, --window and --softcap are for builds without a MODEL")
    config = config_from_args(args, EngineConfig)
    folders = _folders(models)
    if not folders or config.attention == "flashinfer":
        _build_flashinfer(args, folders, config)
    if folders:
        _build_triton(args, folders, config)
    return 0


def models_of(args: argparse.Namespace) -> list[str]:
    """The models named, as arguments or by --model."""
    named: list[str] = getattr(args, "named", [])
    if named and args.models and set(named) != set(args.models):
        usage_error(args, f"different models are named: {' '.join(named)}, and by --model")
    return named or list(args.models)


def _folders(models: list[str]) -> dict[str, Path]:
    from asyncllm.models.loading.hub import resolve_folder

    return {name: resolve_folder(name, weights=False) for name in models}


def _build_flashinfer(
    args: argparse.Namespace, folders: dict[str, Path], config: EngineConfig
) -> None:
    import torch

    from asyncllm.executor.startup import flashinfer_prebuild as prebuild
    from asyncllm.models.spec import read_spec

    specs = {name: read_spec(folder) for name, folder in folders.items()}
    gpus = prebuild.prepare(args.arch)
    size = 0
    of_cache = torch.float8_e4m3fn if config.has_fp8_cache else None
    libraries = _libraries(args, specs, gpus, of_cache)
    for library in libraries:
        print(f"{library}: ", end="", flush=True)
        built = prebuild.build(library, force=args.force)
        took = "was there" if built.seconds is None else f"{built.seconds:.1f} s"
        print(f"{took}, {built.size / 2**20:.2f} MiB")
        size += built.size
    if libraries:
        folder = built.path.parents[1]
        print(f"{len(libraries)} of FlashInfer's libraries, {size / 2**20:.2f} MiB, in {folder}")


def _libraries(
    args: argparse.Namespace,
    specs: dict[str, ModelSpec],
    gpus: list[Capability],
    of_cache: torch.dtype | None,
) -> list[Library]:
    """FlashInfer's libraries for the models or, without any, for the options."""
    import torch

    from asyncllm.attention.flashinfer.library import libraries_by_size, libraries_for, unsupported
    from asyncllm.models.loading.loader import make_model

    dtypes = [getattr(torch, name) for name in args.dtypes]
    libraries: list[Library] = []
    if not specs:
        head_dims = [int(size) for size in args.head_dim or ("64", "128")]
        windows, softcaps = range(args.window + 1), range(args.softcap + 1)
        for dtype, size, w, s in itertools.product(dtypes, head_dims, windows, softcaps):
            libraries += libraries_by_size(dtype, size, bool(w), bool(s), gpus)
    for (name, spec), dtype in itertools.product(specs.items(), dtypes):
        model = make_model(spec, dtype, torch.device("meta"), 1)
        problem = unsupported(model.cached_specs, dtype)
        if problem is not None:
            print(f"{name} does not run on FlashInfer: {problem}")
            continue
        for gpu in gpus:
            libraries += libraries_for(model.cached_specs, dtype, gpu, of_cache)
    return list(dict.fromkeys(libraries))


def _build_triton(args: argparse.Namespace, folders: dict[str, Path], config: EngineConfig) -> None:
    from asyncllm.executor.startup.compile_job import CompileJob
    from asyncllm.executor.startup.kernel_compiler import KernelCompiler
    from asyncllm.executor.startup.triton_prebuild import gpus_of

    for gpu in gpus_of(args.arch):
        for (name, folder), dtype in itertools.product(folders.items(), args.dtypes):
            started = time.perf_counter()
            job = CompileJob.of(config, folder, gpu, dtype)
            with closing(KernelCompiler()) as compiler:
                compiler.begin(job)
                count = compiler.wait()
            print(
                f"{name}: {count} of Triton's kernels in {dtype} for {gpu.name}: "
                f"{time.perf_counter() - started:.1f} s, in {job.cache}"
            )
