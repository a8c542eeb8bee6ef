"""Writes `docs/kernels.md` from the kernel table; `--check` only compares and exits 1 on a difference."""

from __future__ import annotations

import sys
from pathlib import Path

from cortiq_o1.geometry import Geometry
from cortiq_o1.kernels import KERNELS, Grid, Kernel
from cortiq_o1.params import (
    ARCHIVE_PARAMS,
    COPY_PARAMS,
    FLASH_PARAMS,
    FUSED_PARAMS,
    STAGE_PARAMS,
    Field,
    params_dtype,
)
from cortiq_o1.paths import ATTEND, COMMIT, Emitter
from cortiq_o1.planes import META_WORDS, PLANES, STORE_ROWS, STORES, Sizes
from cortiq_o1.planning import BLOCK_ROWS, FLASH_ROWS_OF_FEW, Limits

TARGET = Path(__file__).parents[1] / "docs" / "kernels.md"
EXAMPLE = Geometry(32, 8, 128)
EXAMPLE_ROWS, EXAMPLE_ARCHIVE = 64, 256

INTRO = f"""# Kernels and planes

Made by `python scripts/kernel_docs.py` from the tables in `cortiq_o1/planes.py`, `cortiq_o1/kernels/` and
`cortiq_o1/paths.py`; do not edit.

Every kernel is `shaders/<name>.wgsl` and has a twin of the same name in `cortiq_o1/cpu/`. Parameters are
the uniform at binding 0, planes follow from binding 1 in the order given, all in group 0. WebGPU's default
limits suffice, and no optional feature is used but `shader-f16` by the kernels that say so.

Symbols: `ng` KV heads (groups), `nh` query heads, `m` landmarks, `d` key width, `dv` value width, `w` ring
capacity, `near` ring capacity and sinks, `rows` rows of the call, `kcap` rows of the longest sub-chunk,
`pieces` pieces of the value sum, `panel` columns of a panel, `psplits` splits of its columns in the value
sum, `splits` splits of the keys of one row, `part` and `record` words of `tok_part` and `tok_record`,
`archive` evictions that the archive holds. Shapes are in 4-byte scalars, outermost first. Buffers are
rounded up to 16 bytes. A call of more than {BLOCK_ROWS} rows goes to the device in several submits.

The kernels answer to those of the same name in cortiq-engine (see `NOTICE`); each section says where one
deviates from its forerunner.
"""

PATHS_TEXT = f"""A sub-chunk of one row takes the path "fused", or "token" where that cannot
serve; one of more rows, on a software renderer of {FLASH_ROWS_OF_FEW} and more, "flash" where its scratch
fits; any other "stages". `plan(..., path=...)` or `CORTIQ_O1_PATH` forces one. A row that is not committed
leaves out the last column, a later commit runs the first kernel of a path and the last column; "fused" runs
both its kernels, told what to leave out. Where a layer has an archive, `o1c_archive` comes before the last
column, or before the last kernel of "fused".

## Precision

The products are float32 throughout in the mode "exact". In "fast", where the device has `shader-f16`, their
operands are rounded to float16, sums stay float32. With half a unit in the last place h = 2^-11 instead of
2^-24, the two products are off by no more than:

- a logit, queries times keys, by the scale times 2h times the sum of the terms' sizes, and mostly by 0.6h
  times the root of the sum of their squares;
- a value sum, weights times values, by 2h times the sum of the terms' sizes, and by 2^-25 times the sum of
  the values' sizes for weights near zero.

Weights stand at the scale of the row's maximum over near and far field. Where the far field lies far above
the near logits and cancels to little, near weights are too small for float16 and the output loses digits: the
worst layer of `verify`, with keys three times as long as the rest, is off by 7e-2 in outputs of about 1, the
others by 5e-3 at most, in "exact" by 1e-5 and 5e-4. The state is the same in both modes, bit for bit.
"""


def _shape(symbols: tuple[str | int, ...]) -> str:
    return "".join(f"[{s}]" for s in symbols)


def _params_table(title: str, fields: tuple[Field, ...]) -> list[str]:
    dtype = params_dtype(fields)
    lines = [
        f"### {title}, {dtype.itemsize} bytes",
        "",
        "| offset | name | type | what |",
        "|---|---|---|---|",
    ]
    for field in fields:
        assert dtype.fields is not None
        offset = dtype.fields[field.name][1]
        lines.append(f"| {offset} | `{field.name}` | {field.type} | {field.text} |")
    return [*lines, ""]


def _paths() -> list[str]:
    lines = ["## Paths", "", "| path | outputs | state after them |", "|---|---|---|"]
    for path, attend in ATTEND.items():
        outputs, state = (" ".join(f"`{k}`" for k in kernels) for kernels in (attend, COMMIT[path]))
        lines.append(f"| {path} | {outputs} | {state} |")
    return [*lines, "", PATHS_TEXT]


def _stores() -> str:
    return ", ".join(f"`{first}` and `{second}`" for first, second in STORES.values())


def _example(kernel: Kernel) -> tuple[str, Grid]:
    """Rows of the example in words, and the kernel's grid for them."""
    k = 1 if kernel.name in (*ATTEND["token"], *COMMIT["token"], *ATTEND["fused"]) else EXAMPLE_ROWS
    sizes = Sizes.of(EXAMPLE, k, k, archive=EXAMPLE_ARCHIVE)
    if kernel.params is not COPY_PARAMS:
        params = dict(Emitter(EXAMPLE, sizes, Limits().workgroups).emit(kernel.name, k, 0).params)
    else:
        params = {"count": PLANES["k_rows"].nbytes(sizes) // 16, "src_at": 0, "dst_at": 0, "pad0": 0}
    return f"{k} row" + ("s" if k > 1 else ""), kernel.grid(params)


def render() -> str:
    """The whole page."""
    lines = [INTRO, "## Planes", "", "| plane | role | element | shape | what |", "|---|---|---|---|---|"]
    for plane in PLANES.values():
        lines.append(
            f"| `{plane.name}` | {plane.role} | `{plane.element}` | `{_shape(plane.shape)}` | {plane.text} |"
        )
    lines += [
        "",
        f"`ring` and `far` are stores: {_stores()}, one behind the other in one buffer, each with "
        f"room for a multiple of {STORE_ROWS} rows.",
    ]
    lines += ["", f"A row of `group_meta` has {META_WORDS} words: a batch of sequences is more groups.", ""]
    lines += ["## Parameters", ""]
    lines += _params_table("`Params` of the stages", STAGE_PARAMS)
    lines += _params_table("`Params` of a fused token", FUSED_PARAMS)
    lines += _params_table("`Params` of a chunk in tiles", FLASH_PARAMS)
    lines += _params_table("`Params` of `o1c_archive`", ARCHIVE_PARAMS)
    lines += _params_table("`Params` of `o1c_copy`", COPY_PARAMS)
    lines += _paths()
    lines += ["## Kernels", ""]
    for kernel in KERNELS.values():
        rows, grid = _example(kernel)
        lines += [
            f"### `{kernel.name}`",
            "",
            f"{kernel.text} {kernel.thread}",
            "",
            "| binding | plane | access | element |",
            "|---|---|---|---|",
        ]
        for number, binding in enumerate(kernel.bindings, start=1):
            access = "read and write" if binding.access == "read_write" else "read"
            lines.append(f"| {number} | `{binding.name}` | {access} | `{binding.element}` |")
        lines += [
            "",
            f"Workgroup {' x '.join(map(str, kernel.workgroup))}, {kernel.shared_bytes} bytes shared. "
            + (f"Needs {', '.join(f'`{f}`' for f in kernel.features)}. " if kernel.features else "")
            + f"Grid for {rows} of {EXAMPLE.num_heads} heads, {EXAMPLE.num_kv_heads} KV heads, "
            f"d = {EXAMPLE.head_dim}, window {EXAMPLE.window}: {' x '.join(map(str, grid))}.",
            "",
            *((f"Deviates: {kernel.deviation}", "") if kernel.deviation else ()),
        ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """The exit code."""
    text = render()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() == text:
            return 0
        print(f"{TARGET.name} differs from the table; run python scripts/kernel_docs.py", file=sys.stderr)
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
