"""Byte counters of a network interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from commfuse_dp.errors import TransportError
from commfuse_dp.observe import InterfaceBytes, read_interface


def test_reads_the_counters_and_takes_differences(tmp_path: Path) -> None:
    folder = tmp_path / "cf0" / "statistics"
    folder.mkdir(parents=True)
    (folder / "rx_bytes").write_text("1500\n")
    (folder / "tx_bytes").write_text("700\n")
    now = read_interface("cf0", root=tmp_path)
    assert now == InterfaceBytes(received=1500, sent=700)
    assert now.since(InterfaceBytes(1000, 100)) == InterfaceBytes(500, 600)


def test_an_unknown_interface_is_named_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "eth7").mkdir()
    with pytest.raises(TransportError, match=r"'nope'.*Interfaces here: eth7"):
        read_interface("nope", root=tmp_path)
