"""Every kernel's WGSL: held against the table, and compiled by naga on each adapter and by Tint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from conftest import adapter_id, adapters

from cortiq_o1 import planes, tiling
from cortiq_o1.errors import DeviceLostError, ShaderError
from cortiq_o1.gpu import shaders
from cortiq_o1.gpu.adapters import AdapterInfo, describe, open_adapter
from cortiq_o1.kernels import KERNELS, LANES, flash, fused, gemm, moves, row, stages, token

FOLDER = Path(__file__).resolve().parent.parent / "shaders"
MAX_STORAGE_BUFFERS, MAX_SHARED_BYTES = 8, 16 << 10  # WebGPU's default limits
TABLES = (planes, tiling, row, stages, gemm, token, fused, flash, moves)
SHADER_ONLY = {
    "EXP_FLOOR", "RECT_FM",
    # How a fused token's lanes share its work, and where its shared memory has what.
    "RECORD_WORDS", "ROW_LANES", "KEYS_ABREAST", "WIDE", "LOGIT_STRIDE", "WEIGHTS", "MARKS_ABREAST",
    "MARK_STRIDE", "KEY_PARTS", "OWN", "NOTHING", "TILE_LANES", "TILE_STEP", "HALF", "SLOTS", "ROWS",
    "STRIPES", "MAXIMA", "KEPT", "FOLDED", "SHARES", "MOVE_STRIPES", "SPLITS_AT_ONCE",
}  # fmt: skip
"""Constants of the shaders that the host has no use for."""

each_kernel = pytest.mark.parametrize("name", KERNELS)


def code(name: str) -> str:
    """A kernel's expanded WGSL without comments."""
    return re.sub(r"//[^\n]*", "", shaders.source(name))


def constants(text: str) -> dict[str, float]:
    """The module's constants by name; all of them are literals."""
    declared = re.findall(r"\bconst (\w+): (?:u32|f32) = (-?[\d.]+(?:e[+-]?\d+)?)u?;", text)
    assert len(declared) == len(re.findall(r"\bconst\b", text)), "a constant that this test cannot read"
    return {constant: float(value) for constant, value in declared}


def byte_size(kind: str, text: str) -> int:
    """Bytes of a type in the workgroup's memory: numbers, vec4s, arrays of them, and their aliases."""
    kind = kind.strip()
    array = re.fullmatch(r"array<(.*), (\w+)>", kind)
    if array:
        count = array[2].rstrip("u")
        return byte_size(array[1], text) * int(constants(text).get(count) or count)
    vector = re.fullmatch(r"vec4<(\w+)>", kind)
    if vector:
        return 4 * byte_size(vector[1], text)
    alias = re.search(rf"\balias {kind} = ([^;]+);", text)
    return byte_size(alias[1], text) if alias else {"f32": 4, "u32": 4, "f16": 2}[kind]


def buffers(text: str) -> list[tuple[int, int, str, str, str]]:
    """(group, binding, address space, name, type) of each bound variable, in order."""
    found = re.findall(r"@group\((\d+)\)\s*@binding\((\d+)\)\s*var<([^>]+)>\s*(\w+)\s*:\s*([^;]+);", text)
    assert len(found) == text.count("@binding("), "a binding that this test cannot read"
    return [(int(group), int(at), space, name, kind.strip()) for group, at, space, name, kind in found]


def test_files_are_the_kernels() -> None:
    assert {path.stem for path in FOLDER.glob("*.wgsl")} == set(KERNELS)
    used = {
        line.file for name in KERNELS for kv in planes.KV_BYTES for line in shaders._kernel_lines(name, kv)
    }
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.wgsl")} == used


@each_kernel
def test_bindings(name: str) -> None:
    kernel = KERNELS[name]
    assert len(kernel.bindings) <= MAX_STORAGE_BUFFERS
    expected = [(0, 0, "uniform", "params", "Params")]
    for at, binding in enumerate(kernel.bindings, 1):
        element = (
            "RingQuad" if binding.name == "ring" or binding.name in planes.KV_PLANES else binding.element
        )
        expected.append((0, at, f"storage, {binding.access}", binding.name, f"array<{element}>"))
    assert buffers(code(name)) == expected
    for kv, quad in (("f32", "vec4<f32>"), ("f16", "vec2<u32>")):
        alias = f"alias RingQuad = {quad};"
        assert (alias in shaders.source(name, kv)) == kernel.binds_ring


@each_kernel
def test_layout(name: str) -> None:
    kernel = KERNELS[name]
    params, *storage = shaders.layout_entries(kernel)
    size = kernel.params_dtype.itemsize
    assert params["buffer"] == {"type": "uniform", "has_dynamic_offset": True, "min_binding_size": size}
    assert [entry["binding"] for entry in storage] == list(range(1, len(kernel.bindings) + 1))
    for entry, binding in zip(storage, kernel.bindings, strict=True):
        read_only = binding.access == "read"
        assert entry["buffer"]["type"] == ("read-only-storage" if read_only else "storage")
        assert not entry["buffer"]["has_dynamic_offset"]


@each_kernel
def test_params(name: str) -> None:
    kernel = KERNELS[name]
    (body,) = re.findall(r"\bstruct Params \{(.*?)\}", code(name), re.DOTALL)
    declared = [tuple(part.strip().split(": ")) for part in body.split(",") if part.strip()]
    assert declared == [(field.name, field.type) for field in kernel.params]
    # Four-byte scalars lie without gaps in a uniform; its size must be a multiple of 16 there.
    dtype = kernel.params_dtype
    offsets = [dtype.fields[field][1] for field, _ in declared]
    assert offsets == [4 * at for at in range(len(declared))]
    assert dtype.itemsize % 16 == 0
    assert all(dtype[field] == np.dtype("<f4" if kind == "f32" else "<u4") for field, kind in declared)


@each_kernel
def test_entry_point(name: str) -> None:
    text = code(name)
    (size,) = re.findall(r"@compute\s+@workgroup_size\(([^)]*)\)\s*fn main\(", text)
    known = constants(text)
    sizes = [int(known.get(part.strip()) or part) for part in size.split(",") if part.strip()]
    assert tuple(sizes + [1] * (3 - len(sizes))) == KERNELS[name].workgroup
    assert len(re.findall(r"@compute\b", text)) == 1


@each_kernel
def test_shared_memory(name: str) -> None:
    text = code(name)
    declared = re.findall(r"var<workgroup> \w+: ([^;]+);", text)
    assert len(declared) == text.count("var<workgroup>"), "shared memory that this test cannot read"
    total = sum(-(-byte_size(kind, text) // 16) * 16 for kind in declared)
    assert total == KERNELS[name].shared_bytes
    assert total <= MAX_SHARED_BYTES


@each_kernel
def test_barriers_need_all_lanes(name: str) -> None:
    text = code(name)
    if "workgroupBarrier" not in text:
        assert "var<workgroup>" not in text
        return
    assert LANES >= 64
    assert not re.search(r"\breturn\b", text[text.index("fn main(") :]), "a lane may leave before a barrier"


@each_kernel
def test_constants_are_the_tables(name: str) -> None:
    declared = constants(code(name))
    assert "LANES" in declared
    table = {name: value for module in TABLES for name, value in vars(module).items()}
    expected = {constant: table[constant] for constant in declared if constant not in SHADER_ONLY}
    assert {constant: declared[constant] for constant in expected} == expected


@each_kernel
def test_style(name: str) -> None:
    text = (FOLDER / f"{name}.wgsl").read_text(encoding="utf-8")
    header = text[: re.search(r"^(?!//)|^//#", text, re.MULTILINE).start()]
    missing = [b.name for b in KERNELS[name].bindings if not re.search(rf"^//   {b.name} +\[", header, re.M)]
    assert not missing, "the header tells the layout of every binding"
    assert "One lane" in header or "One workgroup" in header
    expanded = shaders.source(name)
    assert "\t" not in expanded
    asked = re.findall(r"^\s*(?:enable|requires)\b\s*(\w+);", expanded, re.MULTILINE)
    assert [f"shader-{extension}" for extension in asked] == list(KERNELS[name].features)
    assert max(map(len, expanded.splitlines())) <= 120


def test_source_needs_no_wgpu() -> None:
    script = (
        "import sys; from cortiq_o1.gpu.shaders import source; assert '@compute' in source('o1c_far');"
        "assert not {'wgpu', 'wgpudawn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the kernels'."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(shaders, "_root", lambda: tmp_path)
    shaders._kernel_lines.cache_clear()
    yield tmp_path
    shaders._kernel_lines.cache_clear()


def test_include_comes_once_and_in_place(folder: Path) -> None:
    (folder / "o1c_max.wgsl").write_text("first\n//#include shared/a.wgsl\n//#include shared/b.wgsl\nlast\n")
    (folder / "shared/a.wgsl").write_text("//#include shared/b.wgsl\na\n")
    (folder / "shared/b.wgsl").write_text("b\n")
    assert shaders.source("o1c_max") == "first\nb\na\nlast\n"


@pytest.mark.parametrize(
    "target", ["shared/gone.wgsl", "gone.wgsl", "", "../secret.wgsl", "/etc/hostname", "shared"]
)
def test_unknown_include(folder: Path, target: str) -> None:
    (folder.parent / "secret.wgsl").write_text("outside\n")
    (folder / "o1c_max.wgsl").write_text(f"//#include {target}\n")
    with pytest.raises(ShaderError, match=re.escape(f"o1c_max.wgsl: includes {target!r}")):
        shaders.source("o1c_max")


def test_cyclic_include(folder: Path) -> None:
    (folder / "o1c_max.wgsl").write_text("//#include shared/a.wgsl\n")
    (folder / "shared/a.wgsl").write_text("//#include shared/b.wgsl\n")
    (folder / "shared/b.wgsl").write_text("\n//#include shared/a.wgsl\n")
    with pytest.raises(ShaderError, match=r"shared/b.wgsl:2: includes 'shared/a.wgsl' in a circle"):
        shaders.source("o1c_max")


def test_unknown_kernel() -> None:
    with pytest.raises(ShaderError, match="'o1c_nothing': no such kernel"):
        shaders.source("o1c_nothing")


@pytest.fixture(
    scope="module",
    params=[pytest.param(a, id=adapter_id(a)) for a in adapters()]
    or [pytest.param(None, marks=pytest.mark.skip(reason="no wgpu adapter"))],
)
def adapter(request: pytest.FixtureRequest) -> AdapterInfo:
    """Each adapter that wgpu sees."""
    return request.param


@pytest.fixture(scope="module")
def raw_device(adapter: AdapterInfo) -> Any:
    """A device of wgpu itself on it, opened with WebGPU's default limits."""
    return open_adapter(adapter, default_limits=True)


def no_tint(reason: str) -> NoReturn:
    """Skips, but never where Tint is promised: the extra has it from Python 3.11 on."""
    if os.environ.get("CI") and sys.version_info >= (3, 11):
        pytest.fail(f"no Tint: {reason}")
    pytest.skip(f"no Tint: {reason}")


@pytest.fixture(scope="module")
def dawn_device() -> Any:
    """A device of Dawn, whose compiler is Tint."""
    try:
        import wgpudawn
    except ImportError as error:
        no_tint(str(error))
    try:
        # Dawn refuses old llvmpipes and takes the next adapter.
        found = wgpudawn.gpu.request_adapter_sync()
    except Exception as error:
        no_tint(str(error))
    if found is None:
        no_tint("Dawn finds no adapter")
    have = [f for f in ("shader-f16",) if f in found.features]
    opened = found.request_device_sync(required_features=have, required_limits={})
    assert opened.limits["max-storage-buffers-per-shader-stage"] >= MAX_STORAGE_BUFFERS
    return opened


def spoiled(name: str, part: str, instead: str) -> str:
    """A kernel with its one occurrence of `part` replaced."""
    text = shaders.source(name)
    assert text.count(part) == 1
    return text.replace(part, instead)


@each_kernel
@pytest.mark.gpu
def test_compiles(adapter: AdapterInfo, raw_device: Any, name: str) -> None:
    features = KERNELS[name].features
    if features:
        with pytest.raises(ShaderError, match=rf"{name} on .*: needs shader-f16, which the device has not"):
            shaders.compile(raw_device, name)
        if not set(features) <= set(adapter.features):
            pytest.skip(f"{adapter.label} has no {', '.join(features)}")
    device = open_adapter(adapter) if features else raw_device
    pipeline = shaders.compile(device, name)
    assert pipeline.label == name
    if KERNELS[name].binds_ring:
        assert shaders.compile(device, name, kv="f16").label == name
    assert pipeline.get_bind_group_layout(0) is not None


@each_kernel
@pytest.mark.dawn
def test_compiles_with_tint(dawn_device: Any, name: str) -> None:
    if shaders.missing_features(dawn_device, name):
        pytest.skip(f"Dawn's adapter has no {', '.join(KERNELS[name].features)}")
    assert shaders.compile(dawn_device, name).label == name
    if KERNELS[name].binds_ring:
        assert shaders.compile(dawn_device, name, kv="f16").label == name


@pytest.mark.dawn
def test_tint_refuses_a_barrier_for_some_lanes(dawn_device: Any) -> None:
    start = "let columns = params.ns"
    text = spoiled("o1c_max", start, f"if (lane < 3u) {{ workgroupBarrier(); }}\n        {start}")
    with pytest.raises(ShaderError, match="'workgroupBarrier' must only be called from uniform control flow"):
        shaders.compile(dawn_device, "o1c_max", text)


@pytest.mark.dawn
def test_tint_refuses_barriers_steered_by_a_writable_plane(dawn_device: Any) -> None:
    # Why group_meta is bound read-only wherever it decides about a barrier.
    text = spoiled("o1c_far_e", "var<storage, read> group_meta", "var<storage, read_write> group_meta")
    with pytest.raises(ShaderError, match="must only be called from uniform control flow"):
        shaders.compile(dawn_device, "o1c_far_e", text)


def check_refusals(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    label = re.escape(describe(device.adapter).label)
    wrong = spoiled("o1c_meta", "let g = id.x;", "let g = id.x + oops;")
    with pytest.raises(ShaderError, match=f"(?s)^o1c_meta on {label}: does not compile: .*oops") as caught:
        shaders.compile(device, "o1c_meta", wrong)
    assert "let g = id.x + oops;" in str(caught.value)
    # Compiles, but writes what the table binds read-only.
    unfit = spoiled("o1c_max", "var<storage, read> scores", "var<storage, read_write> scores")
    with pytest.raises(ShaderError, match=f"^o1c_max on {label}: does not link: ") as caught:
        shaders.compile(device, "o1c_max", unfit)
    # A mistake in a shared file is told by that file's line, not by that of the expanded text.
    lines = [
        line._replace(text="oops") if line.text.startswith("struct Group") else line
        for line in shaders._kernel_lines("o1c_meta")
    ]
    (at,) = [line.number for line in lines if line.text == "oops"]
    monkeypatch.setattr(shaders, "_kernel_lines", lambda name, kv: tuple(lines))
    with pytest.raises(ShaderError, match=rf"does not compile: shared/group\.wgsl:{at}:\d+: oops\n"):
        shaders.compile(device, "o1c_meta")


@pytest.mark.gpu
def test_refusals_name_kernel_adapter_and_line(raw_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refusals(raw_device, monkeypatch)


@pytest.mark.dawn
def test_refusals_by_tint(dawn_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refusals(dawn_device, monkeypatch)


@pytest.mark.gpu
def test_lost_device(adapter: AdapterInfo) -> None:
    gone = adapter.handle.request_device_sync()
    gone.destroy()
    with pytest.raises(DeviceLostError, match=re.escape(f"o1c_max on {adapter.label}: the device is lost")):
        shaders.compile(gone, "o1c_max")
