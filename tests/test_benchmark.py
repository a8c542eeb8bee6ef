"""The benchmark's figures, and how they are shown: layers, bytes, errors, crossovers. Times nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

import cortiq_o1 as o1
from cortiq_o1 import benchmark as bm
from cortiq_o1.benchmark import layers, quality
from cortiq_o1.cli import bench_report, svg
from cortiq_o1.planes import MZ_SECTIONS


@pytest.mark.parametrize(
    ("points", "level", "expected"),
    [
        ([(1000, 1.0), (4000, 4.0)], 2.0, bm.Crossover("at", 2000)),
        ([(1000, 1.0), (4000, 4.0)], 0.5, bm.Crossover("below", 1000)),
        ([(1000, 1.0), (4000, 4.0)], 4.0, bm.Crossover("above", 4000)),
        ([(1000, 3.0), (2000, 1.0), (8000, 4.0)], 2.0, bm.Crossover("at", 4000)),
        ([], 1.0, None),
    ],
)
def test_crossover(points: list[tuple[int, float]], level: float, expected: bm.Crossover | None) -> None:
    assert bm.find_crossover(points, level) == expected


def test_crossover_is_not_before_the_seal() -> None:
    points = [(1000, 1.0), (4000, 4.0)]
    assert bm.find_crossover(points, 2.0, first=2500) == bm.Crossover("at", 2500)
    assert bm.find_crossover(points, 0.5, first=2500) == bm.Crossover("at", 2500)
    assert bm.find_crossover(points, 0.5, first=500) == bm.Crossover("below", 1000)
    assert bm.find_crossover(points, 8.0, first=2500) == bm.Crossover("above", 4000)


def test_median_and_spread() -> None:
    timing = bm.Timing("wall", (5.0, 1.0, 2.0, 3.0, 4.0))
    assert (timing.median, timing.spread) == (3.0, pytest.approx(2 / 3))


def test_exact_layer_is_exact_attention(rng: np.random.Generator) -> None:
    geometry = layers.exact_geometry(o1.Geometry(4, 2, 8, window=16), 24)
    state = layers.exact_state(geometry)
    layer = o1.open_device("cpu").load(state)
    q, k, v = (rng.standard_normal((1, n, 8), dtype=np.float32) for n in (4, 2, 2))
    out = layer.attend(q, k, v)
    for head in range(4):
        group = head // 2
        # The newest row takes the place of the oldest, in slot 0.
        keys = np.concatenate([k[:, group], state.planes["ring_k"][group, 1:]]).astype(np.float64)
        values = np.concatenate([v[:, group], state.planes["ring_v"][group, 1:]])
        weights = np.exp(keys @ q[0, head] * 8**-0.5)
        np.testing.assert_allclose(out[0, head], weights @ values / weights.sum(), atol=2e-6)
    assert not layer.state().planes["group_meta"][:, 2].any()


def test_sealed_layer_has_a_full_ring_and_a_far_field() -> None:
    state = layers.sealed_state(o1.Geometry(4, 2, 8, window=16, landmarks=8))
    meta = state.planes["group_meta"]
    assert (meta[:, 0] == 16).all()
    assert (meta[:, 2] > 0).all()


def test_moved_bytes() -> None:
    geometry = o1.Geometry(4, 2, 8, window=16, sinks=0, landmarks=4)
    ring, rows = 2 * (2 * 16 * 8), 2 * (4 * 8) + 4 * (2 * 8)
    far = 2 * 4 * 8 + 4 * 4 * 8 + 4 * 4 * 4 + 2 * (4 * MZ_SECTIONS * 4 + 4 * 2 * 4 * 8)
    assert layers.moved_bytes(geometry, 1, False, "f32") == 4 * (ring + rows)
    assert layers.moved_bytes(geometry, 1, True, "f32") == 4 * (ring + rows + far)
    assert layers.moved_bytes(geometry, 1, False, "f16") == 2 * ring + 4 * rows


def test_attention64_against_single_rows(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((12, n, 4)) for n in (4, 2, 2))
    data = quality.RealLayer("", q, k, v)
    full = quality.attention64(data, 5, 0.5)
    near = quality.attention64(data, 5, 0.5, near=(2, 3))
    for at in range(5, 12):
        for head in range(4):
            for got, seen in ((full, list(range(at + 1))), (near, [0, 1, *range(at - 2, at + 1)])):
                weights = np.exp(0.5 * k[seen, head // 2] @ q[at, head])
                np.testing.assert_allclose(got[at - 5, head], weights @ v[seen, head // 2] / weights.sum())


def test_error_on_real_data() -> None:
    probe = quality.QualityProbe(1e-6)
    found = probe.run(o1.open_device("cpu"))
    assert (found.prompt_rows, found.streamed_rows) == (512, 512)
    # The far field brings most rows and heads closer to exact attention.
    assert found.sealed.median < 0.75 * found.window_only.median
    assert quality.errors(probe.exact, probe.exact) == bm.Errors(0.0, 0.0, 0.0)


def test_presets_make_layers() -> None:
    shapes = {p.name: (p.layers, p.num_heads, p.num_kv_heads, p.head_dim) for p in bm.PRESETS.values()}
    assert shapes["smollm2-135m"] == (30, 9, 3, 64)
    assert shapes["qwen3-8b"] == (36, 32, 8, 128)
    assert all(p.geometry().heads_per_group * p.num_kv_heads == p.num_heads for p in bm.PRESETS.values())
    assert any(p.head_dim == 256 and p.geometry().heads_per_group == 6 for p in bm.PRESETS.values())


# A report with three devices, as text and as a drawing.


def made_report() -> bm.Report:
    preset = bm.find_preset("qwen3-8b")
    report = bm.Report(
        preset.name, preset.model, preset.layers, preset.geometry(), (1024, 4096, 16384), (1,), 10.0, {}
    )
    for number, name in enumerate(
        ("Card <A> & Sons", "Card B", "A card with a very long name, of which all is told")
    ):
        device = bm.DeviceResult(
            name, "vulkan", software=number == 2, copy_bytes_per_s=1e11, copy_clock="gpu"
        )
        for context in (None, *report.contexts):
            time = 1e-4 * (1 + 0.001 * number) * (context or 2048) / 2048
            timings = [bm.Timing(clock, (time, time * 1.1, time * 0.9)) for clock in ("wall", "gpu")]
            device.cells.append(bm.Cell(context, 1, 1000, 1000, *timings))
        report.devices.append(device)
    report.devices[1].cells[-1] = bm.Cell(16384, 1, problem="ring_k: 67108864 bytes, too many for a binding")
    return report


@pytest.mark.parametrize("columns", [80, 60])
def test_report_loses_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report = made_report()
    bench_report.render(report)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for device in report.devices:
        assert set(device.name.split()) <= set(out.split())
    assert set("ring_k: 67108864 bytes, too many for a binding".split()) <= set(out.split())
    assert out.count("GPU time by timestamps") == 3
    assert "16.0x" not in out  # the ratio of times at 16,384 is 8
    assert out.count("8.00x") == 2


def test_svg_is_well_formed_and_legible() -> None:
    report = made_report()
    root = ET.fromstring(svg.draw(report, 1))
    space = {"s": "http://www.w3.org/2000/svg"}
    texts = root.findall("s:text", space)
    labels = [t for t in texts if (t.text or "").endswith(("exact", "sealed"))]
    assert len(labels) == 6
    assert any("Card <A> & Sons" in (t.text or "") for t in labels)
    heights = sorted(float(t.get("y", "nan")) for t in labels)
    assert min(np.diff(heights)) >= svg.LABEL_GAP - 0.11
    for curve in root.findall("s:polyline", space):
        for point in curve.get("points", "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= svg.WIDTH
            assert 0 <= y <= svg.HEIGHT


def test_svg_keeps_many_labels_apart_and_inside() -> None:
    report = made_report()
    report.devices = [report.devices[0]] * 12
    root = ET.fromstring(svg.draw(report, 1))
    texts = root.findall("{http://www.w3.org/2000/svg}text")
    heights = sorted(float(t.get("y", "nan")) for t in texts if (t.text or "").endswith(("exact", "sealed")))
    assert len(heights) == 24
    assert min(np.diff(heights)) >= svg.LABEL_GAP - 0.11
    assert heights[0] >= svg.TOP
    assert heights[-1] <= svg.HEIGHT - svg.BOTTOM + 5


def test_svg_of_nothing_says_so() -> None:
    report = made_report()
    report.devices.clear()
    assert "nothing was timed" in "".join(ET.fromstring(svg.draw(report, 1)).itertext())
