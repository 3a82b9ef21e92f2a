"""SpeculativeConfig: what is drafted, in the form of vLLM's ``--speculative-config``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from asyncllm.errors import BadRequest

#: The most tokens of a draft that ``num_speculative_tokens`` may ask for.
MOST_DRAFT_TOKENS: Final = 64
#: Of a draft, where nothing else is said, and of one that a head makes, which takes time for each.
#: The time of steps decides how many of them are used.
DRAFT_TOKENS: Final = 8
HEAD_DRAFT_TOKENS: Final = 3
#: The most of the last tokens that are looked for: looking takes longer with each.
MOST_LOOKED_UP: Final = 64
#: Methods in which a layer drafts that reads hidden states of the model.
HEADS: Final = ("eagle3", "mtp")
#: Names of vLLM's that mean the same as "mtp".
_MTP_NAMES: Final = ("glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
#: Others of vLLM's methods.
_MISSING: Final = ("draft_model", "eagle", "medusa", "mlp_speculator", "suffix")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafts for every request. A request's own ``prediction`` is used without it, too.

    Attributes:
        method: "ngram": what followed the last tokens where they were before, and what a grammar
            leaves no choice about. "mtp": what the model's own layer for further tokens predicts.
            "eagle3": what an EAGLE-3 head predicts.
        model: folder or hub id of the EAGLE-3 head.
        num_speculative_tokens: the most tokens of a draft.
        prompt_lookup_min, prompt_lookup_max: how many of the last tokens must be found, and how
            many are looked for.
        synthetic_acceptance: for benchmarks of random weights: chance decides how many tokens of a
            draft are right, so that a row with the longest draft yields so many tokens on average.

    Raises:
        BadRequest: a value is out of range.
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = DRAFT_TOKENS
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 8
    synthetic_acceptance: float | None = None

    def __post_init__(self) -> None:
        _check_method(self.method)
        _need(
            self.model is None or self.method == "eagle3",
            f"model is for the method eagle3; {self.method} has none",
        )
        _need(
            1 <= self.num_speculative_tokens <= MOST_DRAFT_TOKENS,
            f"num_speculative_tokens must be from 1 to {MOST_DRAFT_TOKENS}",
        )
        _need(
            1 <= self.prompt_lookup_max <= MOST_LOOKED_UP,
            f"prompt_lookup_max must be from 1 to {MOST_LOOKED_UP}",
        )
        _need(
            1 <= self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_min must be from 1 to prompt_lookup_max "
            f"({self.prompt_lookup_max}), not {self.prompt_lookup_min}",
        )
        mean, most = self.synthetic_acceptance, self.num_speculative_tokens + 1
        _need(
            mean is None or 1 <= mean <= most,
            f"synthetic_acceptance must be from 1 to num_speculative_tokens + 1 ({most}), not "
            f"{mean}",
        )

    @property
    def has_head(self) -> bool:
        """Whether a layer drafts that reads hidden states of the model."""
        return self.method in HEADS


def speculation_of(config: Any) -> SpeculativeConfig | None:
    """What an engine of these options drafts for every request."""
    value = config.speculative_config
    return None if value is None else parse_speculative(value)


def with_draft(draft: str | None, value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The value of ``speculative_config``, with that of the option ``draft`` in it.

    Raises:
        BadRequest: they contradict each other.
    """
    if draft is None:
        return value
    both = {"method": "eagle3", "model": draft, **(value or {})}
    if both["method"] != "eagle3" or both["model"] != draft:
        other = "method" if both["method"] != "eagle3" else "model"
        raise BadRequest(
            f"draft: it names an EAGLE-3 head, but {other} of speculative_config is "
            f"{both[other]!r}; leave one of them out",
            param="draft",
        )
    return both


def synthetic_rate(value: dict[str, Any] | None) -> float | None:
    """With ``synthetic_acceptance``, how probable it is that a drafted token is right if those
    before are; otherwise None."""
    config = None if value is None else parse_speculative(value)
    if config is None or config.synthetic_acceptance is None:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        mean = sum(rate**count for count in range(config.num_speculative_tokens + 1))
        low, high = (rate, high) if mean < config.synthetic_acceptance else (low, rate)
    return high if config.synthetic_acceptance > 1 else 0.0


def most_drafted(value: dict[str, Any] | None, max_num_seqs: int) -> int:
    """The most tokens of a draft, given the option's value: no more than a step has rows for."""
    asked = DRAFT_TOKENS if value is None else parse_speculative(value).num_speculative_tokens
    return min(asked, max_num_seqs - 1)


def draft_rules(config: Any) -> Iterator[tuple[bool, str, str]]:
    """What drafts need of an engine's other options: whether they are so, the one at fault, and
    the error message."""
    name, value, rows = "speculative_config", config.speculative_config, config.max_num_seqs
    if value is None:
        return
    asked = value.get("num_speculative_tokens", 1)
    small = f"a draft of {asked} token{'s' * (asked > 1)} needs max_num_seqs of more than {rows}"
    yield asked < rows, name, f"{name}: {small}"
    speculation = parse_speculative(value)
    lacks = speculation.method == "eagle3" and speculation.model is None
    yield not lacks, name, f"{name}: eagle3 needs model, the folder or hub id of the head"
    flash = speculation.has_head and config.attention == "flashinfer"
    yield not flash, name, f"{name}: {speculation.method} does not work with attention flashinfer"
    # With real weights, answers would be wrong, and look right.
    no_model = config.load_format == "dummy" or config.device == "sim"
    plain = synthetic_rate(value) is None
    yield no_model or plain, name, f"{name}: synthetic_acceptance needs load_format dummy"


def parse_speculative(value: dict[str, Any]) -> SpeculativeConfig:
    """From the option's JSON object.

    Raises:
        BadRequest: it is not of this form.
    """
    given = dict(value)
    if isinstance(method := given.get("method"), str):
        _check_method(method)  # first: other methods have other fields
        if method in _MTP_NAMES:
            given["method"] = method = "mtp"
        if method in HEADS:
            given.setdefault("num_speculative_tokens", HEAD_DRAFT_TOKENS)
    if "prompt_lookup_max" in given and "prompt_lookup_min" not in given:
        most = given["prompt_lookup_max"]
        given["prompt_lookup_min"] = min(3, most) if isinstance(most, int) else most
    elif "prompt_lookup_min" in given and "prompt_lookup_max" not in given:
        least = given["prompt_lookup_min"]
        given["prompt_lookup_max"] = (
            min(max(8, least), MOST_LOOKED_UP) if isinstance(least, int) else least
        )
    try:
        return msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, BadRequest):
            raise error.__cause__ from None
        raise BadRequest(f"speculative_config: {error}", param="speculative_config") from None


def check_speculative(name: str, value: dict[str, Any]) -> None:
    """The rule of the option ``name``."""
    parse_speculative(value)


def _check_method(method: str) -> None:
    _need(
        method in ("ngram", *HEADS, *_MTP_NAMES),
        f"the method {method!r} is not served; ngram, eagle3 and mtp are"
        if method in _MISSING
        else f"method must be ngram, eagle3 or mtp, not {method!r}",
    )


def _need(fine: bool, message: str) -> None:
    if not fine:
        raise BadRequest(f"speculative_config: {message}", param="speculative_config")
