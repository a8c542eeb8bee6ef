"""Rows that pass the wgpu engine, kept in logs, also by way of `encode`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_sequence_support import (
    ALL,
    ODD,
    assert_rows,
    everything,
    loaded,
    own_buffers,
    sealed,
)
from gpu_support import GEOMETRY, assert_same_planes
from support import part, random_rows

import cortiq_o1 as o1
from cortiq_o1.engine import Accepted
from cortiq_o1.gpu import logs as gpu_logs
from cortiq_o1.gpu.executor import GpuEngine
from cortiq_o1.planning import BLOCK_ROWS, Limits


@pytest.fixture
def engine(gpu: o1.Device) -> GpuEngine:
    """The adapter's engine."""
    return gpu.engine


@pytest.fixture
def state(rng: np.random.Generator) -> o1.LayerState:
    """A sealed layer with a far field."""
    return sealed(rng, GEOMETRY)


# Logs.


@pytest.mark.parametrize("parts", [ALL, ("q",)])
@pytest.mark.parametrize("geometry", [GEOMETRY, ODD])
def test_a_log_has_the_rows_in_order(
    engine: GpuEngine,
    rng: np.random.Generator,
    geometry: o1.Geometry,
    parts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_logs, "FIRST_ROWS", 6)  # segments that calls straddle
    state = sealed(rng, geometry)
    resident, log = loaded(engine, state), engine.new_log(geometry, parts)
    assert [a.shape[0] for a in engine.read_log(log)] == [0] * len(parts)
    seen = []
    for rows in (1, 3, 5, 1, 70, BLOCK_ROWS + 9, 2, 64):
        new = random_rows(rng, rows, geometry)
        engine.attend(resident, *new, commit=True, log=log)
        engine.attend(resident, *new, commit=False, log=log)  # not of the stream yet
        seen.append(new)
        assert log.rows == sum(len(r[0]) for r in seen)
        engine.commit([Accepted(resident, rows // 2, log=log)])
        seen.append(part(new, slice(rows // 2)))
    found = engine.read_log(log)
    for name, got in zip(parts, found, strict=True):
        np.testing.assert_array_equal(got, np.concatenate([rows[ALL.index(name)] for rows in seen]))
    assert log.parts == parts
    assert sum(a.nbytes for a in found) <= log.nbytes <= 4 * sum(a.nbytes for a in found)


def test_a_log_is_cut_where_a_binding_ends(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, log = loaded(engine, state), engine.new_log(GEOMETRY, ALL)
    new = random_rows(rng, 200, GEOMETRY)
    row = new[0][0].nbytes
    monkeypatch.setattr(engine.context, "limits", Limits(binding_bytes=77 * row))
    engine.attend(resident, *new, commit=True, log=log)
    assert [s.rows for s in log._segments] == [77, 77, 77]
    assert_rows(engine.read_log(log), new)


def test_a_log_of_no_such_part_is_refused(engine: GpuEngine) -> None:
    for parts in (("q", "x"), ()):
        with pytest.raises(o1.ArgumentError, match=r"parts: .*expected some of"):
            engine.new_log(GEOMETRY, parts)


def test_a_call_that_fails_does_not_join_the_log(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its second block, when the first has moved state, archive and log's buffers."""
    resident, log = loaded(engine, state, 64), engine.new_log(GEOMETRY, ALL)
    new = random_rows(rng, BLOCK_ROWS + 9, GEOMETRY)
    first = part(new, slice(30))
    engine.attend(resident, *first, commit=True, log=log)
    engine.attend(resident, *first, commit=False, draft="d")
    before = everything(engine, resident)
    take, calls = engine.context.readback.take, []

    def interrupted(array: np.ndarray, step: str) -> None:
        calls.append(step)
        if len(calls) == 2:
            raise KeyboardInterrupt
        take(array, step)

    monkeypatch.setattr(engine.context.readback, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.attend(resident, *new, commit=True, log=log)
    monkeypatch.undo()
    assert_same_planes(everything(engine, resident), before)
    assert resident.drafts["d"].rows == 30
    assert_rows(engine.read_log(log), first)
    engine.attend(resident, *new, commit=True, log=log)
    assert_rows(engine.read_log(log), first, new)


def test_a_long_log_takes_no_more_groups_or_parameters(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator
) -> None:
    context = engine.context
    resident, log = loaded(engine, state), engine.new_log(GEOMETRY, ALL)
    new = random_rows(rng, 3, GEOMETRY)

    def pass_by(rows: int) -> None:
        while log.rows < rows:
            engine.attend(resident, *part(new, slice(1)), commit=True, log=log)
            engine.attend(resident, *new, commit=False)
            engine.commit([Accepted(resident, 2, log=log)])

    def counts() -> tuple[Any, ...]:
        users = sum(len(keys) for keys in context.groups._users.values())
        return len(context.parameters._slots), context.generation, len(context.groups), users

    pass_by(3 * gpu_logs.WINDOW_ROWS)  # every place in a window
    before = counts()
    pass_by(12 * gpu_logs.WINDOW_ROWS)
    assert counts() == before


@pytest.mark.parametrize("commit", [True, False])
def test_encode_keeps_drafts_and_logs_as_attend_does(
    engine: GpuEngine, state: o1.LayerState, rng: np.random.Generator, commit: bool
) -> None:
    resident, twin = loaded(engine, state, 64), loaded(engine, state, 64)
    log = engine.new_log(GEOMETRY, ALL)
    calls = [random_rows(rng, n, GEOMETRY) for n in (2, 20)]
    engine.attend(resident, *calls[0], commit=False, draft="before")
    device = engine.context.device
    encoder = device.create_command_encoder()
    compute_pass = encoder.begin_compute_pass()
    for at, rows in enumerate(calls):
        engine.encode(
            resident, compute_pass, *own_buffers(engine, rows), len(rows[0]), commit, f"call {at}", log
        )
    compute_pass.end()
    device.queue.submit([encoder.finish()])
    if commit:
        assert not resident.drafts
        for rows in calls:
            engine.attend(twin, *rows, commit=True)
        assert_rows(engine.read_log(log), *calls)
    else:
        assert {n: d.rows for n, d in resident.drafts.items()} == {"before": 2, "call 0": 2, "call 1": 20}
        assert log.rows == 0
        engine.commit([Accepted(resident, 19, "call 1", log)])
        accepted = part(calls[1], slice(19))
        engine.attend(twin, *accepted, commit=True)
        assert_rows(engine.read_log(log), accepted)
    assert_same_planes(everything(engine, resident), everything(engine, twin))
