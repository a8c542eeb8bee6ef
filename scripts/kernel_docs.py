"""Writes `docs/kernels.md` from the kernel table; `--check` only compares and exits 1 on a difference."""

from __future__ import annotations

import sys
from pathlib import Path

from cortiq_o1.kernels import (
    COPY_PARAMS,
    KERNELS,
    META_WORDS,
    PLANES,
    STAGE_PARAMS,
    Field,
    Params,
    Sizes,
    params_dtype,
    stage_params,
)
from cortiq_o1.planning import BLOCK_ROWS, Geometry

TARGET = Path(__file__).parents[1] / "docs" / "kernels.md"
EXAMPLE = Geometry(32, 8, 128)
EXAMPLE_ROWS = 64

INTRO = f"""# Kernels and planes

Made by `python scripts/kernel_docs.py` from the table in `cortiq_o1/kernels.py`; do not edit.

Every kernel is `shaders/<name>.wgsl` and has a twin of the same name in `cortiq_o1/cpu/`. Parameters are
the uniform at binding 0, planes follow from binding 1 in the order given, all in group 0. Each workgroup
has the same size for all kernels, WebGPU's default limits suffice, and no optional feature is used.

Symbols: `ng` KV heads (groups), `nh` query heads, `m` landmarks, `d` key width, `dv` value width, `w` ring
capacity, `near` ring capacity and sinks, `rows` rows of the call, `kcap` rows of the longest sub-chunk,
`pieces` pieces of the value sum. Shapes are in 4-byte scalars, outermost first. Buffers are rounded up to
16 bytes. A call of more than {BLOCK_ROWS} rows goes to the device in several submits.

The kernels answer to those of the same name in cortiq-engine (see `NOTICE`); each section says where one
deviates from its forerunner.
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


def render() -> str:
    """The whole page."""
    lines = [INTRO, "## Planes", "", "| plane | role | element | shape | what |", "|---|---|---|---|---|"]
    for plane in PLANES.values():
        lines.append(
            f"| `{plane.name}` | {plane.role} | `{plane.element}` | `{_shape(plane.shape)}` | {plane.text} |"
        )
    lines += ["", f"A row of `group_meta` has {META_WORDS} words: a batch of sequences is more groups.", ""]
    lines += ["## Parameters", ""]
    lines += _params_table("`Params` of the stages", STAGE_PARAMS)
    lines += _params_table("`Params` of `o1c_copy`", COPY_PARAMS)
    lines += ["## Kernels", ""]
    sizes = Sizes.of(EXAMPLE, EXAMPLE_ROWS, EXAMPLE_ROWS)
    stage = stage_params(EXAMPLE, sizes, EXAMPLE_ROWS, 0)
    copy: Params = {"count": PLANES["k_rows"].nbytes(sizes) // 16, "src_at": 0, "dst_at": 0, "pad0": 0}
    for kernel in KERNELS.values():
        grid = kernel.grid(stage if kernel.params is STAGE_PARAMS else copy)
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
            f"Grid for {EXAMPLE_ROWS} rows of {EXAMPLE.num_heads} heads, {EXAMPLE.num_kv_heads} KV heads, "
            f"d = {EXAMPLE.head_dim}, window {EXAMPLE.window}: {' x '.join(map(str, grid))}.",
            "",
            f"Deviates: {kernel.deviation}",
            "",
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
