"""The engine that runs plans on NumPy: commits, order of dispatches, failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plan_support import CASES, PLAIN, Array, Planes, cut, run, same_bits, sealed, stream

from cortiq_o1.cpu import executor
from cortiq_o1.cpu.executor import POISON, PlanEngine, PlanResident, run_plan
from cortiq_o1.cpu.twins import TWINS
from cortiq_o1.engine import Accepted
from cortiq_o1.errors import ArgumentError, StateError
from cortiq_o1.hazards import without_barrier
from cortiq_o1.kernels import KERNELS
from cortiq_o1.paths import PATHS
from cortiq_o1.planes import PLANES
from cortiq_o1.planning import Limits, plan
from cortiq_o1.plans import Dispatch

each_path = pytest.mark.parametrize("path", PATHS)


@each_path
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("case", ["plain", "ring-fills", "fold-prompt"])
def test_verify_then_commit_is_attend(case: str, n: int, path: str) -> None:
    geometry, prompt, fold, _ = CASES[case]
    planes = sealed(geometry, prompt, fold)
    rows = stream(geometry, 40, seed=4)
    engine = PlanEngine(path=path)
    resident = engine.upload(geometry, planes)
    out = engine.attend(resident, *rows, commit=False)
    assert same_bits(engine.read(resident), planes)
    engine.commit([Accepted(resident, n)])
    committed, state = run(planes, geometry, rows, [40], path=path)
    assert out.tobytes() == committed.tobytes()
    if n == 0:
        assert same_bits(engine.read(resident), planes)
    else:
        _, state = run(planes, geometry, cut(rows, 0, n), [n], path=path)
        assert same_bits(engine.read(resident), state)
    with pytest.raises(StateError, match="rows: 1, expected 0 to the 0"):
        engine.commit([Accepted(resident, 1)])


def test_pending_rows_last_until_the_next_call() -> None:
    engine = PlanEngine()
    resident = engine.upload(PLAIN, sealed(PLAIN, 60))
    rows = stream(PLAIN, 5, seed=5)
    engine.attend(resident, *rows, commit=False)
    with pytest.raises(StateError, match="rows: 6, expected 0 to the 5 rows"):
        engine.commit([Accepted(resident, 6)])
    engine.commit([Accepted(resident, 5)])  # the refused call forgot nothing
    engine.attend(resident, *rows, commit=False)
    engine.attend(resident, *rows, commit=True)
    with pytest.raises(StateError, match="0 rows"):
        engine.commit([Accepted(resident, 1)])


@each_path
@pytest.mark.parametrize("case", ["plain", "windows-differ", "ring-fills", "fm"])
def test_shuffled_dispatches_give_the_same_bits(case: str, path: str) -> None:
    geometry, prompt, fold, calls = CASES[case]
    planes = sealed(geometry, prompt, fold)
    rows = stream(geometry, sum(calls), seed=6)
    out, state = run(planes, geometry, rows, calls, path=path)
    for seed in range(4):
        shuffled, end = run(planes, geometry, rows, calls, path=path, shuffle=np.random.default_rng(seed))
        assert shuffled.tobytes() == out.tobytes()
        assert same_bits(end, state)


@pytest.mark.parametrize(
    ("path", "count"), [("stages", 5), ("gemm", 5), ("flash", 5), ("token", 2), ("fused", 2)]
)
def test_shuffling_finds_every_barrier_that_is_missing(path: str, count: int) -> None:
    planes = sealed(PLAIN, 60)
    rows = stream(PLAIN, count, seed=7)
    whole = plan(PLAIN, count, path=path)

    def outcome(steps: Any, shuffle: np.random.Generator | None) -> bytes:
        given = dict(zip(("q", "k_rows", "v_rows"), rows, strict=True))
        bound = {name: planes[name].copy() if name in planes else given.get(name) for name in steps.planes}
        for name, array in bound.items():
            if array is None:
                bound[name] = np.full(PLANES[name].dims(steps.sizes), POISON)
        try:
            with np.errstate(all="ignore"):
                run_plan(steps, bound, shuffle)  # type: ignore[arg-type]
        except IndexError:
            return b""  # what nobody has written yet is no slot of the ring
        return b"".join(bound[name].tobytes() for name in ("out", *planes) if name in bound)  # type: ignore[union-attr]

    want = outcome(whole, None)
    assert outcome(whole, np.random.default_rng(0)) == want
    for b in range(len(whole.barriers)):
        less = without_barrier(whole, b)
        assert any(outcome(less, np.random.default_rng(seed)) != want for seed in range(12)), f"barrier {b}"


@pytest.mark.parametrize("commit", [True, False])
def test_a_call_that_fails_leaves_the_state(commit: bool) -> None:
    planes = sealed(PLAIN, 60)
    rows = stream(PLAIN, 40, seed=14)
    fuse = [10**9]

    def hook(dispatch: Dispatch, before: Planes, after: Planes) -> None:
        fuse[0] -= 1
        if fuse[0] == 0:
            raise RuntimeError("stopped here")

    engine = PlanEngine(on_dispatch=hook)
    resident = engine.upload(PLAIN, planes)
    engine.attend(resident, *cut(rows, 0, 7), commit=False)
    total = len(plan(PLAIN, 40, commit).dispatches)
    for at in (1, total // 2, total):
        fuse[0] = at
        with pytest.raises(RuntimeError, match="stopped here"):
            engine.attend(resident, *rows, commit=commit)
        assert same_bits(engine.read(resident), planes)
    fuse[0] = 2
    with pytest.raises(RuntimeError, match="stopped here"):
        engine.commit([Accepted(resident, 7)])
    assert same_bits(engine.read(resident), planes)
    engine.commit([Accepted(resident, 7)])  # and the rows of the verify are still there
    assert same_bits(engine.read(resident), run(planes, PLAIN, cut(rows, 0, 7), [7])[1])


def test_planes_that_do_not_fit_are_refused() -> None:
    planes = sealed(PLAIN, 60)
    engine = PlanEngine()
    with pytest.raises(ArgumentError, match="planes: no 'mix', expected one"):
        engine.upload(PLAIN, {n: a for n, a in planes.items() if n != "mix"})
    with pytest.raises(ArgumentError, match=r"mix: float64 \(4, 4, 4\), expected C-contiguous float32"):
        engine.upload(PLAIN, {**planes, "mix": planes["mix"].astype(np.float64)})
    with pytest.raises(ArgumentError, match=r"k_tilde: float32 \(2, 3, 8\), expected .*\(2, 4, 8\)"):
        engine.upload(PLAIN, {**planes, "k_tilde": planes["k_tilde"][:, :3].copy()})
    with pytest.raises(ArgumentError, match=r"mix: .* in another order"):
        engine.upload(PLAIN, {**planes, "mix": planes["mix"].transpose(0, 2, 1)})


def test_upload_and_read_copy() -> None:
    planes = sealed(PLAIN, 60)
    engine = PlanEngine()
    resident = engine.upload(PLAIN, planes)
    assert isinstance(resident, PlanResident)
    kept = {name: array.copy() for name, array in planes.items()}
    planes["ring_k"][:] = 7
    engine.read(resident)["ring_v"][:] = 7
    assert same_bits(engine.read(resident), kept)


def test_planes_that_a_kernel_reads_reach_its_twin_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def spy(name: str) -> Any:
        def twin(p: Any, grid: Any, *planes: Array) -> None:
            for binding, array in zip(KERNELS[name].bindings, planes, strict=True):
                for one in array if isinstance(array, tuple) else (array,):
                    assert one.flags.writeable == (binding.access == "read_write")
            seen.add(name)
            TWINS[name](p, grid, *planes)

        return twin

    monkeypatch.setattr(executor, "TWINS", {name: spy(name) for name in TWINS})
    for path in PATHS:
        for precision in ("exact", "fast"):
            engine = PlanEngine(Limits(float16=True), path=path, precision=precision)
            resident = engine.upload(PLAIN, sealed(PLAIN, 60), archive=64)
            engine.attend(resident, *stream(PLAIN, 20), commit=False)
            engine.commit([Accepted(resident, 20)])
    assert seen == set(KERNELS)
