"""Models that do not train equal to stock, each with its reason. What stands here and is equal fails the sweep, too."""

from __future__ import annotations

import fnmatch

EXPECTED: dict[str, str] = {
    "base:diffusion_gemma_text": "differs in fp32, and stock cannot in fp64, which would tell whether it is sensitive: not looked at yet",
    "detection:owlvit": "in bf16 three parameters are out of bounds, at an error of the whole of 1.1 times stock's: not looked at yet",
}
"""Names of cases, patterns of fnmatch, to the reason."""


def reason(case: object) -> str | None:
    return next((why for pattern, why in EXPECTED.items() if fnmatch.fnmatchcase(str(case), pattern)), None)
