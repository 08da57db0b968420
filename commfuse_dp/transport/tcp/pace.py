"""How much the kernel may queue for a connection: what it sends in QUEUED_S, so that little is in front of what is urgent.

[Note: Priority is only worth what the kernel's queue allows]
What is in the kernel's send queue cannot be overtaken. TCP_NOTSENT_LOWAT bounds the unsent part of it; bytes that are sent and
wait for their acknowledgement are not limited by it, so throughput does not suffer. Smaller queues, like smaller chunks, cost
wake-ups: per GB 2500 of the sender's thread with 512 KB, 900 with 2 MB. So the bound is one of time: at 2 Gbit/s and above it
is the 2 MB that cost the least; at 0.3 Gbit/s, where 2 MB would keep everything else waiting for 55 ms, a few hundred KB.
"""

from __future__ import annotations

QUEUED_S = 0.01
LEAST_BYTES = 128 << 10


class Pace:
    """Of one connection."""

    def __init__(self, most: int) -> None:
        """most: bytes, also as long as nothing is known."""
        self.queue_bytes = self._most = most
        self._blocked: tuple[float, int] | None = None

    def blocked(self, now: float, written: int) -> bool:
        """The kernel takes no more for the moment, of `written` bytes in all. Whether `queue_bytes` has changed.

        now: seconds. Between two of these calls without `idle` the connection has been busy."""
        before, self._blocked = self._blocked, (now, written)
        if before is None or now <= before[0] or written <= before[1]:
            return False
        wanted = int(QUEUED_S * (written - before[1]) / (now - before[0]))
        wanted = min(self._most, max(min(LEAST_BYTES, self._most), wanted), 2 * self.queue_bytes)
        if abs(wanted - self.queue_bytes) * 4 < self.queue_bytes:
            return False
        self.queue_bytes = (wanted + self.queue_bytes) // 2  # one interval may be a burst
        return True

    def idle(self) -> None:
        """Everything has been handed over."""
        self._blocked = None
