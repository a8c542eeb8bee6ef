"""The one table of planes, parameters and kernels.

The planner, both executors, the shader loader, the documentation and the tests read it: a plane's
layout, a kernel's bindings and its grid are written here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from .geometry import Geometry

Access = Literal["read", "read_write"]
Element = Literal["f32", "u32", "vec4<f32>", "vec4<u32>"]
# state: a layer's own; rows: a call's input and output; pending: rows of an uncommitted call;
# scratch: shared by all layers of a geometry, dead after the call.
Role = Literal["state", "rows", "pending", "scratch"]

SUB_ROWS = 64
"""Most rows of a sub-chunk: one lane of `o1c_far_e` each."""
MAX_PIECES, PIECE_KEYS = 16, 128
"""The value sum is cut into at most this many pieces, of at least so many keys."""
MAX_LOOP_STEPS = 30_000
"""Most loop steps of an invocation: Mesa's software drivers stop at 65,535 without a word."""
LARGE = 1.7e38
"""Stands for infinity: half of float32's range, so that differences of two stay finite."""
FLUSH_ROWS = 4096
"""Folded rows after which the far field's recent sums join its totals."""

META_WORDS = 8
"""Words of a group's row in `group_meta`."""
META_LEN, META_HEAD, META_FAR_LEN, META_WINDOW, META_FAR_LIMIT, META_LANDMARKS = range(6)
NO_FAR_LIMIT = 0xFFFFFFFF

MZ_MAX, MZ_TOTAL, MZ_RECENT, MZ_SHIFT, MZ_SECTIONS = range(5)
"""Sections of `far_mz`: the far maximum, the far mass in two levels, what is taken from every far logit."""
T_TOTAL, T_RECENT, T_SECTIONS = range(3)
"""Sections of `t_hat`: the far numerator in two levels."""
S_LOGIT, S_MAX, S_RESCALE, S_MASS, S_WEIGHT, S_SECTIONS = range(6)
"""Sections of `far_rows`, see its plane."""
HD_MAX, HD_FAR, HD_HAVE, HD_INV, HD_WORDS = range(5)
"""Words of a row in `row_head`."""


@dataclass(frozen=True)
class Sizes:
    """What the symbols in plane shapes stand for: a geometry, a call's rows, a sub-chunk's rows."""

    ng: int
    nh: int
    m: int
    d: int
    dv: int
    w: int
    near: int
    rows: int
    kcap: int
    pieces: int

    @classmethod
    def of(cls, geometry: Geometry, rows: int = 1, kcap: int = 1) -> Sizes:
        """The sizes of `rows` rows in sub-chunks of at most `kcap` rows."""
        near = geometry.window + geometry.sinks
        assert geometry.value_dim is not None
        return cls(
            ng=geometry.num_kv_heads,
            nh=geometry.num_heads,
            m=geometry.landmarks,
            d=geometry.head_dim,
            dv=geometry.value_dim,
            w=geometry.window,
            near=near,
            rows=rows,
            kcap=kcap,
            pieces=max(1, min(MAX_PIECES, math.ceil(near / PIECE_KEYS))),
        )


@dataclass(frozen=True)
class Plane:
    """A buffer: its element type as WGSL binds it, and its shape in scalars, outermost first."""

    name: str
    element: Element
    shape: tuple[str | int, ...]
    role: Role
    text: str

    def dims(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape in scalars."""
        return tuple(s if isinstance(s, int) else getattr(sizes, s) for s in self.shape)

    def nbytes(self, sizes: Sizes) -> int:
        """The size in bytes."""
        return 4 * math.prod(self.dims(sizes))

    @property
    def dtype(self) -> np.dtype:
        """The scalar's NumPy type."""
        return np.dtype(np.uint32 if "u32" in self.element else np.float32)


def _plane(name: str, element: Element, shape: str, role: Role, text: str) -> Plane:
    symbols = tuple(int(s) if s.isdigit() else s for s in shape.split())
    return Plane(name, element, symbols, role, text)


_V4: Element = "vec4<f32>"
PLANES: MappingProxyType[str, Plane] = MappingProxyType(
    {
        p.name: p
        for p in (
            _plane(
                "group_meta", "u32", f"ng {META_WORDS}", "state",
                "Per group: rows in the ring, slot of the oldest, rows folded, the group's window, "
                "folded rows at which the far field closes, landmarks in use, two spare words.",
            ),
            _plane("ring_k", _V4, "ng near d", "state", "Keys: the ring's `w` slots, then the sinks."),
            _plane("ring_v", _V4, "ng near dv", "state", "Values, laid out as the keys."),
            _plane("k_tilde", _V4, "ng m d", "state", "Key landmarks."),
            _plane("q_tilde", _V4, "nh m d", "state", "Query landmarks."),
            _plane("mix", "f32", "nh m m", "state", "The mixing matrix M times exp(c), `[a][b]`."),
            _plane(
                "far_mz", "f32", f"nh {MZ_SECTIONS} m", "state",
                "Far maximum mu; far mass at scale exp(-mu), the total and what came since; the shift c "
                "that is taken from a folded key's logit, hence from mu, the same for all landmarks.",
            ),
            _plane(
                "t_hat", _V4, f"nh {T_SECTIONS} m dv", "state",
                "Far numerator at scale exp(-mu), in the same two levels.",
            ),
            _plane("q", _V4, "rows nh d", "rows", "The call's queries."),
            _plane("k_rows", _V4, "rows ng d", "rows", "The call's keys."),
            _plane("v_rows", _V4, "rows ng dv", "rows", "The call's values."),
            _plane("out", _V4, "rows nh dv", "rows", "The call's outputs."),
            _plane("spec_k", _V4, "rows ng d", "pending", "Keys of a call that has yet to be committed."),
            _plane("spec_v", _V4, "rows ng dv", "pending", "Values of such a call."),
            _plane(
                "far_rows", "f32", f"{S_SECTIONS} nh m kcap", "scratch",
                "Per landmark and row of the sub-chunk: the evicted key's logit (-LARGE if none is "
                "folded), the far maximum after the row, exp(maximum before - that), the far mass after "
                "the row, the evicted key's weight at the scale after the sub-chunk.",
            ),
            _plane(
                "scores", "f32", "kcap nh near", "scratch",
                "Near logits, then weights: sinks, then window.",
            ),
            _plane("land_scores", "f32", "kcap nh m", "scratch", "Landmark logits p."),
            _plane("near_max", "f32", "kcap nh", "scratch", "The largest near logit."),
            _plane(
                "row_head", "f32", f"kcap nh {HD_WORDS}", "scratch",
                "The row's maximum C, its far mass, 1 where the far field counts, 1 / denominator.",
            ),
            _plane("gains", "f32", "kcap nh m", "scratch", "Weights of the numerator before the sub-chunk."),
            _plane("evict_weights", "f32", "kcap nh kcap", "scratch", "Weights of the rows evicted so far."),
            _plane(
                "sum_pieces", _V4, "kcap nh pieces dv", "scratch",
                "Near value sums, a piece of the keys each.",
            ),
        )
    }
)  # fmt: skip
STATE_PLANES: tuple[str, ...] = tuple(p.name for p in PLANES.values() if p.role == "state")
MOVING_PLANES: tuple[str, ...] = ("group_meta", "ring_k", "ring_v", "far_mz", "t_hat")
"""The state planes that a committed row changes."""


@dataclass(frozen=True)
class Field:
    """One parameter of a kernel, as its WGSL struct declares it."""

    name: str
    type: Literal["u32", "f32"]
    text: str


STAGE_PARAMS: tuple[Field, ...] = (
    Field("hpg", "u32", "query heads a group"),
    Field("m", "u32", "landmarks, capacity"),
    Field("w", "u32", "ring capacity"),
    Field("ns", "u32", "sinks"),
    Field("d", "u32", "key width in floats"),
    Field("dv", "u32", "value width in floats"),
    Field("nh", "u32", "query heads of all groups"),
    Field("ng", "u32", "groups"),
    Field("k", "u32", "rows of this sub-chunk"),
    Field("r0", "u32", "its first row within the call"),
    Field("kcap", "u32", "row stride of far_rows and evict_weights"),
    Field("pieces", "u32", "pieces of the value sum"),
    Field("rect", "u32", "0 aggregate, 1 fm"),
    Field("scale", "f32", "factor of every logit"),
    Field("pad0", "u32", "unused"),
    Field("pad1", "u32", "unused"),
)
COPY_PARAMS: tuple[Field, ...] = (
    Field("count", "u32", "vec4s to copy"),
    Field("src_at", "u32", "first vec4 read"),
    Field("dst_at", "u32", "first vec4 written"),
    Field("pad0", "u32", "unused"),
)

Params = dict[str, int | float]
Grid = tuple[int, int, int]


def params_dtype(fields: Iterable[Field]) -> np.dtype:
    """The NumPy struct of a kernel's parameters; all fields are four bytes, so WGSL adds no gaps."""
    return np.dtype([(f.name, "<f4" if f.type == "f32" else "<u4") for f in fields])


@dataclass(frozen=True)
class Binding:
    """A kernel's storage binding; `element` is that of every plane that may be bound there."""

    name: str
    access: Access
    element: Element


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

    @property
    def params_dtype(self) -> np.dtype:
        """The NumPy struct of the parameters."""
        return params_dtype(self.params)


def _bind(spec: str) -> tuple[Binding, ...]:
    """Bindings from plane names; a trailing `!` marks what the kernel writes."""
    found = []
    for word in spec.split():
        name = word.rstrip("!")
        found.append(Binding(name, "read_write" if word.endswith("!") else "read", PLANES[name].element))
    return tuple(found)


def _up(count: float, per: int) -> int:
    return max(1, -(-int(count) // per))


LANES = 64
"""Invocations of a workgroup: at least 64 wherever there is a barrier, at most 256."""
MAX_GRID = 65_535

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
) -> Kernel:
    return Kernel(
        name,
        text,
        thread,
        _bind(spec),
        STAGE_PARAMS,
        (LANES, 1, 1),
        4 * shared_words,
        grid,
        deviation.strip(),
    )


def _copy_grid(p: Params) -> Grid:
    groups = _up(p["count"], LANES)
    x = min(groups, MAX_GRID)
    return (x, _up(groups, x), 1)


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
                "Ring length, head and far count after the sub-chunk.",
                "One lane a group.",
                _META + "The far count stops at the far limit.",
            ),
            Kernel(
                "o1c_copy",
                "A range of one plane into another.",
                "One lane a vec4.",
                (Binding("src", "read", "vec4<u32>"), Binding("dst", "read_write", "vec4<u32>")),
                COPY_PARAMS,
                (LANES, 1, 1),
                0,
                _copy_grid,
                "Copies bits, not floats: a driver may flush a small integer that it takes for a float. "
                "The grid is folded in two dimensions.",
            ),
        )
    }
)  # fmt: skip


def stage_params(geometry: Geometry, sizes: Sizes, k: int, r0: int) -> Params:
    """The parameters of a stage over rows `r0 .. r0 + k` of a call."""
    return {
        "hpg": geometry.heads_per_group,
        "m": sizes.m,
        "w": sizes.w,
        "ns": geometry.sinks,
        "d": sizes.d,
        "dv": sizes.dv,
        "nh": sizes.nh,
        "ng": sizes.ng,
        "k": k,
        "r0": r0,
        "kcap": sizes.kcap,
        "pieces": sizes.pieces,
        "rect": 1 if geometry.rect == "fm" else 0,
        "scale": float(geometry.scale32),
        "pad0": 0,
        "pad1": 0,
    }
