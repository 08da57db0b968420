"""torch.compile per block: stock's gradients, no graph break of ours, one graph for all equal blocks.

Backend aot_eager: everything that concerns registered ops (fake tensors, functionalisation, the joint graph and its cut into
forward and backward) without the time that code generation takes; one small case goes through inductor.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import commfuse_dp
from tests.parity.fsdp2 import pair
from tests.support import graphs
from tests.support.cells import INDUCTOR, slow

BLOCKS = 11  # more than dynamo recompiles a function (8): a graph per block would fall back to eager, with a break counted


@pytest.fixture(autouse=True, scope="module")
def fresh_processes(workers):
    """DeepSpeed and Accelerate, once imported, change how the compiler treats a model: bf16 losses then differ by 4e-4."""
    workers.close()


def compiled_blocks(rank: int, world_size: int, how: str, backend: str, blocks: int) -> dict[str, int]:
    graphs.fresh()
    stock, net = pair.build(blocks), pair.build(blocks)
    with pair.applied(net, transport="tcp") as report:
        if how == "method":
            for block in net.blocks:
                block.compile(backend=backend)
        else:
            compiled = {id(block): torch.compile(block, backend=backend) for block in net.blocks}
            net.run_block = lambda block, x: compiled[id(block)](x)
        remote = sum((p.numel() - pair.local(p).numel()) * p.element_size() for p in net.parameters())
        for step in range(3):
            moved = pair.counted(
                report, lambda step=step: pair.assert_gradients_of_one_step(net, stock, rank, world_size, step, relative=5e-6)
            )
            assert 0.9 * remote <= moved.param_bytes_received <= 2.1 * remote + 8192
        for model in (net, stock):
            model.zero_grad()  # an evaluation leaves the root gathered; zero_grad would then miss the sharded gradients
        found = {"breaks": sum(counters["graph_break"].values()), "graphs": counters["stats"]["unique_graphs"]}
        with torch.no_grad():
            data = pair.batch(rank, world_size, 7)
            assert pair.loss_of(net, data).item() == pytest.approx(pair.loss_of(stock, data).item(), rel=1e-5)
    if how == "method":  # compiled graphs refer to what remove() took away: they must notice
        for step in (3, 4):
            pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)
    return found


@pytest.mark.parametrize(("how", "blocks"), [slow("method", BLOCKS), ("method", 3), slow("function", 3)])
def test_blocks_compile_without_a_graph_break_to_two_graphs(workers, how, blocks):
    for found in workers(2).run(compiled_blocks, how, "aot_eager", blocks, timeout=150):
        assert found == {"breaks": 0, "graphs": 2}  # the first one for its layer alone, then one for every layer


@pytest.mark.slow
@INDUCTOR
def test_inductor(workers):
    for found in workers(2).run(compiled_blocks, "function", "inductor", 2, timeout=240):
        assert found["breaks"] == 0


def mixed_precision(rank: int, world_size: int) -> None:
    graphs.fresh()
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stock, net = pair.build(2, mp_policy=policy), pair.build(2, mp_policy=policy)
    with pair.applied(net):
        for block in net.blocks:
            block.compile(backend="aot_eager")
        # bf16 roundings of 2**-9 in other places than stock's, over four layers
        pair.assert_gradients_of_one_step(net, stock, rank, world_size, relative=2.0**-5)
        grads = pair.gradients(net)
        assert {grad.dtype for grad in grads.values()} == {torch.float32}


def test_mixed_precision(workers):
    workers(2).run(mixed_precision, timeout=120)


def removed_while_compiled(rank: int, world_size: int) -> str:
    """A graph that outlives the integration says so: called with its ops, not through the module (whose guards notice)."""
    net = pair.build(1)
    commfuse_dp.apply(net, pair.config())
    from commfuse_dp.ops import operands

    handle = operands.register_operand(net) - 1  # of the last layer: numbers count up
    pair.loss_of(net, pair.batch(rank, world_size, 0)).backward()
    commfuse_dp.remove(net)
    with pytest.raises(RuntimeError) as error:
        torch.ops.commfuse.linear(torch.zeros(2, pair.WIDTH), torch.empty(0), None, handle, pair.HIDDEN, False, 0)
    return str(error.value)


def test_a_graph_of_a_removed_integration_says_so(workers):
    for text in workers(2).run(removed_while_compiled):
        assert "removed" in text and "compile the model again" in text
