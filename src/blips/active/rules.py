r"""Which candidates to label, in closed form on the conditioned posterior. Arrays in, indices out.

A candidate has rows b, the derivatives of its energy and forces by the noise of weights (`rows`).
In units of the noise of labels, and white under the posterior so far,

    B = rows Lambda^(-1/2) / s,        [q, d]

its label takes Lambda to Lambda + b^T b / s^2 whatever the label will be. So every pick changes
the rows of all others at once, b -> b (I + B^T B)^(-1/2), before anything is labelled, and a batch
is chosen one by one, each pick knowing those before it. Candidates that are alike go together.

| rule | a candidate's gain |
|---|---|
| information | what its label tells about the weights, 1/2 log det(I + B B^T), nats (BALD) |
| expected_reduction | what its label takes off the variance of the rows T of target structures, tr[(I + B B^T)^-1 B T^T T B^T] |
| force_std | its largest atomic force std, times the root of the share of its force variance that earlier picks leave |
| energy_std | its energy std per atom (the paper's rule), eV; picks do not change each other |
| random | nothing |

Gains of information and force_std can only fall as picks are made (submodular), so a candidate
whose old gain is below another's new one need not be looked at again: lazy evaluation.
"""  # noqa: E501 (tables)

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
REFRESHED = 16  # candidates whose gain is worked out again at once
NEGLIGIBLE = 1e-12  # eigenvalues of B B^T below this share of the largest are rounding


@dataclass(frozen=True)
class Choice:
    """A member of a batch: which candidate, and the gain that it was chosen by."""

    index: int
    gain: float


def best(scores: Array, count: int) -> list[Choice]:
    """Return the largest scores; of equal ones the first."""
    order = np.lexsort((np.arange(len(scores)), -scores))[:count]
    return [Choice(int(i), float(scores[i])) for i in order]


def random_score(seed: int, round: int, index: int) -> float:
    """Return a pseudorandom number in (0, 1) that is a function of the three arguments."""
    return float(np.random.default_rng([seed, 77, round, index]).random())


def information(rows: Array) -> Array:
    """Compute 1/2 log det(I + B B^T) of candidates' rows [c, q, d], [c]."""
    return 0.5 * np.linalg.slogdet(_with_noise(rows))[1]


def expected_reduction(rows: Array, target: Array) -> Array:
    """Compute tr[(I + B B^T)^-1 B T^T T B^T] of rows [c, q, d] for targets [t, d], [c]."""
    along = rows @ target.T  # [c, q, t]
    explained = along @ along.transpose(0, 2, 1)  # [c, q, q]
    return np.linalg.solve(_with_noise(rows), explained).trace(axis1=1, axis2=2)


def target_rows(forces: Array, energies: Array) -> Array:
    """Join target rows of forces [t, d] and energies per atom [s, d] into T, [t + s, d].

    Both count alike: each is divided by the root of its variance, the sum of its squares. So a gain
    is the share of the forces' variance that a label takes away, plus that of the energies'.
    """
    tiny = np.finfo(float).tiny
    return np.concatenate([rows / max(np.linalg.norm(rows), tiny) for rows in (forces, energies)])


def _with_noise(rows: Array) -> Array:
    return np.eye(rows.shape[1]) + rows @ rows.transpose(0, 2, 1)


class Greedy:
    """Choose a batch one by one by a rule of the table above.

    Args:
        rule: information, expected_reduction or force_std.
        rows: of the candidates, B [c, 1 + q, d], the energy first.
        target: expected_reduction: rows T of the target structures, [t, d].
        std: force_std: of the candidates before any pick, [c].
        cost: of the candidates' labels, which gains are divided by, [c].
    """

    def __init__(
        self,
        rule: str,
        rows: Array,
        *,
        target: Array | None = None,
        std: Array | None = None,
        cost: Array | None = None,
    ) -> None:
        self.rule, self.rows = rule, np.array(rows, dtype=float)
        self.target = np.zeros((0, rows.shape[2])) if target is None else target
        self.std = np.ones(len(rows)) if std is None else std
        self.cost = np.ones(len(rows)) if cost is None else cost
        self.lazy = rule != "expected_reduction"  # two picks may reduce more than each by itself
        self.evaluations = 0  # gains that were worked out
        self._force_var = _force_var(self.rows)
        self._picks: list[Callable[[Array], Array]] = []  # what each does to rows
        self._seen = np.zeros(len(rows), dtype=int)  # picks that a candidate's rows know of

    def gain(self, index: Array) -> Array:
        """Return the gains of these candidates, whose rows account for all picks, [c]."""
        rows = self.rows[index]
        if self.rule == "information":
            return information(rows)
        if self.rule == "expected_reduction":
            return expected_reduction(rows, self.target)
        left, whole = _force_var(rows), self._force_var[index]
        share = np.divide(left, whole, out=np.ones_like(left), where=whole > 0)
        return self.std[index] * np.sqrt(share)

    def choose(self, count: int) -> list[Choice]:
        """Choose the batch; of equal candidates the first, and none twice."""
        gains = self._evaluate(np.arange(len(self.rows)))
        chosen: list[Choice] = []
        for _ in range(min(count, len(self.rows))):
            k = self._best(gains)
            chosen.append(Choice(k, float(gains[k] * self.cost[k])))
            gains[k] = -np.inf
            after_pick = _conditioned_on(self.rows[k])
            self._picks.append(after_pick)
            self.target = after_pick(self.target)
        return chosen

    def _best(self, gains: Array) -> int:
        while True:
            k = int(np.argmax(gains))  # the first of equals
            if self._seen[k] == len(self._picks):
                return k
            late = np.flatnonzero((self._seen < len(self._picks)) & (gains > -np.inf))
            if self.lazy:  # the most promising ones
                late = late[np.argsort(-gains[late], kind="stable")[:REFRESHED]]
            gains[late] = self._evaluate(late)

    def _evaluate(self, index: Array) -> Array:
        """Return gains over costs of candidates, after conditioning their rows on all picks."""
        for number, after_pick in enumerate(self._picks):
            late = index[self._seen[index] <= number]
            self.rows[late] = after_pick(self.rows[late])
        self._seen[index] = len(self._picks)
        self.evaluations += len(index)
        return self.gain(index) / self.cost[index]


def _force_var(rows: Array) -> Array:
    """Sum the variances of the forces, [c]; the energy's row is the first."""
    return np.square(rows[:, 1:]).sum(axis=(1, 2))


def _conditioned_on(pick: Array) -> Callable[[Array], Array]:
    """Return what a pick does to rows: b (I + B^T B)^(-1/2) = b - sum_j (b u_j) shrink_j u_j."""
    values, left = np.linalg.eigh(pick @ pick.T)
    kept = values > NEGLIGIBLE * max(float(values[-1]), np.finfo(float).tiny)
    values = values[kept]
    vectors = (left[:, kept] / np.sqrt(values)).T @ pick  # u, [m, d]
    shrink = 1.0 - 1.0 / np.sqrt(1.0 + values)  # [m]
    return lambda rows: rows - ((rows @ vectors.T) * shrink) @ vectors
