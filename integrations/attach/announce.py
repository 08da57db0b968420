"""The report in the log, and on stderr of an unmodified script that has configured no logging for us."""

from __future__ import annotations

import logging
import sys
from typing import Any

from commfuse_dp.integrations.attach.ranks import Ranks

log = logging.getLogger("commfuse_dp")


def log_report(report: Any, ranks: Ranks) -> None:
    """The whole of it, at level INFO on the first of these ranks, at level DEBUG on the others, where it is the same."""
    log.log(logging.INFO if ranks.first else logging.DEBUG, "%s", report)


def announce_report(report: Any) -> None:
    """A summary of what was logged, on stderr if no log shows that."""
    if not _shown():
        announce(report.summary)


def announce(text: str) -> None:
    """Log at level INFO, so that it is seen: on stderr if the program has set up no logging that would show it."""
    if _shown():
        log.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def _shown() -> bool:
    return log.isEnabledFor(logging.INFO) and log.hasHandlers()
