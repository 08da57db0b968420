"""The report in the log of an unmodified script, which has configured no logging for us."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("commfuse_dp")


def announce(text: str) -> None:
    """Log at level INFO, so that it is seen: on stderr if the program has set up no logging that would show it."""
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)
