"""FlashInfer's functions as far as the backend relies on them, in plain torch.

Plans go through the same memory as FlashInfer's: written to the staging memory, copied to the
workspace, and read there by the launch. What a captured launch pads its work with is left as it was
in the staging memory, which is garbage after each plan.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.flashinfer.library import Library

#: FlashInfer's log-sum-exp of no scores: its minus infinity is finite.
_NO_KEYS = -5e4


def load(library: Library) -> Any:
    """In place of ``Library.load``."""
    if library.template == "decode":
        return SimpleNamespace(plan=_plan_decode, run=_run_decode)
    is_fa3 = library.template == "fa3"
    plan = _plan_fa3 if is_fa3 else _plan_fa2
    run = _run_fa3 if is_fa3 else _run_fa2
    return SimpleNamespace(plan=plan, paged_run=run)


def _plan_decode(
    partial: Tensor,
    memory: Tensor,
    staged: Tensor,
    kv_indptr: Tensor,
    batch: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    captured: bool,
    *options: Any,
) -> list[int]:
    assert len(options) == 6
    pages = _host(kv_indptr, batch + 1)
    _copy(np.diff(pages), staged, memory)
    return [batch, captured]


def _run_decode(
    *,
    int_workspace_buffer: Tensor,
    plan_info_vec: list[int],
    q: Tensor,
    paged_kv_indptr: Tensor,
    **launch: Any,
) -> None:
    batch = plan_info_vec[0]
    assert len(q) == batch == len(paged_kv_indptr) - 1
    planned = _ints(int_workspace_buffer, batch)
    assert planned.tolist() == paged_kv_indptr.diff().tolist()
    for row in range(batch):
        keys = _length(row, paged_kv_indptr, launch)
        _attend(q, row, row + 1, int(paged_kv_indptr[row]), keys, **launch)


def _plan_prefill(
    memory: Tensor,
    staged: Tensor,
    indptrs: tuple[Tensor, Tensor],
    lengths: Tensor,
    shape: tuple[int, int, int, bool],
) -> list[int]:
    """The plan: the rows, then the numbers of those that are work to do."""
    tokens, batch, page_size, captured = shape
    q_indptr, kv_indptr = (_host(indptr, batch + 1) for indptr in indptrs)
    assert int(q_indptr[-1]) <= tokens
    assert (np.diff(q_indptr) >= 0).all()
    assert np.diff(kv_indptr).tolist() == (-(-_host(lengths, batch) // page_size)).tolist()
    rows = np.stack([q_indptr[:-1], q_indptr[1:], kv_indptr[:-1], lengths.numpy()])
    work = np.flatnonzero(np.diff(q_indptr)).astype(np.int32)
    padded = batch + 3 if captured else len(work)
    _copy(np.concatenate([rows.ravel(), work]), staged, memory, 4 * (4 * batch + padded))
    return [batch, padded, captured]


def _plan_fa2(
    partial: Tensor,
    memory: Tensor,
    staged: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    lengths: Tensor,
    tokens: int,
    batch: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    captured: bool,
    *options: Any,
) -> list[int]:
    assert len(options) == 7
    assert int(q_indptr[0]) == 0  # results of the first row go to token 0
    shape = tokens, batch, page_size, captured
    return _plan_prefill(memory, staged, (q_indptr, kv_indptr), lengths, shape)


def _plan_fa3(
    partial: Tensor,
    memory: Tensor,
    staged: Tensor,
    q_indptr: Tensor,
    kv_indptr: Tensor,
    lengths: Tensor,
    tokens: int,
    batch: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    captured: bool,
    *options: Any,
) -> list[int]:
    assert len(options) == 4
    _, padded, _ = _plan_prefill(
        memory, staged, (q_indptr, kv_indptr), lengths, (tokens, batch, page_size, False)
    )
    count = torch.tensor([padded], dtype=torch.int32)
    memory[-4:] = count.view(torch.uint8)  # FA3 reads on the device how much work there is
    return [batch, captured]


def _run_fa2(
    *,
    int_workspace_buffer: Tensor,
    plan_info_vec: list[int],
    q: Tensor,
    qo_indptr: Tensor,
    paged_kv_indptr: Tensor,
    **launch: Any,
) -> None:
    batch, padded, _ = plan_info_vec
    planned = _ints(int_workspace_buffer, 4 * batch + padded)
    for row in planned[4 * batch :].tolist():
        assert 0 <= row < batch
        begin, end = qo_indptr[row : row + 2].tolist()
        first = int(paged_kv_indptr[row])
        keys = _length(row, paged_kv_indptr, launch)
        assert planned[: 4 * batch].reshape(4, batch)[:, row].tolist() == [begin, end, first, keys]
        _attend(q, begin, end, first, keys, **launch)


def _run_fa3(
    *, int_workspace_buffer: Tensor, plan_info_vec: list[int], q: Tensor, **launch: Any
) -> None:
    batch, _ = plan_info_vec
    work = int(int_workspace_buffer[-4:].view(torch.int32))
    planned = _ints(int_workspace_buffer, 4 * batch + work)
    for row in planned[4 * batch :].tolist():
        begin, end, first, keys = planned[: 4 * batch].reshape(4, batch)[:, row].tolist()
        assert 0 < end - begin <= keys
        _attend(q, begin, end, first, keys, **launch)


def _attend(
    q: Tensor,
    begin: int,
    end: int,
    first: int,
    keys: int,
    *,
    paged_k_cache: Tensor,
    paged_v_cache: Tensor,
    paged_kv_indices: Tensor,
    o: Tensor,
    maybe_lse: Tensor | None,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
    **_: Any,
) -> None:
    """Queries [begin, end) are the last ones of a row with so many keys."""
    lse = torch.empty(q.shape[:2]) if maybe_lse is None else maybe_lse
    assert lse.dtype == torch.float32
    assert lse.shape == q.shape[:2]
    assert lse.is_contiguous()
    if keys == 0:
        o[begin:end] = 0
        lse[begin:end] = _NO_KEYS
        return
    page_size = paged_k_cache.shape[1]
    pages = paged_kv_indices[first : first + -(-keys // page_size)].long()
    group = q.shape[1] // paged_k_cache.shape[2]
    k, v = (
        cache[pages].flatten(0, 1)[:keys].to(q.dtype) for cache in (paged_k_cache, paged_v_cache)
    )
    k, v = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (k, v))
    scores = q[begin:end].transpose(0, 1) @ k.transpose(1, 2) * sm_scale
    if logits_soft_cap > 0:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    own = torch.arange(keys - (end - begin), keys)[:, None]
    key = torch.arange(keys)
    hidden = key > own
    if window_left >= 0:
        hidden |= key < own - window_left
    scores = scores.masked_fill(hidden, -torch.inf)
    o[begin:end] = (scores.softmax(-1) @ v).transpose(0, 1)
    lse[begin:end] = scores.logsumexp(-1).T / math.log(2)


def _length(row: int, kv_indptr: Tensor, launch: dict[str, Any]) -> int:
    """As the kernels compute it on the device."""
    num_pages = int(kv_indptr[row + 1] - kv_indptr[row])
    if num_pages == 0:
        return 0
    page_size = launch["paged_k_cache"].shape[1]
    return (num_pages - 1) * int(page_size) + int(launch["paged_kv_last_page_len"][row])


def _host(tensor: Tensor, length: int) -> np.ndarray:
    assert tensor.dtype == torch.int32
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert len(tensor) == length
    return tensor.numpy()


def _ints(memory: Tensor, count: int) -> np.ndarray:
    return memory[: 4 * count].view(torch.int32).numpy()


def _copy(plan: np.ndarray, staged: Tensor, memory: Tensor, num_bytes: int | None = None) -> None:
    """Through the staging memory, where other plans then leave garbage."""
    _ints(staged, plan.size)[:] = plan
    num_bytes = plan.size * 4 if num_bytes is None else num_bytes
    memory[:num_bytes] = staged[:num_bytes]
    staged.fill_(255)
