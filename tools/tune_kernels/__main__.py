from __future__ import annotations

import sys

import torch

from asyncllm.kernels.gpu import gpu_of
from asyncllm.models.loading.hub import resolve_folder
from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import read_spec
from tools import tune_kernels
from tools.tune_kernels.layers import layers
from tools.tune_kernels.table import save
from tools.tune_kernels.timing import BUCKETS, compile_all, tune


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(tune_kernels.__doc__)
    if not torch.cuda.is_available():
        sys.exit("there is no GPU to measure")
    spec = read_spec(resolve_folder(sys.argv[1], weights=False))
    dtype = torch.bfloat16
    model = make_model(spec, dtype, torch.device("meta"), 1)
    kinds = list(dict.fromkeys(layers(model)))
    compile_all(kinds, dtype)
    for layer in kinds:
        for rows in BUCKETS:
            tuned = tune(layer, rows, dtype)
            path = save(gpu_of(torch.cuda.current_device()).name, rows, tuned.tiles)
            print(
                f"{rows} rows: {tuned.microseconds:.1f} us instead of "
                f"{tuned.library_microseconds:.1f}, {', '.join(shape.key for shape in layer)}"
            )
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
