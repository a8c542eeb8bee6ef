"""The one table of kernels: bindings, parameters, grids.

The planner, both executors, the shader loader, the documentation and the tests read it: what a kernel
binds and how it is launched is written here and nowhere else. `planes.py` has the planes, `params.py` the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from .params import ARCHIVE_PARAMS, COPY_PARAMS, FLASH_PARAMS, FUSED_PARAMS, STAGE_PARAMS, Field, params_dtype
from .params import Params as Params
from .params import stage_params as stage_params
from .planes import FLUSH_ROWS, PANEL_ALIGN, PLANES, STORES, Element
from .tiling import TILE_KEYS as TILE_KEYS
from .tiling import TILE_ROWS

Access = Literal["read", "read_write"]
Grid = tuple[int, int, int]
Constants = tuple[tuple[str, int], ...]
"""Names of a shader's `override`s, and what they are."""


@dataclass(frozen=True)
class Binding:
    """A kernel's storage binding: a plane or a store; `element` is how the kernel takes it."""

    name: str
    access: Access
    element: Element


def _no_constants(params: Params) -> Constants:
    return ()


@dataclass(frozen=True)
class Kernel:
    """One kernel: `shaders/<name>.wgsl`, its twin `<name>` in `cpu/twins.py`.

    Binding 0 is the parameter uniform, bindings 1.. are `bindings` in order, all in group 0.
    """

    name: str
    text: str
    thread: str
    bindings: tuple[Binding, ...]
    params: tuple[Field, ...]
    workgroup: Grid
    shared_bytes: int
    grid: Callable[[Params], Grid]
    deviation: str
    features: tuple[str, ...] = ()
    constants: Callable[[Params], Constants] = _no_constants
    """Values of the shader's `override`s for some parameters: a pipeline for each."""

    @property
    def params_dtype(self) -> np.dtype:
        """The NumPy struct of the parameters."""
        return params_dtype(self.params)


def _bind(spec: str) -> tuple[Binding, ...]:
    """Bindings from names of planes or stores; a trailing `!` marks what the kernel writes, `:f32` before
    it a plane of vec4s that it takes for floats."""
    found = []
    for word in spec.split():
        name, _, element = word.rstrip("!").partition(":")
        plane = PLANES.get(name) or PLANES[STORES[name][1]]
        access: Access = "read_write" if word.endswith("!") else "read"
        found.append(Binding(name, access, "f32" if element == "f32" else plane.element))
    return tuple(found)


def _up(count: float, per: int) -> int:
    return max(1, -(-int(count) // per))


LANES = 64
"""Invocations of a workgroup: at least 64 wherever there is a barrier, at most 256."""
MAX_GRID = 65_535
TILE_M, TILE_N, TILE_K = 64, 64, 16
"""A workgroup's tile of a matrix product: rows, columns, and the step along the sum."""
TILE_QUADS = 16
"""Vec4s across either operand's tile."""
PRODUCT_LANES = 128
NEAR_LANES, NEAR_HEADS, NEAR_KEYS, KEY_LANES = 128, 4, 32, 16
"""A workgroup of `o1c_tok_near`: lanes, heads, keys of a tile, and the lanes that share a key."""
NEAR_SCORES = NEAR_HEADS * NEAR_KEYS
PART_STRIDE = NEAR_SCORES + 2
NEAR_PARTS = KEY_LANES * PART_STRIDE
FAR_LANES, DOT_LANES = 256, 8
"""A workgroup of `o1c_tok_far`: lanes, and those that share a landmark, or a row in `o1c_fl_evict`."""
DOT_STRIDE = LANES + 4
DOT_PARTS = DOT_LANES * DOT_STRIDE
MERGE_LANES, MERGE_COLUMNS = 256, 8
"""A workgroup of `o1c_tok_merge`: lanes, and vec4s of the value."""
MERGE_STRIPES = MERGE_LANES // MERGE_COLUMNS
SUM_STRIDE = MERGE_LANES + 8
MERGE_SUMS = 4 * SUM_STRIDE
COMMIT_LANES, COMMIT_COLUMNS = 256, 2
"""A workgroup of `o1c_tok_commit`: lanes, and vec4s of the width."""
EVICT_LANES, CHUNK_LANES = 256, 256
"""Invocations of a workgroup of `o1c_fl_evict`, and of the chunk's others."""
VALUE_QUADS = 32
"""Vec4s of the value that a workgroup of a chunk sums; wider values take more workgroups."""
FUSED_LANES, FUSED_LARGE, FUSED_SMALL = 128, 1088, 384
"""A workgroup of `o1c_fu_read`: lanes, and words of its two arrays."""
MOVE_LANES, MOVE_COLUMNS = 256, 8
"""A workgroup of `o1c_fu_move`: lanes, and vec4s of the value."""

_SINKS = "Sinks lie behind the ring in one plane, which frees two bindings. "
_META = "`meta` is a reserved word of WGSL: `group_meta`, eight words a group instead of four. "


def _stage(
    name: str,
    spec: str,
    grid: Callable[[Params], Grid],
    shared_words: int,
    text: str,
    thread: str,
    deviation: str,
    lanes: int = LANES,
) -> Kernel:
    return Kernel(
        name,
        text,
        thread,
        _bind(spec),
        STAGE_PARAMS,
        (lanes, 1, 1),
        4 * shared_words,
        grid,
        deviation.strip(),
    )


def _products(
    name: str, spec: str, grid: Callable[[Params], Grid], text: str, deviation: str
) -> tuple[Kernel, Kernel]:
    """A tiled matrix product in float32, and with its operands rounded to float16."""
    exact = Kernel(
        name, text, f"One workgroup a tile of {TILE_M} x {TILE_N}.", _bind(spec), STAGE_PARAMS,
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


def _fused(
    name: str, spec: str, grid: Callable[[Params], Grid], lanes: int, shared_words: int, text: str,
    thread: str, deviation: str,
) -> Kernel:  # fmt: skip
    """A half of a fused token, for whose widths a pipeline is made."""
    return Kernel(
        name, text, thread, _bind(spec), FUSED_PARAMS, (lanes, 1, 1), 4 * shared_words, grid, deviation,
        constants=lambda p: (("D4", int(p["d"]) // 4), ("DV4", int(p["dv"]) // 4)),
    )  # fmt: skip


def _folded(lanes: float) -> tuple[int, int]:
    """Workgroups for so many lanes, in two dimensions, since one holds no more than `MAX_GRID`."""
    groups = _up(lanes, LANES)
    x = min(groups, MAX_GRID)
    return x, _up(groups, x)


KERNELS: MappingProxyType[str, Kernel] = MappingProxyType(
    {
        k.name: k
        for k in (
            _stage(
                "o1c_far_e", "group_meta ring_k q_tilde far_mz far_rows!",
                lambda p: (int(p["m"]), int(p["nh"]), 1), LANES,
                "Every key that the sub-chunk evicts against a query landmark: its logit, and the far "
                "maximum and mass after each row.",
                "One workgroup a (landmark, query head), one lane a row.",
                _META + "One far maximum a row instead of one for the whole sub-chunk, so that a late large "
                "key does not empty the far field of the rows before it. Keeps logits, since weights at the "
                "scale of the last row would underflow for the earlier ones. Takes the shift c from every "
                "logit, so that far weights of large logits stay within range. Honours the far limit.",
            ),
            _stage(
                "o1c_score", "group_meta q ring_k k_rows scores!",
                lambda p: (_up(p["w"] + p["ns"], LANES), int(p["nh"]), int(p["k"])), 0,
                "Near logits of every row over the sinks and its own window.",
                "One lane a (key, query head, row).",
                _SINKS + "Scores lie [row][head][key]: the lanes of the next stages read side by side.",
            ),
            _stage(
                "o1c_land", "group_meta q k_tilde land_scores!",
                lambda p: (1, int(p["nh"]), int(p["k"])), 0,
                "Landmark logits of every row.",
                "One lane a landmark.",
                "Up to 64 landmarks, their number read from `group_meta`; scores lie [row][head][landmark].",
            ),
            _stage(
                "o1c_max", "group_meta scores near_max!",
                lambda p: (int(p["nh"]), int(p["k"]), 1), LANES,
                "The largest near logit of a row.",
                "One workgroup a (query head, row).",
                "A tree in shared memory instead of a subgroup's maximum.",
            ),
            _stage(
                "o1c_far", "group_meta land_scores near_max mix far_rows row_head! gains! evict_weights!",
                lambda p: (int(p["nh"]), int(p["k"]), 1), 4 * LANES,
                "The far part of a row with the far field as of that row: its maximum, its mass, the weight "
                "of the old numerator and of every row evicted so far.",
                "One workgroup a (query head, row), one lane a landmark, then a row.",
                "A far field that is dropped takes no part in the maximum C either. Both rectifiers. "
                "One lane a landmark instead of one a head.",
            ),
            _stage(
                "o1c_soft", "group_meta scores! row_head!",
                lambda p: (int(p["nh"]), int(p["k"]), 1), LANES,
                "Near weights in place of the logits, and one over the denominator.",
                "One workgroup a (query head, row).",
                "One over the denominator goes to a word of `row_head`, which frees a binding in `o1c_add`.",
            ),
            _stage(
                "o1c_sum", "group_meta scores ring_v v_rows sum_pieces!",
                lambda p: (_up(p["pieces"] * (p["dv"] // 4), LANES), int(p["nh"]), int(p["k"])), 0,
                "The near value sum in pieces of the keys.",
                "One lane a (piece, vec4 of the value), for each query head and row.",
                _SINKS + "Any number of heads a group: a lane sums for one head. "
                "The number of pieces follows the window.",
            ),
            _stage(
                "o1c_add", "group_meta sum_pieces row_head gains t_hat evict_weights ring_v out!",
                lambda p: (_up(p["dv"] // 4, LANES), int(p["nh"]), int(p["k"])), 0,
                "The output: the pieces, the far numerator, the rows evicted so far, over the denominator.",
                "One lane a vec4 of the value, for each query head and row.",
                _SINKS + "Eight storage buffers instead of nine.",
            ),
            _stage(
                "o1c_far_commit", "group_meta ring_v far_rows far_mz! t_hat!",
                lambda p: (_up(p["m"] * (p["dv"] // 4), LANES), int(p["nh"]), 1), 0,
                "The far field after the sub-chunk: rescaled to its maximum, plus every folded row.",
                "One lane a (landmark, vec4 of the value), for each query head.",
                f"Mass and numerator in two levels; the recent one joins the total each {FLUSH_ROWS} rows.",
            ),
            _stage(
                "o1c_ring_commit", "group_meta k_rows v_rows ring_k! ring_v!",
                lambda p: (_up(max(p["d"], p["dv"]) // 4, LANES), int(p["ng"]), int(p["k"])), 0,
                "The sub-chunk's keys and values into the ring.",
                "One lane a vec4 of the key and of the value, for each group and row.",
                "Keys and values of different width.",
            ),
            _stage(
                "o1c_meta", "group_meta!",
                lambda p: (_up(p["ng"], LANES), 1, 1), 0,
                "Ring length, head, far count and evictions after the sub-chunk.",
                "One lane a group.",
                _META + "The far count stops at the far limit.",
            ),
            _stage(
                "o1c_gather", "group_meta ring_k ring_v k_rows v_rows panel_k! panel_v!",
                lambda p: (*_folded(int(p["panel"]) * (max(p["d"], p["dv"]) // 4)), int(p["ng"])), 0,
                "The window's keys and values as one panel for each group: sinks, ring from its oldest row, "
                "the sub-chunk's rows, zeros.",
                "One lane a vec4 of a column's key and value.",
                _SINKS + "Keys and values of different width. Columns are padded to a multiple of "
                f"{PANEL_ALIGN}. The grid is folded in two dimensions.",
            ),
            _stage(
                "o1c_pack", "q panel_q!",
                lambda p: (_up(int(p["k"]) * (p["d"] // 4), LANES), int(p["nh"]), 1), 0,
                "The sub-chunk's queries, a head's rows together.",
                "One lane a vec4 of a query, for each head.",
                "The engine's `packh`. A head's rows lie `kcap` apart from the next head's.",
            ),
            *_products(
                "o1c_qk", "panel_q panel_k panel_scores!",
                lambda p: (_up(p["panel"], TILE_N), _up(int(p["hpg"]) * int(p["k"]), TILE_M), int(p["ng"])),
                "Near logits of all rows over all columns: scale times queries times keys transposed.",
                "The engine's matrix product with the scale folded in, over all groups in one dispatch.",
            ),
            _stage(
                "o1c_gmax", "group_meta panel_scores near_max!",
                lambda p: (int(p["nh"]), int(p["k"]), 1), LANES,
                "The largest near logit of a row, over the columns it sees.",
                "One workgroup a (query head, row).",
                "A tree in shared memory instead of a subgroup's maximum. Columns are read by fours.",
            ),
            _stage(
                "o1c_gsoft", "group_meta panel_scores! row_head!",
                lambda p: (int(p["nh"]), int(p["k"]), 1), LANES,
                "Near weights in place of the logits, zero in columns that the row does not see, and one "
                "over the denominator.",
                "One workgroup a (query head, row).",
                "One over the denominator goes to a word of `row_head`.",
            ),
            *_products(
                "o1c_pv", "panel_scores panel_v near_parts!",
                lambda p: (
                    _up(p["dv"], TILE_N),
                    _up(int(p["hpg"]) * int(p["k"]), TILE_M),
                    int(p["ng"]) * int(p["splits"]),
                ),
                "Near value sums of all rows: weights times values, a part of the columns each.",
                "The engine's matrix product, over all groups and splits of the columns in one dispatch: "
                "there are too few tiles otherwise.",
            ),
            _stage(
                "o1c_gadd", "group_meta near_parts row_head gains t_hat evict_weights ring_v out!",
                lambda p: (_up(_up(p["k"], 4) * (p["dv"] // 4), LANES), int(p["nh"]), 1), 0,
                "The output, as `o1c_add` has it, with the near sum from the product.",
                "One lane a vec4 of the value in four rows, for each query head.",
                _SINKS + "Adds the splits of the near sum. Four rows a lane share the reads of the far "
                "numerator.",
            ),
            _stage(
                "o1c_tok_near", "group_meta q ring_k k_rows ring_v v_rows tok_part!",
                lambda p: (int(p["splits"]), int(p["ng"]), _up(p["hpg"], NEAR_HEADS)),
                NEAR_PARTS + 2 * NEAR_SCORES + NEAR_HEADS,
                "Near part of a row over a split of the keys: largest logit, mass, value sum.",
                f"One workgroup a (split, group, {NEAR_HEADS} of its heads).",
                _SINKS + "Any number of heads a group, any width; a tree in shared memory instead of "
                "subgroups. The number of splits follows the window and the device.",
                NEAR_LANES,
            ),
            _stage(
                "o1c_tok_far", "group_meta q k_tilde ring_k q_tilde far_mz mix tok_record!",
                lambda p: (int(p["nh"]), 1, 1), 2 * DOT_PARTS + 4 * LANES + FAR_LANES,
                "Far part of a row for a head, and what the commit needs: the eviction, gains at the scale "
                "of their own maximum, the far mass.",
                "One workgroup a query head.",
                "Shares no plane that it writes with `o1c_tok_near`, so that wgpu lets both run at once. "
                "Up to 64 landmarks, both rectifiers, the far limit.",
                FAR_LANES,
            ),
            _stage(
                "o1c_tok_merge", "group_meta tok_part tok_record t_hat ring_v out!",
                lambda p: (_up(p["dv"] // 4, MERGE_COLUMNS), int(p["nh"]), 1), 3 * MERGE_STRIPES + MERGE_SUMS,
                "The output: the splits, the far numerator and the evicted row at one scale, over the "
                "denominator.",
                f"One workgroup a ({MERGE_COLUMNS} vec4s of the value, query head), its lanes in stripes of "
                "the splits and landmarks.",
                "The far field joins here instead of in a partial of its own.",
                MERGE_LANES,
            ),
            _stage(
                "o1c_tok_commit", "tok_record k_rows v_rows group_meta! ring_k! ring_v! far_mz! t_hat!",
                lambda p: (_up(max(p["d"], p["dv"]) // 4, COMMIT_COLUMNS), int(p["ng"]), 1), 0,
                "The state after the row: far field, ring, position.",
                f"One workgroup a ({COMMIT_COLUMNS} vec4s of the width, group): it reads the evicted row's "
                "part before it overwrites it.",
                "Position and flags come from `tok_record`: only the lane that moves `group_meta` reads it. "
                "Spread over the width instead of one workgroup a group. Mass and numerator in two levels.",
                COMMIT_LANES,
            ),
            _fused(
                "o1c_fu_read", "group_meta q ring k_tilde q_tilde mix far_mz fu_part!",
                lambda p: (
                    int(p["hpg"]) + int(p["outputs"]) * int(p["splits"]) * _up(p["hpg"], NEAR_HEADS),
                    int(p["ng"]), 1,
                ),
                FUSED_LANES, FUSED_LARGE + FUSED_SMALL,
                "First half of a token: the near part over each split of the window, the far part, and what "
                "the second half needs to move the state. Reads the state alone.",
                f"One workgroup a query head for the far part, one a (split, {NEAR_HEADS} heads of a group).",
                "Near and far part in one dispatch, without the row's own key, whose loads would delay the "
                "others. Splits are of slots, not of ages. Widths are compiled in.",
            ),
            _fused(
                "o1c_fu_move", "group_meta! q k_rows v_rows fu_part ring! far! out:f32!",
                lambda p: (_up(p["dv"] // 4, MOVE_COLUMNS), int(p["nh"]) + int(p["ng"]), 1),
                MOVE_LANES, 3 * MOVE_LANES // MOVE_COLUMNS + 4 * (MOVE_LANES + 8),
                "Second half of a token: the output from the splits, the far numerator and the row's own "
                "key, and the state after the row.",
                f"One workgroup a ({MOVE_COLUMNS} vec4s of the value, query head), one a group.",
                "Merge and commit in one dispatch: what either writes the other does not read. Leaves out "
                "the output or the state where `outputs` or `moves` says so.",
            ),
            *(
                replace(kernel, params=FLASH_PARAMS)
                for kernel in (
                    _stage(
                        "o1c_fl_evict", "group_meta ring_k q_tilde far_mz q k_tilde fl_rows!",
                        lambda p: (_up(p["m"], 4), int(p["nh"]), 1), 4 * DOT_PARTS + 4 * EVICT_LANES,
                        "Queries against the key landmarks, every key that the sub-chunk evicts against the "
                        "query landmarks, and the far maximum and mass after each row.",
                        "One workgroup four landmarks of a query head, eight lanes a row.",
                        "`o1c_far_e` and `o1c_land` in one.",
                        EVICT_LANES,
                    ),
                    _stage(
                        "o1c_fl_near", "group_meta q ring_k ring_v k_rows v_rows fl_parts! fl_rows",
                        lambda p: (
                            _up(int(p["ng"]) * _up(int(p["hpg"]) * int(p["k"]), TILE_ROWS) * p["pair_tiles"],
                                int(p["tiles"])),
                            _up(p["dv"] // 4, VALUE_QUADS), 1,
                        ),
                        16 * 49 * 4,
                        "Near part of every row over some tiles of keys: largest logit, mass, value sum.",
                        "One workgroup a run of key tiles, for each 32 vec4s of the value.",
                        "Logits stay in registers: no plane of scores. Binds `fl_rows`, which it does not "
                        "read, so that wgpu's wait for it comes before and the far part runs beside this.",
                        PRODUCT_LANES,
                    ),
                    _stage(
                        "o1c_fl_far", "group_meta mix fl_rows fl_far!",
                        lambda p: (_up(p["k"], 8), int(p["nh"]), 1), 1536,
                        "The far part of every row at its own maximum: weights of the old numerator and of "
                        "the rows evicted so far, and its mass.",
                        "One workgroup eight rows of a query head, 32 lanes a row.",
                        "Does not wait for the near part.",
                        CHUNK_LANES,
                    ),
                    _stage(
                        "o1c_fl_merge", "group_meta fl_far fl_parts t_hat ring_v out!",
                        lambda p: (_up(p["dv"] // 4, VALUE_QUADS), _up(p["k"], 8), int(p["nh"])), 3328,
                        "The output: near parts, far numerator, the rows evicted so far, over the "
                        "denominator.",
                        "One workgroup eight rows of a query head and 32 vec4s of the value.",
                        "The far field joins here, at the row's own scale.",
                        CHUNK_LANES,
                    ),
                    _stage(
                        "o1c_fl_commit", "group_meta! k_rows v_rows fl_rows ring_k! ring_v! far_mz! t_hat!",
                        lambda p: (_up(max(p["d"], p["dv"]) // 4, COMMIT_COLUMNS), int(p["ng"]), 1), 512,
                        "The state after the sub-chunk: far field, ring, position.",
                        f"One workgroup a ({COMMIT_COLUMNS} vec4s of the width, group).",
                        "`o1c_far_commit`, `o1c_ring_commit` and `o1c_meta` in one: it keeps the evicted "
                        "values in shared memory before it overwrites them.",
                        CHUNK_LANES,
                    ),
                )
            ),
            replace(
                _stage(
                    "o1c_archive", "group_meta q ring_k ring_v archive_q! archive_k! archive_v!",
                    lambda p: (_up(max(p["d"], p["dv"]) // 4, LANES), int(p["nh"]), int(p["k"])), 0,
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
                lambda p: (*_folded(p["count"]), 1),
                "Copies bits, not floats: a driver may flush a small integer that it takes for a float. "
                "The grid is folded in two dimensions.",
            ),
        )
    }
)  # fmt: skip
