"""How options are declared: a description, a group in ``--help``, and the range of a number."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest

#: ``--help`` lists the options of one group together, in this order.
Group = Literal[
    "model", "memory", "scheduling", "device", "server", "limits", "logging", "for developers"
]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)


def doc(text: str, group: Group = "server", metavar: str | None = None) -> Meta:
    """Describes a field: its documentation and its group in ``--help``."""
    return Meta(description=text, extra={"group": group, "metavar": metavar})


class Range(NamedTuple):
    """What a number may be; the least one may be left out."""

    least: float
    most: float
    is_open: bool = False

    def wrong_with(self, value: float) -> str | None:
        """What a number must be that is out of the range."""
        if not (value > self.least or (value == self.least and not self.is_open)):
            return f"{'above' if self.is_open else 'at least'} {self.least:,}"
        return None if value <= self.most else f"at most {self.most:,}"


#: Sizes and counts of tokens are int32 on the device.
MANY: Final = 2**31 - 1

Count = Annotated[int, Range(1, MANY)]
Gpus = Annotated[int, Range(1, 256)]
Threads = Annotated[int, Range(1, 4096)]
Bytes = Annotated[int, Range(1, 2**40)]
Share = Annotated[float, Range(0, 1)]
#: No wait is longer than thirty days.
Seconds = Annotated[float, Range(0, 30 * 86_400)]


def type_of(hint: Any) -> tuple[Any, list[Any]]:
    """A field's type, without None and annotations; and the annotations."""
    extras: list[Any] = []
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            extras += more
            continue
        members = [m for m in get_args(hint) if m is not type(None)]
        if len(members) == len(get_args(hint)) or len(members) != 1:
            return hint, extras
        [hint] = members


@cache
def _ranges(struct: type[msgspec.Struct]) -> tuple[tuple[str, Range], ...]:
    return tuple(
        (name, extra)
        for name, hint in get_type_hints(struct, include_extras=True).items()
        for extra in type_of(hint)[1]
        if isinstance(extra, Range)
    )


def check_ranges(struct: msgspec.Struct) -> None:
    """Check every number against the range in its type.

    Raises:
        BadRequest: a number is out of its range; ``param`` names the field.
    """
    for name, range in _ranges(type(struct)):
        value = getattr(struct, name)
        wrong = None if value is None else range.wrong_with(value)
        if wrong is not None:
            raise BadRequest(f"{name} must be {wrong}, not {value}", param=name)
