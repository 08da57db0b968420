"""A piece of a parameter as the ops compute on it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Rows row_start .. row_start+rows-1 of one part (0: weight, 1: bias), or columns from column_start on of one row."""

    part: int
    row_start: int
    tensor: torch.Tensor  # [rows, *shape[1:]]; [1, columns] if it is a part of a row
    column_start: int = 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of a whole parameter that this piece covers."""
        rows = whole.narrow(0, self.row_start, self.tensor.shape[0])
        if rows.shape == self.tensor.shape:
            return rows
        return rows.narrow(1, self.column_start, self.tensor.shape[1])
