"""The scales of keys and values that checkpoints for an 8-bit KV cache have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.loading.checkpoint import Header, read_headers, read_tensor, text_part
from asyncllm.models.loading.weight_files import weight_files
from asyncllm.parallel.ranks import Ranks

#: The names: ``k_scale`` of the attention (compressed-tensors), ``k_proj.k_scale`` (ModelOpt),
#: ``k_proj.output_scale`` (Quark), and ``kv_scale`` of both. Scales of queries and of weights of
#: the softmax are for kernels that compute in 8 bits, and ours do not.
_NAME: Final = re.compile(
    r"\.layers\.(\d{1,9})\.[a-z_]*(?:attn|attention|mixer)\."
    r"(?:(?P<of>k|v|kv|q|prob|prob_output)_scale|"
    r"(?:[kqv]|qkv|qkqkv)_proj\.(?P<within>k|v|q)_scale|"
    r"(?P<output>[kqv])_proj\.output_scale)$"
)


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name scales what attention computes with."""
    return _NAME.search(name) is not None


def read_kv_scales(
    folder: Path, specs: Iterable[AttentionSpec], ranks: Ranks
) -> dict[int, tuple[Tensor, Tensor]]:
    """Scales of keys and values, float32 [num_kv_heads], of the layers that have both, by layer.

    A number is what is in the cache times the scale.

    Args:
        specs: of all layers, with this rank's heads.

    Raises:
        ModelError: a scale is not a finite number above 0, or there are not as many as heads.
    """
    stored: dict[int, dict[str, Header]] = {}
    for header in read_headers(weight_files(folder)):
        name = text_part(header.name)
        found = None if name is None else _NAME.search(name)
        if found is not None:
            whose = found["of"] or found["within"] or found["output"]
            for kind in whose if whose == "kv" else (whose,):
                stored.setdefault(int(found[1]), {})[kind] = header
    return {
        spec.layer: (_of_rank(own["k"], spec, ranks), _of_rank(own["v"], spec, ranks))
        for spec in specs
        if spec.shares is None and {"k", "v"} <= (own := stored.get(spec.layer, {})).keys()
    }


def _of_rank(header: Header, spec: AttentionSpec, ranks: Ranks) -> Tensor:
    """A rank's part of a tensor with one scale, or one for each head."""
    scales = read_tensor(header).float().flatten()
    heads, count = spec.num_kv_heads, scales.numel()
    if count == 1:
        scales = scales.expand(heads).clone()
    elif count == heads * ranks.size or (count and heads == 1 and ranks.size % count == 0):
        # With fewer heads than ranks, several ranks have the same one.
        first = ranks.rank * count // ranks.size
        scales = scales[first : first + heads]
    else:
        raise ModelError(
            f"{header.file}: tensor {header.name!r} has {count} scales, which do not fit "
            f"{heads * ranks.size} heads of keys and values"
        )
    wrong = scales[~(scales.isfinite() & (scales > 0))]
    if wrong.numel():
        raise ModelError(
            f"{header.file}: tensor {header.name!r} has the scale {wrong[0].item():g}, which is "
            "not a finite number above 0"
        )
    return scales
