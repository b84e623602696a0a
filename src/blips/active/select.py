"""From candidates to the batch of a round: screen in chunks, keep the best, choose greedily.

Screening is the part that sees every candidate: chunks go to the executor, and of each only the
numbers and scores of those that could still be chosen are kept. The final choice looks at the
structures of these few. A gain can only fall as picks are made, so the batch is that of all
candidates wherever its last gain is above the score of the last one that was kept.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import fsum
from typing import Any

import numpy as np
from ase import Atoms

from blips import keys
from blips.active.candidates import Candidate, Candidates, Pool
from blips.active.config import CampaignConfig, LimitsConfig
from blips.active.database import CampaignError
from blips.active.evidence import candidate_rows
from blips.active.executor import Executor, JobLost
from blips.active.frames import digest, to_json
from blips.active.rules import Choice, Greedy, best, expected_reduction, random_score
from blips.active.store import CampaignStore, Pick
from blips.active.worker import Model, one_thread, potential_of, read_target, screen
from blips.errors import InputError
from blips.sim.guard import Guard

TARGETS = 128  # structures that stand for the target distribution
Row = tuple[int, dict[str, float]]  # number and scores of a candidate


class Screening:
    """The best candidates so far; which they are in the end does not depend on the order.

    `rows` has the best first; those beyond the automatic limit come last, the least uncertain
    first, with the score "beyond".
    """

    def __init__(self, config: CampaignConfig, round: int) -> None:
        self.rows: list[Row] = []
        self.seen = 0  # candidates in all
        self.excluded: Counter[str] = Counter()  # beyond a limit or known, by reason
        self.largest: dict[str, float] = {}  # of every score, among those that can be chosen
        self._stds: list[float] = []  # sums over the chunks, ascending
        self._counted = 0
        self.config, self.round, self._select = config, round, config.select
        self._count = config.select.keep * config.select.batch
        self._soft = config.limits.force_std == "auto"

    def summary(self, numbers: list[int], result: dict[str, Any], seen: int) -> dict[str, Any]:
        """Return the part of a screened chunk to keep, JSON-able."""
        rows: list[Row] = []
        for number, row, reason in zip(numbers, result["scores"], result["excluded"], strict=True):
            if row is None or (reason is not None and not (self._soft and reason == "force_std")):
                continue
            if self._select.rule == "random":
                row["random"] = random_score(self.config.seed, self.round, number)
            if reason is not None:
                row["beyond"] = 1.0
            rows.append((number, row))
        excluded = Counter(reason for reason in result["excluded"] if reason is not None)
        excluded["known"] += seen - len(numbers)
        found = [row for _, row in rows]
        names = [name for name in (found[0] if found else ()) if name != "beyond"]
        rows.sort(key=self._key)
        if len(self.rows) >= self._count:
            rows = [row for row in rows if self._key(row) < self._key(self.rows[-1])]
        return {
            "rows": rows[: self._count],
            "largest": {name: max(row[name] for row in found) for name in names},
            "std": {"sum": fsum(row["mean_std"] for row in found), "count": len(found)},
            "excluded": +excluded,
            "seen": seen,
        }

    @property
    def mean_std(self) -> float:
        """Mean force std of a component over all that can be chosen, eV/A."""
        return fsum(self._stds) / max(self._counted, 1)

    def add(self, content: dict[str, Any]) -> None:
        """Add what `summary` kept of a chunk."""
        self.rows += [(number, row) for number, row in content["rows"]]
        self.rows.sort(key=self._key)
        del self.rows[self._count :]
        self.excluded.update(content["excluded"])
        self.seen += content["seen"]
        self._counted += content["std"]["count"]
        insort(self._stds, content["std"]["sum"])
        for name, value in content["largest"].items():
            self.largest[name] = max(value, self.largest.get(name, value))

    def _key(self, row: Row) -> tuple[bool, float, int]:
        """Return the sort key: the score within the limits; beyond, the least uncertain first."""
        number, scores = row
        if "beyond" in scores:
            return True, scores["force_std"], number
        return False, -scores[self._select.rule] / scores["atoms"] ** self._select.cost, number


def screen_candidates(
    candidates: Candidates,
    model: Model,
    config: CampaignConfig,
    store: CampaignStore,
    executor: Executor,
    round: int,
    limits: LimitsConfig | None = None,
) -> Screening:
    """Score all candidates; finished chunks are in the store and not screened again.

    `limits` are those of the configuration, with numbers for what is "auto" there; else none is.
    """
    found = Screening(config, round)
    known, done = store.known_digests(), store.chunks(round)
    for content in done.values():
        found.add(content)
    common = {
        "model": model,
        "select": config.select,
        "limits": limits or config.limits,
        "seed": config.seed,
    }
    if _has_evidence(model):
        write_target(candidates, model, config)
    waiting: dict[int, tuple[int, list[int], int]] = {}

    def jobs() -> Iterator[dict[str, Any]]:
        chunks = enumerate(range(0, len(candidates), config.select.chunk))
        left = ((chunk, first) for chunk, first in chunks if chunk not in done)
        for place, (chunk, first) in enumerate(left):
            numbers = range(first, min(first + config.select.chunk, len(candidates)))
            part = {number: candidates[number][0] for number in numbers}
            fresh = {number: atoms for number, atoms in part.items() if digest(atoms) not in known}
            waiting[place] = (chunk, list(fresh), len(part))
            yield {**common, "structures": [to_json(atoms) for atoms in fresh.values()]}

    for place, result in executor.run(screen, jobs()):
        if isinstance(result, JobLost):
            raise CampaignError(f"screening lost its workers ({result}); start the campaign again")
        chunk, numbers, seen = waiting.pop(place)
        content = found.summary(numbers, result, seen)
        found.add(content)
        store.add_chunk(round, chunk, content)
    return found


def choose(candidates: Candidates, screening: Screening, model: Model, count: int) -> list[Pick]:
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
        rows, target = _rows(model, structures, config), read_target(model)
        greedy = Greedy(select.rule, rows, target=target, std=by_score, cost=cost)
        chosen = greedy.choose(count)
    picked = [(within[choice.index], choice) for choice in chosen]
    picked += [(number, Choice(-1, 0.0)) for number in beyond[: max(0, count - len(picked))]]
    picks: list[Pick] = []
    for place, (number, choice) in enumerate(picked):
        atoms, origin = kept[number]
        reason = {
            "rule": select.rule,
            "gain": choice.gain,
            "rank": choice.index,  # among the candidates by score alone; -1: beyond the limits
            "candidate": number,
            "origin": origin,
            "scores": scores[number],
        }
        score = scores[number][select.rule]
        picks.append(Pick(screening.round, place, atoms.copy(), score, reason))
    return picks


def predicted_std(picks: Sequence[Pick], model: Model, config: CampaignConfig) -> list[float]:
    """Predict the force std on the target before and after the picks are labelled, eV/A.

    Root of the mean variance of a component, the misfit's floor included; nothing for models
    without a posterior in closed form.
    """
    if not picks or not _has_evidence(model):
        return []
    rows = _rows(model, [pick.atoms for pick in picks], config)
    with np.load(model.target) as found:
        target = found["forces"]
    reduction = expected_reduction(rows.reshape(1, -1, rows.shape[2]), target)[0]
    scale, before = potential_of(model).conditioned().scale, float(np.square(target).sum())
    noise, misfit = scale.ratio * scale.scale**2, scale.floor[keys.FORCES] ** 2  # variances
    return [float(np.sqrt(noise * var + misfit)) for var in (before, before - reduction)]


def write_target(candidates: Candidates, model: Model, config: CampaignConfig) -> None:
    """Write the rows of structures that matter beside the model, for all workers.

    Divided by the roots of the numbers that they stand for, so that sums of squares are the mean
    variances of a force component and of an energy per atom (in units of the noise of labels).
    """
    rng, given = np.random.default_rng([config.seed, 5]), config.select.target
    source = candidates if given is None else Pool(given)
    numbers = sorted(rng.permutation(len(source))[:TARGETS].tolist())
    guard = Guard(closest=config.limits.closest, farthest=config.limits.farthest)
    nothing = np.zeros((0, potential_of(model).conditioned().maps.sketch.size))
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
        model.target,
        energies=np.concatenate(energies) / np.sqrt(max(len(energies) - 1, 1)),
        forces=np.concatenate(forces) / np.sqrt(max(components, 1)),
    )


def _has_evidence(model: Model) -> bool:
    posterior = potential_of(model).posterior
    return posterior is not None and posterior.evidence is not None


def _rows(model: Model, structures: Sequence[Atoms], config: CampaignConfig) -> np.ndarray:
    with one_thread():
        return candidate_rows(
            potential_of(model), structures, rows=config.select.rows, seed=config.seed
        )


def _without_repeats(candidates: Mapping[int, Candidate]) -> dict[int, Candidate]:
    """Keep one candidate of equal geometries: the smallest number, at the best one's place."""
    found: dict[str, int] = {}
    for number, (atoms, _) in candidates.items():
        name = digest(atoms)
        found[name] = min(number, found.get(name, number))
    return {number: candidates[number] for number in found.values()}
