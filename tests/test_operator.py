"""What must hold of the operator whatever its arithmetic: checks that do not ask the reference."""

from __future__ import annotations

import numpy as np
import pytest

import cortiq_o1 as o1


def streamed(
    device: o1.Device, offset: float, values: np.ndarray | None, rng: np.random.Generator
) -> np.ndarray:
    """Twenty rows after a prompt of 150 whose logits all lie about `offset`."""
    geometry = o1.Geometry(2, 1, 16, window=16, sinks=2, landmarks=8, scale=1.0)
    q, k = (0.3 * rng.standard_normal((170, n, 16)) for n in (2, 1))
    q[..., 0], k[..., 0] = np.sqrt(abs(offset)), np.sign(offset) * np.sqrt(abs(offset))
    v = np.ones((170, 1, 16)) if values is None else values
    layer = device.load(o1.seal(q[:150], k[:150], v[:150], geometry))
    return layer.attend(q[150:], k[150:], v[150:])


@pytest.mark.parametrize("offset", [0.0, 30.0, 75.0, 90.0, 400.0, -30.0, -90.0, -400.0])
def test_an_average_of_ones_is_one(device: o1.Device, rng: np.random.Generator, offset: float) -> None:
    out = streamed(device, offset, None, rng)
    np.testing.assert_allclose(out, 1.0, atol=1e-3)


@pytest.mark.parametrize("offset", [75.0, 150.0, -150.0])
def test_a_shared_offset_of_all_logits_changes_nothing(device: o1.Device, offset: float) -> None:
    """Softmax does not see it, neither does the far field."""
    values = np.random.default_rng(3).standard_normal((170, 1, 16))
    plain, moved = (streamed(device, o, values, np.random.default_rng(4)) for o in (0.0, offset))
    # A logit near 150 is known to 1e-5, and the mixing matrix magnifies that.
    np.testing.assert_allclose(moved, plain, atol=5e-3)
