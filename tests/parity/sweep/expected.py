"""Models that do not train equal to stock, each with its reason. What stands here and is equal fails the sweep, too."""

from __future__ import annotations

import fnmatch

EXPECTED: dict[str, str] = {
    "base:diffusion_gemma_text": "differs in fp32; stock cannot in fp64, so sensitivity is open: not looked at",
    "detection:owlvit": "bf16: three parameters out of bounds, the whole at 1.1 times stock error: not looked at",
}
"""Names of cases, patterns of fnmatch, to the reason."""


def reason(case: object) -> str | None:
    return next((why for pattern, why in EXPECTED.items() if fnmatch.fnmatchcase(str(case), pattern)), None)
