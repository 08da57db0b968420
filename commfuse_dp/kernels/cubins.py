"""Compiled kernels on disk: one file per key, in a folder that only its owner can write to.

A cubin is code that will run with this process's rights over the GPU, so a folder that others can write to is not used. Files
are written beside their place and renamed into it: ranks that start together may all write, and none reads half a file. What
does not match its own checksum is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

_MAGIC = b"commfuse-cubin-1\n"
_DIGEST = hashlib.sha256().digest_size


def default_folder() -> Path | None:
    """$XDG_CACHE_HOME/commfuse_dp/cubins, ~/.cache where that is not set; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base, "commfuse_dp", "cubins")
    try:
        return Path.home() / ".cache" / "commfuse_dp" / "cubins"
    except RuntimeError:
        return None


class CubinCache:
    """Never raises: where the disk does not serve, kernels are compiled in each process, with one warning."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = default_folder() if folder is None else folder

    def get(self, key: str) -> bytes | None:
        """What was put under `key`, or None: not there, not private, or broken (then it is removed)."""
        if self._folder is None or not self._private(self._folder):
            return None
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        code = data[len(_MAGIC) + _DIGEST :]
        if (
            data.startswith(_MAGIC)
            and hashlib.sha256(key.encode() + code).digest() == data[len(_MAGIC) : len(_MAGIC) + _DIGEST]
        ):
            return code
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def put(self, key: str, code: bytes) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _warn(f"no place for compiled kernels in {self._folder} ({error.strerror}): each process compiles its own")
            return
        if not self._private(self._folder):
            _warn(
                f"{self._folder} belongs to another user or can be written to by others: compiled kernels are not kept there "
                "(chmod 700 it, or set XDG_CACHE_HOME)"
            )
            return
        data = _MAGIC + hashlib.sha256(key.encode() + code).digest() + code
        try:
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(name, self._path(key))
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _warn(f"a compiled kernel could not be kept in {self._folder} ({error.strerror})")

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}.cubin"

    @staticmethod
    def _private(folder: Path) -> bool:
        try:
            status = folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)
