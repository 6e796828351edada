"""Where memory goes, counted."""

from speechbrain_rev.memory.meter import LiveBytes, live_bytes_peak
from speechbrain_rev.memory.report import MemoryReport, breakdown

__all__ = ["LiveBytes", "MemoryReport", "breakdown", "live_bytes_peak"]
