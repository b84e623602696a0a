"""Which rule to select by, from the labels at hand (`select.rule: auto`). Arrays in, a rule out.

The labels of a round are new to the model that asked for them, so they can stand for a campaign. A
third of them, drawn at random, are targets, the others a pool. Every rule picks a third of the
pool, and the mean takes the closed-form step that the labels of its picks call for,

    y(T) -> y(T) + B_T B^T (B B^T + c I)^-1 (y - mean),        B: white rows of the picks

No training is needed. The force error that is left on the targets, over that of random picks,
compares the rules. Trials of all rounds count, and their noise is known from the splits. The rule
is the first of `RULES` that is not worse than the best one by more than this noise; without trials
it is the first.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from blips.active.rules import greedy, target_rows

RULES = ("expected_reduction", "information", "force_std", "random")  # in case of doubt the first
SPLITS, DRAWS = 32, 8  # of the labels into targets and pool; of random picks
NOISE = 10.0  # c, in variances of the posterior's noise: the step is at first order only
LEAST = 6  # labels for a trial: two targets, a pool of four

Trial = Mapping[str, Sequence[float]]  # log of the error over random's, by rule and split


def trial(rows: np.ndarray, residuals: np.ndarray, seed: int) -> dict[str, list[float]]:
    """Compare the rules on labels that the model has not seen; nothing where these are too few.

    `rows` of the structures are white, the energy first, [S, 1 + q, d]; `residuals` are label minus
    mean along them, [S, 1 + q].
    """
    found: dict[str, list[float]] = {}
    structures, third = len(rows), len(rows) // 3
    if structures < LEAST or not np.any(residuals[:, 1:]):
        return found
    rng = np.random.default_rng([seed, 6, structures])
    for _ in range(SPLITS):
        order = rng.permutation(structures)
        targets, pool = order[:third], order[third:]
        count = max(1, len(pool) // 3)
        draws = [rng.permutation(pool)[:count] for _ in range(DRAWS)]
        random = np.mean([_log_error(rows, residuals, picks, targets) for picks in draws])
        forces = rows[pool, 1:]
        target = target_rows(np.concatenate(forces), rows[pool, 0])
        std = np.sqrt(np.square(forces).sum(axis=(1, 2)))
        for rule in RULES[:-1]:
            chosen = greedy(rule, rows[pool], count, target=target, std=std)
            picks = pool[[index for index, _ in chosen]]
            error = _log_error(rows, residuals, picks, targets)
            found.setdefault(rule, []).append(float(error - random))
        found.setdefault(RULES[-1], []).append(0.0)
    return found


def chosen_rule(trials: Sequence[Trial]) -> str:
    """Choose the first rule that is not worse than the best by more than the trials' noise."""
    trials = [one for one in trials if one]
    if not trials:
        return RULES[0]
    errors = {rule: np.array([one[rule] for one in trials]) for rule in RULES}  # [rounds, splits]
    best = min(errors.values(), key=np.mean)
    worse = {rule: found - best for rule, found in errors.items()}
    noise = {rule: w.std() / np.sqrt(len(w)) for rule, w in worse.items()}  # splits share labels
    return next(rule for rule in RULES if worse[rule].mean() <= noise[rule])


def _log_error(
    rows: np.ndarray, residuals: np.ndarray, picks: np.ndarray, targets: np.ndarray
) -> float:
    """Compute the log of the mean force error on the targets after the step, eV/A."""
    known, asked = (rows[k].reshape(-1, rows.shape[2]) for k in (picks, targets))
    kernel = known @ known.T + NOISE * np.eye(len(known))
    step = asked @ known.T @ np.linalg.solve(kernel, residuals[picks].ravel())
    left = residuals[targets].ravel() - step
    error = np.abs(left.reshape(len(targets), -1)[:, 1:]).mean()
    return float(np.log(max(error, np.finfo(float).tiny)))
