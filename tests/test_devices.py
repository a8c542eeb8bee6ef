"""Listing, choosing and opening devices."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import adapters

import cortiq_o1 as o1
from cortiq_o1.devices import VARIABLE, FallbackWarning
from cortiq_o1.gpu import adapters as listing
from cortiq_o1.gpu import shaders
from cortiq_o1.gpu.adapters import DEFAULT_LIMITS, AdapterInfo, open_adapter, ranked, required_limits

# The package's attribute of that name is the function.
chooser = importlib.import_module("cortiq_o1.devices")


def made_up(name: str, backend: str, kind: str, software: bool = False, **more: Any) -> AdapterInfo:
    """An adapter that nobody has; whoever opens it gets an exception."""
    fields = {"vendor": "", "driver": "", "features": (), "limits": dict(DEFAULT_LIMITS), **more}
    return AdapterInfo(name=name, backend=backend, kind=kind, software=software, **fields)


MACHINE = [
    made_up("Renderer (soft)", "vulkan", "cpu", software=True),
    made_up("Arc 7", "gl", "other"),
    made_up("Iris 5", "vulkan", "integrated"),
    made_up("Arc 7", "vulkan", "discrete"),
    made_up("Old 1", "vulkan", "discrete", problem="too old"),
]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[AdapterInfo]:
    """A machine with five adapters; opening one only notes which."""
    opened: list[AdapterInfo] = []

    def note(adapter: AdapterInfo, path: str) -> Any:
        opened.append(adapter)
        return SimpleNamespace(name=adapter.name, backend=adapter.backend)

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(chooser, "find_adapters", lambda: (ranked(MACHINE), None))
    monkeypatch.setattr(chooser, "_open_adapter", note)
    monkeypatch.setattr(chooser, "_prove", lambda device: None)
    return opened


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", ("Arc 7", "vulkan")),
        ("vulkan", ("Arc 7", "vulkan")),
        ("gl", ("Arc 7", "gl")),
        ("OpenGL", ("Arc 7", "gl")),
        ("iris", ("Iris 5", "vulkan")),
        ("ARC", ("Arc 7", "vulkan")),
        ("gl:arc", ("Arc 7", "gl")),
        ("vulkan:iris", ("Iris 5", "vulkan")),
        ("renderer (", ("Renderer (soft)", "vulkan")),
    ],
)
def test_a_name_stands_for_the_best_adapter(
    machine: list[AdapterInfo], name: str, expected: tuple[str, str]
) -> None:
    device = o1.open_device(name)
    assert (device.name, device.backend) == expected
    assert len(machine) == 1


@pytest.mark.parametrize("name", ["metal", "geforce", "gl:iris", "", "wat:arc"])
def test_an_unknown_name_lists_what_there_is(machine: list[AdapterInfo], name: str) -> None:
    with pytest.raises(o1.DeviceError, match="answers to") as caught:
        o1.open_device(name)
    for there in ("vulkan:Arc 7", "gl:Arc 7", "vulkan:Iris 5", "vulkan:Renderer (soft)", "cpu"):
        assert there in str(caught.value)
    assert not machine


def test_the_environment_stands_in_for_auto_only(
    machine: list[AdapterInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "iris")
    assert o1.open_device().name == "Iris 5"
    assert o1.open_device("gl").backend == "gl"
    monkeypatch.setenv(VARIABLE, "cpu")
    assert o1.open_device().backend == "cpu"
    monkeypatch.setenv(VARIABLE, "auto")
    assert o1.open_device().name == "Arc 7"
    monkeypatch.setenv(VARIABLE, "geforce")
    with pytest.raises(o1.DeviceError, match=f"{VARIABLE}.*'geforce'.*vulkan:Arc 7"):
        o1.open_device()


def test_auto_takes_the_next_gpu_where_one_fails(
    machine: list[AdapterInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: Any) -> None:
        if device.name == "Arc 7":
            raise o1.DeviceError("Arc 7: on fire")

    monkeypatch.setattr(chooser, "_prove", fail)
    assert o1.open_device().name == "Iris 5"


def test_adapters_rank_by_use_then_kind_then_backend() -> None:
    assert [(a.name, a.backend) for a in ranked(MACHINE)] == [
        ("Arc 7", "vulkan"),
        ("Iris 5", "vulkan"),
        ("Arc 7", "gl"),
        ("Renderer (soft)", "vulkan"),
        ("Old 1", "vulkan"),
    ]


def test_the_cpu_is_always_listed_last() -> None:
    found = o1.devices()
    assert found[-1].backend == "cpu"
    assert [d.backend for d in found[:-1]] == [a.backend for a in listing.list_adapters()]
    assert len({d.adapter.key for d in found if d.adapter}) == len(found) - 1


def test_software_renderers_are_marked() -> None:
    for adapter in adapters():
        if any(word in adapter.name.lower() for word in ("llvmpipe", "swiftshader")):
            assert adapter.software


def test_a_probe_that_fails_does_not_stop_the_listing() -> None:
    class Broken:
        @property
        def info(self) -> dict[str, str]:
            raise RuntimeError("no answer")

    found = listing.describe(Broken())
    assert found.problem == "cannot be probed: no answer"
    with pytest.raises(o1.DeviceError, match="no answer"):
        open_adapter(found)


def test_an_adapter_with_too_little_says_what_it_lacks() -> None:
    handle = SimpleNamespace(
        info={"device": "Tiny", "adapter_type": "IntegratedGPU", "backend_type": "OpenGLES"},
        features=set(),
        limits={**DEFAULT_LIMITS, "max-storage-buffers-per-shader-stage": 4},
    )
    found = listing.describe(handle)
    assert (found.backend, found.kind) == ("gl", "integrated")
    assert found.problem == "max-storage-buffers-per-shader-stage 4, needs 8"


def test_equal_cards_are_told_apart() -> None:
    info = {"device": "Card", "adapter_type": "DiscreteGPU", "backend_type": "Vulkan"}
    handle = SimpleNamespace(info=info, features=set(), limits=DEFAULT_LIMITS)
    assert [a.ordinal for a in listing._with_ordinals([handle, handle])] == [0, 1]


def test_limits_asked_for_are_stated_and_granted() -> None:
    plenty = {name: 2 * value for name, value in DEFAULT_LIMITS.items()}
    info = made_up("Large", "vulkan", "discrete", limits={**plenty, "max-buffer-size": 1 << 40})
    assert required_limits(info, default_limits=True) == {
        name: 512 if name.startswith("min-") else value for name, value in DEFAULT_LIMITS.items()
    }
    asked = required_limits(info)
    assert asked["max-storage-buffer-binding-size"] == 256 << 20
    assert asked["max-buffer-size"] == listing.LARGEST_BUFFER
    raised = {n for n in asked if not n.startswith("min-") and asked[n] > DEFAULT_LIMITS[n]}
    assert raised == set(listing.RAISED_LIMITS)


def test_a_device_is_opened_once(gpu: o1.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    (info,) = [a for a in adapters() if (a.name, a.backend) == (gpu.name, gpu.backend)]
    first = open_adapter(info, default_limits=True)
    assert open_adapter(info, default_limits=True) is first is gpu.gpu
    again = o1.open_device(gpu.gpu)
    assert again.engine.context is gpu.engine.context
    # A device does not survive a fork.
    calls = []
    handle = SimpleNamespace(request_device_sync=lambda **given: calls.append(given) or object())
    monkeypatch.setattr(listing.os, "getpid", lambda: -1)
    monkeypatch.setattr(listing, "_open", dict(listing._open))
    assert open_adapter(replace(info, handle=handle), default_limits=True) is not first
    assert len(calls) == 1


def test_a_device_has_just_the_default_limits(gpu: o1.Device) -> None:
    assert gpu.gpu.limits["max-storage-buffers-per-shader-stage"] == 8
    assert gpu.gpu.limits["max-compute-workgroup-storage-size"] == 16384
    assert gpu.limits.binding_bytes == 128 << 20
    assert "timestamp-query" not in gpu.gpu.features


def test_a_foreign_device_with_too_little_is_refused(gpu: o1.Device) -> None:
    limits = {**gpu.gpu.limits, "max-storage-buffers-per-shader-stage": 4}
    less = SimpleNamespace(queue=None, adapter=gpu.gpu.adapter, limits=limits, create_compute_pipeline=None)
    with pytest.raises(
        o1.DeviceError, match="opened with too little: max-storage-buffers-per-shader-stage 4"
    ):
        o1.open_device(less)


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(o1.DeviceError, match="int, expected a name or a GPUDevice"):
        o1.open_device(7)
    with pytest.raises(o1.ArgumentError, match="path: 'fast'"):
        o1.open_device("cpu", path="fast")


def test_a_layer_that_cannot_fit_is_refused_before_it_is_loaded(gpu: o1.Device) -> None:
    # Without the half gigabyte that its planes would take.
    state = o1.LayerState.__new__(o1.LayerState)
    state.geometry = o1.Geometry(num_heads=8, num_kv_heads=8, head_dim=512, window=16_384)
    with pytest.raises(o1.GeometryError, match=r"ring_k: .* binds at most 134217728; lower window"):
        gpu.load(state)
    with pytest.raises(o1.ArgumentTypeError, match="state: str, expected a LayerState"):
        gpu.load("layer.o1")


def test_without_wgpu_auto_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "wgpu", None)
    assert [d.backend for d in o1.devices()] == ["cpu"]
    with pytest.warns(FallbackWarning, match="wgpu cannot be imported"):
        device = o1.open_device()
    assert device.backend == "cpu"
    with pytest.raises(o1.DeviceError, match=r"no adapter \(wgpu cannot be imported"):
        o1.open_device("vulkan")


def test_a_gpu_that_refuses_a_device_is_told_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: Any) -> None:
        raise RuntimeError("driver says no")

    monkeypatch.delenv(VARIABLE, raising=False)
    card = made_up("Card", "vulkan", "discrete", handle=SimpleNamespace(request_device_sync=refuse))
    monkeypatch.setattr(chooser, "find_adapters", lambda: ([card], None))
    with pytest.warns(FallbackWarning, match=r"Card \(vulkan\): refuses a device: driver says no") as caught:
        device = o1.open_device()
    assert device.backend == "cpu"
    assert caught[0].filename == __file__


def test_software_renderers_alone_are_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(chooser, "find_adapters", lambda: (MACHINE[:1], None))
    with pytest.warns(FallbackWarning, match=r"only software renderers.*vulkan:Renderer"):
        assert o1.open_device().backend == "cpu"


def as_hardware(monkeypatch: pytest.MonkeyPatch) -> AdapterInfo:
    """One of the machine's adapters, passed off as hardware."""
    if not adapters():
        pytest.skip("no wgpu adapter")
    card = replace(adapters()[0], software=False, kind="discrete")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(chooser, "find_adapters", lambda: ([card], None))
    return card


@pytest.mark.gpu
def test_auto_takes_a_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    card = as_hardware(monkeypatch)
    device = o1.open_device()
    assert (device.name, device.backend, device.software) == (card.name, card.backend, False)


@pytest.mark.gpu
def test_auto_falls_back_where_a_kernel_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any, name: str, *rest: Any) -> Any:
        raise o1.ShaderError(f"{name} on a card: does not compile")

    as_hardware(monkeypatch)
    monkeypatch.setattr(shaders, "compile", refuse)
    monkeypatch.setattr("cortiq_o1.gpu.context._contexts", {})
    with pytest.warns(FallbackWarning, match="o1c_copy on a card: does not compile"):
        assert o1.open_device().backend == "cpu"


def test_neither_the_package_nor_the_cpu_imports_wgpu() -> None:
    code = (
        "import sys, cortiq_o1 as o1; d = o1.open_device('cpu', path='stages'); d.engine; "
        "bad = {m.partition('.')[0] for m in sys.modules} & {'wgpu', 'wgpudawn', 'rich'}; "
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_reports_tell_name_backend_and_path() -> None:
    device = o1.open_device("cpu")
    assert device.info()["backend"] == "cpu"
    assert device.info()["path"] == "auto"
    assert repr(device) == f"Device({device.name!r}, 'cpu', path='auto')"


@pytest.mark.parametrize(
    ("driver", "problem"),
    [
        ("3.3.0 NVIDIA 580.159.04", "OpenGL 3.3, needs 4.3 for compute shaders"),
        ("4.5 (Core Profile) Mesa 22.3.6", None),
        ("4.3.0 NVIDIA 580.159.04", None),
        ("OpenGL ES 3.2 NVIDIA 580.159.04", None),
        ("", None),
    ],
)
def test_an_opengl_context_without_compute_shaders_is_listed_as_such(
    driver: str, problem: str | None
) -> None:
    handle = SimpleNamespace(
        info={"device": "Card", "backend_type": "OpenGL", "description": driver}, features=(), limits={}
    )
    assert listing.describe(handle).problem == problem


@pytest.mark.parametrize(
    ("kind", "software", "expected"),
    [("discrete", False, 264), ("integrated", False, 64), ("other", False, 64), ("cpu", True, 14)],
)
def test_work_is_split_by_the_adapters_kind(
    monkeypatch: pytest.MonkeyPatch, kind: str, software: bool, expected: int
) -> None:
    monkeypatch.setattr(listing.os, "cpu_count", lambda: 7)
    assert listing.busy_workgroups(made_up("Card", "vulkan", kind, software)) == expected


def test_limits_tell_what_the_planner_must_know(gpu: o1.Device) -> None:
    (info,) = [a for a in adapters() if (a.name, a.backend) == (gpu.name, gpu.backend)]
    assert gpu.limits.workgroups == listing.busy_workgroups(info)
    assert not gpu.limits.float16  # opened without features
    device = o1.open_device(info, precision="fast")
    has = "shader-f16" in info.features
    assert device.limits.float16 == ("shader-f16" in device.gpu.features) == has
    assert device.precision == ("fast" if has else "exact")
    assert device.info()["precision"] == device.precision


def test_path_and_precision_are_told() -> None:
    device = o1.open_device("cpu", "gemm", "fast")
    assert (device.path, device.precision, device.engine.precision) == ("gemm", "fast", "fast")
    assert repr(device) == f"Device({device.name!r}, 'cpu', path='gemm', precision='fast')"


@pytest.mark.dawn
def test_dawn_is_opened_by_name_and_listed_by_nobody() -> None:
    found, why = listing.find_dawn_adapters()
    if not found:
        if os.environ.get("CI"):
            raise AssertionError(why)
        pytest.skip(str(why))
    device = o1.open_device("dawn")
    assert device.backend == "dawn"
    assert device is not o1.open_device("dawn")
    assert device.gpu is o1.open_device(f"dawn:{found[0].name}").gpu
    assert "dawn" not in {info.backend for info in o1.devices()}
    with pytest.raises(o1.DeviceError, match="no device answers to 'dawn:nothing'; there is: dawn:"):
        o1.open_device("dawn:nothing")
