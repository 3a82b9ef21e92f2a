from __future__ import annotations

import argparse
import sys

import torch

from asyncllm.kernels.gpu import gpu_of
from asyncllm.models.loading.hub import resolve_folder
from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import read_spec
from asyncllm.parallel.ranks import Alone, Apart
from tools import tune_kernels
from tools.tune_kernels.candidates import layers
from tools.tune_kernels.timing import BUCKETS, compile_all, save, tune


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.tune_kernels",
        description=tune_kernels.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument("--tp", type=int, default=1, help="tune the shares of so many GPUs")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU to measure")
    spec = read_spec(resolve_folder(args.model, weights=False))
    dtype = torch.bfloat16
    ranks = Apart(0, args.tp) if args.tp > 1 else Alone()
    model = make_model(spec, dtype, torch.device("meta"), 1, ranks=ranks)
    kinds = list(dict.fromkeys(layers(model, ranks)))
    compile_all(kinds, dtype)
    for rows in BUCKETS:
        for layer in kinds:
            tuned = tune(layer, rows, dtype)
            path = save(gpu_of(torch.cuda.current_device()).name, rows, tuned.tiles)
            print(
                f"{rows} rows: {tuned.microseconds:.1f} us instead of "
                f"{tuned.library_microseconds:.1f}, {', '.join(shape.key for shape in layer)}",
                flush=True,
            )
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
