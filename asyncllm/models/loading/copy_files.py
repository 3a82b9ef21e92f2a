"""Copy the tensors of a checkpoint to their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.models.loading.checkpoint import (
    DTYPES,
    Header,
    Reader,
    TorchFile,
    open_file,
    read_tensor,
)
from asyncllm.models.loading.quantized_tensors import StoredMatrix
from asyncllm.models.loading.weight_stream import WeightStream
from asyncllm.models.quant.formats import fill
from asyncllm.models.quant.place import Place, Sliced

#: Of tensors that are converted on the device, at once.
STAGED_BYTES = 1 << 30


class Source(NamedTuple):
    """A tensor or a quantised matrix of the checkpoint, and its place."""

    stored: Header | StoredMatrix
    place: Place


def copy_files(
    files: Sequence[Path],
    plans: Mapping[Path, list[Source]],
    device: torch.device,
    stream: WeightStream | None,
    report: Callable[[int, int], None],
) -> None:
    """Copy the tensors of all files.

    Args:
        plans: sources by the file that holds them, or the largest part of them.
        device: of the places.
        stream: to that device; without one, tensors are copied from mapped files.
        report: called with bytes done and the total.
    """
    sizes = {file: file.stat().st_size for file in files}
    total, done = sum(sizes.values()), 0
    for file in files:
        with open_file(file) as reader:
            copied = 0
            for num_bytes in _copies(file, reader, plans.get(file, []), device, stream):
                # Tensors that share memory in the file count twice.
                copied = min(copied + num_bytes, sizes[file])
                report(done + copied, total)
        done += sizes[file]
        report(done, total)


def _copies(
    file: Path,
    reader: Reader,
    sources: list[Source],
    device: torch.device,
    stream: WeightStream | None,
) -> Iterator[int]:
    """Copy a file's tensors to their places; yields the bytes of each copy."""
    if stream is not None:
        plain, rows, sources = _split(sources)
        if not isinstance(reader, TorchFile):
            yield from stream.copy(file, {**plain, **rows})
            yield from _stage(file, reader, sources, device, stream)
            return
        mapped = {name: reader.get_tensor(name).contiguous() for name in plain}
        yield from stream.copy_mapped(mapped, plain)
        for name, place in rows.items():
            tensor = reader.get_tensor(name)
            fill(place, tensor)
            yield tensor.nbytes
    for stored, target in sources:
        yield _copy(stored, target, file, reader, device)


class _Staged(NamedTuple):
    """A file of which some tensors are on the device already."""

    tensors: dict[str, Tensor]
    file: Reader

    def get_tensor(self, name: str, /) -> Tensor:
        found = self.tensors.get(name)
        return self.file.get_tensor(name) if found is None else found


def _stage(
    file: Path, reader: Reader, sources: list[Source], device: torch.device, stream: WeightStream
) -> Iterator[int]:
    """Stream tensors to the device, where they are converted; a part of the file at a time."""
    pending: list[Source] = []
    staged: dict[str, Tensor] = {}
    for source in sources:
        for header in _headers(source.stored):
            if header.file == file and header.dtype in DTYPES:
                dtype = DTYPES[header.dtype]
                staged[header.name] = torch.empty(header.shape, dtype=dtype, device=device)
        pending.append(source)
        if source is sources[-1] or sum(x.nbytes for x in staged.values()) >= STAGED_BYTES:
            yield from stream.copy(file, staged)
            for stored, target in pending:
                _copy(stored, target, file, _Staged(staged, reader), device)
            pending, staged = [], {}


def _headers(stored: Header | StoredMatrix) -> list[Header]:
    return [stored] if isinstance(stored, Header) else list(stored.tensors.values())


def _split(sources: list[Source]) -> tuple[dict[str, Tensor], dict[str, Sliced], list[Source]]:
    """Places by name of tensors, and of rows of tensors, that only change their dtype; the rest."""
    plain: dict[str, Tensor] = {}
    rows: dict[str, Sliced] = {}
    rest: list[Source] = []
    for stored, place in sources:
        if isinstance(stored, Header) and isinstance(place, Tensor) and place.is_contiguous():
            plain[stored.name] = place
        elif isinstance(stored, Header) and isinstance(place, Sliced) and _has_rows(place):
            rows[stored.name] = place
        else:
            rest.append(Source(stored, place))
    return plain, rows, rest


def _has_rows(sliced: Sliced) -> bool:
    """Whether the slices are whole rows of the tensor, in its order."""
    return all(
        part.dim == 0 and isinstance(part.place, Tensor) and part.place.is_contiguous()
        for part in sliced.slices
    )


def _copy(
    stored: Header | StoredMatrix, target: Place, file: Path, reader: Reader, device: torch.device
) -> int:
    """Fill a place from the open file, and others if needed; returns bytes read."""
    copied = 0

    def read(header: Header) -> Tensor:
        nonlocal copied
        tensor = reader.get_tensor(header.name) if header.file == file else read_tensor(header)
        copied += tensor.nbytes
        return tensor

    fill(target, read(stored) if isinstance(stored, Header) else stored.read(read, device))
    return copied
