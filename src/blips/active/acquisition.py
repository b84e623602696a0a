"""Which candidates to label: scores, and greedy batches. Arrays in, indices out.

| score | of a structure |
|---|---|
| energy_std | sigma of the energy over the number of atoms, eV (the paper's criterion) |
| force_std_max | largest atomic force sigma, root of the summed component variances, eV/A |
| force_std_mean | mean atomic force sigma, eV/A |
| information | what the batch tells about the posterior, nats (`greedy_information`) |
| random | nothing: the baseline |
"""

from dataclasses import dataclass

import numpy as np

from blips.errors import InputError


@dataclass(frozen=True)
class Choice:
    """A member of a batch.

    Attributes:
        index: of the candidate.
        gain: what the choice was made by: residual sigma, information in nats, or the score.
    """

    index: int
    gain: float


def structure_scores(
    n_atoms: np.ndarray, energy_std: np.ndarray, forces_std: np.ndarray, forces: np.ndarray
) -> dict[str, np.ndarray]:
    """Scores of S structures from predicted deviations.

    Args:
        n_atoms: [S].
        energy_std: [S] eV.
        forces_std: [N, 3] eV/A.
        forces: [N, 3] eV/A.

    Returns:
        energy_std, force_std_max, force_std_mean and force_max, [S] each.
    """
    first = np.concatenate([[0], np.cumsum(n_atoms)[:-1]]).astype(int)
    atom_std = np.linalg.norm(forces_std, axis=1)  # [N]
    atom_force = np.linalg.norm(forces, axis=1)  # [N]
    return {
        "energy_std": energy_std / n_atoms,
        "force_std_max": np.maximum.reduceat(atom_std, first),
        "force_std_mean": np.add.reduceat(atom_std, first) / n_atoms,
        "force_max": np.maximum.reduceat(atom_force, first),
    }


def random_score(seed: int, round: int, index: int) -> float:
    """A number in (0, 1) that only these three decide."""
    return float(np.random.default_rng([seed, 77, round, index]).random())


def best(scores: np.ndarray, count: int) -> list[Choice]:
    """The largest scores; of equal ones the first."""
    order = np.lexsort((np.arange(len(scores)), -scores))[:count]
    return [Choice(int(i), float(scores[i])) for i in order]


def greedy_diverse(scores: np.ndarray, features: np.ndarray, count: int) -> list[Choice]:
    """Greedy choice of uncertain candidates that are unlike each other.

    The errors of candidates are taken as a Gaussian process with deviations s and correlations
    k(f_i, f_j) = exp(-|f_i - f_j|^2 / 2 l^2), l the median distance of candidates. A label takes
    away what it explains of the others; the candidate with the largest residual deviation is next.
    This is a pivoted Cholesky decomposition of diag(s) K diag(s).

    Args:
        scores: s, [C], not negative.
        features: f, [C, D].
        count: of choices.
    """
    num = len(scores)
    norm_sq = (features**2).sum(1)
    distance_sq = norm_sq[:, None] + norm_sq[None] - 2.0 * features @ features.T  # [C, C]
    distance_sq = np.maximum(distance_sq, 0.0)
    pairs = distance_sq[np.triu_indices(num, 1)]
    length_sq = float(np.median(pairs[pairs > 0])) if (pairs > 0).any() else 1.0
    covariance = np.exp(-0.5 * distance_sq / length_sq) * scores[:, None] * scores[None]
    residual = np.diag(covariance).copy()
    factors = np.zeros((num, 0))
    chosen: list[Choice] = []
    open_ = np.ones(num, dtype=bool)
    for _ in range(min(count, num)):
        k = int(np.argmax(np.where(open_, residual, -np.inf)))
        open_[k] = False
        pivot = float(max(residual[k], 0.0))
        chosen.append(Choice(k, float(np.sqrt(pivot))))
        if pivot <= 1e-12 * float(covariance.diagonal().max()):
            continue  # the rest is explained: take it in order
        column = (covariance[:, k] - factors @ factors[k]) / np.sqrt(pivot)
        factors = np.concatenate([factors, column[:, None]], axis=1)
        residual = np.maximum(residual - column**2, 0.0)
    return chosen


def greedy_information(deviations: list[np.ndarray], count: int) -> list[Choice]:
    """Greedy batch with the largest joint information about the posterior (BALD).

    With K members whose predictions of candidate i (energy and forces) deviate from their mean by
    A_i [K, D_i], in units of the noise that the labels have, the information of a batch B about the
    member is, for Gaussians,

        I(B) = 1/2 log det( 1 + sum_{i in B} A_i A_i^T / (K - 1) )

    a K x K determinant, whatever the number of force components. Each step takes the candidate
    that adds most.

    Args:
        deviations: A_i of the candidates.
        count: of choices.
    """
    if not deviations:
        return []
    members = deviations[0].shape[0]
    if members < 2:
        raise InputError(f"information needs at least 2 members, got {members}")
    grams = np.stack([a @ a.T / (members - 1) for a in deviations])  # [C, K, K]
    total = np.eye(members)
    log_det = 0.0
    open_ = np.ones(len(grams), dtype=bool)
    chosen: list[Choice] = []
    for _ in range(min(count, len(grams))):
        log_dets = np.linalg.slogdet(total[None] + grams)[1]  # [C]
        k = int(np.argmax(np.where(open_, log_dets, -np.inf)))
        open_[k] = False
        chosen.append(Choice(k, 0.5 * float(log_dets[k] - log_det)))
        total, log_det = total + grams[k], float(log_dets[k])
    return chosen
