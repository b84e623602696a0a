"""From candidates to the batch of a round: screen in chunks, keep the best, choose greedily.

Screening is the part that sees every candidate: chunks go to the executor, and of each only the
numbers and scores of those that could still be chosen are kept. The final choice looks at the
structures of these few. A gain can only fall as picks are made, so the batch is that of all
candidates wherever its last gain is above the score of the last one that was kept.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import fsum
from pathlib import Path

import numpy as np
from ase import Atoms

from blips import keys
from blips.active.candidates import Candidate, Candidates, Pool
from blips.active.config import CampaignConfig
from blips.active.evidence import candidate_rows
from blips.active.executor import Executor, JobLost
from blips.active.frames import digest, to_json
from blips.active.rules import best, expected_reduction, greedy, random_score, target_rows
from blips.active.store import CampaignStore, Pick
from blips.active.worker import TARGET, Scores, read_target, screen
from blips.errors import InputError
from blips.sim.guard import Guard
from blips.train.released import load_once

TARGETS = 128  # structures that stand for the target distribution


class Screening:
    """The best candidates so far; which they are in the end does not depend on the order.

    `rows` has the best first; those beyond the automatic limit come last, the least uncertain
    first, with the score "beyond".
    """

    def __init__(self, config: CampaignConfig, round: int) -> None:
        self.rows: list[tuple[int, Scores]] = []  # numbers and scores
        self.seen = 0  # candidates in all
        self.excluded: Counter[str] = Counter()  # beyond a limit or known, by reason
        self.largest: Scores = {}  # of every score, among those that can be chosen
        self.config, self.round = config, round
        self._sums: list[float] = []  # of their mean stds, by chunk
        self._counted = 0

    @property
    def mean_std(self) -> float:
        """Mean force std of a component over all that can be chosen, eV/A."""
        return fsum(self._sums) / max(self._counted, 1)

    def add(self, chunk: Iterable[tuple[int, Scores | None, str | None]]) -> None:
        """Add a chunk as `screen` returns it."""
        stds: list[float] = []
        select, soft = self.config.select, self.config.limits.force_std == "auto"
        for number, scores, reason in chunk:
            self.seen += 1
            self.excluded.update([reason] if reason else [])
            beyond = soft and reason == "force_std"
            if scores is None or (reason and not beyond):
                continue
            if select.rule == "random":
                scores["random"] = random_score(self.config.seed, self.round, number)
            for name, value in scores.items():
                self.largest[name] = max(value, self.largest.get(name, value))
            stds.append(scores["mean_std"])
            self.rows.append((number, {**scores, "beyond": 1.0} if beyond else scores))
        self._sums.append(fsum(stds))
        self._counted += len(stds)
        self.rows.sort(key=self._key)
        del self.rows[select.keep * select.batch :]

    def _key(self, row: tuple[int, Scores]) -> tuple[bool, float, int]:
        """Return the sort key: the score within the limits; beyond, the least uncertain first."""
        (number, scores), select = row, self.config.select
        if "beyond" in scores:
            return True, scores["force_std"], number
        return False, -scores[select.rule] / scores["atoms"] ** select.cost, number


def screen_candidates(
    candidates: Candidates,
    model: Path,
    config: CampaignConfig,
    store: CampaignStore,
    executor: Executor,
    round: int,
    largest_std: float | None,
) -> Screening:
    """Score all candidates; finished chunks are in the store and not screened again.

    `largest_std` is the limit of the force std, a number also where it is "auto".
    """
    found, done = Screening(config, round), store.read_all("chunk", round)
    for chunk in done.values():
        found.add(chunk)
    if _has_evidence(model):
        write_target(candidates, model, config)
    size, total = config.select.chunk, len(candidates)
    left = [first for first in range(0, total, size) if (round, first) not in done]
    known = {digest(pick.atoms) for pick in store.picks()}

    def jobs() -> Iterator[dict[int, str]]:
        for first in left:
            part = {k: candidates[k][0] for k in range(first, min(first + size, total))}
            yield {k: to_json(atoms) for k, atoms in part.items() if digest(atoms) not in known}

    work = partial(screen, model=model, config=config, largest_std=largest_std)
    for place, chunk in executor.run(work, jobs()):
        if isinstance(chunk, JobLost):
            raise chunk
        store.write("chunk", chunk, round, left[place])
        found.add(chunk)
    found.excluded += Counter(known=total - found.seen)
    found.seen = total
    return found


def choose(candidates: Candidates, screening: Screening, model: Path, count: int) -> list[Pick]:
    """Choose the batch of a round, each pick with its score and the reason for it."""
    config, scores = screening.config, dict(screening.rows)
    select = config.select
    kept = _without_repeats({number: candidates[number] for number in scores})
    within = [number for number in kept if "beyond" not in scores[number]]
    beyond = [number for number in kept if "beyond" in scores[number]]
    by_score = np.array([scores[number][select.rule] for number in within])
    structures = [kept[number][0] for number in within]
    cost = np.array([len(atoms) for atoms in structures], dtype=float) ** select.cost
    if not within or select.rule in ("energy_std", "random") or not _has_evidence(model):
        chosen = best(by_score / cost, count)
    else:
        rows, target = _rows(model, structures, config), target_rows(*read_target(model))
        chosen = greedy(select.rule, rows, count, target=target, std=by_score, cost=cost)
    picked = [(within[index], index, gain) for index, gain in chosen]
    picked += [(number, -1, 0.0) for number in beyond]
    picks: list[Pick] = []
    for place, (number, rank, gain) in enumerate(picked[:count]):
        atoms, origin = kept[number]
        reason = {
            "rule": select.rule,
            "gain": gain,
            "rank": rank,  # among the candidates by score alone; -1: beyond the limits
            "candidate": number,
            "origin": origin,
            "scores": scores[number],
        }
        score = scores[number][select.rule]
        picks.append(Pick(screening.round, place, atoms.copy(), score, reason))
    return picks


def predicted_std(picks: Sequence[Pick], model: Path, config: CampaignConfig) -> list[float]:
    """Predict the force std on the target before and after the picks are labelled, eV/A.

    Root of the mean variance of a component, the misfit's floor included; nothing for models
    without a posterior in closed form.
    """
    if not picks or not _has_evidence(model):
        return []
    rows = _rows(model, [pick.atoms for pick in picks], config)
    target, _ = read_target(model)
    reduction = expected_reduction(rows.reshape(1, -1, rows.shape[2]), target)[0]
    scale, before = load_once(model).conditioned().scale, float(np.square(target).sum())
    noise, misfit = scale.ratio * scale.scale**2, scale.floor[keys.FORCES] ** 2  # variances
    return [float(np.sqrt(noise * var + misfit)) for var in (before, before - reduction)]


def write_target(candidates: Candidates, model: Path, config: CampaignConfig) -> None:
    """Write the rows of structures that matter beside the model, for all workers.

    Divided by the roots of the numbers that they stand for, so that sums of squares are the mean
    variances of a force component and of an energy per atom (in units of the noise of labels).
    """
    rng, given = np.random.default_rng([config.seed, 5]), config.select.target
    source = candidates if given is None else Pool(given)
    numbers = sorted(rng.permutation(len(source))[:TARGETS].tolist())
    guard = Guard(closest=config.limits.closest, farthest=config.limits.farthest)
    nothing = np.zeros((0, load_once(model).conditioned().maps.sketch.size))
    energies, forces, components = [nothing], [nothing], 0
    for number in numbers:
        atoms, _ = source[number]
        with suppress(InputError):  # a structure that the model cannot judge
            rows = _rows(model, [atoms], config)[0]  # [1 + q, d], the energy first
            if np.isfinite(rows).all() and not guard.check(atoms):
                energies.append(rows[:1] / len(atoms))
                forces.append(rows[1:])
                components += 3 * len(atoms)
    np.savez(
        model.with_name(TARGET),
        energies=np.concatenate(energies) / np.sqrt(max(len(energies) - 1, 1)),
        forces=np.concatenate(forces) / np.sqrt(max(components, 1)),
    )


def _has_evidence(model: Path) -> bool:
    return getattr(load_once(model).posterior, "evidence", None) is not None


def _rows(model: Path, structures: Sequence[Atoms], config: CampaignConfig) -> np.ndarray:
    rows, seed = config.select.rows, config.seed
    return candidate_rows(load_once(model), structures, rows=rows, seed=seed)


def _without_repeats(candidates: Mapping[int, Candidate]) -> dict[int, Candidate]:
    """Keep one candidate of equal geometries: the smallest number, at the best one's place."""
    found: dict[str, int] = {}
    for number, (atoms, _) in candidates.items():
        name = digest(atoms)
        found[name] = min(number, found.get(name, number))
    return {number: candidates[number] for number in found.values()}
