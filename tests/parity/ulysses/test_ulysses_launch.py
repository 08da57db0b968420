"""An unmodified program with accelerate's sp_size, switched on by the environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launching import launch

PROGRAM = Path(__file__).parent / "programs" / "sp_train.py"
SERVED = "CommFuse: UlyssesSPAttentionHF(sdpa_attention_forward): served: "


@pytest.mark.slow
def test_accelerates_sequence_parallelism(tmp_path):
    losses = {}
    for switch in ("0", "1"):
        command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
        out, err = launch(command, tmp_path, ACCELERATE_USE_DEEPSPEED="true", COMMFUSE=switch)
        assert err.count(SERVED) == int(switch), err[-3000:]  # rank 0 says it
        assert "train alone" not in err
        losses[switch] = [float(loss) for loss in re.findall(r"loss \d (\S+)", out)]
    assert len(losses["0"]) == len(set(losses["0"])) == 8
    assert losses["1"] == pytest.approx(losses["0"], rel=1e-5)
