"""Embeddings, and the vocabulary that the ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels.types import Norm
from asyncllm.models.layers.linear import Kept, Linear
from asyncllm.models.layers.parameter import Placement, Stored
from asyncllm.models.quant.place import Place
from asyncllm.parallel.ranks import Ranks


class Embedding(nn.Module):
    """Rows of a table by id: int64 [tokens] -> [tokens, size].

    Ids are clamped to the table, as padding and failed rows may have invalid ones, and on a GPU an
    index out of range ends the process.

    Args:
        scale: factor of embeddings, rounded to their dtype first.
    """

    def __init__(self, rows: int, size: int, place: Placement, *, scale: float | None = None):
        super().__init__()
        self.weight = place.empty(rows, size)
        self.scale = None if scale is None else torch.tensor(scale, dtype=place.dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids.clamp(0, self.weight.shape[0] - 1), self.weight)
        return x if self.scale is None else x * self.scale


class Vocabulary:
    """The tokens of one rank, ``rows`` from ``first`` on.

    All ranks have as many rows, so that they can be gathered. Rows beyond the vocabulary are
    padding, which nobody reads.
    """

    def __init__(self, size: int, ranks: Ranks):
        self.size = size
        self.ranks = ranks
        self.rows = -(-size // ranks.size)
        self.first = min(ranks.rank * self.rows, size)

    def place(self, weight: Tensor) -> Place:
        """The place on disk of a table with this rank's rows."""
        end = min(self.first + self.rows, self.size)
        return Kept(self.size, (slice(self.first, end),)).place(0, weight[: end - self.first])

    def gather(self, scores: Tensor) -> Tensor:
        """From this rank's tokens to all: [n, rows] -> [n, size], contiguous."""
        return self.ranks.gather(scores)[:, : self.size].contiguous()


class SharedEmbedding(Embedding, Stored):
    """Rows of a table by id, of which each rank has some."""

    def __init__(self, vocab_size: int, size: int, place: Placement, *, scale: float | None = None):
        self.vocabulary = Vocabulary(vocab_size, place.ranks)
        super().__init__(self.vocabulary.rows, size, place, scale=scale)

    def forward(self, ids: Tensor) -> Tensor:
        if self.vocabulary.ranks.size == 1:
            return super().forward(ids)
        here = ids.clamp(0, self.vocabulary.size - 1) - self.vocabulary.first
        elsewhere = (here < 0) | (here >= self.vocabulary.rows)
        x = super().forward(here).masked_fill_(elsewhere.unsqueeze(1), 0)
        return self.vocabulary.ranks.sum(x)

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield "weight", self.vocabulary.place(self.weight)


class TokenEmbedding(SharedEmbedding):
    """The embeddings of the vocabulary."""

    def __init__(self, vocab_size: int, size: int, place: Placement, *, scale: float | None = None):
        super().__init__(vocab_size, size, place, scale=scale)
        self.kernels = place.kernels

    def scores(self, hidden: Tensor, norm: Norm | None = None) -> Tensor:
        """As ``OutputProjection``, by the embeddings."""
        return self.vocabulary.gather(self.kernels.linear(hidden, self.weight, norm=norm))


class OutputProjection(Linear):
    """Scores of all tokens: [tokens, features] -> [tokens, vocab]; each rank computes some."""

    def __init__(self, in_features: int, vocab_size: int, place: Placement):
        self.vocabulary = Vocabulary(vocab_size, place.ranks)
        super().__init__(in_features, self.vocabulary.rows, place)

    def forward(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return self.vocabulary.gather(super().forward(x, norm=norm, residual=residual))

    def parts(self) -> Iterator[tuple[str, Place]]:
        assert isinstance(self.weight, Tensor), "never quantised"
        yield "weight", self.vocabulary.place(self.weight)
