"""The demo's text: the source code of the running Python's standard library, as bytes. Real text, there without a download."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from commfuse_dp.errors import CommFuseError

SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT_ONE_IN = 20
MINIMUM_BYTES = 1 << 20
TRAIN, VALIDATION = "train.bin", "validation.bin"


@dataclass(frozen=True)
class CorpusInfo:
    """What was found. `digest` tells whether two runs read the same text."""

    root: str
    train_files: int
    train_bytes: int
    validation_files: int
    validation_bytes: int
    digest: str


def is_held_out(name: str) -> bool:
    """Whether a file (name relative to the library, with /) is kept for validation; by its name's hash: alike everywhere."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def source_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of all .py files of the library, sorted by name."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        for file in files:
            if file.endswith(".py"):
                path = Path(folder, file)
                found.append((path.relative_to(root).as_posix(), path))
    yield from sorted(found)


def write_corpus(out: Path, root: Path | None = None) -> CorpusInfo:
    """Write train.bin and validation.bin into `out`; files follow each other with a zero byte between them.

    Raises CommFuseError if the library's source is not on disk (a zipped or stripped installation).
    """
    root = root if root is not None else Path(sysconfig.get_paths()["stdlib"])
    digest = hashlib.sha256()
    count = {TRAIN: 0, VALIDATION: 0}
    size = {TRAIN: 0, VALIDATION: 0}
    with (out / TRAIN).open("wb") as train, (out / VALIDATION).open("wb") as validation:
        for name, path in source_files(root):
            try:
                text = path.read_bytes() + b"\0"
            except OSError:
                continue  # unreadable or gone since it was listed: the digest tells
            digest.update(text)
            split = VALIDATION if is_held_out(name) else TRAIN
            (validation if split == VALIDATION else train).write(text)
            count[split] += 1
            size[split] += len(text)
    if min(size[TRAIN], size[VALIDATION] * HELD_OUT_ONE_IN) < MINIMUM_BYTES:
        raise CommFuseError(
            f"the demo trains on the source of Python's standard library, but {root} has only {sum(size.values())} bytes of "
            f".py files (at least {MINIMUM_BYTES} are needed). Run it with a Python whose library is not zipped or stripped."
        )
    return CorpusInfo(str(root), count[TRAIN], size[TRAIN], count[VALIDATION], size[VALIDATION], digest.hexdigest()[:16])


class Batches:
    """Random windows of a corpus file. Batch number and rank give the place, so every variant sees the same data."""

    def __init__(self, path: Path, *, context: int, batch: int, rank: int, world_size: int, seed: int) -> None:
        self._text = np.memmap(path, dtype=np.uint8, mode="r")
        self._context, self._batch = context, batch
        self._rank, self._world_size, self._seed = rank, world_size, seed
        if len(self._text) <= context + 1:
            raise CommFuseError(f"{path} has {len(self._text)} bytes, too few for windows of {context}.")

    def __call__(self, number: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 (batch, context) each: the targets are the inputs shifted by one byte."""
        choose = np.random.default_rng((self._seed, number, self._rank))
        starts = choose.integers(0, len(self._text) - self._context - 1, size=self._batch)
        rows = np.stack([self._text[start : start + self._context + 1] for start in starts]).astype(np.int64)
        both = torch.from_numpy(rows).to(device)
        return both[:, :-1], both[:, 1:]
