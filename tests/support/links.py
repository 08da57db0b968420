"""A mark for tests that need shaped links, with the reason for which this machine makes none."""

from __future__ import annotations

import pytest

from commfuse_dp.launch import netns


def _why_not() -> str:
    try:
        with netns.shaped_world(2, "1gbit"):
            return ""
    except netns.LinkError as error:
        return str(error)


_REASON = _why_not()
# Containers without the right to make namespaces have no links at all. pytest prints every skip with the reason (-rs).
needs_link = pytest.mark.skipif(bool(_REASON), reason=_REASON or "shaped links work")
