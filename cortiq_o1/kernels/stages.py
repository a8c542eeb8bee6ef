"""The kernels of the path "stages", the plain form of the operator: one quantity a kernel."""

from __future__ import annotations

from ..planes import FLUSH_ROWS
from .row import LANES, META, SINKS, stage, up

KERNELS = (
    stage(
        "o1c_far_e", "group_meta ring_k q_tilde far_mz far_rows!",
        lambda p: (int(p["m"]), int(p["nh"]), 1), LANES,
        "Every key that the sub-chunk evicts against a query landmark: its logit, and the far "
        "maximum and mass after each row.",
        "One workgroup a (landmark, query head), one lane a row.",
        META + "One far maximum a row instead of one for the whole sub-chunk, so that a late large "
        "key does not empty the far field of the rows before it. Keeps logits, since weights at the "
        "scale of the last row would underflow for the earlier ones. Takes the shift c from every "
        "logit, so that far weights of large logits stay within range. Honours the far limit.",
    ),
    stage(
        "o1c_score", "group_meta q ring_k k_rows scores!",
        lambda p: (up(p["w"] + p["ns"], LANES), int(p["nh"]), int(p["k"])), 0,
        "Near logits of every row over the sinks and its own window.",
        "One lane a (key, query head, row).",
        SINKS + "Scores lie [row][head][key]: the lanes of the next stages read side by side.",
    ),
    stage(
        "o1c_land", "group_meta q k_tilde land_scores!",
        lambda p: (1, int(p["nh"]), int(p["k"])), 0,
        "Landmark logits of every row.",
        "One lane a landmark.",
        "Up to 64 landmarks, their number read from `group_meta`; scores lie [row][head][landmark].",
    ),
    stage(
        "o1c_max", "group_meta scores near_max!",
        lambda p: (int(p["nh"]), int(p["k"]), 1), LANES,
        "The largest near logit of a row.",
        "One workgroup a (query head, row).",
        "A tree in shared memory instead of a subgroup's maximum.",
    ),
    stage(
        "o1c_far", "group_meta land_scores near_max mix far_rows row_head! gains! evict_weights!",
        lambda p: (int(p["nh"]), int(p["k"]), 1), 4 * LANES,
        "The far part of a row with the far field as of that row: its maximum, its mass, the weight "
        "of the old numerator and of every row evicted so far.",
        "One workgroup a (query head, row), one lane a landmark, then a row.",
        "A far field that is dropped takes no part in the maximum C either. Both rectifiers. "
        "One lane a landmark instead of one a head.",
    ),
    stage(
        "o1c_soft", "group_meta scores! row_head!",
        lambda p: (int(p["nh"]), int(p["k"]), 1), LANES,
        "Near weights in place of the logits, and one over the denominator.",
        "One workgroup a (query head, row).",
        "One over the denominator goes to a word of `row_head`, which frees a binding in `o1c_add`.",
    ),
    stage(
        "o1c_sum", "group_meta scores ring_v v_rows sum_pieces!",
        lambda p: (up(p["pieces"] * (p["dv"] // 4), LANES), int(p["nh"]), int(p["k"])), 0,
        "The near value sum in pieces of the keys.",
        "One lane a (piece, vec4 of the value), for each query head and row.",
        SINKS + "Any number of heads a group: a lane sums for one head. "
        "The number of pieces follows the window.",
    ),
    stage(
        "o1c_add", "group_meta sum_pieces row_head gains t_hat evict_weights ring_v out!",
        lambda p: (up(p["dv"] // 4, LANES), int(p["nh"]), int(p["k"])), 0,
        "The output: the pieces, the far numerator, the rows evicted so far, over the denominator.",
        "One lane a vec4 of the value, for each query head and row.",
        SINKS + "Eight storage buffers instead of nine.",
    ),
    stage(
        "o1c_far_commit", "group_meta ring_v far_rows far_mz! t_hat!",
        lambda p: (up(p["m"] * (p["dv"] // 4), LANES), int(p["nh"]), 1), 0,
        "The far field after the sub-chunk: rescaled to its maximum, plus every folded row.",
        "One lane a (landmark, vec4 of the value), for each query head.",
        f"Mass and numerator in two levels; the recent one joins the total each {FLUSH_ROWS} rows.",
    ),
    stage(
        "o1c_ring_commit", "group_meta k_rows v_rows ring_k! ring_v!",
        lambda p: (up(max(p["d"], p["dv"]) // 4, LANES), int(p["ng"]), int(p["k"])), 0,
        "The sub-chunk's keys and values into the ring.",
        "One lane a vec4 of the key and of the value, for each group and row.",
        "Keys and values of different width.",
    ),
    stage(
        "o1c_meta", "group_meta!",
        lambda p: (up(p["ng"], LANES), 1, 1), 0,
        "Ring length, head, far count and evictions after the sub-chunk.",
        "One lane a group.",
        META + "The far count stops at the far limit.",
    ),
)  # fmt: skip
