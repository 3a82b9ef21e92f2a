"""The page's texts can be read: contrasts of WCAG's level AA, in the light and in the dark."""

from __future__ import annotations

import re

import pytest

from asyncllm.server.page.files import FOLDER

STYLE = (FOLDER / "style.css").read_text("utf-8")
COLOURS = {
    name: (light, dark)
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", STYLE)
}
#: A text and what is behind it.
TEXTS = [
    *((text, behind) for text in ("text", "muted") for behind in ("back", "card", "code")),
    *(("text", behind) for behind in ("soft", "bad-soft")),
    *(("accent", behind) for behind in ("back", "card", "soft")),
    ("on-accent", "accent"),
    ("bad", "bad-soft"),
    ("bad", "card"),
]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "behind"), TEXTS)
def test_contrast(text: str, behind: str, scheme: int) -> None:
    low, high = sorted(luminance(COLOURS[name][scheme]) for name in (text, behind))
    assert (high + 0.05) / (low + 0.05) >= 4.5
