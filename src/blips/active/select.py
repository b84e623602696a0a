"""From candidates to the batch of a round: screen in chunks, keep the best, choose greedily.

Screening is the part that sees every candidate: chunks go to the executor, and of each only the
numbers and scores of those that could still be chosen are kept. The final choice looks at the
structures of these few. A gain can only fall as picks are made, so the batch is that of all
candidates wherever its last gain is above the score of the last one that was kept.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from blips import keys
from blips.active.candidates import Candidate, Candidates
from blips.active.config import CampaignConfig
from blips.active.database import CampaignError
from blips.active.evidence import candidate_rows
from blips.active.executor import Executor, JobLost
from blips.active.frames import digest, to_json
from blips.active.rules import Choice, Greedy, best, expected_reduction, random_score
from blips.active.store import CampaignStore, Pick
from blips.active.worker import model_of, one_thread, read_target, screen
from blips.errors import InputError
from blips.sim.guard import Guard

TARGETS = 128  # structures that stand for the target distribution
Row = tuple[int, dict[str, float]]  # number and scores of a candidate


@dataclass(frozen=True)
class Model:
    """A trained model as workers find it."""

    path: str
    digest: str

    def job(self, **more: Any) -> dict[str, Any]:
        """Describe the job for `blips.active.worker`."""
        return {"model": self.path, "digest": self.digest, **more}


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
        self._rule, self._power = config.select.rule, config.select.cost
        self._count = config.select.keep * config.select.batch
        self._soft = config.limits.force_std == "auto"
        self._seed, self._round = config.seed, round

    def summary(self, numbers: list[int], result: dict[str, Any], seen: int) -> dict[str, Any]:
        """Return the part of a screened chunk to keep, JSON-able."""
        rows: list[Row] = []
        for number, row, reason in zip(numbers, result["scores"], result["excluded"], strict=True):
            if row is None or (reason is not None and not (self._soft and reason == "force_std")):
                continue
            if self._rule == "random":
                row["random"] = random_score(self._seed, self._round, number)
            if reason is not None:
                row["beyond"] = 1.0
            rows.append((number, row))
        excluded = Counter(reason for reason in result["excluded"] if reason is not None)
        excluded["known"] += seen - len(numbers)
        found = [row for _, row in rows]
        rows.sort(key=self._key)
        worst = self._key(self.rows[-1]) if len(self.rows) >= self._count else None
        rows = [row for row in rows[: self._count] if worst is None or self._key(row) < worst]
        names = [name for name in (found[0] if found else ()) if name != "beyond"]
        largest = {name: max(row[name] for row in found) for name in names}
        std = {"sum": fsum(row["mean_std"] for row in found), "count": len(found)}
        counts = {"excluded": +excluded, "seen": seen}
        return {"rows": rows, "largest": largest, "std": std, **counts}

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
        return False, -scores[self._rule] / scores["atoms"] ** self._power, number


def screen_candidates(
    candidates: Candidates,
    model: Model,
    config: CampaignConfig,
    store: CampaignStore,
    executor: Executor,
    round: int,
    limits: dict[str, Any] | None = None,
) -> Screening:
    """Score all candidates; finished chunks are in the store and not screened again.

    `limits` are those of the configuration, with numbers for what is "auto" there; else none is.
    """
    select, found = config.select, Screening(config, round)
    known, done = store.known_digests(), store.chunks(round)
    for content in done.values():
        found.add(content)
    waiting: dict[int, tuple[int, list[int], int]] = {}
    common = {
        "samples": select.samples,
        "method": select.method,
        "seed": config.seed,
        "rule": select.rule,
        "rows": select.rows,
        "limits": limits or {**config.limits.model_dump(), "force_std": None},
        "target": str(_target_file(model)),
    }
    if _has_evidence(model):
        write_target(candidates, model, config)

    def jobs() -> Iterator[dict[str, Any]]:
        for place, (chunk, part) in enumerate(candidates.chunks(select.chunk, set(done))):
            fresh = [(number, atoms) for number, atoms, _ in part if digest(atoms) not in known]
            numbers = [number for number, _ in fresh]
            waiting[place] = (chunk, numbers, len(part))
            texts = [to_json(atoms) for _, atoms in fresh]
            yield model.job(structures=texts, **common)

    for place, result in executor.run(screen, jobs()):
        if isinstance(result, JobLost):
            raise CampaignError(f"screening lost its workers ({result}); start the campaign again")
        chunk, numbers, seen = waiting.pop(place)
        content = found.summary(numbers, result, seen)
        found.add(content)
        store.add_chunk(round, chunk, content)
    return found


def choose(
    candidates: Candidates,
    screening: Screening,
    model: Model,
    config: CampaignConfig,
    round: int,
    count: int,
) -> list[Pick]:
    """Choose the batch of a round, each pick with its score and the reason for it."""
    scores = dict(screening.rows)
    kept = _without_repeats(candidates.fetch(list(scores)))
    within = [candidate for candidate in kept if "beyond" not in scores[candidate[0]]]
    beyond = [candidate for candidate in kept if "beyond" in scores[candidate[0]]]
    chosen = _choices(within, [scores[number] for number, _, _ in within], model, config, count)
    picked = [(within[choice.index], choice) for choice in chosen]
    for candidate in beyond[: max(0, count - len(picked))]:
        picked.append((candidate, Choice(-1, 0.0)))
    picks: list[Pick] = []
    for place, ((number, atoms, origin), choice) in enumerate(picked):
        plain = atoms.copy()
        plain.calc = None
        reason = {
            "rule": config.select.rule,
            "gain": choice.gain,
            "rank": choice.index,  # among the candidates by score alone; -1: beyond the limits
            "candidate": number,
            "origin": origin,
            "scores": scores[number],
        }
        picks.append(Pick(round, place, plain, scores[number][config.select.rule], reason))
    return picks


def _choices(
    candidates: Sequence[Candidate],
    scores: Sequence[dict[str, float]],
    model: Model,
    config: CampaignConfig,
    count: int,
) -> list[Choice]:
    select = config.select
    if not candidates:
        return []
    by_score = np.array([row[select.rule] for row in scores])
    cost = np.array([len(atoms) for _, atoms, _ in candidates], dtype=float) ** select.cost
    if select.rule in ("energy_std", "random") or not _has_evidence(model):
        return best(by_score / cost, count)
    rows = _rows(model, [atoms for _, atoms, _ in candidates], config)
    target = read_target(_target_file(model))
    return Greedy(select.rule, rows, target=target, std=by_score, cost=cost).choose(count)


def predicted_std(picks: Sequence[Pick], model: Model, config: CampaignConfig) -> list[float]:
    """Predict the force std on the target before and after the picks are labelled, eV/A.

    Root of the mean variance of a component, the misfit's floor included; nothing for models
    without a posterior in closed form.
    """
    if not picks or not _has_evidence(model):
        return []
    rows = _rows(model, [pick.atoms for pick in picks], config)
    with np.load(_target_file(model)) as found:
        target = found["forces"]
    reduction = expected_reduction(rows.reshape(1, -1, rows.shape[2]), target)[0]
    scale, before = model_of(model.job()).conditioned().scale, float(np.square(target).sum())
    noise, misfit = scale.ratio * scale.scale**2, scale.floor[keys.FORCES] ** 2  # variances
    return [float(np.sqrt(noise * var + misfit)) for var in (before, before - reduction)]


def _has_evidence(model: Model) -> bool:
    posterior = model_of(model.job()).posterior
    return posterior is not None and posterior.evidence is not None


def _rows(model: Model, structures: Sequence[Atoms], config: CampaignConfig) -> np.ndarray:
    with one_thread():
        potential, rows = model_of(model.job()), config.select.rows
        return candidate_rows(potential, structures, rows=rows, seed=config.seed)


def write_target(candidates: Candidates, model: Model, config: CampaignConfig) -> None:
    """Write the rows of structures that matter beside the model, for all workers.

    Divided by the roots of the numbers that they stand for, so that sums of squares are the mean
    variances of a force component and of an energy per atom (in units of the noise of labels).
    """
    rng, given = np.random.default_rng([config.seed, 5]), config.select.target
    source = candidates if given is None else Candidates.of_file(given)
    numbers = sorted(rng.permutation(source.total)[:TARGETS].tolist())
    guard = Guard(closest=config.limits.closest, farthest=config.limits.farthest)
    nothing = np.zeros((0, model_of(model.job()).conditioned().maps.sketch.size))
    energies, forces, components = [nothing], [nothing], 0
    for _, atoms, _ in source.fetch(numbers):
        with suppress(InputError):  # a structure that the model cannot judge
            rows = _rows(model, [atoms], config)[0]  # [1 + q, d], the energy first
            if np.isfinite(rows).all() and not guard.check(atoms):
                energies.append(rows[:1] / len(atoms))
                forces.append(rows[1:])
                components += 3 * len(atoms)
    np.savez(
        _target_file(model),
        energies=np.concatenate(energies) / np.sqrt(max(len(energies) - 1, 1)),
        forces=np.concatenate(forces) / np.sqrt(max(components, 1)),
    )


def _target_file(model: Model) -> Path:
    return Path(model.path).with_name("target.npz")


def _without_repeats(candidates: list[Candidate]) -> list[Candidate]:
    """Keep one candidate of equal geometries: the smallest number, at the best one's place."""
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        name = digest(candidate[1])
        found[name] = min(candidate, found.get(name, candidate), key=lambda one: one[0])
    return list(found.values())
