"""How options are declared: a description, a group in ``--help``, and the range of a number."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from msgspec import Meta

from asyncllm.types.validate import Range

#: ``--help`` lists the options of one group together, in this order.
Group = Literal[
    "model", "memory", "scheduling", "device", "server", "limits", "logging", "for developers"
]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)


def doc(text: str, group: Group = "server", metavar: str | None = None) -> Meta:
    """Describes a field: its documentation and its group in ``--help``."""
    return Meta(description=text, extra={"group": group, "metavar": metavar})


#: Sizes and counts of tokens are int32 on the device.
MANY: Final = 2**31 - 1

Count = Annotated[int, Range(1, MANY)]
Gpus = Annotated[int, Range(1, 256)]
Threads = Annotated[int, Range(1, 4096)]
Bytes = Annotated[int, Range(1, 2**40)]
Share = Annotated[float, Range(0, 1)]
#: No wait is longer than thirty days.
Seconds = Annotated[float, Range(0, 30 * 86_400)]
