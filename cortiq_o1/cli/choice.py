"""From the names after `--device` to devices."""

from __future__ import annotations

from collections.abc import Sequence

from ..device import Device, DeviceInfo
from ..devices import devices, open_device
from ..errors import DeviceError


def choose(names: Sequence[str]) -> list[DeviceInfo]:
    """The devices that the names mean, each once, in the order of the listing.

    "all" means every one, also those that cannot be used, which say why. "auto" is the one that
    `open_device` takes. Any other name is a backend or part of a name, and means all that match.

    Raises:
        DeviceError: a name that no device bears, or that only devices bear which cannot be used.
    """
    listed = devices()
    chosen: list[DeviceInfo] = []
    for name in names:
        if name == "all":
            found = listed
        elif name == "auto":
            opened = open_device("auto")
            found = [info for info in listed if _is(info, opened)][:1]
        else:
            found = _matching(name, listed)
        chosen += [info for info in found if info not in chosen]
    # Dawn's adapters are in no listing.
    return sorted(chosen, key=lambda info: listed.index(info) if info in listed else len(listed))


def _matching(name: str, listed: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    wanted = name.lower().strip()
    found = [info for info in listed if wanted == info.backend]
    found = found or [info for info in listed if wanted and wanted in info.name.lower()]
    if not found:
        # `open_device` knows more spellings, and what to say of one that it does not know.
        opened = open_device(name)
        found = [info for info in listed if _is(info, opened)] or [opened.described]
    usable = [info for info in found if not info.problem]
    if not usable:
        raise DeviceError(f"{found[0].label}: cannot be used: {found[0].problem}")
    return usable


def _is(info: DeviceInfo, opened: Device) -> bool:
    return (info.name, info.backend) == (opened.name, opened.backend)
