"""The kernels of the path "token": one row of any width."""

from __future__ import annotations

from .row import (
    COMMIT_COLUMNS,
    COMMIT_LANES,
    DOT_PARTS,
    FAR_LANES,
    KEY_LANES,
    LANES,
    NEAR_HEADS,
    NEAR_KEYS,
    NEAR_LANES,
    SINKS,
    stage,
    up,
)

NEAR_SCORES = NEAR_HEADS * NEAR_KEYS
PART_STRIDE = NEAR_SCORES + 2
NEAR_PARTS = KEY_LANES * PART_STRIDE
MERGE_LANES, MERGE_COLUMNS = 256, 8
"""A workgroup of `o1c_tok_merge`: lanes, and vec4s of the value."""
MERGE_STRIPES = MERGE_LANES // MERGE_COLUMNS
SUM_STRIDE = MERGE_LANES + 8
MERGE_SUMS = 4 * SUM_STRIDE

KERNELS = (
    stage(
        "o1c_tok_near", "group_meta q ring_k k_rows ring_v v_rows tok_part!",
        lambda p: (int(p["splits"]), int(p["ng"]), up(p["hpg"], NEAR_HEADS)),
        NEAR_PARTS + 2 * NEAR_SCORES + NEAR_HEADS,
        "Near part of a row over a split of the keys: largest logit, mass, value sum.",
        f"One workgroup a (split, group, {NEAR_HEADS} of its heads).",
        SINKS + "Any number of heads a group, any width; a tree in shared memory instead of "
        "subgroups. The number of splits follows the window and the device.",
        NEAR_LANES,
    ),
    stage(
        "o1c_tok_far", "group_meta q k_tilde ring_k q_tilde far_mz mix tok_record!",
        lambda p: (int(p["nh"]), 1, 1), 2 * DOT_PARTS + 4 * LANES + FAR_LANES,
        "Far part of a row for a head, and what the commit needs: the eviction, gains at the scale "
        "of their own maximum, the far mass.",
        "One workgroup a query head.",
        "Shares no plane that it writes with `o1c_tok_near`, so that wgpu lets both run at once. "
        "Up to 64 landmarks, both rectifiers, the far limit.",
        FAR_LANES,
    ),
    stage(
        "o1c_tok_merge", "group_meta tok_part tok_record t_hat ring_v out!",
        lambda p: (up(p["dv"] // 4, MERGE_COLUMNS), int(p["nh"]), 1), 3 * MERGE_STRIPES + MERGE_SUMS,
        "The output: the splits, the far numerator and the evicted row at one scale, over the "
        "denominator.",
        f"One workgroup a ({MERGE_COLUMNS} vec4s of the value, query head), its lanes in stripes of "
        "the splits and landmarks.",
        "The far field joins here instead of in a partial of its own.",
        MERGE_LANES,
    ),
    stage(
        "o1c_tok_commit", "tok_record k_rows v_rows group_meta! ring_k! ring_v! far_mz! t_hat!",
        lambda p: (up(max(p["d"], p["dv"]) // 4, COMMIT_COLUMNS), int(p["ng"]), 1), 0,
        "The state after the row: far field, ring, position.",
        f"One workgroup a ({COMMIT_COLUMNS} vec4s of the width, group): it reads the evicted row's "
        "part before it overwrites it.",
        "Position and flags come from `tok_record`: only the lane that moves `group_meta` reads it. "
        "Spread over the width instead of one workgroup a group. Mass and numerator in two levels.",
        COMMIT_LANES,
    ),
)  # fmt: skip
