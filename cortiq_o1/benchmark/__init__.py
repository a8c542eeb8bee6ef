"""Measuring a sealed layer beside exact attention: the data; `cortiq_o1.cli` renders it."""

from .path_results import PathReport
from .path_suite import PathSuite
from .presets import PRESETS, Preset, find_preset
from .results import Cell, Crossover, DeviceResult, Errors, Quality, Report, Timing, find_crossover
from .suite import Settings, Suite

__all__ = [
    "PRESETS",
    "Cell",
    "Crossover",
    "DeviceResult",
    "Errors",
    "PathReport",
    "PathSuite",
    "Preset",
    "Quality",
    "Report",
    "Settings",
    "Suite",
    "Timing",
    "find_crossover",
    "find_preset",
]
