"""Whole layers against the reference: they pass on every device, and what is wrong with one is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from support import random_rows

import cortiq_o1 as o1
from cortiq_o1 import exact_stream
from cortiq_o1.engine import Accepted
from cortiq_o1.paths import PATHS
from cortiq_o1.planning import serves
from cortiq_o1.sealing import sealed_state
from cortiq_o1.verification import layer_cases
from cortiq_o1.verification.layers import Truth, check_layer, truth
from cortiq_o1.verification.suite import Cases, Suite, target_of
from cortiq_o1.ways import open_ways

LAYER_CASES = {c.name: c for c in layer_cases.PICKED}


@cache
def known(case: layer_cases.LayerCase) -> Truth:
    """The reference is slower than any device, so each case goes through it once."""
    return truth(case)


@cache
def halved(case: layer_cases.LayerCase) -> Truth:
    return truth(case, "f16")


WAYS = open_ways(o1.devices()[-1])
"""Every way to run a layer on NumPy."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", layer_cases.PICKED, ids=lambda c: c.name)
def test_layers_on_numpy_follow_the_reference(way: str, case: layer_cases.LayerCase) -> None:
    device = WAYS[way]
    if not serves(device.path, case.geometry, device.limits):
        rng = np.random.default_rng(0)
        with pytest.raises(o1.GeometryError, match="path 'fused' cannot serve: head_dim"):
            device.load(o1.seal(*random_rows(rng, 80, case.geometry), case.geometry))
        return
    found = check_layer((halved if device.kv == "f16" else known)(case), device)
    assert found.passed, found.where


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", layer_cases.PICKED, ids=lambda c: c.name)
def test_layers_follow_the_reference(gpu: o1.Device, case: layer_cases.LayerCase, path: str) -> None:
    device = o1.open_device(gpu.gpu, path)
    if serves(path, case.geometry, device.limits):
        found = check_layer(known(case), device)
        assert found.passed, found.where


@pytest.mark.parametrize("case", layer_cases.PICKED[::2], ids=lambda c: c.name)
def test_layers_of_float16_windows_follow_the_reference(gpu: o1.Device, case: layer_cases.LayerCase) -> None:
    """The reference sees what the windows hold; nothing more is lost than in float32."""
    found = check_layer(halved(case), o1.open_device(gpu.gpu, kv="f16"))
    assert found.passed, found.where


@pytest.mark.parametrize("number", range(6))
def test_random_layers_follow_the_reference(gpu: o1.Device, number: int) -> None:
    case = layer_cases.random_case(7, number)
    path = PATHS[number % len(PATHS)]
    path = path if serves(path, case.geometry, gpu.limits) else "auto"
    found = check_layer(known(case), o1.open_device(gpu.gpu, path))
    assert found.passed, f"{found.where}: {case.describe()}"


class _Wrong:
    """A device whose layers do something wrong."""

    precision = "exact"

    def __init__(self, change: Callable[[Any, np.ndarray], np.ndarray]) -> None:
        self.device = o1.open_device("cpu")
        self.change = change

    def load(self, state: o1.LayerState) -> Any:
        layer, change = self.device.load(state), self.change

        class Wrong:
            def attend(self, q: Any, k: Any, v: Any, commit: bool, draft: str = "") -> np.ndarray:
                return change(layer, layer.attend(q, k, v, commit=commit, draft=draft))

            def __getattr__(self, name: str) -> Any:
                return getattr(layer, name)

        return Wrong()


def _nudge(layer: Any, out: np.ndarray) -> np.ndarray:
    out[-1, -1, -1] += 2e-4
    return out


def _nan(layer: Any, out: np.ndarray) -> np.ndarray:
    out[0, 0, 0] = np.nan
    return out


def _lost_commit(layer: Any, out: np.ndarray) -> np.ndarray:
    layer.commit = lambda rows, draft: o1.Layer.commit(layer, 0)
    return out


@pytest.mark.parametrize("change", [_nudge, _nan, _lost_commit])
def test_a_wrong_layer_is_seen(change: Any) -> None:
    clustered = known(LAYER_CASES["clustered"])
    assert not check_layer(clustered, _Wrong(change)).passed  # type: ignore[arg-type]
    assert check_layer(clustered, _Wrong(lambda layer, out: out)).passed  # type: ignore[arg-type]


def _commit(change: Callable[[Accepted], Accepted]) -> Callable[..., Any]:
    return lambda commit: lambda accepted: commit([change(one) for one in accepted])


# A picked case that must show the fault, what of the engine is at fault, and a wrong one made from it.
SABOTAGE: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "commit-one-short": (
        "drafts", "commit", _commit(lambda one: replace(one, rows=max(0, one.rows - 1)))
    ),
    "commit-of-another-draft": (
        "drafts", "commit",
        _commit(lambda one: replace(one, draft="0", rows=min(one.rows, len(one.resident.drafts["0"][0])))
                if "0" in one.resident.drafts else one),
    ),
    "snapshot-moves-along": ("snapshots", "fork", lambda fork: lambda resident: resident),
    "restore-does-nothing": ("snapshots", "assign", lambda assign: lambda resident, source: None),
    "short-snapshot-moves-along": ("crossing-back", "fork", lambda fork: lambda resident: resident),
    "rows-after-the-seal-lost": (
        "crossing-drafts", "commit", _commit(lambda one: one if one.draft else replace(one, rows=0))
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SABOTAGE)
def test_a_wrong_commit_or_restore_is_seen(fault: str) -> None:
    case, method, wrong = SABOTAGE[fault]
    device = o1.open_device("cpu")
    assert check_layer(known(LAYER_CASES[case]), device).passed
    setattr(device.engine, method, wrong(getattr(device.engine, method)))
    suite = Suite([target_of({"direct": device}, "NumPy", "cpu")])
    suite.run(Cases.of("quick", 0, case))
    assert suite.failed
    (failure,) = suite.failures
    assert failure.row == case


@pytest.mark.parametrize("left_out", [0, -1], ids=["oldest", "newest"])
def test_a_seal_that_misses_a_row_is_seen(monkeypatch: pytest.MonkeyPatch, left_out: int) -> None:
    def missing(q: Any, k: Any, v: Any, *how: Any) -> o1.LayerState:
        return sealed_state(*(np.delete(x, left_out, axis=0) for x in (q, k, v)), *how)

    case = known(LAYER_CASES["crossing"])
    device = o1.open_device("cpu")
    assert check_layer(case, device).passed
    monkeypatch.setattr(exact_stream, "sealed_state", missing)
    assert not check_layer(case, device).passed


def test_a_layer_that_seals_itself_too_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """While all rows are exact outputs need not differ much: the state at the end does."""
    state, rows = LAYER_CASES["crossing"].make()
    exact = layer_cases.LayerCase("exact", state.geometry, 0, layer_cases.calls(22, 1))
    found = truth(exact)
    assert check_layer(found, o1.open_device("cpu")).passed
    monkeypatch.setattr(o1.Layer, "state", lambda self: o1.seal(*(x[:22] for x in rows), state.geometry))
    late = check_layer(found, o1.open_device("cpu"))
    assert not late.passed
    assert late.where == "sealed is False, expected True"


def test_every_level_has_drafts_snapshots_and_the_crossing() -> None:
    for level in ("quick", "default", "full"):
        cases = Cases.of(level, 0).layers
        assert {"drafts", "snapshots", "crossing"} <= {c.name for c in cases}
    kinds = {
        type(call) for c in Cases.of("full", 0).layers if c.name.startswith("random-") for call in c.calls
    }
    assert kinds == {layer_cases.Attend, layer_cases.Drafts, layer_cases.TakeSnapshot, layer_cases.Restore}
    assert any(
        c.prompt <= c.geometry.exact_rows < c.prompt + c.streamed
        for c in Cases.of("quick", 0).layers
        if c.name.startswith("random-")
    ), "no random case of a quick run seals itself"


def test_the_parity_geometries_have_a_bound_of_their_own() -> None:
    parity = [c for c in layer_cases.PICKED if c.name.startswith("parity-")]
    assert len(parity) == 4
    assert all(c.most == 2e-5 for c in parity)


@pytest.mark.parametrize("case", ["clustered", "noise", "real-data"])
def test_a_layer_in_float16_needs_a_bound_of_its_own(case: str) -> None:
    class Claims:
        """Says that nothing is rounded."""

        precision = "exact"
        load = WAYS["gemm, fast"].load

    found = known(LAYER_CASES[case])
    assert check_layer(found, WAYS["gemm, fast"]).passed
    assert not check_layer(found, Claims()).passed  # type: ignore[arg-type]
