"""The library measures itself: exposed communication, bytes and waits of a step, spans of all ranks, traces and pictures."""

from __future__ import annotations

from commfuse_dp.observe.interface import InterfaceBytes, read_interface
from commfuse_dp.observe.meter import StepMeter, StepReading, StepSummary
from commfuse_dp.observe.modules import ModuleSpans, UnshardedPeak
from commfuse_dp.observe.perfetto import trace_events, write_trace
from commfuse_dp.observe.skew import skew_ms
from commfuse_dp.observe.spans import RankSpans, Span, SpanRecorder
from commfuse_dp.observe.stock import StockMeter, payload_received
from commfuse_dp.observe.timeline import StepView, draw_timeline, view_step

__all__ = [
    "InterfaceBytes",
    "ModuleSpans",
    "RankSpans",
    "Span",
    "SpanRecorder",
    "StepMeter",
    "StepReading",
    "StepSummary",
    "StepView",
    "StockMeter",
    "UnshardedPeak",
    "draw_timeline",
    "payload_received",
    "read_interface",
    "skew_ms",
    "trace_events",
    "view_step",
    "write_trace",
]
