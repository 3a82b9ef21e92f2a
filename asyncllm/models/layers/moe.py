"""Mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from asyncllm.errors import ModelError
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.types import ExpertWeight, Gated, GatedExperts, Norm
from asyncllm.models.layers.linear import Kept, Weight
from asyncllm.models.layers.parameter import Packed, Placement
from asyncllm.models.layers.router import Router
from asyncllm.models.quant.place import Each, Place, sliced
from asyncllm.models.quant.weight import Mxfp4Weight, QuantizedWeight, Rows, Stack

#: Bytes that rows of the matrices of ``grouped_mm`` must be multiples of.
_ALIGNMENT = 16


class Experts(Packed):
    """The gated MLPs of all experts: one tensor for gate and up, one for down.

    Each rank has a share of every expert's features.

    A shared expert, which every token goes through, is an MLP of its own in checkpoints. Where it
    is a few times as large as an expert, and in the same format, it is so many more experts here:
    what any of its features adds is the same. It then costs a few more rows of the same launches,
    and no launch of its own. See ``SparseMoE`` for one that is not.

    Args:
        shared: how many experts the shared one is here.

    Attributes:
        routed, count: experts that tokens choose among, and all of them.
        inner: this rank's features of an expert.
        padded: rows of gate, rows of up and columns of down here: the features, then zeros.
        is_fused_on_disk: the checkpoint has two tensors of all experts, not three matrices of each.
        is_shared_fused: gate and up of the shared expert are one matrix in the checkpoint.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        place: Placement,
        *,
        shared: int = 0,
        is_shared_fused: bool = False,
    ):
        super().__init__()
        self.is_fused_on_disk = False
        self.is_shared_fused = is_shared_fused
        self.routed = num_experts
        self.shared = shared
        self.ranks = place.ranks
        self.inner = Kept.share(intermediate_size, "the size of experts", place.ranks)
        self.padded = self.inner.size
        if place.ranks.size > 1 and self.inner.size * place.dtype.itemsize % _ALIGNMENT:
            raise ModelError(
                f"tp {place.ranks.size} divides experts of {intermediate_size} features so that "
                f"rows are no multiples of {_ALIGNMENT} bytes, which their matmul needs",
                param="tp",
            )
        if any(n * place.dtype.itemsize % _ALIGNMENT for n in (hidden_size, intermediate_size)):
            raise ModelError(
                f"experts of {intermediate_size} features and a hidden size of {hidden_size} have "
                f"rows that are no multiples of {_ALIGNMENT} bytes, which their matmul needs"
            )
        self.hidden_size = hidden_size
        self.gate_up_proj: Weight
        self.down_proj: Weight
        for name, shape in self.shapes().items():
            setattr(self, name, place.projection(*shape))
        self.act = act

    @property
    def count(self) -> int:
        return self.routed + self.shared

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Of the weights, by name: experts, and rows and columns of each."""
        return {
            "gate_up_proj": (self.count, 2 * self.padded, self.hidden_size),
            "down_proj": (self.count, self.hidden_size, self.padded),
        }

    def matrices(self) -> GatedExperts:
        """The weights for ``kernels.experts``."""
        weights = _matrices(self.gate_up_proj), _matrices(self.down_proj)
        return GatedExperts(self.count, *weights, act=self.act)

    def modules_on_disk(self) -> dict[str, list[str]]:
        """The modules of the checkpoint whose matrices each weight has, relative to the parent."""
        owners = [f"experts.{expert}" for expert in range(self.routed)]
        gates = [f"{owner}.{name}" for owner in owners for name in ("gate_proj", "up_proj")]
        downs = [f"{owner}.down_proj" for owner in owners]
        if self.shared:
            fused = self.is_shared_fused
            names = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
            gates += [f"shared_expert.{name}" for name in names]
            downs.append("shared_expert.down_proj")
        return {"gate_up_proj": gates, "down_proj": downs}

    def align(self, unit: int, place: Placement) -> None:
        """Share the features in units of so many, which keep a scale in a quantised format.

        Ranks may then have different numbers of them, and pad their weights to the same size;
        nothing changes if that doubled their weights, which 16 bits do as well. The weights are
        allocated again afterwards.
        """
        units = -(-self.inner.whole // unit)
        padded = -(-units // self.ranks.size) * unit
        if padded < 2 * self.inner.size:
            self.inner = Kept.aligned(self.inner.whole, unit, self.ranks)
            self.padded = padded

    def parts(self) -> Iterator[tuple[str, Place]]:
        if self.is_fused_on_disk:
            yield from self._fused_parts()
        else:
            for expert in range(self.routed):
                gate, up, down = self._of_expert(expert)
                yield f"experts.{expert}.gate_proj.weight", self.inner.place(0, gate)
                yield f"experts.{expert}.up_proj.weight", self.inner.place(0, up)
                yield f"experts.{expert}.down_proj.weight", self.inner.place(1, down)
        if self.shared:
            yield from self._shared_parts()

    def _fused_parts(self) -> Iterator[tuple[str, Place]]:
        if isinstance(self.gate_up_proj, Tensor):
            pairs = Kept.of(self.inner, self.inner)
            yield "experts.gate_up_proj", pairs.place(1, self.gate_up_proj[: self.routed])
        else:
            both = (self._of_expert(expert)[:2] for expert in range(self.routed))
            yield "experts.gate_up_proj", Each(tuple(self._gate_and_up(*each) for each in both))
        if isinstance(self.down_proj, Tensor):
            yield "experts.down_proj", self.inner.place(2, self.down_proj[: self.routed])
        else:
            downs = (self._of_expert(expert)[2] for expert in range(self.routed))
            yield "experts.down_proj", Each(tuple(self.inner.place(1, down) for down in downs))

    def _gate_and_up(self, gate: Tensor | Rows, up: Tensor | Rows) -> Place:
        """The place of a matrix of the checkpoint that has the rows of both."""
        whole, start = self.inner.whole, self.inner.slices[0].start
        return sliced(0, 2 * whole, [(start, gate), (whole + start, up)])

    def _shared_parts(self) -> Iterator[tuple[str, Place]]:
        """The shared expert's features, dealt out in order."""
        whole, start = self.inner.whole, self.inner.slices[0].start
        gates, ups, downs = [], [], []
        for number in range(self.shared):
            gate, up, down = self._of_expert(self.routed + number)
            gates.append((number * whole + start, gate))
            ups.append((number * whole + start, up))
            downs.append((number * whole + start, down))
        size = self.shared * whole
        if self.is_shared_fused:
            both = [*gates, *((size + at, up) for at, up in ups)]
            yield "shared_expert.gate_up_proj.weight", sliced(0, 2 * size, both)
        else:
            yield "shared_expert.gate_proj.weight", sliced(0, size, gates)
            yield "shared_expert.up_proj.weight", sliced(0, size, ups)
        yield "shared_expert.down_proj.weight", sliced(1, size, downs)

    def _of_expert(self, expert: int) -> tuple[Tensor | Rows, Tensor | Rows, Tensor | Rows]:
        """The places of this rank's features of gate, up and down."""
        size, hidden, features = self.padded, self.hidden_size, self.inner.size
        gates, downs = _flat(self.gate_up_proj), _flat(self.down_proj)
        start = 2 * size * expert
        gate, up = (gates[at : at + features] for at in (start, start + size))
        down = downs[hidden * expert : hidden * (expert + 1)]
        return gate, up, _first_columns(down, features)


class PlainExperts(Experts):
    """Experts of two matrices: down(relu(up(x))²).

    That is down(relu(gate(x)) * up(x)) where gate and up are the same, and so they are stored here:
    all kernels take such experts.
    """

    def __init__(self, num_experts: int, hidden_size: int, size: int, place: Placement):
        super().__init__(num_experts, hidden_size, size, "relu", place)

    def modules_on_disk(self) -> dict[str, list[str]]:
        owners = [f"experts.{expert}" for expert in range(self.routed)]
        names = {"gate_up_proj": "up_proj", "down_proj": "down_proj"}
        return {own: [f"{owner}.{name}" for owner in owners] for own, name in names.items()}

    def parts(self) -> Iterator[tuple[str, Place]]:
        whole, start = self.inner.whole, self.inner.slices[0].start
        for expert in range(self.routed):
            gate, up, down = self._of_expert(expert)
            both = [(start, gate), (start, up)]
            yield f"experts.{expert}.up_proj.weight", sliced(0, whole, both)
            yield f"experts.{expert}.down_proj.weight", self.inner.place(1, down)


class ClampedExperts(Experts):
    """gpt-oss's: with biases, and gate and up of a feature side by side, here and on disk.

    The activation is ``(up + 1) * gate * sigmoid(alpha * gate)``, of gate at most ``limit``, and up
    between that and its negative.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        place: Placement,
        *,
        alpha: float,
        limit: float,
    ):
        super().__init__(num_experts, hidden_size, intermediate_size, "silu", place)
        self.gate_up_proj_bias = place.empty(num_experts, 2 * self.padded)
        self.down_proj_bias = place.empty(num_experts, hidden_size)
        self.alpha = alpha
        self.limit = limit
        self.adds_bias = place.ranks.rank == 0  # as outputs are added up

    def align(self, unit: int, place: Placement) -> None:
        super().align(unit, place)
        self.gate_up_proj_bias = place.empty(self.count, 2 * self.padded)
        self.gate_up_proj_bias.zero_()  # what is padded

    def matrices(self) -> GatedExperts:
        return GatedExperts(
            self.count,
            _matrices(self.gate_up_proj),
            _matrices(self.down_proj),
            self.gate_up_proj_bias,
            self.down_proj_bias if self.adds_bias else None,
            act="clamped",
            paired=True,
            alpha=self.alpha,
            limit=self.limit,
        )

    def parts(self) -> Iterator[tuple[str, Place]]:
        (one,) = self.inner.slices
        pairs = Kept(2 * self.inner.whole, (slice(2 * one.start, 2 * one.stop),))
        gate_up, down = self.gate_up_proj, self.down_proj
        shapes = (pairs.size, self.hidden_size), (self.hidden_size, self.inner.size)
        yield "experts.gate_up_proj", self._in_one(pairs, 0, gate_up, *shapes[0])
        yield "experts.gate_up_proj_bias", pairs.place(1, self.gate_up_proj_bias[:, : pairs.size])
        yield "experts.down_proj", self._in_one(self.inner, 1, down, *shapes[1])
        yield "experts.down_proj_bias", self.down_proj_bias

    def _in_one(self, kept: Kept, dim: int, weight: Weight, rows: int, columns: int) -> Place:
        """The place of a tensor of the checkpoint that has the matrices of all experts.

        Args:
            kept: what this rank has along that dimension of each matrix.
            rows, columns: the first ones of each matrix here, which the tensor has.
        """
        if isinstance(weight, Mxfp4Weight):
            return kept.place(1 + dim, Stack(weight, self.count, rows, columns))
        if isinstance(weight, Tensor):
            return kept.place(1 + dim, weight[:, :rows, :columns])
        height = weight.shape[0] // self.count
        starts = range(0, height * self.count, height)
        matrices = (_first_columns(weight[at : at + rows], columns) for at in starts)
        return Each(tuple(kept.place(dim, matrix) for matrix in matrices))


def _matrices(weight: Weight) -> ExpertWeight:
    return weight.matrix() if isinstance(weight, QuantizedWeight) else weight


def _flat(weight: Weight) -> Tensor | QuantizedWeight:
    """The rows of all experts, one after the other."""
    return weight if isinstance(weight, QuantizedWeight) else weight.flatten(0, 1)


def _first_columns(rows: Tensor | Rows, count: int) -> Tensor | Rows:
    return rows._replace(columns=count) if isinstance(rows, Rows) else rows[:, :count]


class SparseMoE(nn.Module):
    """Each token goes through the experts that the router chooses: [tokens, hidden] -> the same.

    All tokens may also go through a shared expert. It is among ``experts`` (see there) if it can
    be, or else ``shared_expert``, an MLP beside them.

    Args:
        shared: makes the MLP; its ranks are ``Apart``. None: there is no shared expert.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        place: Placement,
        *,
        shared: Callable[[], nn.Module] | None = None,
    ):
        super().__init__()
        self.gate = router
        self.experts = experts
        self.ranks = place.ranks
        self.kernels = place.kernels
        self._make_shared = shared
        self.shared_expert = None if shared is None or experts.shared else shared()

    def set_apart(self) -> None:
        """Take the shared expert out of ``experts``; weights are allocated again afterwards."""
        assert self._make_shared is not None
        self.experts.shared = 0
        self.gate.routing = self.gate.routing._replace(shared=0)
        self.shared_expert = self._make_shared()

    def unused_weights(self) -> int:
        """Weights of the experts that a token does not choose."""
        experts = self.experts
        stored = sum(math.prod(shape) for shape in experts.shapes().values())
        return stored * (experts.routed - self.gate.routing.top_k) // experts.count

    def forward(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """Normalises x first, and adds to ``residual`` in place.

        Args:
            routed_by: what the router sees, if not the normalised x; of the same shape.
        """
        if norm is not None:
            x = rms_norm(x, norm)
        weights, chosen, gate = self.gate.route(x if routed_by is None else routed_by)
        is_alone = self.ranks.size == 1
        total = residual if is_alone else None
        beside = None
        if self.shared_expert is not None:
            if gate is None:
                total = self.shared_expert(x, residual=total)
            else:
                beside = Gated(self.shared_expert(x), gate)
        out = self.kernels.mix_experts(x, weights, chosen, self.experts.matrices(), total, beside)
        return out if is_alone else self.ranks.sum(out, residual)
