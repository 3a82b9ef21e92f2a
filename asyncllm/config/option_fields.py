"""How options are declared: a description, a group in ``--help``, the range of a number, and what
other options one needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, get_args

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


def deterministic_rules(config: Any) -> Iterator[tuple[bool, str, str]]:
    """What ``deterministic`` needs of an engine's other options: whether they are so, the one at
    fault, and the error message."""
    if not config.deterministic:
        return
    is_gpu = config.device not in ("cpu", "sim")
    yield is_gpu, "deterministic", "deterministic needs a GPU: no other device has it"
    for name, values in (
        ("attention", ("auto", "triton")),
        ("dtype", ("auto", "bfloat16", "float16")),
    ):
        needed = f"deterministic needs {name} {' or '.join(values)}"
        yield getattr(config, name) in values, name, needed
