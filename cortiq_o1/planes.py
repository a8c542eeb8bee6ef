"""Every plane: its layout, its role, and the constants that its words are told by.

A plane's layout is written here and nowhere else; `kernels/` says which kernels bind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .geometry import Geometry
from .tiling import flash_slots, fused_splits, fused_words

Element = Literal["f32", "u32", "vec4<f32>", "vec4<u32>"]
# state: a layer's own; rows: a call's input and output; pending: rows of an uncommitted call;
# archive: what left a layer's ring lately; scratch: shared by all layers of a geometry, dead after the
# call; own: scratch of one layer, where sharing would make a layer wait for the one before.
Role = Literal["state", "rows", "pending", "archive", "scratch", "own"]

SUB_ROWS = 64
"""Most rows of a sub-chunk: one lane of `o1c_far_e` each."""
MAX_PIECES, PIECE_KEYS = 16, 128
"""The value sum is cut into at most this many pieces, of at least so many keys."""
PANEL_ALIGN = 64
"""Columns of a key panel are padded to a multiple of this, so that a product's tiles have no edge there."""
MIN_SPLIT_KEYS = 32
"""A split of the keys has at least so many, else its overhead shows."""
MAX_LOOP_STEPS = 30_000
"""Most loop steps of an invocation: Mesa's software drivers stop at 65,535 without a word."""
LARGE = 1.7e38
"""Stands for infinity: half of float32's range, so that differences of two stay finite."""
MIN_DENOMINATOR = 1e-30
"""What a row is divided by is at least this, where near and far weights vanish or cancel."""
FLUSH_ROWS = 4096
"""Folded rows after which the far field's recent sums join its totals."""

META_WORDS = 8
"""Words of a group's row in `group_meta`."""
META_LEN, META_HEAD, META_FAR_LEN, META_WINDOW, META_FAR_LIMIT, META_LANDMARKS, META_EVICTED = range(7)
NO_FAR_LIMIT = 0xFFFFFFFF

MZ_MAX, MZ_TOTAL, MZ_RECENT, MZ_SHIFT, MZ_SECTIONS = range(5)
"""Sections of `far_mz`: the far maximum, the far mass in two levels, what is taken from every far logit."""
T_TOTAL, T_RECENT, T_SECTIONS = range(3)
"""Sections of `t_hat`: the far numerator in two levels."""
S_LOGIT, S_MAX, S_RESCALE, S_MASS, S_WEIGHT, S_SECTIONS = range(6)
"""Sections of `far_rows`, see its plane."""
HD_MAX, HD_FAR, HD_HAVE, HD_INV, HD_WORDS = range(5)
"""Words of a row in `row_head`."""
TP_MAX, TP_MASS, _, _, TP_WORDS = range(5)
"""Words of a split's partial in `tok_part` before its values."""
TR_MAX, TR_FAR, TR_HAVE, TR_EVICTED, TR_SLOT, TR_FOLDS, TR_FLUSHES, TR_EVICTS, TR_WORDS = range(9)
"""Words of a head's record in `tok_record` before its sections of `m`."""
TS_GAIN, TS_MAX, TS_RESCALE, TS_WEIGHT, TS_SECTIONS = range(5)
"""Sections of a head's record in `tok_record`."""
FR_LEN, FR_HEAD, FR_WINDOW, FR_FIRST, FR_END, FR_LANDMARKS, FR_FLUSHES, _, FR_WORDS = range(9)
"""Words of a group's record in `fl_rows`."""
FF_MAX, FF_MASS, FF_HAVE = range(3)
FF_GAINS, FF_WEIGHTS, FF_WORDS = 4, 68, 132
"""Words of a row in `fl_far`; from `FF_GAINS` and `FF_WEIGHTS` on 64 each."""


KV_BYTES: MappingProxyType[str, int] = MappingProxyType({"f32": 4, "f16": 2})
"""How a device may keep the rows of rings and sinks, and bytes a number then takes."""
KV_PLANES: tuple[str, ...] = ("ring_k", "ring_v")
"""The planes that are kept so; all others are float32, or words."""


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
    panel: int
    psplits: int
    splits: int
    part: int
    record: int
    archive: int
    fsplits: int
    fused: int
    flash: int
    fslots: int
    kv: str

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        rows: int = 1,
        kcap: int = 1,
        workgroups: int = 256,
        archive: int = 1,
        kv: str = "f32",
    ) -> Sizes:
        """The sizes of `rows` rows in sub-chunks of at most `kcap` rows.

        `workgroups`: how many keep the device busy, see `planning.Limits`; the keys are split until
        there are about as many. `archive`: evictions that the archive holds, 1 where there is none.
        `kv`: how rings are kept, one of `KV_BYTES`.
        """
        near = geometry.window + geometry.sinks
        panel = -(-(near + kcap) // PANEL_ALIGN) * PANEL_ALIGN
        tiles = geometry.num_kv_heads * -(-geometry.heads_per_group * kcap // 64)
        tiles *= -(-(geometry.value_dim or 0) // 64)
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
            panel=panel,
            psplits=max(1, min(2 * workgroups // tiles, panel // (2 * PANEL_ALIGN), MAX_PIECES)),
            splits=max(1, min(-(-workgroups // geometry.num_kv_heads), near // MIN_SPLIT_KEYS)),
            part=TP_WORDS + geometry.value_dim,
            record=TR_WORDS + TS_SECTIONS * geometry.landmarks,
            archive=archive,
            fsplits=fused_splits(geometry),
            fused=fused_words(geometry),
            flash=6 * geometry.num_heads * geometry.landmarks * kcap + FR_WORDS * geometry.num_kv_heads,
            fslots=flash_slots(geometry, kcap, workgroups),
            kv=kv,
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
        return (KV_BYTES[sizes.kv] if self.name in KV_PLANES else 4) * math.prod(self.dims(sizes))

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
                "folded rows at which the far field closes, landmarks in use, rows that have left the "
                "ring so far, folded or not, wrapping at 2^32, a spare word.",
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
            _plane("spec_q", _V4, "rows nh d", "pending", "Queries of such a call."),
            _plane(
                "archive_q", _V4, "archive nh d", "archive",
                "Queries of the rows that evicted, each group's heads in the slot of that group's eviction: "
                "its number, as `group_meta` counts them, modulo `archive`. Where the count wraps, slots "
                "run on only if `archive` is a power of two.",
            ),
            _plane("archive_k", _V4, "ng archive d", "archive", "Evicted keys, by the same slot."),
            _plane("archive_v", _V4, "ng archive dv", "archive", "Evicted values, by the same slot."),
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
            _plane(
                "panel_k", _V4, "ng panel d", "scratch",
                "Keys in order: sinks, ring from its oldest row, the sub-chunk's rows, zeros.",
            ),
            _plane("panel_v", _V4, "ng panel dv", "scratch", "Values, laid out as the keys."),
            _plane("panel_q", _V4, "nh kcap d", "scratch", "Queries, a head's rows together."),
            _plane(
                "panel_scores", _V4, "nh kcap panel", "scratch",
                "Logits of every row over the panel, then weights, zero where the row does not look.",
            ),
            _plane(
                "near_parts", _V4, "psplits nh kcap dv", "scratch",
                "Near value sums, a split of the panel's columns each.",
            ),
            _plane(
                "tok_part", _V4, "nh splits part", "scratch",
                "A split's largest logit, its mass at that scale, two unused words, its value sum.",
            ),
            _plane(
                "tok_record", "f32", "nh record", "own",
                "The far part of a row: its maximum, its mass, 1 where it counts, the evicted row's weight "
                "(all at that maximum's scale); the ring slot the row takes, how many landmarks fold the "
                "evicted row (those in use or none), 1 where levels join, 1 where a row is evicted; then per "
                "landmark in use the old numerator's gain, the far maximum after the row, exp(maximum before "
                "- that), the folded row's weight.",
            ),
            _plane(
                "fl_rows", "f32", "flash", "own",
                "`far_rows` of a chunk without score planes; behind it eight words a group, of what the "
                "commit must know of `group_meta`, and the landmark logits `kcap nh m`.",
            ),
            _plane(
                "fl_far", "f32", f"kcap nh {FF_WORDS}", "own",
                "The far part of a row at the scale of its own maximum: that maximum, its mass, 1 where it "
                "counts, an unused word, weights of the numerator before, those of the rows evicted so far.",
            ),
            _plane(
                "fl_parts", _V4, "fslots kcap nh part", "scratch",
                "A row's largest logit over some tiles of keys, its mass at that scale, two unused words, "
                "its value sum.",
            ),
            _plane(
                "fu_part", _V4, "nh fused", "own",
                "For each of a head's splits of the window its largest logit and mass at that scale, in four "
                "words, and its value sum. Then the far part's record, see shaders/shared/fused.wgsl.",
            ),
        )
    }
)  # fmt: skip
STORES: MappingProxyType[str, tuple[str, str]] = MappingProxyType(
    {"ring": ("ring_k", "ring_v"), "far": ("far_mz", "t_hat")}
)
"""Two planes that may lie one behind the other in one buffer, so that a kernel can bind both as one."""
STORE_ROWS = 32
"""A store has room for a multiple of so many rows: a plane then begins on a multiple of 256 bytes, also where
rows of four numbers take eight bytes."""


def packed(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Rows of a multiple of four numbers as rings of kind "f16" keep them: float16 in pairs, two a word."""
    return np.ascontiguousarray(values, np.float16).view(np.uint32)


def unpacked(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """The numbers that `packed` made words of, in float32."""
    return words.view(np.float16).astype(np.float32)


def store_rows(store: str, ng: int, near: int, nh: int, m: int) -> int:
    """Rows that each plane of a store has, of four floats at least: the keys and values of a ring's slots, or
    masses and numerators of landmarks. A kernel finds the second plane by the length of the whole."""
    return ng * near if store == "ring" else nh * m


def store_room(rows: int) -> int:
    """Rows that a store has room for."""
    return -(-rows // STORE_ROWS) * STORE_ROWS


def store_ranges(store: str, sizes: Sizes) -> dict[str, tuple[int, int]]:
    """`(offset, bytes)` of each plane of a store, room included."""
    rows = store_rows(store, sizes.ng, sizes.near, sizes.nh, sizes.m)
    found, at = {}, 0
    for name in STORES[store]:
        nbytes = PLANES[name].nbytes(sizes) // rows * store_room(rows)
        found[name] = (at, nbytes)
        at += nbytes
    return found


def store_bytes(store: str, sizes: Sizes) -> int:
    """Bytes of a whole store."""
    return sum(nbytes for _, nbytes in store_ranges(store, sizes).values())


STATE_PLANES: tuple[str, ...] = tuple(p.name for p in PLANES.values() if p.role == "state")
PENDING_PLANES: tuple[str, ...] = tuple(p.name for p in PLANES.values() if p.role == "pending")
ARCHIVE_PLANES: tuple[str, ...] = tuple(p.name for p in PLANES.values() if p.role == "archive")
OWN_PLANES: tuple[str, ...] = tuple(p.name for p in PLANES.values() if p.role == "own")
MOVING_PLANES: tuple[str, ...] = ("group_meta", "ring_k", "ring_v", "far_mz", "t_hat")
"""The state planes that a committed row changes."""
STILL_PLANES: tuple[str, ...] = tuple(name for name in STATE_PLANES if name not in MOVING_PLANES)
"""Those that it does not."""
