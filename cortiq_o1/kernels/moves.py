"""Kernels that no path owns: rows into the archive, a plane into another."""

from __future__ import annotations

from dataclasses import replace

from ..params import ARCHIVE_PARAMS, COPY_PARAMS
from .row import LANES, Binding, Kernel, folded, stage, up

KERNELS = (
    replace(
        stage(
            "o1c_archive", "group_meta q ring_k ring_v archive_q! archive_k! archive_v!",
            lambda p: (up(max(p["d"], p["dv"]) // 4, LANES), int(p["nh"]), int(p["k"])), 0,
            "Every key and value that the sub-chunk evicts, and the queries of the evicting row.",
            "One lane a vec4 of the width, for each query head and row; a group's first head copies "
            "the key and the value.",
            "Has no forerunner.",
        ),
        params=ARCHIVE_PARAMS,
    ),
    Kernel(
        "o1c_copy",
        "A range of one plane into another.",
        "One lane a vec4.",
        (Binding("src", "read", "vec4<u32>"), Binding("dst", "read_write", "vec4<u32>")),
        COPY_PARAMS,
        (LANES, 1, 1),
        0,
        lambda p: (*folded(p["count"]), 1),
        "Copies bits, not floats: a driver may flush a small integer that it takes for a float. "
        "The grid is folded in two dimensions.",
    ),
)  # fmt: skip
