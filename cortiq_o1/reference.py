"""The operator in float64, one row after another: the truth that every test answers to.

Written for reading, not for speed; `docs/operator.md` has the same steps in formulas. It reads the
state's planes (float32, so kernel and reference start from the same bits) or seals a prompt itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .geometry import MIN_LANDMARKS, Geometry
from .planes import (
    META_FAR_LEN,
    META_FAR_LIMIT,
    META_HEAD,
    META_LANDMARKS,
    META_LEN,
    META_WINDOW,
    MIN_DENOMINATOR,
    MZ_MAX,
    MZ_RECENT,
    MZ_SHIFT,
    MZ_TOTAL,
    NO_FAR_LIMIT,
    T_RECENT,
    T_TOTAL,
)

Float64 = npt.NDArray[np.float64]

EPSILON = 2.0**-24
"""Half a unit in the last place of 1 in float32."""
BASE_BOUND = 1e-5
ROUNDINGS = 8.0
"""Roundings, each of `EPSILON`, granted to every value that enters a sum; see `_rounding`."""


@dataclass(frozen=True)
class StepResult:
    """One row's outputs and how well float32 can know them.

    `out (nh, dv)`; `other (nh, dv)`: the output had the far field's sign come out the other way,
    equal to `out` where float32 can tell; `bound (nh,)`: largest error to accept; `kappa (nh,)`: by
    how much the far field cancels.
    """

    out: Float64
    other: Float64
    bound: Float64
    kappa: Float64

    def error(self, got: npt.NDArray[Any]) -> Float64:
        """The worst error of each head `(nh,)` against the nearer of both branches; NaN is infinite."""
        got = np.asarray(got, np.float64)
        error = np.minimum(np.abs(got - self.out).max(axis=1), np.abs(got - self.other).max(axis=1))
        return np.where(np.isfinite(error), error, np.inf)


def _rounding(exponent: Float64, terms: Float64) -> Float64:
    """Relative error of `exp(exponent)` in units of `ROUNDINGS * EPSILON`.

    The exponent is a difference of logits: what rounding costs a logit grows with its `terms`
    `s * sum |q_i k_i|`, what it costs the difference, and WGSL's exp itself, with `|exponent|`.
    """
    return 1.0 + np.abs(exponent) + terms


class _Group:
    """One KV head and the query heads that read it."""

    def __init__(self, geometry: Geometry, window: int, far_limit: int) -> None:
        self.geometry = geometry
        self.window = window
        self.far_limit = far_limit
        self.sinks: list[tuple[Float64, Float64]] = []
        self.ring: deque[tuple[Float64, Float64]] = deque()
        self.far_len = 0

    def set_landmarks(self, q_tilde: Float64, k_tilde: Float64, mix: Float64, shift: Float64) -> None:
        """`q_tilde (H, m, d)`, `k_tilde (m, d)`, `mix (H, m, m)`, `shift (H,)`; no row is folded yet."""
        self.q_tilde, self.k_tilde, self.mix = q_tilde, k_tilde, mix
        self.shift = shift
        heads, m = q_tilde.shape[:2]
        self.far_max = np.full((heads, m), -np.inf)
        self.far_mass = np.zeros((heads, m))
        self.far_num = np.zeros((heads, m, self.geometry.value_dim or 0))
        self._start_rounding()

    def _start_rounding(self) -> None:
        """Errors of mass and numerator in units of `ROUNDINGS * EPSILON`: as yet their last rounding."""
        self.mass_rounding = self.far_mass.copy()
        self.num_rounding = np.abs(self.far_num)

    def push(self, k: Float64, v: Float64) -> None:
        """Steps 1 and 2 of a row: the oldest row leaves a full ring, the new one enters."""
        if len(self.ring) == self.window:
            evicted_k, evicted_v = self.ring.popleft()
            if self.far_len < self.far_limit:
                self.fold(evicted_k, evicted_v)
        self.ring.append((k, v))

    def fold(self, k: Float64, v: Float64) -> None:
        """One evicted row into the far field of every head and landmark."""
        logit = self.geometry.scale32 * (self.q_tilde @ k) - self.shift[:, None]
        new_max = np.maximum(self.far_max, logit)
        rescale = np.exp(self.far_max - new_max)
        weight = np.exp(logit - new_max)
        self.far_mass = rescale * self.far_mass + weight
        self.far_num = rescale[:, :, None] * self.far_num + weight[:, :, None] * v
        scale = float(self.geometry.scale32)
        terms = scale * (np.abs(self.q_tilde) @ np.abs(k)) + np.abs(self.shift)[:, None]
        loss = weight * _rounding(logit - new_max, terms)
        self.mass_rounding = rescale * self.mass_rounding + loss
        self.num_rounding = rescale[:, :, None] * self.num_rounding + loss[:, :, None] * np.abs(v)
        self.far_max = new_max
        self.far_len += 1

    def skip(self, k: Float64, v: Float64) -> None:
        """`push` for each row of `k (rows, d)`, `v (rows, dv)`, with all that leave folded at once."""
        self.ring.extend(zip(k, v, strict=True))
        gone = [self.ring.popleft() for _ in range(len(self.ring) - self.window)]
        gone = gone[: max(0, self.far_limit - self.far_len)]
        if not gone:
            return
        keys, values = (np.array(side) for side in zip(*gone, strict=True))
        scale = float(self.geometry.scale32)
        logit = scale * (self.q_tilde @ keys.T) - self.shift[:, None, None]
        terms = scale * (np.abs(self.q_tilde) @ np.abs(keys).T) + np.abs(self.shift)[:, None, None]
        new_max = np.maximum(self.far_max, logit.max(axis=-1))
        rescale = np.exp(self.far_max - new_max)
        weight = np.exp(logit - new_max[..., None])
        loss = weight * _rounding(logit - new_max[..., None], terms)
        self.far_mass = rescale * self.far_mass + weight.sum(axis=-1)
        self.far_num = rescale[..., None] * self.far_num + weight @ values
        self.mass_rounding = rescale * self.mass_rounding + loss.sum(axis=-1)
        self.num_rounding = rescale[..., None] * self.num_rounding + loss @ np.abs(values)
        self.far_max = new_max
        self.far_len += len(gone)

    def attend(self, q: Float64) -> StepResult:
        """Steps 3 to 5 for the group's heads, `q (H, d)`."""
        scale = np.float64(self.geometry.scale32)
        keys = np.array([k for k, _ in (*self.sinks, *self.ring)])
        values = np.array([v for _, v in (*self.sinks, *self.ring)])
        near = scale * (q @ keys.T), scale * (np.abs(q) @ np.abs(keys).T)
        land = scale * (q @ self.k_tilde.T), scale * (np.abs(q) @ np.abs(self.k_tilde).T)
        results = [
            self._head(h, near[0][h], near[1][h], values, land[0][h], land[1][h]) for h in range(len(q))
        ]
        return StepResult(*(np.array(column) for column in zip(*results, strict=True)))

    def _head(
        self, h: int, x: Float64, x_terms: Float64, values: Float64, p: Float64, p_terms: Float64
    ) -> tuple[Float64, Float64, float, float]:
        """A head's `out`, `other`, `bound`, `kappa`, from its near logits `x` over `values` and its
        landmark logits `p`, each with its terms."""
        unit = ROUNDINGS * EPSILON
        near_max = x.max()
        weights = np.exp(x - near_max)
        weights_rounding = weights * _rounding(x - near_max, x_terms)
        near_num, near_den = weights @ values, weights.sum()
        near_only = near_num / near_den
        near_bound = (
            BASE_BOUND + unit * float((weights_rounding @ np.abs(values - near_only)).max()) / near_den
        )
        if self.far_len == 0:
            return near_only, near_only, near_bound, 0.0
        mu, mass, num, mix = self.far_max[h], self.far_mass[h], self.far_num[h], self.mix[h]
        f = p.max()
        e = np.exp(p - f)
        u = e @ mix
        if self.geometry.rect == "fm":
            # A weight clamped at zero passes no error on; near zero it does, but then a small one.
            mix = mix * (u > 0.0)
            u = np.maximum(u, 0.0)
        c = max(near_max, (f + mu).max())
        reach = np.exp(f + mu - c)
        gain = u * reach
        near = np.exp(near_max - c)
        far = gain @ mass
        den = near * near_den + far
        with_far = (near * near_num + gain @ num) / max(den, MIN_DENOMINATOR)

        # How far roundings move a sum over b of gain_b * y_b: those of exp(p_a - f) act through all
        # of row a of the mixing matrix at once, those of the sum u_b through its terms' sizes, which
        # may be far above u_b itself.
        e_rounding = e * _rounding(p - f, p_terms)
        u_rounding = e @ np.abs(mix)
        gain_rounding = np.abs(gain) * (_rounding(f + mu - c, np.abs(f + mu)))

        def moved(y: Float64) -> Float64:
            return e_rounding @ np.abs(mix @ (reach[:, None] * y)) + (
                u_rounding * reach + gain_rounding
            ) @ np.abs(y)

        far_rounding = moved(mass[:, None])[0] + np.abs(gain) @ self.mass_rounding[h]
        unsure = abs(far) <= unit * far_rounding
        kappa = (np.abs(gain) @ mass) / max(abs(far), 1e-300)
        if far < 0.0 and not unsure:
            return near_only, near_only, near_bound, kappa
        den = max(den, near * near_den, MIN_DENOMINATOR)  # of two possible branches the bound is the larger
        spread = (
            near * (weights_rounding @ np.abs(values - with_far))
            + moved(num - mass[:, None] * with_far)
            + np.abs(gain) @ (self.num_rounding[h] + self.mass_rounding[h][:, None] * np.abs(with_far))
        )
        bound = BASE_BOUND + unit * float(spread.max()) / den
        out = near_only if far < 0.0 else with_far
        if not unsure:
            return out, out, bound, kappa
        other = with_far if far < 0.0 else near_only
        return out, other, max(bound, near_bound), kappa


class ReferenceLayer:
    """A sealed layer in float64; a batch of sequences is more groups."""

    def __init__(self, geometry: Geometry, groups: list[_Group]) -> None:
        self.geometry = geometry
        self.groups = groups

    @classmethod
    def from_planes(cls, geometry: Geometry, planes: Mapping[str, npt.NDArray[Any]]) -> ReferenceLayer:
        """The layer that a state's planes hold, see `planes.PLANES`."""
        groups = []
        heads = geometry.heads_per_group
        for g, meta in enumerate(planes["group_meta"].astype(int)):
            group = _Group(geometry, int(meta[META_WINDOW]), int(meta[META_FAR_LIMIT]))
            k, v = (planes[name][g].astype(np.float64) for name in ("ring_k", "ring_v"))
            for j in range(geometry.window, geometry.window + geometry.sinks):
                group.sinks.append((k[j], v[j]))
            for x in range(meta[META_LEN]):
                slot = (meta[META_HEAD] + x) % group.window
                group.ring.append((k[slot], v[slot]))
            m = int(meta[META_LANDMARKS])
            own = slice(g * heads, (g + 1) * heads)
            group.set_landmarks(
                planes["q_tilde"][own, :m].astype(np.float64),
                planes["k_tilde"][g, :m].astype(np.float64),
                planes["mix"][own, :m, :m].astype(np.float64),
                planes["far_mz"][own, MZ_SHIFT, 0].astype(np.float64),
            )
            group.far_len = int(meta[META_FAR_LEN])
            if group.far_len:
                mz, t = (planes[name][own].astype(np.float64) for name in ("far_mz", "t_hat"))
                group.far_max = mz[:, MZ_MAX, :m]
                group.far_mass = mz[:, MZ_TOTAL, :m] + mz[:, MZ_RECENT, :m]
                group.far_num = t[:, T_TOTAL, :m] + t[:, T_RECENT, :m]
                group._start_rounding()
            groups.append(group)
        return cls(geometry, groups)

    @classmethod
    def exact(cls, geometry: Geometry) -> ReferenceLayer:
        """A layer that has seen nothing and attends exactly: room for every row until the seal."""
        groups = []
        heads, d = geometry.heads_per_group, geometry.head_dim
        for _ in range(geometry.num_kv_heads):
            group = _Group(geometry, geometry.exact_rows, 0)
            group.set_landmarks(
                np.zeros((heads, 0, d)), np.zeros((0, d)), np.zeros((heads, 0, 0)), np.zeros(heads)
            )
            groups.append(group)
        return cls(geometry, groups)

    @classmethod
    def seal(
        cls,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        geometry: Geometry,
        ridge: float = 1e-6,
        fold: str = "always",
    ) -> ReferenceLayer:
        """Seals a prompt of `T > geometry.exact_rows` rows: `q (T, nh, d)`, `k (T, G, d)`, `v (T, G, dv)`."""
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        rows = len(k)
        m = min(max(rows // 8, MIN_LANDMARKS), geometry.landmarks)
        cuts = [i * rows // m for i in range(m + 1)]
        heads = geometry.heads_per_group
        groups = []
        for g, window in enumerate(geometry.group_windows):
            group = _Group(geometry, window, NO_FAR_LIMIT)
            k_tilde = np.array([k[a:b, g].mean(axis=0) for a, b in pairwise(cuts)])
            q_tilde = np.array(
                [[q[a:b, g * heads + h].mean(axis=0) for a, b in pairwise(cuts)] for h in range(heads)]
            )
            logits = geometry.scale32 * (q_tilde @ k_tilde.T)
            shift = logits.max(axis=(1, 2))
            mix = np.array([_mixing(a, ridge) for a in np.exp(logits - shift[:, None, None])])
            group.set_landmarks(q_tilde, k_tilde, mix, shift)
            group.sinks = [(k[t, g], v[t, g]) for t in range(geometry.sinks)]
            for t in range(geometry.sinks, rows):
                group.push(k[t, g], v[t, g])
            group.far_limit = {
                "always": NO_FAR_LIMIT,
                "prompt": rows - geometry.sinks,
                "never": group.far_len,
            }[fold]
            groups.append(group)
        return cls(geometry, groups)

    def step(self, q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any]) -> StepResult:
        """One row: `q (nh, d)`, `k (G, d)`, `v (G, dv)`; the state moves over it."""
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        heads = self.geometry.heads_per_group
        results = []
        for g, group in enumerate(self.groups):
            group.push(k[g], v[g])
            results.append(group.attend(q[g * heads : (g + 1) * heads]))
        return StepResult(
            *(
                np.concatenate([getattr(r, name) for r in results])
                for name in ("out", "other", "bound", "kappa")
            )
        )

    def run(self, q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any]) -> list[StepResult]:
        """`step` for each row of `q (rows, nh, d)`, `k (rows, G, d)`, `v (rows, G, dv)`."""
        return [self.step(*row) for row in zip(q, k, v, strict=True)]

    def skip(self, k: npt.NDArray[Any], v: npt.NDArray[Any]) -> None:
        """Moves the state over rows `k (rows, G, d)`, `v (rows, G, dv)` without outputs, many at a time."""
        for g, group in enumerate(self.groups):
            group.skip(k[:, g].astype(np.float64), v[:, g].astype(np.float64))


class ReferenceStream:
    """A layer from its first row on: exact attention while the stream is short, then a sealed layer.

    `seal` makes that layer from the rows so far, `ReferenceLayer.seal` if not given.
    """

    def __init__(
        self,
        geometry: Geometry,
        seal: Callable[[Float64, Float64, Float64], ReferenceLayer] | None = None,
    ) -> None:
        self.geometry = geometry
        self.layer = ReferenceLayer.exact(geometry)
        self.rows: list[tuple[Float64, Float64, Float64]] = []
        self.sealed = False
        self._seal = seal or (lambda q, k, v: ReferenceLayer.seal(q, k, v, geometry))

    @property
    def groups(self) -> list[_Group]:
        """Those of the layer as it is now."""
        return self.layer.groups

    def history(self) -> tuple[Float64, Float64, Float64]:
        """The rows before the seal: `q (rows, nh, d)`, `k (rows, G, d)`, `v (rows, G, dv)`."""
        q, k, v = (np.array(column) for column in zip(*self.rows, strict=True))
        return q, k, v

    def step(self, q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any]) -> StepResult:
        """One row, as `ReferenceLayer.step`."""
        if not self.sealed and len(self.rows) == self.geometry.exact_rows:
            self.layer, self.sealed = self._seal(*self.history()), True
        if not self.sealed:
            q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
            self.rows.append((q, k, v))
        return self.layer.step(q, k, v)

    def run(self, q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any]) -> list[StepResult]:
        """`step` for each row."""
        return [self.step(*row) for row in zip(q, k, v, strict=True)]


def _mixing(a: Float64, ridge: float) -> Float64:
    """`(A^T A + lam I)^-1 A^T` by Cholesky, `lam` times ten when that fails."""
    gram = a.T @ a
    lam = ridge * np.diag(gram).mean()
    while True:
        try:
            lower = np.linalg.cholesky(gram + lam * np.eye(len(gram)))
        except np.linalg.LinAlgError:
            lam *= 10.0
            continue
        return np.asarray(np.linalg.solve(lower.T, np.linalg.solve(lower, a.T)))


def worst_error(results: list[StepResult], got: npt.NDArray[Any]) -> tuple[float, float]:
    """The worst error of `got (rows, nh, dv)`, and the worst error as a part of its own bound."""
    errors = np.array([r.error(row) for r, row in zip(results, got, strict=True)])
    bounds = np.array([r.bound for r in results])
    return float(errors.max(initial=0.0)), float((errors / bounds).max(initial=0.0))
