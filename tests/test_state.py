"""The state's one file: whole or refused, and it says why."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import assert_same_state, random_rows

import cortiq_o1 as o1
from cortiq_o1.files import sealed_bytes
from cortiq_o1.state import SealOptions

GEOMETRY = o1.Geometry(4, 2, 8, 12, window=16, sinks=2, landmarks=8, windows=(16, 9))


@pytest.fixture(params=[100, 5, 0], ids=["sealed", "exact", "empty"])
def state(request: pytest.FixtureRequest, rng: np.random.Generator) -> o1.LayerState:
    return o1.seal(*random_rows(rng, request.param, GEOMETRY), GEOMETRY, ridge=1e-4, fold="prompt")


def test_round_trip(state: o1.LayerState, tmp_path: Path) -> None:
    file = tmp_path / "layer.o1"
    state.save(file)
    assert_same_state(o1.LayerState.load(file), state)
    assert [p.name for p in tmp_path.iterdir()] == ["layer.o1"]


def test_every_truncation_is_refused(state: o1.LayerState, tmp_path: Path) -> None:
    file = tmp_path / "layer.o1"
    state.save(file)
    raw = file.read_bytes()
    for length in {0, 1, 3, 100, len(raw) // 2, len(raw) - 30, len(raw) - 1}:
        file.write_bytes(raw[:length])
        with pytest.raises(o1.StateFileError, match=r"truncated|not a state file"):
            o1.LayerState.load(file)


def test_every_altered_byte_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    state = o1.seal(*random_rows(rng, 60, GEOMETRY), GEOMETRY)
    file = tmp_path / "layer.o1"
    state.save(file)
    raw = file.read_bytes()
    for at in rng.integers(0, len(raw), 200):
        changed = bytearray(raw)
        changed[at] ^= 1 << rng.integers(8)
        file.write_bytes(changed)
        with pytest.raises(o1.StateFileError, match="altered"):
            o1.LayerState.load(file)


def test_what_is_appended_is_refused(state: o1.LayerState, tmp_path: Path) -> None:
    file = tmp_path / "layer.o1"
    state.save(file)
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(o1.StateFileError, match="truncated or altered"):
        o1.LayerState.load(file)


def test_a_link_keeps_pointing_at_the_file(state: o1.LayerState, tmp_path: Path) -> None:
    (tmp_path / "real.o1").touch()
    link = tmp_path / "link.o1"
    link.symlink_to("real.o1")
    state.save(link)
    assert link.is_symlink()
    assert_same_state(o1.LayerState.load(tmp_path / "real.o1"), state)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04rubbish", b"\x93NUMPY\x01\x00"])
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "foreign"
    file.write_bytes(content)
    with pytest.raises(o1.StateFileError, match="foreign"):
        o1.LayerState.load(file)


def test_another_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", q=np.zeros(3))
    with pytest.raises(o1.StateFileError, match="truncated or altered"):
        o1.LayerState.load(tmp_path / "other.npz")


def rewritten(file: Path, change: Any) -> None:
    """Changes the header as somebody would who also mends the checksum."""
    with np.load(io.BytesIO(file.read_bytes())) as npz:
        arrays = dict(npz)
    header = json.loads(arrays.pop("header").tobytes())
    change(header)
    content = io.BytesIO()
    np.savez(content, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
    file.write_bytes(sealed_bytes(content.getvalue()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99, this library reads version 1"),
        ({"format": "else"}, "a file of format 'else', expected 'cortiq-o1-state'"),
        ({"rows": -5}, "rows: -5, expected at least 0"),
        ({"options": {"method": "nystrom", "ridge": 1e-6, "fold": "bogus"}}, "fold: 'bogus'"),
        ({"geometry": {"num_heads": 3}}, "no layer can have this state"),
    ],
)
def test_a_header_that_cannot_be_is_named(
    state: o1.LayerState, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "layer.o1"
    state.save(file)
    rewritten(file, lambda header: header.update(change))
    with pytest.raises(o1.StateFileError, match=message):
        o1.LayerState.load(file)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.savez(content, header=np.array([{"format": "cortiq-o1-state"}], dtype=object))
    (tmp_path / "evil.o1").write_bytes(sealed_bytes(content.getvalue()))
    with pytest.raises(o1.StateFileError, match="allow_pickle"):
        o1.LayerState.load(tmp_path / "evil.o1")


def test_a_missing_file_stays_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        o1.LayerState.load(tmp_path / "none")


def test_a_failed_save_leaves_the_old_file(
    state: o1.LayerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "layer.o1"
    state.save(file)
    before = file.read_bytes()

    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        state.save(file)
    assert file.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_consistent_file_with_an_impossible_state_is_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The checksum holds, the ring position does not."""
    state = o1.seal(*random_rows(rng, 60, GEOMETRY), GEOMETRY)
    state.planes["group_meta"][0, 1] = 16
    state.save(tmp_path / "layer.o1")
    with pytest.raises(o1.StateFileError, match="ring position outside its window"):
        o1.LayerState.load(tmp_path / "layer.o1")


def test_an_empty_far_field_must_be_empty(rng: np.random.Generator) -> None:
    geometry = o1.Geometry(2, 2, 8, window=60, sinks=0, landmarks=4, windows=(4, 60))
    planes = o1.seal(*random_rows(rng, 20, geometry), geometry).planes
    planes["far_mz"][1, 1, 0] = 1.0
    with pytest.raises(ValueError, match="took in no row is not empty"):
        o1.LayerState(geometry, SealOptions(), 20, planes=planes)


def test_the_file_is_a_plain_zip(state: o1.LayerState, tmp_path: Path) -> None:
    state.save(tmp_path / "layer.o1")
    assert zipfile.is_zipfile(io.BytesIO((tmp_path / "layer.o1").read_bytes()))
