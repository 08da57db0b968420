"""`import commfuse_dp` imports nothing, and still every public name is where it was."""

from __future__ import annotations

import pickle

import installs
import pytest

import commfuse_dp
from commfuse_dp.errors import PeerLostError, Where


def test_import_adds_no_module_of_others():
    code = """
        import sys, typing
        before = set(sys.modules)
        import commfuse_dp
        print(sorted(set(sys.modules) - before), commfuse_dp.__version__)
        commfuse_dp.ConfigError
        print(sorted(set(sys.modules) - before))
        from commfuse_dp import *
        print(CommFuseConfig.__module__, apply.__module__, "torch" in sys.modules)
        print(commfuse_dp.config.asked_for(), set(commfuse_dp.__all__) <= set(dir(commfuse_dp)), "ops" in dir(commfuse_dp))
    """
    out, err = installs.run(code)
    assert out == [
        "['commfuse_dp'] 0.1.0",
        "['commfuse_dp', 'commfuse_dp.errors']",
        "commfuse_dp.config commfuse_dp False",
        "False True True",
    ]
    assert not err


@pytest.mark.parametrize(
    "item",
    [
        commfuse_dp.CommFuseConfig(order="ring", exclude=("a", "b")),
        commfuse_dp.CommFuseConfig,
        commfuse_dp.apply,
        commfuse_dp.ConfigError("text"),
    ],
)
def test_pickling(item):
    again = pickle.loads(pickle.dumps(item))
    assert repr(again) == repr(item) and type(again) is type(item)


def test_names_are_the_ones_of_their_modules():
    assert commfuse_dp.PeerLostError is PeerLostError
    assert commfuse_dp.CommFuseConfig is commfuse_dp.config.CommFuseConfig
    assert PeerLostError("x", rank=0, peer=1, where=Where()).peer == 1
    with pytest.raises(AttributeError, match="no attribute 'CommFuseConfg'"):
        commfuse_dp.CommFuseConfg  # noqa: B018
    with pytest.raises(ImportError, match="CommFuseConfg"):
        from commfuse_dp import CommFuseConfg  # noqa: F401
