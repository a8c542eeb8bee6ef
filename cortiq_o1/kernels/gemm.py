"""The kernels of the path "gemm": the window as a panel, and tiled matrix products over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..params import STAGE_PARAMS, Params
from ..planes import PANEL_ALIGN
from .row import LANES, PRODUCT_LANES, SINKS, Grid, Kernel, bind, folded, stage, up

TILE_M, TILE_N, TILE_K = 64, 64, 16
"""A workgroup's tile of a matrix product: rows, columns, and the step along the sum."""
TILE_QUADS = 16
"""Vec4s across either operand's tile."""


def products(
    name: str, spec: str, grid: Callable[[Params], Grid], text: str, deviation: str
) -> tuple[Kernel, Kernel]:
    """A tiled matrix product in float32, and with its operands rounded to float16."""
    exact = Kernel(
        name, text, f"One workgroup a tile of {TILE_M} x {TILE_N}.", bind(spec), STAGE_PARAMS,
        (PRODUCT_LANES, 1, 1), 4 * TILE_K * (TILE_M + TILE_N), grid, deviation,
    )  # fmt: skip
    fast = replace(
        exact,
        name=name + "_f16",
        text=text + " Operands are rounded to float16, sums are float32.",
        shared_bytes=exact.shared_bytes // 2,
        features=("shader-f16",),
    )
    return exact, fast


KERNELS = (
    stage(
        "o1c_gather", "group_meta ring_k ring_v k_rows v_rows panel_k! panel_v!",
        lambda p: (*folded(int(p["panel"]) * (max(p["d"], p["dv"]) // 4)), int(p["ng"])), 0,
        "The window's keys and values as one panel for each group: sinks, ring from its oldest row, "
        "the sub-chunk's rows, zeros.",
        "One lane a vec4 of a column's key and value.",
        SINKS + "Keys and values of different width. Columns are padded to a multiple of "
        f"{PANEL_ALIGN}. The grid is folded in two dimensions.",
    ),
    stage(
        "o1c_pack", "q panel_q!",
        lambda p: (up(int(p["k"]) * (p["d"] // 4), LANES), int(p["nh"]), 1), 0,
        "The sub-chunk's queries, a head's rows together.",
        "One lane a vec4 of a query, for each head.",
        "The engine's `packh`. A head's rows lie `kcap` apart from the next head's.",
    ),
    *products(
        "o1c_qk", "panel_q panel_k panel_scores!",
        lambda p: (up(p["panel"], TILE_N), up(int(p["hpg"]) * int(p["k"]), TILE_M), int(p["ng"])),
        "Near logits of all rows over all columns: scale times queries times keys transposed.",
        "The engine's matrix product with the scale folded in, over all groups in one dispatch.",
    ),
    stage(
        "o1c_gmax", "group_meta panel_scores near_max!",
        lambda p: (int(p["nh"]), int(p["k"]), 1), LANES,
        "The largest near logit of a row, over the columns it sees.",
        "One workgroup a (query head, row).",
        "A tree in shared memory instead of a subgroup's maximum. Columns are read by fours.",
    ),
    stage(
        "o1c_gsoft", "group_meta panel_scores! row_head!",
        lambda p: (int(p["nh"]), int(p["k"]), 1), LANES,
        "Near weights in place of the logits, zero in columns that the row does not see, and one "
        "over the denominator.",
        "One workgroup a (query head, row).",
        "One over the denominator goes to a word of `row_head`.",
    ),
    *products(
        "o1c_pv", "panel_scores panel_v near_parts!",
        lambda p: (
            up(p["dv"], TILE_N),
            up(int(p["hpg"]) * int(p["k"]), TILE_M),
            int(p["ng"]) * int(p["splits"]),
        ),
        "Near value sums of all rows: weights times values, a part of the columns each.",
        "The engine's matrix product, over all groups and splits of the columns in one dispatch: "
        "there are too few tiles otherwise.",
    ),
    stage(
        "o1c_gadd", "group_meta near_parts row_head gains t_hat evict_weights ring_v out!",
        lambda p: (up(up(p["k"], 4) * (p["dv"] // 4), LANES), int(p["nh"]), 1), 0,
        "The output, as `o1c_add` has it, with the near sum from the product.",
        "One lane a vec4 of the value in four rows, for each query head.",
        SINKS + "Adds the splits of the near sum. Four rows a lane share the reads of the far "
        "numerator.",
    ),
)  # fmt: skip
