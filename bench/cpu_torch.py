"""What PyTorch does on the CPU in the place of a sealed layer: the peers of `bench/cpu.py`.

Eager, in inference mode, float32; a group's heads are folded into rows, so that keys are read once for all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cortiq_o1.geometry import Geometry
from cortiq_o1.planes import META_LANDMARKS, MZ_MAX, MZ_RECENT, MZ_TOTAL, T_RECENT, T_TOTAL


def set_threads(threads: int) -> None:
    """Threads of every operation."""
    torch.set_num_threads(threads)


class Exact:
    """Exact attention of one row over `keys (g, n, d)` and `values (g, n, dv)`, by PyTorch's own kernel."""

    def __init__(self, geometry: Geometry, keys: np.ndarray, values: np.ndarray) -> None:
        self.geometry = geometry
        self.keys, self.values = (torch.from_numpy(array)[None] for array in (keys, values))

    @torch.inference_mode()
    def attend(self, q: np.ndarray) -> np.ndarray:
        """Outputs `(nh, dv)` for `q (nh, d)`."""
        g = self.geometry
        rows = torch.from_numpy(q).view(1, g.num_kv_heads, g.heads_per_group, -1)
        out = scaled_dot_product_attention(rows, self.keys, self.values, scale=g.scale)
        return out.view(g.num_heads, -1).numpy()


class Operator:
    """The operator itself over a full ring, a token with its commit: `cortiq_o1` in PyTorch's own words.

    Takes copies of state planes as `cortiq_o1.planes` shapes them, all windows full and alike.
    """

    def __init__(self, geometry: Geometry, planes: Mapping[str, np.ndarray]) -> None:
        assert geometry.rect == "aggregate"
        assert (planes["group_meta"][:, META_LANDMARKS] == geometry.landmarks).all()
        self.geometry = geometry
        self.lanes = (geometry.num_kv_heads, geometry.heads_per_group)
        m = geometry.landmarks

        def own(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.copy())

        self.keys, self.values = own(planes["ring_k"]), own(planes["ring_v"])
        self.key_marks = own(planes["k_tilde"]).transpose(1, 2)
        self.query_marks = own(planes["q_tilde"]).view(self.lanes[0], self.lanes[1] * m, -1)
        self.mix = own(planes["mix"])
        mz, t = planes["far_mz"], planes["t_hat"]
        self.maximum = own(mz[:, MZ_MAX]).view(*self.lanes, m)
        self.mass = own(mz[:, MZ_TOTAL] + mz[:, MZ_RECENT]).view(*self.lanes, m)
        self.numerator = own(t[:, T_TOTAL] + t[:, T_RECENT])
        self.head = 0

    @torch.inference_mode()
    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Outputs `(nh, dv)` for `q (nh, d)`, `k (g, d)` and `v (g, dv)`; the state moves over the row."""
        g = self.geometry
        self._fold()
        self.keys[:, self.head], self.values[:, self.head] = torch.from_numpy(k), torch.from_numpy(v)
        self.head = (self.head + 1) % g.window
        rows = (torch.from_numpy(q) * g.scale).view(*self.lanes, -1)
        near = torch.bmm(rows, self.keys.transpose(1, 2))
        marks = torch.bmm(rows, self.key_marks)
        best = marks.amax(-1, keepdim=True)
        marks = marks.sub_(best).exp_().view(g.num_heads, 1, -1)
        gains = torch.bmm(marks, self.mix).view_as(self.maximum)
        reach = self.maximum + best
        far_top = reach.amax(-1, keepdim=True)
        gains = gains.mul_(reach.sub_(far_top).exp_())
        far = (gains * self.mass).sum(-1, keepdim=True)
        far_top = far_top.masked_fill_(far < 0.0, -torch.inf)
        top = torch.maximum(near.amax(-1, keepdim=True), far_top)
        lift = (far_top - top).exp_()
        weights = near.sub_(top).exp_()
        below = weights.sum(-1, keepdim=True).add_(far.mul_(lift)).clamp_(min=1e-30)
        above = torch.bmm(weights, self.values)
        gains = gains.mul_(lift).view(g.num_heads, 1, -1)
        above += torch.bmm(gains, self.numerator).view_as(above)
        return above.div_(below).view(g.num_heads, -1).numpy()

    def _fold(self) -> None:
        """The row that leaves, into the far field."""
        key = self.keys[:, self.head, :, None] * self.geometry.scale
        value = self.values[:, self.head].clone()
        logits = torch.bmm(self.query_marks, key).view_as(self.maximum)
        maximum = torch.maximum(self.maximum, logits)
        weights = logits.sub_(maximum).exp_()
        if not torch.equal(maximum, self.maximum):
            rescale = self.maximum.sub_(maximum).exp_()
            self.mass.mul_(rescale)
            self.numerator.mul_(rescale.view(self.geometry.num_heads, -1, 1))
        self.maximum = maximum
        self.mass.add_(weights)
        sums = self.numerator.view(self.lanes[0], -1, value.shape[1])
        sums.addcmul_(weights.view(self.lanes[0], -1, 1), value[:, None])
