"""How much of a connection's bytes the kernel may queue (commfuse_dp/transport/tcp/pace.py)."""

from __future__ import annotations

import pytest

from commfuse_dp.transport.tcp.pace import LEAST_BYTES, QUEUED_S, Pace

MOST = 2 << 20


@pytest.mark.parametrize(
    ("rate", "queued"), [(1e6, LEAST_BYTES), (50e6, 50e6 * QUEUED_S), (150e6, 150e6 * QUEUED_S), (1e10, MOST)]
)
def test_a_busy_connection_comes_to_queue_what_leaves_in_a_given_time(rate: float, queued: float) -> None:
    pace, now, written = Pace(MOST), 100.0, 0
    pace.blocked(now, written)
    for _ in range(12):  # the kernel takes more when half of its queue has been sent
        written += pace.queue_bytes // 2
        now += pace.queue_bytes // 2 / rate
        pace.blocked(now, written)
    assert pace.queue_bytes == pytest.approx(queued, rel=0.4)  # changes by less than a quarter are not worth a system call


def test_time_without_anything_to_send_does_not_count() -> None:
    pace = Pace(MOST)
    pace.blocked(0.0, 0)
    for second in range(1, 10):
        pace.idle()
        assert not pace.blocked(float(second), second << 20)
    assert pace.queue_bytes == MOST


def test_a_burst_does_not_undo_what_is_known() -> None:
    pace, now, written = Pace(MOST), 0.0, 0
    for _ in range(12):
        pace.blocked(now, written)
        now, written = now + 0.01, written + 200_000
    known = pace.queue_bytes
    assert known < MOST // 4
    pace.blocked(now - 0.00999, written)
    assert pace.queue_bytes <= 1.5 * known
