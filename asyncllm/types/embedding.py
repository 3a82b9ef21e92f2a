"""Parameters of embeddings: prompts as vectors, made of the model's final hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from asyncllm.errors import BadRequest, StepError
from asyncllm.types.validate import check_fields, check_kind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: The vector of a prompt is the final hidden state of its last token, or the mean of all.
Pooling: TypeAlias = Literal["last", "mean"]


class EmbeddingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How hidden states (after the last norm) become a vector.

    Attributes:
        pooling: ``last`` takes the hidden state of the last token; ``mean`` the mean over all
            tokens, which uses nothing of the prefix cache.
        normalize: scale the vector to length 1.
        dimensions: keep only its first elements, before normalizing; None keeps all. For models
            that are trained for it (Kusupati et al., Matryoshka, NeurIPS 2022).

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dimensions is not None and self.dimensions < 1:
            raise BadRequest("dimensions must be at least 1", param="dimensions")

    def check(self, size: int) -> None:
        """Raise BadRequest if hidden states of ``size`` elements have fewer ``dimensions``."""
        if self.dimensions is not None and self.dimensions > size:
            raise BadRequest(
                f"dimensions must be at most {size}, the size of the model's hidden states",
                param="dimensions",
            )

    def vector(self, hidden: bytes) -> npt.NDArray[np.float32]:
        """float32 [dimensions], of ``TokenDelta.hidden``.

        Raises:
            StepError: it is not finite.
        """
        import numpy as np

        vector = np.frombuffer(hidden, dtype="<f4")[: self.dimensions]
        if not np.isfinite(vector).all():
            raise StepError("the model's hidden states were not finite")
        # In float64: the squares may overflow float32.
        length = np.linalg.norm(vector.astype(np.float64)) if self.normalize else 1.0
        scaled: np.ndarray = (vector / length if length > 0 else vector).astype(np.float32)
        return scaled


def embedding_params(
    params: EmbeddingParams | None, options: dict[str, Any], defaults: EmbeddingParams
) -> EmbeddingParams:
    """The one that is given, or the defaults with the options.

    Raises:
        BadRequest: both are given, or an option is unknown.
    """
    check_kind("params", params, EmbeddingParams)
    if params is not None and options:
        raise BadRequest("give either params or options, not both", param="params")
    try:
        return params or msgspec.structs.replace(defaults, **options)
    except TypeError as error:
        raise BadRequest(str(error), param="params") from None
