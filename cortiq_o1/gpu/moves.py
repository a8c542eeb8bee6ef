"""State from one resident into another, on the device: forks, and the sequences of a batch.

All of it is called under the context's lock. Buffers are made before anything is copied, and all
copies of a call go in one submission.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..engine import Planes
from ..errors import ArgumentError, StateError
from ..geometry import Geometry
from ..planes import MOVING_PLANES, OWN_PLANES, PLANES, STATE_PLANES, STORES, Sizes, store_bytes
from ..planning import check_state_fits
from ..plans import SHADOW, plane_bytes
from .context import Context
from .residents import FIXED_PLANES, Buffers, Copy, Resident, allocate, copy, kept, parts


def _whole(source: Resident, target: Buffers, names: Iterable[str]) -> list[Copy]:
    """Copies of whole planes, or of what a batch has of them."""
    sizes = source.sizes
    return [(source.buffers[name], 0, target[name], 0, plane_bytes(name, sizes)) for name in names]


def _sequence_bytes(sizes: Sizes, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """What one sequence of a batch has of each plane: no padding lies between two."""
    return ((name, PLANES[name].nbytes(sizes)) for name in names)


def fork(context: Context, resident: Resident) -> Resident:
    """See `engine.Engine.fork`."""
    own = allocate(context, resident.moving, resident.sizes)
    shared = {name: resident.buffers[name] for name in FIXED_PLANES}
    copy(context, _whole(resident, own, resident.moving), "fork")
    resident.shares_fixed = True
    return Resident(resident.geometry, {**shared, **own}, resident.archive, True, resident.kv)


def shadow(context: Context, resident: Resident, archive: bool) -> Resident:
    """A fork for the length of a call, over buffers that the device's next one takes over.

    `archive`: whether the archive comes along; without it, the shadow keeps none.
    """
    names = resident.moving if archive else MOVING_PLANES
    buffers = {
        name: resident.buffers[name] for name in (*FIXED_PLANES, *OWN_PLANES) if name in resident.buffers
    }
    for store in STORES:
        if store in resident.buffers:
            nbytes = store_bytes(store, resident.sizes)
            buffers |= parts(context.pool.get(SHADOW + store, SHADOW + store, nbytes), store, resident.sizes)
    for name in names:
        if name not in buffers:
            nbytes = plane_bytes(name, resident.sizes)
            buffers[name] = context.pool.get(SHADOW + name, SHADOW + name, nbytes)
    copy(context, _whole(resident, buffers, names), "fork")
    return Resident(resident.geometry, buffers, resident.archive if archive else 0, kv=resident.kv)


def assign(context: Context, resident: Resident, source: Resident) -> None:
    """See `engine.Engine.assign`; raises `StateError` where the two do not match."""
    if (resident.geometry, resident.archive, resident.kv) != (source.geometry, source.archive, source.kv):
        raise StateError(f"assign: {_kind(source)}, expected {_kind(resident)}")
    put_back(context, resident, source)
    resident.forget()


def put_back(context: Context, resident: Resident, source: Resident) -> None:
    """What moves, out of a fork or a shadow; drafts stay."""
    copy(context, _whole(source, resident.buffers, resident.moving), "restore")


def _kind(resident: Resident) -> str:
    kept = "" if resident.kv == "f32" else f" and rings of {resident.kv}"
    return f"a state of {resident.geometry} with an archive of {resident.archive}{kept}"


def replaced(context: Context, resident: Resident, planes: Planes) -> Resident:
    """See `engine.Engine.replaced`."""
    unknown = set(planes) - set(resident.planes)
    if unknown:
        raise ArgumentError(f"planes: {sorted(unknown)}, expected some of {resident.planes}")
    beside = [other for pair in STORES.values() if not set(pair).isdisjoint(planes) for other in pair]
    new = allocate(context, dict.fromkeys((*planes, *beside)), resident.sizes)
    context.upload([(new[n], kept(n, array, resident.kv)) for n, array in planes.items()], "upload of planes")
    copy(context, _whole(resident, new, [name for name in beside if name not in planes]), "replace")
    shares_fixed = not set(FIXED_PLANES) <= set(new)
    resident.shares_fixed |= shares_fixed
    buffers = {**resident.buffers, **new}
    return Resident(resident.geometry, buffers, resident.archive, shares_fixed, resident.kv)


def join(context: Context, resident: Resident | None, one: Resident, count: int) -> Resident:
    """See `engine.Engine.join`: in place where the buffers have room, else into buffers twice the size.

    Raises:
        StateError: either keeps an archive.
        ArgumentError: `resident` is no batch of `count` sequences like `one`.
        GeometryError: so many sequences do not fit the device's bindings.
        DeviceMemoryError: the device has no room.
    """
    if one.archive or (resident is not None and resident.archive):
        raise StateError("join: a layer that keeps an archive, expected one without")
    if (resident is None) != (count == 0):
        raise ArgumentError(f"count: {count}, expected {'0' if resident is None else 'at least 1'}")
    if resident is not None:
        _check_batch(resident, one.geometry, count)
    geometry = one.geometry.batch(count + 1)
    sizes = one.sizes_of(geometry)
    check_state_fits(geometry, replace(context.limits, kv=one.kv))
    before: Buffers = {} if resident is None else resident.buffers
    buffers = dict(before)
    if any(name not in buffers or buffers[name].size < plane_bytes(name, sizes) for name in STATE_PLANES):
        buffers |= allocate(context, STATE_PLANES, _roomy(context, one, count))
    elif resident is not None and resident.shares_fixed:
        buffers |= {name: context.memory.create(name, before[name].size) for name in FIXED_PLANES}
    copies: list[Copy] = []
    for name, nbytes in _sequence_bytes(one.sizes, STATE_PLANES):
        if name in before and buffers[name] is not before[name]:
            copies.append((before[name], 0, buffers[name], 0, count * nbytes))
        copies.append((one.buffers[name], 0, buffers[name], count * nbytes, nbytes))
    copy(context, copies, "join")
    return Resident(geometry, buffers, kv=one.kv)


def _roomy(context: Context, one: Resident, count: int) -> Sizes:
    """Room for twice as many sequences, or for just one more where a binding does not hold so many."""
    twice = one.sizes_of(one.geometry.batch(max(1, 2 * count)))
    needs = [plane_bytes(name, twice) for name in STATE_PLANES]
    needs += [store_bytes(name, twice) for name in STORES]
    if max(needs) <= context.limits.binding_bytes:
        return twice
    return one.sizes_of(one.geometry.batch(count + 1))


def drop(context: Context, resident: Resident, geometry: Geometry, count: int, index: int) -> None:
    """See `engine.Engine.drop`."""
    _check_batch(resident, geometry, count, index)
    after = geometry.batch(count - 1)
    last = count - 1
    sequence = list(_sequence_bytes(resident.sizes_of(geometry), STATE_PLANES))
    # WebGPU copies within one buffer by way of another.
    between = context.memory.create("drop", max(nbytes for _, nbytes in sequence)) if index < last else None
    buffers = dict(resident.buffers)
    copies: list[Copy] = []
    for name, nbytes in sequence:
        buffer = buffers[name]
        if between is None:
            continue
        if resident.shares_fixed and name in FIXED_PLANES:
            # Others read this buffer: the batch goes on in one of its own.
            buffers[name] = context.memory.create(name, buffer.size)
            copies.append((buffer, 0, buffers[name], 0, last * nbytes))
            copies.append((buffer, last * nbytes, buffers[name], index * nbytes, nbytes))
        else:
            copies.append((buffer, last * nbytes, between, 0, nbytes))
            copies.append((between, 0, buffer, index * nbytes, nbytes))
    if copies:
        copy(context, copies, "drop")
        resident.shares_fixed = False
    resident.buffers = buffers
    resident.geometry = after
    resident.forget()


def take(context: Context, resident: Resident, geometry: Geometry, index: int) -> Resident:
    """See `engine.Engine.take`; raises `StateError` where a batch keeps an archive, which has no parts."""
    count = resident.geometry.num_kv_heads // geometry.num_kv_heads
    _check_batch(resident, geometry, count, index)
    if resident.archive and count > 1:
        raise StateError("take: a batch that keeps an archive, expected one without")
    sizes = resident.sizes_of(geometry)
    buffers = allocate(context, resident.planes, sizes)
    if resident.archive:
        copies = _whole(resident, buffers, resident.planes)
    else:
        copies = [
            (resident.buffers[name], index * nbytes, buffers[name], 0, nbytes)
            for name, nbytes in _sequence_bytes(sizes, STATE_PLANES)
        ]
    copy(context, copies, "take")
    return Resident(geometry, buffers, resident.archive, kv=resident.kv)


def put(context: Context, resident: Resident, index: int, one: Resident) -> None:
    """See `engine.Engine.put`; raises `StateError` where one of the two keeps an archive."""
    count = resident.geometry.num_kv_heads // one.geometry.num_kv_heads
    _check_batch(resident, one.geometry, count, index)
    if resident.archive or one.archive:
        raise StateError("put: a layer that keeps an archive, expected one without")
    copies: list[Copy] = [
        (one.buffers[name], 0, resident.buffers[name], index * nbytes, nbytes)
        for name, nbytes in _sequence_bytes(one.sizes, MOVING_PLANES)
    ]
    copy(context, copies, "put")
    resident.forget()


def _check_batch(resident: Resident, geometry: Geometry, count: int, index: int = 0) -> None:
    if count < 1 or resident.geometry != geometry.batch(count):
        raise ArgumentError(f"resident: {resident.geometry}, expected {count} sequences of {geometry}")
    if not 0 <= index < count:
        raise ArgumentError(f"index: {index}, expected 0 to {count - 1}")
