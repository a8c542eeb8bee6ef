"""Adapters for the tests: every one that wgpu sees, and those that must be there.

`CORTIQ_O1_REQUIRE_ADAPTERS=vulkan:llvmpipe,gl:llvmpipe` makes a missing adapter a failure; without it
the tests that need a GPU are skipped, and counted, where there is none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import cache

import hypothesis
import numpy as np
import pytest

import cortiq_o1 as o1
from cortiq_o1.gpu.adapters import AdapterInfo, list_adapters

# Mesa's drivers complain on standard error where a desktop has not set this.
os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
# The same examples on every run: a red test must stay red until it is mended.
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=25, print_blob=True
)
hypothesis.settings.load_profile("repeatable")


@cache
def adapters() -> tuple[AdapterInfo, ...]:
    """The usable adapters."""
    return tuple(a for a in list_adapters() if a.problem is None)


def adapter_id(adapter: AdapterInfo) -> str:
    """A test id: backend and the adapter's first word."""
    return f"{adapter.backend}-{adapter.name.split()[0].lower()}"


def missing_adapters() -> list[str]:
    """The required `backend:part of the name` that no adapter answers to."""
    wanted = [w.strip() for w in os.environ.get("CORTIQ_O1_REQUIRE_ADAPTERS", "").split(",") if w.strip()]
    found = [f"{a.backend}:{a.name}".lower() for a in adapters()]

    def there(want: str) -> bool:
        backend, _, name = want.lower().partition(":")
        return any(f.startswith(backend + ":") and name in f for f in found)

    return [w for w in wanted if not there(w)]


def pytest_report_header() -> str:
    return "adapters: " + (", ".join(f"{a.name} ({a.backend})" for a in adapters()) or "none")


def pytest_sessionstart() -> None:
    missing = missing_adapters()
    if missing:
        pytest.exit(f"required adapters are missing: {', '.join(missing)}", returncode=1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gpu" in metafunc.fixturenames:
        found = adapters()
        params = (
            [pytest.param(a, id=adapter_id(a), marks=pytest.mark.gpu) for a in found]
            if found
            else [pytest.param(None, id="no-adapter", marks=pytest.mark.skip(reason="no wgpu adapter"))]
        )
        metafunc.parametrize("gpu", params, indirect=True, scope="session")
    if "device" in metafunc.fixturenames:
        params = [pytest.param("cpu", id="cpu"), pytest.param("stages", id="cpu-stages")]
        params += [pytest.param(a, id=adapter_id(a), marks=pytest.mark.gpu) for a in adapters()]
        metafunc.parametrize("device", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> o1.Device:
    """A device of each adapter found, opened with WebGPU's default limits."""
    adapter: AdapterInfo = request.param
    return open_adapter_device(adapter)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> o1.Device:
    """Every way to run a layer: both NumPy paths, and each adapter found."""
    if isinstance(request.param, str):
        return o1.open_device("cpu", path="auto" if request.param == "cpu" else "stages")
    return open_adapter_device(request.param)


@cache
def open_adapter_device(adapter: AdapterInfo) -> o1.Device:
    """One device an adapter for the whole run."""
    from cortiq_o1.gpu.adapters import open_adapter

    return o1.open_device(open_adapter(adapter, default_limits=True))


@pytest.fixture(autouse=True)
def _loud_floats() -> Iterator[None]:
    """NumPy raises on a float error instead of warning; an underflow is exp's ordinary business."""
    with np.errstate(divide="raise", over="raise", invalid="raise", under="ignore"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator, new for each test."""
    return np.random.default_rng(20_26)
