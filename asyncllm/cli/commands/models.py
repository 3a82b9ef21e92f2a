"""``asyncllm models``: the families that are served, or what one model needs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from asyncllm.cli.options import add_model
from asyncllm.errors import ModelError

if TYPE_CHECKING:
    from asyncllm.models.registry import Family
    from asyncllm.models.spec import ModelSpec

_GIB: Final = 2**30

_FORMATS: Final = """\
Formats: safetensors in bfloat16, float16 or float32, or pytorch_model.bin where there are none.
fp8 (compressed-tensors or blocks of 128), AWQ and GPTQ (4 bits), and experts in MXFP4 stay
quantised on an NVIDIA GPU, and are converted to 16 bits or more where they are loaded on a CPU.
With --quantization fp8, checkpoints of 16 bits become fp8 while they are loaded.
Needs: 2 bytes of GPU memory a parameter in 16 bits, 1 in fp8, 0.6 in 4 bits, and room for keys and
values. 'asyncllm models MODEL' computes both; docs/models.md says what was tested where."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the families of models that are served, with the names that their config.json has "
        "in 'architectures'. With a MODEL, print its family and the memory that it needs; its "
        "weights are not downloaded."
    )
    add_model(parser, text="folder or hub id; lists all families by default")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    name = getattr(args, "model", None)
    print(_families() if name is None else _model(name))
    return 0


def _families() -> str:
    from asyncllm.models.registry import FAMILIES

    width = max(len(family.title) for family in FAMILIES)
    lines = [f"{family.title:{width}}  {_names(family)}" for family in FAMILIES]
    return "\n".join([*lines, "", _FORMATS])


def _names(family: Family) -> str:
    kinds = (
        (family.architectures, ""),
        (family.backbones, " (embeddings)"),
        (family.multimodal, " (text only)"),
    )
    return ", ".join(f"{name}{note}" for names, note in kinds for name in names)


def _model(name: str) -> str:
    from asyncllm.models import registry
    from asyncllm.models.loading.hub import resolve_folder
    from asyncllm.models.spec import read_spec

    folder = resolve_folder(name, weights=False)
    spec = read_spec(folder)
    family = registry.find(spec.architecture)
    if spec.architecture in family.multimodal:
        served = "its text part; requests with images are refused"
    else:
        served = "embeddings only" if spec.architecture in family.backbones else "yes"
    rows = {
        "family": f"{family.title} ({spec.architecture})",
        "served": served,
        "context": f"{spec.max_position_embeddings:,} tokens",
        "weights": _weights(spec),
        "KV cache": f"{spec.kv_bytes_per_token(2) / 1024:,.0f} KiB a token in 16 bits",
    }
    if state := spec.state_bytes(2):
        rows["state"] = (
            f"{state / 2**20:,.1f} MiB a sequence, and for each end of a chat that is cached"
        )
    return "\n".join(f"{title:9} {text}" for title, text in rows.items())


def _weights(spec: ModelSpec) -> str:
    from asyncllm.executor.sim.shape import shape_of

    try:
        shape = shape_of("auto", spec)
    except ModelError as error:
        return str(error)
    params, stored = shape.stored_params, spec.dtype
    if spec.quantization is not None:
        stored = f"{spec.quantization.method} ({shape.stored_bytes(2) / _GIB:.1f} GiB)"
    return (
        f"about {params / 1e9:.2f} billion parameters, stored as {stored}; "
        f"{2 * params / _GIB:.1f} GiB in 16 bits"
    )
