"""How many calls of the driver fused linears make: exact numbers, so that one more is seen. Times are not looked at."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks.micro import device_layers
from benchmarks.micro import device_overhead as overhead
from benchmarks.one_rank import NullDevice, NullEvent, OneRank, UnwaitingDevice
from commfuse_dp.device.base import as_int32, reached
from commfuse_dp.kernels.table import SliceTable

LAYERS = 12


def calls(world_size, **settings):
    """Of a step's beginning, forward and backward, once everything has found its place."""
    with overhead.nothing_computed():
        return tuple(map(dict, overhead.run(world_size, LAYERS, 1, NullDevice, **settings)[1]))


# The beginning fills the window. Its slices are awaited one by one, as they may be there before their owner's last; behind them
# one wait for an owner's last word serves.
# Slices that come together: one batch of copies and one call for words, however many. A product: the mark behind it, and the
# wait for the window's buffers that came back with another mark than the last ones. Backward: dgrad's slices that the window
# did not keep over the turn, as in forward; partials, a batch of copies and one call for their words; one more call for the
# first, one for all that are received and one for credit; marks and waits between the streams of compute, sends and sums.
EXPECTED = {
    2: (
        {"record": 3, "wait_event": 9, "words": 19, "copy": 8},
        {"record": 13, "wait_event": 4, "words": 5, "copy": 4},
        {"record": 61, "wait_event": 37, "words": 52, "copy": 16},
    ),
    8: (
        {"record": 3, "wait_event": 5, "words": 11, "copies": 4},
        {"record": 13, "wait_event": 8, "words": 9, "copies": 8},
        {"record": 61, "wait_event": 45, "words": 56, "copies": 20},
    ),
}


@pytest.mark.parametrize(
    ("world_size", "expected"), [(2, EXPECTED[2]), (8, EXPECTED[8]), pytest.param(64, EXPECTED[8], marks=pytest.mark.slow)]
)
def test_calls_of_twelve_layers(world_size, expected):
    """They do not grow with the number of ranks."""
    assert calls(world_size) == expected


def test_ranks_on_one_gpu_have_no_words_between_copies():
    _, forward, backward = calls(8, kernels_may_wait=False)
    assert forward == {"record": 20, "wait_event": 17, "words": 1, "copies": 8}
    assert backward == {"record": 69, "wait_event": 56, "words": 48, "copies": 20}


def test_tables_are_written_once(monkeypatch):
    """Addresses and words come again: in a steady order nothing is sent to the device for them."""
    written = []
    repoint = SliceTable.repoint

    def noted(self, *arguments):
        written.append(self)
        repoint(self, *arguments)

    monkeypatch.setattr(SliceTable, "repoint", noted)

    rank = OneRank(NullDevice(), 4, layers=LAYERS, width=64, window=3)
    x = torch.zeros(8, 64, dtype=torch.bfloat16, requires_grad=True)
    with overhead.nothing_computed():
        for number in range(overhead.WARM_UP + 3):
            if number == overhead.WARM_UP:
                assert written
                written.clear()
            overhead.step(rank, x)
    rank.close()
    assert not written


def test_layers_of_tensor_parallelism_are_timed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["device_layers", "--ranks", "2,3", "--steps", "1"])
    device_layers.main()
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [["N", "=", "2"], ["N", "=", "3"]]


def on_cuda(found):
    """Makes UnwaitingDevices over the recorded driver, which looks at what streams wait for; the values go to `found`."""
    cuda = pytest.importorskip("tests.support.recorded_cuda")
    words = {}

    class Answering(cuda.Recorder):
        def __getattr__(self, name):
            call = super().__getattr__(name)
            if not name.startswith("cuStream"):
                return call
            return lambda *arguments: self._words(name, arguments) or call(*arguments)

        def _words(self, name, arguments):
            if name == "cuStreamBatchMemOp":
                operations = arguments[2]
            else:
                _, address, value, flags = arguments
                operations = [("wait",) * name.startswith("cuStreamWait") + (address, value, flags)]
            for *waits, address, value, flags in operations:
                if waits:
                    found.append(value)
                    assert reached(as_int32(words.get(address, 0)), as_int32(value), exact=bool(flags)), "it waits for ever"
                else:
                    words[address] = value

    class Streams(UnwaitingDevice):
        """Those of a GPU are torch's."""

        current_stream, side_stream, on = NullDevice.current_stream, NullDevice.side_stream, NullDevice.on

        def record(self, stream, *, timing=False):
            return NullEvent()

        def wait_event(self, stream, event):
            return

    def make():
        device = cuda.recorded(Streams)
        device._driver, device.counts = Answering(), Counter()
        device._batch_operations = device._driver.batch_operations
        device._current = cuda.stream(1)
        device._streams = {name: cuda.stream(n) for n, name in enumerate(("gather", "scatter", "reduce", "arrivals"), start=2)}
        return device

    return make


@pytest.mark.parametrize("world_size", [2, 8])
def test_no_stream_waits_for_peers_that_do_nothing(world_size):
    """With CUDA's own calls: on a GPU such a wait would never end."""
    found = []
    with overhead.nothing_computed():
        overhead.run(world_size, LAYERS, 2, on_cuda(found))
    assert found
    found.clear()
    device_layers.measure(world_size, 2, on_cuda(found))
    assert found
