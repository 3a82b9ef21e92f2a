"""One thread for CPU kernels: the models are tiny and the machine may be shared."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
