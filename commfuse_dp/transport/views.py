"""Messages as numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST_VIEWS = 4096  # that are kept


def shaped(message: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The bytes of a message as a tensor."""
    return message.view(dtype).view(shape)


class Views(dict[tuple[int, ...], torch.Tensor]):
    """Views by their places, which come again: making one takes longer than looking for it."""

    def __init__(self, make: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, place: tuple[int, ...]) -> torch.Tensor:
        if len(self) >= MOST_VIEWS:
            self.clear()
        view = self[place] = self._make(*place)
        return view


class Shaped:
    """`shaped`, for transports that give the same tensor for the same place again: its views come again, too.

    They keep the memory: a transport that is closed clears them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, message: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        name = id(message), dtype, shape
        found = self._known.get(name)
        if found is None:  # what lies here keeps its message: no other object has its id
            if len(self._known) >= MOST_VIEWS:
                self._known.clear()
            with torch.inference_mode(False):  # an evaluation may come first, whose views must serve training, too
                found = self._known[name] = message, shaped(message, dtype, shape)
        return found[1]

    def clear(self) -> None:
        self._known.clear()
