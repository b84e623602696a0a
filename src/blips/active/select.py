"""From candidates to the batch of a round: screen in chunks, keep the best, choose greedily.

Screening is the part that sees every candidate: chunks go to the executor, and of each only the
numbers and scores of those that could still be chosen are kept. The final choice looks at the
structures of these few.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms
from vesin import NeighborList

from blips.active.acquisition import (
    Choice,
    best,
    greedy_diverse,
    greedy_information,
    random_score,
)
from blips.active.config import CampaignConfig
from blips.active.database import CampaignError
from blips.active.executor import DaskExecutor, InlineExecutor, JobLost
from blips.active.frames import digest, to_json
from blips.active.pool import Candidate, Candidates
from blips.active.store import CampaignStore, Pick
from blips.active.worker import member_deviations, screen

PRESCREEN = {"information": "force_std_mean"}  # by what candidates of a joint score are kept
FEATURE_CUTOFF = 5.0  # A
FEATURE_CENTRES = np.linspace(0.6, FEATURE_CUTOFF, 24)  # A
FEATURE_WIDTH = 0.2  # A


@dataclass(frozen=True)
class Model:
    """A trained model as workers find it."""

    path: str
    digest: str

    def job(self, **more: Any) -> dict[str, Any]:
        """A job for `blips.active.worker`."""
        return {"model": self.path, "digest": self.digest, **more}


@dataclass(frozen=True)
class Screening:
    """What screening found.

    Attributes:
        rows: (number, scores) of the best, best first.
        seen: candidates in all.
        excluded: how many were thrown out, by reason.
        largest: largest value of every score among those that were not.
    """

    rows: list[tuple[int, dict[str, float]]]
    seen: int
    excluded: dict[str, int]
    largest: dict[str, float]


def screen_candidates(
    candidates: Candidates,
    model: Model,
    config: CampaignConfig,
    store: CampaignStore,
    executor: InlineExecutor | DaskExecutor,
    round: int,
) -> Screening:
    """Score all candidates; finished chunks are in the store and not screened again."""
    select, top = config.select, _Top(config, round)
    for content in store.chunks(round).values():
        top.add(content)
    known = store.known_digests()
    done = set(store.chunks(round))
    waiting: dict[int, tuple[int, list[int], int]] = {}

    def jobs() -> Iterator[dict[str, Any]]:
        for place, (chunk, part) in enumerate(candidates.chunks(select.chunk, done)):
            fresh = [(number, atoms) for number, atoms, _ in part if digest(atoms) not in known]
            waiting[place] = (chunk, [number for number, _ in fresh], len(part))
            yield model.job(
                structures=[to_json(atoms) for _, atoms in fresh],
                samples=select.samples,
                method=select.method,
                seed=config.seed,
                bounds=select.bounds.model_dump(mode="json"),
            )

    for place, result in executor.run(screen, jobs()):
        if isinstance(result, JobLost):
            raise CampaignError(f"screening lost its workers ({result}); start the campaign again")
        chunk, numbers, seen = waiting.pop(place)
        content = top.summary(numbers, result, seen)
        top.add(content)
        store.add_chunk(round, chunk, content)
    return top.screening()


class _Top:
    """The best candidates so far; which they are in the end does not depend on the order."""

    def __init__(self, config: CampaignConfig, round: int) -> None:
        self.score = config.select.score
        self.by = PRESCREEN.get(self.score, self.score)
        self.count = config.select.keep * config.select.batch
        self.seed, self.round = config.seed, round
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.excluded: Counter[str] = Counter()
        self.largest: dict[str, float] = {}
        self.seen = 0

    def summary(self, numbers: list[int], result: dict[str, Any], seen: int) -> dict[str, Any]:
        """What is worth keeping of a screened chunk, JSON-able."""
        rows, largest = [], {}
        for number, row in zip(numbers, result["scores"], strict=True):
            if row is None:
                continue
            if self.by == "random":
                row["random"] = random_score(self.seed, self.round, number)
            rows.append((number, row))
            largest = {name: max(value, largest.get(name, value)) for name, value in row.items()}
        excluded = Counter(reason for reason in result["excluded"] if reason is not None)
        excluded["known"] += seen - len(numbers)
        rows.sort(key=self._key)
        worst = self._key(self.rows[-1]) if len(self.rows) >= self.count else None
        rows = [row for row in rows[: self.count] if worst is None or self._key(row) < worst]
        return {"rows": rows, "excluded": +excluded, "largest": largest, "seen": seen}

    def add(self, content: dict[str, Any]) -> None:
        self.rows += [(number, row) for number, row in content["rows"]]
        self.rows.sort(key=self._key)
        del self.rows[self.count :]
        self.excluded.update(content["excluded"])
        self.seen += content["seen"]
        for name, value in content["largest"].items():
            self.largest[name] = max(value, self.largest.get(name, value))

    def screening(self) -> Screening:
        excluded = dict(sorted(self.excluded.items()))
        return Screening(self.rows, self.seen, excluded, self.largest)

    def _key(self, row: tuple[int, dict[str, float]]) -> tuple[float, int]:
        return (-row[1][self.by], row[0])


def choose(
    candidates: Candidates,
    screening: Screening,
    model: Model,
    config: CampaignConfig,
    round: int,
    count: int,
) -> list[Pick]:
    """The batch of a round, each pick with its score and the reason for it."""
    rows, select = screening.rows, config.select
    kept = _without_repeats(candidates.fetch([number for number, _ in rows]))
    rows = [row for row in rows if row[0] in {number for number, _, _ in kept}]
    if not kept:
        return []
    scores = np.array([row[select.score] for _, row in rows if select.score in row])
    if select.score == "information":
        job = model.job(
            structures=[to_json(atoms) for _, atoms, _ in kept],
            samples=select.samples,
            seed=config.seed,
            energy_noise=select.energy_noise,
            force_noise=select.noise,
        )
        chosen = greedy_information(member_deviations(job), count)
    elif select.diversity and select.score != "random":
        chosen = greedy_diverse(scores, structure_features([atoms for _, atoms, _ in kept]), count)
    else:
        chosen = best(scores, count)
    return [
        _pick(round, place, choice, kept[choice.index], rows[choice.index][1], config)
        for place, choice in enumerate(chosen)
    ]


def _without_repeats(candidates: list[Candidate]) -> list[Candidate]:
    """The first of equal geometries."""
    seen: set[str] = set()
    kept: list[Candidate] = []
    for candidate in candidates:
        name = digest(candidate[1])
        if name not in seen:
            kept.append(candidate)
        seen.add(name)
    return kept


def _pick(
    round: int,
    place: int,
    choice: Choice,
    candidate: Candidate,
    scores: dict[str, float],
    config: CampaignConfig,
) -> Pick:
    number, atoms, origin = candidate
    plain = atoms.copy()
    plain.calc = None
    score = config.select.score
    reason = {
        "score": score,
        "gain": choice.gain,
        "rank": choice.index,  # among the candidates by score alone
        "candidate": number,
        "origin": origin,
        "scores": scores,
    }
    return Pick(round, place, plain, scores.get(score, choice.gain), reason)


def structure_features(structures: Sequence[Atoms]) -> np.ndarray:
    """Describe structures by invariant features, [S, pairs of elements x centres].

    They tell whether two candidates are alike. For every pair of elements (a, b): the smeared
    histogram of distances from atoms a to their neighbours b within a cutoff c, weighted to
    vanish there, per atom of the structure:

        f_ab(mu) = 1/N sum_{i in a, j in b} exp(-(r_ij - mu)^2 / 2 w^2) (1 + cos(pi r_ij / c)) / 2
    """
    elements = sorted({int(z) for atoms in structures for z in atoms.numbers})
    place = {z: i for i, z in enumerate(elements)}
    features = np.zeros((len(structures), len(elements) ** 2, len(FEATURE_CENTRES)))
    for s, atoms in enumerate(structures):
        first, second, distance = NeighborList(
            cutoff=FEATURE_CUTOFF, full_list=True, sorted=False
        ).compute(atoms.positions, atoms.cell.array, atoms.pbc, "ijd")
        kinds = np.array([place[int(z)] for z in atoms.numbers])  # [N]
        pair = kinds[first] * len(elements) + kinds[second]  # [E]
        weight = 0.5 * (1.0 + np.cos(np.pi * distance / FEATURE_CUTOFF)) / len(atoms)  # [E]
        smeared = np.exp(-0.5 * ((distance[:, None] - FEATURE_CENTRES) / FEATURE_WIDTH) ** 2)
        np.add.at(features[s], pair, smeared * weight[:, None])
    return features.reshape(len(structures), -1)
