"""Time for the parts of the check: each has a limit, and what one leaves over the later ones may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_S = 10.0  # with less no part is started
GRACE_S = 5.0  # from the limit that a part knows to the signal that ends it


@dataclass(frozen=True)
class Share:
    """A part and the seconds that it should need."""

    name: str
    seconds: float


def limit_for(shares: Sequence[Share], index: int, left_s: float) -> float | None:
    """Seconds that part `index` may take when `left_s` are left of the whole; None: too few to start it.

    What was saved before (or is saved for nobody) goes to the parts that are still to come, in proportion to their shares; if
    too little is left, all that remain are cut alike.
    """
    rest = sum(share.seconds for share in shares[index:])
    usable = left_s - GRACE_S * (len(shares) - index)
    limit = shares[index].seconds * usable / rest
    return limit if limit >= LEAST_S else None
