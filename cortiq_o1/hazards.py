"""A second opinion on a plan's barriers, found the slow way and apart from the planner.

From the plan's flat list and the kernels' declared access it compares every pair of dispatches,
plane by plane, and says which pairs must be ordered, whether the barriers order them, and whether
each barrier is needed. wgpu takes no barriers from anybody: it derives them from the bindings,
buffer by buffer. `implied` does as it does, and `check` holds the plan against that as well.

Dispatches go by their number in `Plan.dispatches`, barriers by theirs in `Plan.barriers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from .kernels import KERNELS
from .planes import STORES
from .plans import SHADOW, Barrier, Dispatch, Plan, base_plane

Usage = Literal["read", "read_write"]


class Conflict(NamedTuple):
    """Dispatches `first` and `second` bind `plane`, at least one to write it: they must be ordered."""

    first: int
    second: int
    plane: str


def conflicts(plan: Plan) -> list[Conflict]:
    """Every pair of dispatches that must be ordered, with the plane that says so."""
    return _conflicts([_access(d) for d in plan.dispatches])


def _conflicts(access: Sequence[Mapping[str, Usage]]) -> list[Conflict]:
    found = []
    for second in range(len(access)):
        for first in range(second):
            for plane, later in access[second].items():
                earlier = access[first].get(plane)
                if earlier is not None and "read_write" in (earlier, later):
                    found.append(Conflict(first, second, plane))
    return found


def missing(plan: Plan) -> list[Conflict]:
    """The conflicts with no barrier between their two dispatches."""
    return _unordered(conflicts(plan), _stage_numbers(plan))


def needless(plan: Plan) -> list[int]:
    """The barriers that could each be left out without one more conflict going unordered."""
    found = conflicts(plan)
    unordered = len(_unordered(found, _stage_numbers(plan)))
    return [
        b
        for b in range(len(plan.barriers))
        if len(_unordered(found, _stage_numbers(without_barrier(plan, b)))) == unordered
    ]


def without_barrier(plan: Plan, number: int) -> Plan:
    """The plan with one barrier taken out."""
    at = [s for s, step in enumerate(plan.steps) if isinstance(step, Barrier)][number]
    return replace(plan, steps=plan.steps[:at] + plan.steps[at + 1 :])


def implied(plan: Plan) -> list[tuple[str, ...]]:
    """For each dispatch the planes, or stores, whose buffers make wgpu wait before it.

    A buffer's first use needs nothing within a submit. After that wgpu waits wherever the usage
    changes, and wherever a buffer that was bound to be written is bound so again.
    """
    last: dict[str, Usage] = {}
    found = []
    for dispatch in plan.dispatches:
        access = _buffer_access(dispatch, plan)
        found.append(
            tuple(b for b, use in access.items() if b in last and (use != last[b] or use == "read_write"))
        )
        last.update(access)
    return found


def redundant_waits(plan: Plan) -> list[tuple[int, tuple[str, ...]]]:
    """Dispatches before which wgpu waits though the plan does not, and the planes it waits for.

    An earlier barrier has ordered those pairs already, for another plane's sake; wgpu looks at each
    buffer alone.
    """
    stage = _stage_numbers(plan)
    return [(d, planes) for d, planes in enumerate(implied(plan)) if planes and not _opens(stage, d)]


def check(plan: Plan) -> list[str]:
    """What is wrong with the plan, a sentence each; empty where nothing is."""
    found = conflicts(plan)
    return [*_table_problems(plan), *_barrier_problems(plan, found), *_implied_problems(plan, found)]


def _barrier_problems(plan: Plan, found: list[Conflict]) -> list[str]:
    stage = _stage_numbers(plan)
    problems = [
        f"no barrier between {_label(plan, c.first)} and {_label(plan, c.second)}, which share {c.plane}"
        for c in _unordered(found, stage)
    ]
    problems += [f"barrier {b} orders nothing" for b in needless(plan)]
    for b, barrier in enumerate(plan.barriers):
        # A barrier's planes are those on which the dispatch after it clashes with the stage before it.
        after = next((d for d in range(len(stage)) if stage[d] > b), None)
        reasons = {c.plane for c in found if c.second == after and stage[c.first] == b}
        if set(barrier.planes) != reasons:
            problems.append(f"barrier {b} names {sorted(barrier.planes)}, the reasons are {sorted(reasons)}")
    return problems


def _implied_problems(plan: Plan, found: list[Conflict]) -> list[str]:
    waits = implied(plan)
    access = [_buffer_access(d, plan) for d in plan.dispatches]
    stage = _stage_numbers(plan)
    problems = []
    for c in found:
        if not any(buffer_of(c.plane, plan) in waits[d] for d in range(c.first + 1, c.second + 1)):
            problems.append(f"wgpu orders nothing between {c.first} and {c.second} for {c.plane}")
    found = _conflicts(access)
    # Neighbours on a plane, no third use in between, are what wgpu's tracker sees.
    edges = {
        (c.second, c.plane)
        for c in found
        if not any(c.plane in access[d] for d in range(c.first + 1, c.second))
    }
    derived = {(d, plane) for d, planes in enumerate(waits) for plane in planes}
    for d, plane in sorted(edges ^ derived):
        who = "the plan's hazards ask" if (d, plane) in edges else "wgpu asks"
        problems.append(f"only {who} for a wait before {_label(plan, d)} on {plane}")
    for b, barrier in enumerate(plan.barriers):
        after = next((d for d in range(len(stage)) if stage[d] > b), None)
        unmet = {buffer_of(p, plan) for p in barrier.planes} - set(waits[after] if after is not None else ())
        if unmet or after is None:
            problems.append(f"wgpu does not wait at barrier {b} for {sorted(unmet)}")
    return problems


def _table_problems(plan: Plan) -> list[str]:
    """Dispatches that do not fit the table, and planes read before anything has written them."""
    problems = []
    written: set[str] = set()
    for d, dispatch in enumerate(plan.dispatches):
        kernel, label = KERNELS[dispatch.kernel], _label(plan, d)
        params = dict(dispatch.params)
        if list(params) != [f.name for f in kernel.params]:
            problems.append(f"{label} has parameters {list(params)}")
        elif dispatch.grid != kernel.grid(params):
            problems.append(f"{label} has grid {dispatch.grid}, the table says {kernel.grid(params)}")
        for plane, times in Counter(plane for plane, _ in dispatch.uses()).items():
            if times > 1 and _access(dispatch)[plane] == "read_write":
                problems.append(f"{label} binds {plane} {times} times and writes it")
        for plane, writes in dispatch.uses():
            role = base_plane(plane).role
            shadow = plane.startswith(SHADOW)
            if writes:
                # `moves` 0 tells a kernel that could move the state to leave it.
                moves = plan.commit or params.get("moves") == 0
                if role in ("state", "archive") and not shadow and not moves:
                    problems.append(f"{label} writes {plane}, though the state must stay")
            elif (role in ("scratch", "own") or shadow) and plane not in written:
                problems.append(f"{label} reads {plane}, which nothing has written")
        written.update(p for p, use in _access(dispatch).items() if use == "read_write")
    return problems


def _access(dispatch: Dispatch) -> dict[str, Usage]:
    """Each plane the dispatch binds, and the stronger of its uses."""
    found: dict[str, Usage] = {}
    for plane, writes in dispatch.uses():
        if found.get(plane) != "read_write":
            found[plane] = "read_write" if writes else "read"
    return found


def buffer_of(plane: str, plan: Plan) -> str:
    """The buffer that a plane lies in: its store's, where it has one, else its own. Shadows are stored
    together only where a kernel of the plan wants them so."""
    base = plane.removeprefix(SHADOW)
    for store, planes in STORES.items():
        name = plane.removesuffix(base) + store
        if base in planes and (name == store or any(name in d.planes for d in plan.dispatches)):
            return name
    return plane


def _buffer_access(dispatch: Dispatch, plan: Plan) -> dict[str, Usage]:
    """`_access` as wgpu sees it, which knows buffers alone."""
    found: dict[str, Usage] = {}
    for plane, use in _access(dispatch).items():
        buffer = buffer_of(plane, plan)
        if found.get(buffer) != "read_write":
            found[buffer] = use
    return found


def _stage_numbers(plan: Plan) -> list[int]:
    """For each dispatch the number of barriers before it."""
    found, barriers = [], 0
    for step in plan.steps:
        if isinstance(step, Barrier):
            barriers += 1
        else:
            found.append(barriers)
    return found


def _unordered(found: list[Conflict], stage: list[int]) -> list[Conflict]:
    return [c for c in found if stage[c.first] == stage[c.second]]


def _opens(stage: list[int], d: int) -> bool:
    """Whether a barrier stands right before dispatch `d`."""
    return stage[d] > (stage[d - 1] if d else 0)


def _label(plan: Plan, d: int) -> str:
    return f"dispatch {d} ({plan.dispatches[d].kernel})"
