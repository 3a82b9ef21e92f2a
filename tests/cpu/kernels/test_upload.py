"""Arrays that travel together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.kernels.upload import upload_aligned


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_keep_their_values_and_begin_aligned(dtype: type[np.integer]) -> None:
    uploads = []

    def upload(array: np.ndarray) -> torch.Tensor:
        uploads.append(array)
        return torch.from_numpy(array)

    lengths = (0, 1, 4, 5, 0, 3, 17)
    arrays = [np.arange(length, dtype=np.int64) + 7 for length in lengths]
    tensors = upload_aligned(arrays, dtype, upload)
    assert len(uploads) == 1
    start = torch.from_numpy(uploads[0]).data_ptr()
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.numpy().dtype == dtype
        assert tensor.tolist() == array.tolist()
        assert (tensor.data_ptr() - start) % 16 == 0 or tensor.numel() == 0
