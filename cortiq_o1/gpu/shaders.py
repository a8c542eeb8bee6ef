"""The kernels' WGSL: found, put together, compiled.

A line `//#include shared/name.wgsl` stands for that file's text, once a kernel: a file that is
already in is not taken again. Everything else is plain WGSL. wgpu is never imported here; a device
brings all that is needed, so that one of Dawn's serves as well.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DeviceLostError, ShaderError
from ..kernels import KERNELS, Binding, Constants, Kernel
from ..planes import KV_BYTES
from .adapters import describe
from .faults import is_lost

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

_COMPUTE = 4  # WebGPU's ShaderStage.COMPUTE; the flag classes are wgpu's, the value is the standard's
_INCLUDE = re.compile(r"\s*//\s*#include\b\s*(.*?)\s*")
_RINGS = {kv: f"shared/ring_{kv}.wgsl" for kv in KV_BYTES}
_BUFFER_TYPES = {"read": "read-only-storage", "read_write": "storage"}


class _Line(NamedTuple):
    text: str
    file: str
    number: int


@lru_cache(maxsize=1)
def _root() -> Traversable:
    """The folder of the kernels: the installed package's, else a checkout's."""
    packaged = files(__package__.rpartition(".")[0]) / "shaders"
    if packaged.is_dir():
        return packaged
    checkout = Path(__file__).resolve().parents[2] / "shaders"
    if checkout.is_dir():
        return checkout
    raise ShaderError(f"shaders: neither in the package nor at {checkout}")


def _read(root: Traversable, file: str) -> str | None:
    """The text of a file below `root`, None where there is none; a path cannot lead out of it."""
    parts = file.split("/")
    if not all(re.fullmatch(r"[a-z0-9_]+(\.wgsl)?", part) for part in parts):
        return None
    found = root.joinpath(*parts)
    return found.read_text(encoding="utf-8") if found.is_file() else None


def _expand(root: Traversable, file: str, chain: tuple[str, ...], done: set[str], kv: str) -> list[_Line]:
    text = _read(root, file)
    if text is None:
        asked = f"{chain[-1]}: includes {file!r}" if chain else repr(file)
        raise ShaderError(f"{asked}: no such file among the shaders")
    chain = (*chain, file)
    lines: list[_Line] = []
    for number, line in enumerate(text.splitlines(), 1):
        directive = _INCLUDE.fullmatch(line)
        if directive is None:
            lines.append(_Line(line, file, number))
            continue
        target = directive.group(1)
        if target == _RINGS["f32"]:
            target = _RINGS[kv]
        if target in chain:
            raise ShaderError(
                f"{file}:{number}: includes {target!r} in a circle: {' > '.join((*chain, target))}"
            )
        if target not in done:
            lines += _expand(root, target, chain, done, kv)
    done.add(file)
    return lines


@lru_cache(maxsize=128)
def _kernel_lines(name: str, kv: str = "f32") -> tuple[_Line, ...]:
    if name not in KERNELS:
        raise ShaderError(f"{name!r}: no such kernel, expected one of {', '.join(KERNELS)}")
    return tuple(_expand(_root(), f"{name}.wgsl", (), set(), kv))


def source(name: str, kv: str = "f32") -> str:
    """The WGSL of a kernel with its includes in place, for rings kept as `kv` says.

    Raises:
        ShaderError: there is no such kernel; or a file that it includes is missing, or includes
            itself by some way.
    """
    return "\n".join(line.text for line in _kernel_lines(name, kv)) + "\n"


def layout_entries(kernel: Kernel) -> list[dict[str, Any]]:
    """The bind group layout: the parameters with a dynamic offset, then the kernel's bindings."""

    def entry(binding: int, **buffer: Any) -> dict[str, Any]:
        return {"binding": binding, "visibility": _COMPUTE, "buffer": buffer}

    def storage(binding: Binding) -> dict[str, Any]:
        # One element at least, as WebGPU derives it from a runtime-sized array.
        size = 16 if binding.element.startswith("vec4") else 4
        return {"type": _BUFFER_TYPES[binding.access], "has_dynamic_offset": False, "min_binding_size": size}

    params = entry(0, type="uniform", has_dynamic_offset=True, min_binding_size=kernel.params_dtype.itemsize)
    return [params, *(entry(i, **storage(b)) for i, b in enumerate(kernel.bindings, 1))]


def missing_features(device: Any, name: str) -> tuple[str, ...]:
    """The optional features that a kernel needs and the device was opened without."""
    return tuple(feature for feature in KERNELS[name].features if feature not in device.features)


def _explain(name: str, message: str, expanded: bool, kv: str) -> str:
    """The compiler's message with the file and line that its first position stands for."""
    message = message.strip().removeprefix("Validation Error").strip().removeprefix("Caused by:").strip()
    # naga says `wgsl:12:5` or `label:12:5`, Tint `:12:5` after a space.
    found = re.search(rf"(?:\bwgsl|\b{name}|^|\s):(\d+):(\d+)", message)
    lines = _kernel_lines(name, kv)
    if not expanded or found is None or not 1 <= int(found.group(1)) <= len(lines):
        return message
    line = lines[int(found.group(1)) - 1]
    return f"{line.file}:{line.number}:{found.group(2)}: {line.text.strip()}\n{message}"


def compile(
    device: Any, name: str, source: str | None = None, constants: Constants = (), kv: str = "f32"
) -> Any:
    """The compute pipeline of a kernel.

    Args:
        device: an open device of wgpu or of wgpudawn.
        name: a kernel of the table; also the label of all that is made here.
        source: WGSL to compile in place of the kernel's own, with the same bindings.
        constants: values of its `override`s; those that are not named keep the shader's own.
        kv: how the rings are kept that it binds, "f32" or "f16".

    Returns:
        The device's pipeline object; its bind group layout 0 is the table's: parameters at binding 0
        with a dynamic offset, the kernel's bindings from 1 on.

    Raises:
        ShaderError: it does not compile, or does not fit the table; names kernel and adapter and
            quotes the compiler. Or it needs a feature that the device was opened without.
        DeviceLostError: the device is gone.
    """
    lacking = missing_features(device, name)
    if lacking:
        adapter = describe(device.adapter).label
        raise ShaderError(f"{name} on {adapter}: needs {', '.join(lacking)}, which the device has not")
    code = "\n".join(line.text for line in _kernel_lines(name, kv)) + "\n" if source is None else source
    step = "compile"
    try:
        module = device.create_shader_module(label=name, code=code)
        step = "link"
        group = device.create_bind_group_layout(label=name, entries=layout_entries(KERNELS[name]))
        layout = device.create_pipeline_layout(label=name, bind_group_layouts=[group])
        stage: dict[str, Any] = {"module": module, "entry_point": "main"}
        if constants:
            stage["constants"] = dict(constants)
        return device.create_compute_pipeline(label=name, layout=layout, compute=stage)
    # The classes are wgpu's or Dawn's own, and a driver may throw anything at all.
    except Exception as error:
        adapter = describe(device.adapter).label
        if is_lost(error, device):
            raise DeviceLostError(f"{name} on {adapter}: the device is lost: {error}") from error
        text = _explain(name, str(error), source is None, kv)
        raise ShaderError(f"{name} on {adapter}: does not {step}: {text}") from error
