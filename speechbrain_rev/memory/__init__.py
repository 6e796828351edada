"""Where memory goes, counted."""

from speechbrain_rev.memory.meter import LiveBytes, live_bytes_peak

__all__ = ["LiveBytes", "live_bytes_peak"]
