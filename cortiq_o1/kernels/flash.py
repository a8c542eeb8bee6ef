"""The kernels of the path "flash": chunks without planes of scores."""

from __future__ import annotations

from dataclasses import replace

from ..params import FLASH_PARAMS
from ..tiling import TILE_ROWS
from .row import COMMIT_COLUMNS, DOT_PARTS, PRODUCT_LANES, stage, up

EVICT_LANES, CHUNK_LANES = 256, 256
"""Invocations of a workgroup of `o1c_fl_evict`, and of the chunk's others."""
VALUE_QUADS = 32
"""Vec4s of the value that a workgroup of a chunk sums; wider values take more workgroups."""

KERNELS = tuple(
    replace(kernel, params=FLASH_PARAMS)
    for kernel in (
        stage(
            "o1c_fl_evict", "group_meta ring_k q_tilde far_mz q k_tilde fl_rows!",
            lambda p: (up(p["m"], 4), int(p["nh"]), 1), 4 * DOT_PARTS + 4 * EVICT_LANES,
            "Queries against the key landmarks, every key that the sub-chunk evicts against the "
            "query landmarks, and the far maximum and mass after each row.",
            "One workgroup four landmarks of a query head, eight lanes a row.",
            "`o1c_far_e` and `o1c_land` in one.",
            EVICT_LANES,
        ),
        stage(
            "o1c_fl_near", "group_meta q ring_k ring_v k_rows v_rows fl_parts! fl_rows",
            lambda p: (
                up(int(p["ng"]) * up(int(p["hpg"]) * int(p["k"]), TILE_ROWS) * p["pair_tiles"],
                    int(p["tiles"])),
                up(p["dv"] // 4, VALUE_QUADS), 1,
            ),
            16 * 49 * 4,
            "Near part of every row over some tiles of keys: largest logit, mass, value sum.",
            "One workgroup a run of key tiles, for each 32 vec4s of the value.",
            "Logits stay in registers: no plane of scores. Binds `fl_rows`, which it does not "
            "read, so that wgpu's wait for it comes before and the far part runs beside this.",
            PRODUCT_LANES,
        ),
        stage(
            "o1c_fl_far", "group_meta mix fl_rows fl_far!",
            lambda p: (up(p["k"], 8), int(p["nh"]), 1), 1536,
            "The far part of every row at its own maximum: weights of the old numerator and of "
            "the rows evicted so far, and its mass.",
            "One workgroup eight rows of a query head, 32 lanes a row.",
            "Does not wait for the near part.",
            CHUNK_LANES,
        ),
        stage(
            "o1c_fl_merge", "group_meta fl_far fl_parts t_hat ring_v out!",
            lambda p: (up(p["dv"] // 4, VALUE_QUADS), up(p["k"], 8), int(p["nh"])), 3328,
            "The output: near parts, far numerator, the rows evicted so far, over the "
            "denominator.",
            "One workgroup eight rows of a query head and 32 vec4s of the value.",
            "The far field joins here, at the row's own scale.",
            CHUNK_LANES,
        ),
        stage(
            "o1c_fl_commit", "group_meta! k_rows v_rows fl_rows ring_k! ring_v! far_mz! t_hat!",
            lambda p: (up(max(p["d"], p["dv"]) // 4, COMMIT_COLUMNS), int(p["ng"]), 1), 512,
            "The state after the sub-chunk: far field, ring, position.",
            f"One workgroup a ({COMMIT_COLUMNS} vec4s of the width, group).",
            "`o1c_far_commit`, `o1c_ring_commit` and `o1c_meta` in one: it keeps the evicted "
            "values in shared memory before it overwrites them.",
            CHUNK_LANES,
        ),
    )
)  # fmt: skip
