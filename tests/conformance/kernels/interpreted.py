"""Runs the GEMM kernels' cells in Triton's interpreter, in one process: `python -m tests.conformance.kernels.interpreted`.

Prints one JSON object: name of a cell -> traceback or null. Arguments: names; none: all.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

import torch

from tests.conformance.kernels import gemm_cells, strided_cells

CELLS: dict[str, Callable[[], None]] = {
    name: cell for module in (gemm_cells, strided_cells) for name, cell in vars(module).items() if name.startswith("cell_")
}


def main() -> None:
    import tests.conformance.kernels.interpreting  # noqa: F401  (before anything imports triton)

    torch.set_num_threads(1)
    results: dict[str, str | None] = {}
    for name in sys.argv[1:] or CELLS:
        try:
            CELLS[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
