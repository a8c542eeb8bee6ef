"""The kernels of the path "fused": one row in two dispatches."""

from __future__ import annotations

from collections.abc import Callable

from ..params import FUSED_PARAMS, Params
from .row import NEAR_HEADS, Grid, Kernel, bind, up

FUSED_LANES, FUSED_LARGE, FUSED_SMALL = 128, 1088, 384
"""A workgroup of `o1c_fu_read`: lanes, and words of its two arrays."""
MOVE_LANES, MOVE_COLUMNS = 256, 8
"""A workgroup of `o1c_fu_move`: lanes, and vec4s of the value."""


def fused(
    name: str, spec: str, grid: Callable[[Params], Grid], lanes: int, shared_words: int, text: str,
    thread: str, deviation: str,
) -> Kernel:  # fmt: skip
    """A half of a fused token, for whose widths a pipeline is made."""
    return Kernel(
        name, text, thread, bind(spec), FUSED_PARAMS, (lanes, 1, 1), 4 * shared_words, grid, deviation,
        constants=lambda p: (("D4", int(p["d"]) // 4), ("DV4", int(p["dv"]) // 4)),
    )  # fmt: skip


KERNELS = (
    fused(
        "o1c_fu_read", "group_meta q ring k_tilde q_tilde mix far_mz fu_part!",
        lambda p: (
            int(p["hpg"]) + int(p["outputs"]) * int(p["splits"]) * up(p["hpg"], NEAR_HEADS),
            int(p["ng"]), 1,
        ),
        FUSED_LANES, FUSED_LARGE + FUSED_SMALL,
        "First half of a token: the near part over each split of the window, the far part, and what "
        "the second half needs to move the state. Reads the state alone.",
        f"One workgroup a query head for the far part, one a (split, {NEAR_HEADS} heads of a group).",
        "Near and far part in one dispatch, without the row's own key, whose loads would delay the "
        "others. Splits are of slots, not of ages. Widths are compiled in.",
    ),
    fused(
        "o1c_fu_move", "group_meta! q k_rows v_rows fu_part ring! far! out:f32!",
        lambda p: (up(p["dv"] // 4, MOVE_COLUMNS), int(p["nh"]) + int(p["ng"]), 1),
        MOVE_LANES, 3 * MOVE_LANES // MOVE_COLUMNS + 4 * (MOVE_LANES + 8),
        "Second half of a token: the output from the splits, the far numerator and the row's own "
        "key, and the state after the row.",
        f"One workgroup a ({MOVE_COLUMNS} vec4s of the value, query head), one a group.",
        "Merge and commit in one dispatch: what either writes the other does not read. Leaves out "
        "the output or the state where `outputs` or `moves` says so.",
    ),
)  # fmt: skip
