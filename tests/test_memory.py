"""What is held stays the same, however many calls, loads, drafts and snapshots have come and gone."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import Rows, random_rows, sealed

import cortiq_o1 as o1
from cortiq_o1.cache import Cache

TINY = o1.Geometry(2, 1, 8, 4, window=20, sinks=1, landmarks=4)
SIZES = (1, 1, 1, 1, 5, 1, 1, 1, 1, 17)
"""Rows of one call after another, so that every path has its turn."""
PARTS = 4
MOST_GROWTH = 1 << 16
"""Bytes that the process may grow by in every part of a test. Allocators and drivers grow in leaps and then
stand still, where a leak goes on: one of 30 bytes a call, or of 3 KiB a load, would pass this."""
MOST_OBJECTS = 100


def resident_bytes() -> int | None:
    """The process's memory, None where Linux does not tell it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def alive() -> Counter[str]:
    """Python's objects of wgpu, by type."""
    kinds = Counter(type(x) for x in gc.get_objects())
    return Counter({k.__name__: n for k, n in kinds.items() if str(k.__module__).startswith("wgpu.")})


def native() -> dict[str, int]:
    """wgpu's own objects behind those, where its version tells them."""
    try:
        from wgpu.backends.wgpu_native._helpers import generate_report
    except ImportError:
        return {}
    return {name: found["kept"] for name, found in generate_report()["hub"].items()}


def held(device: o1.Device) -> Counter[str]:
    """All that is counted, on NumPy nothing."""
    gc.collect()
    found: Counter[str] = Counter()
    if device.gpu is None:
        return found
    import wgpu

    context = device.engine.context
    with context.lock:
        context.groups.tidy()
    found["bind groups of the engine"] = len(context.groups)
    found["bytes of the pool"] = context.pool.nbytes
    found |= {f"{name}s of Python": n for name, n in alive().items()}
    found |= {f"{name} of wgpu": n for name, n in native().items()}
    for name, counts in wgpu.diagnostics.object_counts.get_dict().items():
        found |= {f"{kind} of {name}": n for kind, n in counts.items()}
    return found


def assert_no_more(device: o1.Device, before: Counter[str]) -> None:
    """Fewer is right: a recording may outlive its layer until the next call."""
    more = held(device) - before
    assert not more, f"more than before: {dict(more)}"


def assert_flat(device: o1.Device, step: Callable[[int], None], warm: int, times: int) -> None:
    """`step` leaves nothing behind: after `warm` of them everything stays as it is for `times` more."""
    for number in range(warm):
        step(number)
    before, objects = held(device), len(gc.get_objects())
    grown, memory = [], resident_bytes()
    for part in range(PARTS):
        for number in range(times * part // PARTS, times * (part + 1) // PARTS):
            step(warm + number)
        gc.collect()
        now = resident_bytes()
        if memory is not None and now is not None:
            grown.append(now - memory)
        memory = now
    assert_no_more(device, before)
    more = len(gc.get_objects()) - objects
    assert more <= MOST_OBJECTS, f"{more} more objects after {times} times"
    assert min(grown, default=0) <= MOST_GROWTH, f"{grown} bytes more in {PARTS} parts of {times} times"


def attends_for(device: o1.Device) -> int:
    """Ten thousand; fewer on the twins, where a call takes milliseconds and nobody streams."""
    return 10_000 if device.path == "auto" else 3000


@pytest.mark.slow
def test_ten_thousand_attends(device: o1.Device, rng: np.random.Generator) -> None:
    layer = device.load(sealed(rng, TINY))
    calls = [random_rows(rng, size, TINY) for size in SIZES]

    def attend(number: int) -> None:
        layer.attend(*calls[number % len(calls)])

    assert_flat(device, attend, 10 * len(calls), attends_for(device))


def test_a_thousand_drafts(device: o1.Device, rng: np.random.Generator) -> None:
    """Of changing lengths and names, committed in part."""
    layer = device.load(sealed(rng, TINY))
    calls = [random_rows(rng, size, TINY) for size in SIZES]

    def draft(number: int) -> None:
        rows = [calls[(number + i) % len(calls)] for i in range(1 + number % 3)]
        for name, each in zip("abc", rows, strict=False):
            layer.attend(*each, commit=False, draft=name)
        layer.commit(number % (1 + len(rows[-1][1])), "abc"[len(rows) - 1])

    assert_flat(device, draft, 120, 300 if device.gpu is not None else 1000)


def lives(device: o1.Device, states: list[o1.LayerState], rows: Rows) -> Cache:
    """A cache through whatever a cache goes through, as it is at the end."""
    cache = Cache(device, reseal_every=30, archive=64)
    for index, state in enumerate(states):
        cache[index] = state
    before = cache.snapshot()
    with cache.capture() as capture:
        for index in cache:
            cache[index].attend(*rows)
            cache[index].attend(*rows, commit=False)
            cache[index].attend(*rows, commit=False, draft="other")
        cache.commit(3, "other")
    assert len(capture.take()) >= len(states)
    after = cache.snapshot("after")
    cache.restore(before)
    for index in cache:
        cache[index].attend(*rows)
    cache.restore(after)
    del cache[0]
    cache[0] = states[0]
    return cache


@pytest.mark.slow
def test_a_hundred_loads(device: o1.Device, rng: np.random.Generator) -> None:
    """Layers sealed and too short to be, one that seals itself on the way, their snapshots and drafts."""
    states = [
        sealed(rng, TINY),
        o1.seal(*random_rows(rng, TINY.exact_rows - 10, TINY), TINY),
        o1.seal(*random_rows(rng, 2, TINY), TINY),
    ]
    rows = random_rows(rng, 17, TINY)

    def load(number: int) -> None:
        lives(device, states, rows)

    assert_flat(device, load, 10, 100)


def test_a_hundred_states_in_one_place(device: o1.Device, rng: np.random.Generator) -> None:
    cache = Cache(device)
    states = [sealed(rng, TINY) for _ in range(3)]
    rows = random_rows(rng, 1, TINY)
    sizes = set()

    def assign(number: int) -> None:
        cache[5] = states[number % 3]
        cache[5].attend(*rows)
        sizes.add(cache.nbytes)

    assert_flat(device, assign, 9, 99)
    assert len(sizes) == 1


def test_a_hundred_sequences_join_and_leave(device: o1.Device, rng: np.random.Generator) -> None:
    states = [sealed(rng, TINY) for _ in range(3)]
    batch = device.load(states[:2])

    def turn(number: int) -> None:
        batch.join(states[number % 3])
        batch.attend(*(np.stack([x] * 3) for x in random_rows(rng, 2, TINY)))
        batch.leave(number % 3)

    assert_flat(device, turn, 12, 99)


def test_a_cache_that_is_deleted_is_gone(device: o1.Device, rng: np.random.Generator) -> None:
    states = [sealed(rng, TINY), o1.seal(*random_rows(rng, 4, TINY), TINY)]
    rows = random_rows(rng, 17, TINY)
    lives(device, states, rows)
    before = held(device)
    cache = lives(device, states, rows)
    residents = [weakref.ref(cache[index]._held.resident) for index in sorted(cache)]
    if device.gpu is not None:
        name = "resource_mem of Buffer"
        assert held(device)[name] >= before[name] + cache.nbytes // 2 > before[name]
    assert all(r() is not None for r in residents)
    kept = cache[0]
    del cache
    assert [r() is None for r in residents] == [False] + [True] * (len(residents) - 1)
    del kept
    assert [r() for r in residents] == [None] * len(residents)
    assert_no_more(device, before)


def test_a_snapshot_outlives_its_cache_alone(device: o1.Device, rng: np.random.Generator) -> None:
    state = sealed(rng, TINY)
    rows = random_rows(rng, 5, TINY)
    cache = Cache(device)
    cache[0] = state
    cache[0].attend(*rows)
    snapshot = cache[0].snapshot()
    want = cache[0].state()
    resident = weakref.ref(cache[0]._held.resident)
    fork = weakref.ref(snapshot.on_engine.fork)
    del cache
    layer = device.load(state)
    layer.restore(snapshot)
    np.testing.assert_array_equal(layer.state().planes["far_mz"], want.planes["far_mz"])
    del snapshot
    gc.collect()
    assert fork() is None
    assert resident() is None


def test_a_leak_is_seen(device: o1.Device, rng: np.random.Generator) -> None:
    state, kept = sealed(rng, TINY), []
    with pytest.raises(AssertionError, match=r"more than before|\d+ more objects"):
        assert_flat(device, lambda number: kept.append(device.load(state)), 3, 50)
    assert len(kept) == 53
