"""Ctrl-C at any place of our own code, as the interpreter delivers it: deterministic by a number, in the thread that asks.

The interpreter looks for signals at few places: where a function begins, behind a call and at a jump backwards. It then calls
the handler of SIGINT, with the frame that it is in, and goes on if that returns. `sys.settrace` stops at the same places, where
`Interruption` does the same. Places count inside our own packages, and in whatever runs on their behalf (torch's Python code,
the standard library's), be it an except, finally or __exit__ of theirs.
"""

from __future__ import annotations

import dis
import os
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ClassVar

import commfuse_dp

_FOLDER = os.path.dirname(commfuse_dp.__file__) + os.sep
_TOP = os.path.dirname(os.path.dirname(commfuse_dp.__file__)) + os.sep
OURS = (_FOLDER, _TOP + "integrations" + os.sep)
# Behind these the interpreter looks for signals. (RESUME: where a function begins.)
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")

Handle = Callable[[FrameType], object]


def is_ours(code: CodeType) -> bool:
    """Of our own packages, tests apart."""
    return code.co_filename.startswith(OURS)


def handler_of_the_process(frame: FrameType) -> None:
    """What the interpreter does with a SIGINT that has come."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler), handler
    handler(signal.SIGINT, frame)


def raise_anyway(frame: FrameType) -> None:
    """An exception that asks nobody: as a handler of another signal would raise it, or a lack of memory."""
    raise KeyboardInterrupt


class Interruption:
    """with Interruption(n, handle): ...      `handle(frame)` is called once, at the n-th place from here (0: at none, they are
    only counted).

    Attributes:
        seen: places so far.
        where: the place, once it was come to: file, line, function.
    """

    _codes: ClassVar[dict[CodeType, bytes]] = {}  # by code: whether the interpreter looks for signals behind an instruction

    def __init__(self, number: int, handle: Handle = handler_of_the_process) -> None:
        self.number = number
        self.seen = 0
        self.where = ""
        self._handle = handle

    def __enter__(self) -> Interruption:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        caller = frame.f_back
        if not is_ours(frame.f_code) and (caller is None or caller.f_trace is None or not caller.f_trace_opcodes):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        looks, looked = self._looks_of(frame.f_code), True

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal looked
            if event == "opcode":
                if looked:
                    self._place(frame)
                looked = bool(looks[frame.f_lasti])
            return step

        return step

    def _place(self, frame: FrameType) -> None:
        self.seen += 1
        if self.seen == self.number:
            code, above = frame.f_code, frame
            while not is_ours(above.f_code) and above.f_back is not None:
                above = above.f_back
            inside = "" if above is frame else f" in {os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
            file = above.f_code.co_filename.removeprefix(_FOLDER).removeprefix(_TOP)
            self.where = f"{file}:{above.f_lineno} {above.f_code.co_name}{inside}"
            sys.settrace(None)
            self._handle(frame)

    @classmethod
    def _looks_of(cls, code: CodeType) -> bytes:
        found = cls._codes.get(code)
        if found is None:
            marks = bytearray(len(code.co_code))
            for instruction in dis.get_instructions(code):
                marks[instruction.offset] = instruction.opname.startswith(_LOOKS)
            found = cls._codes[code] = bytes(marks)
        return found
