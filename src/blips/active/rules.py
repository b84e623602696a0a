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
"""  # noqa: E501 (tables)

from collections.abc import Callable

import numpy as np

Array = np.ndarray
Choice = tuple[int, float]  # which candidate, and the gain that it was chosen by
NEGLIGIBLE = 1e-12  # eigenvalues of B B^T below this share of the largest are rounding


def best(scores: Array, count: int) -> list[Choice]:
    """Return the largest scores; of equal ones the first."""
    order = np.argsort(-scores, kind="stable")[:count]
    return [(int(i), float(scores[i])) for i in order]


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


def greedy(
    rule: str,
    rows: Array,
    count: int,
    *,
    target: Array | None = None,
    std: Array | None = None,
    cost: Array | None = None,
) -> list[Choice]:
    """Choose a batch one by one by information, expected_reduction or force_std; none twice.

    Rows B [c, 1 + q, d] have the energy first; of equals the first is chosen. For
    expected_reduction `target` is T [t, d], for force_std `std` [c] is before any pick. Gains are
    weighed against the `cost` of labels, [c].
    """
    target = np.zeros((0, rows.shape[2])) if target is None else target
    std, cost = (np.ones(len(rows)) if one is None else one for one in (std, cost))
    whole, left = _force_var(rows), np.ones(len(rows), dtype=bool)
    chosen: list[Choice] = []
    for _ in range(min(count, len(rows))):
        if rule == "information":
            gains = information(rows)
        elif rule == "expected_reduction":
            gains = expected_reduction(rows, target)
        else:
            var = _force_var(rows)
            gains = std * np.sqrt(np.divide(var, whole, out=np.ones_like(var), where=whole > 0))
        gains = np.where(left, gains / cost, -np.inf)
        pick = int(np.argmax(gains))  # the first of equals
        chosen.append((pick, float(gains[pick] * cost[pick])))
        left[pick] = False
        after_pick = _conditioned_on(rows[pick])
        rows, target = after_pick(rows), after_pick(target)
    return chosen


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
