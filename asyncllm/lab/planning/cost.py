"""Predicted step times: a roofline, and what measured steps took beyond theirs.

The profiles of Qwen3-0.6B and 8B on one H200 say how much longer each shape of step takes than its
roofline. That is scaled by the number of kernels, and for a model in between it is a mean of both,
by the logarithm of the bytes that a kernel reads. So the two models themselves have their measured
times again. (In proportion to the roofline instead, 8B's times cannot be told from 0.6B's.) On
another GPU, the measured models are taken to be as many times slower as their rooflines. Sums over
ranks are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from asyncllm.executor.sim.cost import H200, Roofline, SimCost
from asyncllm.executor.sim.profile import Profile, StepShape, shipped
from asyncllm.executor.sim.shape import SHAPES, Work
from asyncllm.executor.sim.timeline import StepTiming
from asyncllm.lab.planning.gpus import PlannedGpu
from asyncllm.lab.planning.rank import RankModel

#: The names of the measured profiles, from the smallest model on, and those of models with experts.
MEASURED: Final = ("h200-0.6b", "h200-8b")
MEASURED_EXPERTS: Final = ("h200-30b-a3b",)
#: A model whose weights differ by less from those of a measured one is that one.
SAME: Final = 0.001


class PredictedCost:
    """The step times of one rank of a model, and so of all ranks.

    Args:
        names: the profiles to learn from, from the smallest model on; by default, those of models
            with experts, or without.

    Attributes:
        profile: that of this very model; or the nearest one, with the host's times of the smallest
            model's, where they were seen to matter.
        is_measured: whether it is of this very model, on this GPU.
    """

    def __init__(self, rank: RankModel, gpu: PlannedGpu, tp: int, names: Sequence[str] = ()):
        names = names or (MEASURED_EXPERTS if rank.work.expert_bytes else MEASURED)
        self._roofline = Roofline(rank.work, gpu.speed)
        self._rank, self._gpu, self._tp = rank, gpu, tp
        references = [_Reference(name, gpu) for name in names]
        sizes = [_kernel_bytes(reference.work) for reference in references]
        shares = _shares(_kernel_bytes(rank.work), sizes)
        self._mean = list(zip(shares, references, strict=True))
        nearest = references[int(np.argmax(shares))]
        self.is_measured = nearest.is_of(rank.work) and gpu.title == "NVIDIA H200" and tp == 1
        self.profile: Profile = nearest.profile
        if not self.is_measured:
            host = shipped(MEASURED[0]).host
            self.profile = msgspec.structs.replace(nearest.profile, host=host)

    def seconds(
        self, starts: np.ndarray, lengths: np.ndarray, num_samples: int, decode_steps: int = 1
    ) -> float:
        """The seconds of a step on the device, with what the ranks exchange."""
        step = starts, lengths, num_samples, decode_steps
        least = seconds = self._roofline.step(*step)
        for share, reference in self._mean:
            if share > 0.0:
                kernels = self._rank.work.kernels / reference.work.kernels
                seconds += share * kernels * reference.beyond(*step)
        # Some measured steps take less than their roofline.
        seconds = max(seconds, least / 2)
        return seconds + decode_steps * self.rank_seconds(int(lengths.sum()), num_samples)

    def least_seconds(self, starts: np.ndarray, lengths: np.ndarray, num_samples: int) -> float:
        """What a step takes if nothing but bandwidth and arithmetic bound it."""
        return self._roofline.step(starts, lengths, num_samples) - self._roofline.base_seconds

    def rank_seconds(self, tokens: int, num_samples: int) -> float:
        """What the ranks exchange in a step of so many tokens, of which some are sampled from."""
        if self._tp == 1:
            return 0.0
        rank = self._rank
        sums = rank.num_sums * all_reduce_seconds(self._gpu, self._tp, tokens * rank.sum_bytes)
        # Gathering logits moves half as much as adding them up.
        logits = num_samples * rank.logit_bytes / 2
        return sums + all_reduce_seconds(self._gpu, self._tp, logits)

    def timing(
        self,
        step: int,
        starts: np.ndarray,
        lengths: np.ndarray,
        num_samples: int,
        decode_steps: int = 1,
    ) -> StepTiming:
        """The times of a step on the device and, by ``profile``, on the host."""
        seconds = self.seconds(starts, lengths, num_samples, decode_steps)
        shape = StepShape.of(starts, lengths, num_samples)
        return self.profile.timing(step, shape, seconds, decode_steps)

    def copy_seconds(self, num_pages: int, page_size: int) -> float:
        """The seconds to copy pages to the host's memory, or back."""
        num_bytes = num_pages * page_size * self._rank.work.kv_bytes
        return num_bytes / self._gpu.speed.copy_bandwidth


class _Reference:
    """A measured model, as it would be on another GPU."""

    def __init__(self, name: str, gpu: PlannedGpu):
        self.profile = shipped(name)
        self.work = SHAPES[name].work(2)
        self._measured = SimCost(SHAPES[name], H200, 2, self.profile)
        self._roofline = Roofline(self.work, gpu.speed)

    def is_of(self, work: Work) -> bool:
        """Whether that is the work of the measured model."""
        return work.kv_bytes == self.work.kv_bytes and math.isclose(
            work.weight_bytes + work.expert_bytes,
            self.work.weight_bytes + self.work.expert_bytes,
            rel_tol=SAME,
        )

    def beyond(
        self, starts: np.ndarray, lengths: np.ndarray, num_samples: int, decode_steps: int
    ) -> float:
        """The seconds of a step beyond its roofline."""
        step = starts, lengths, num_samples, decode_steps
        ratio = self._measured.seconds(*step) / self._measured.step(*step)
        return (ratio - 1.0) * self._roofline.step(*step)


def _kernel_bytes(work: Work) -> float:
    """The bytes of weights that a kernel reads, on average."""
    return (work.weight_bytes + work.expert_bytes) / work.kernels


def _shares(size: float, sizes: Sequence[float]) -> list[float]:
    """The weights of the rising ``sizes`` in a mean for ``size``; they add up to 1."""
    places = np.interp(math.log(size), np.log(sizes), np.arange(len(sizes)))
    return [max(0.0, 1.0 - abs(float(places) - i)) for i in range(len(sizes))]


#: Microseconds of a sum on two H200s, in a CUDA graph, by the KiB that each rank pushes
#: (docs/why/tensor-parallelism.md).
PUSHED_KIB: Final = (8, 64, 256, 1024, 4096, 12288)
PUSHED: Final = (1.7, 2.0, 2.8, 5.7, 17.0, 47.4)
#: Sums in two shots cross the link once more, and are taken where they push so many KiB less
#: (``asyncllm.parallel.push``).
CROSSING_SECONDS: Final = 1.4e-6
CROSSING_KIB: Final = 384
NCCL_KIB: Final = (8192, 12288)
NCCL: Final = (50.8, 67.2)
#: What each doubling of the ranks adds to a sum by NCCL, as a share: measured from 2 to 4 H200s.
NCCL_DOUBLING: Final = 0.23
#: Bytes a second that one H200 sends.
H200_LINK: Final = 450e9
#: Seconds of a small sum over PCIe, on 2 GPUs; each doubling adds half as much.
PCIE_SECONDS: Final = 30e-6


def is_measured(gpu: PlannedGpu, tp: int) -> bool:
    """Whether the times are of this very kind and number of GPUs."""
    return gpu.title == "NVIDIA H200" and tp == 2


def all_reduce_seconds(gpu: PlannedGpu, tp: int, num_bytes: float) -> float:
    """The seconds of one sum over ``tp`` GPUs of one machine; 0.0 for one."""
    if tp == 1:
        return 0.0
    if not gpu.has_nvlink:
        # A ring: each GPU sends its part to the next, twice around.
        sent = 2 * (tp - 1) / tp * num_bytes
        return PCIE_SECONDS * (1 + math.log2(tp)) / 2 + sent / gpu.link
    kib = num_bytes / 1024
    one_shot, two_shots = (tp - 1) * kib, 2 * (tp - 1) / tp * kib
    crossing = CROSSING_SECONDS if one_shot - two_shots > CROSSING_KIB else 0.0
    pushed = two_shots if crossing else one_shot
    slower = H200_LINK / gpu.link  # what depends on the size
    if pushed <= PUSHED_KIB[-1]:
        return crossing + _between(pushed * slower, PUSHED_KIB, PUSHED)
    return _between(kib * slower, NCCL_KIB, NCCL) * (1 + NCCL_DOUBLING * (math.log2(tp) - 1))


def _between(kib: float, at: tuple[int, ...], microseconds: tuple[float, ...]) -> float:
    """Seconds: between the points, and beyond the last on the same line as before it."""
    if kib <= at[-1]:
        return float(np.interp(kib, at, microseconds)) * 1e-6
    slope = (microseconds[-1] - microseconds[-2]) / (at[-1] - at[-2])
    return (microseconds[-1] + slope * (kib - at[-1])) * 1e-6
