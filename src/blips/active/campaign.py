"""The loop: explore, select, label, train, evaluate, until a budget or a target is reached.

    round 0:  choose initial structures -> label
    round n:  train on all labels -> evaluate -> explore -> select -> label

Every stage is a function of what the store holds and of seeds, and ends with a transaction. What
an interrupted stage had finished (a label, a trajectory, a screened chunk, epochs of training) is
there when the campaign goes on, and is not done again.
"""

from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from blips.active.auto import chosen_rule, trial
from blips.active.candidates import Candidates, Pool
from blips.active.config import CampaignConfig
from blips.active.database import CampaignError
from blips.active.display import CampaignDisplay
from blips.active.evidence import labelled_rows
from blips.active.executor import Executor, JobLost, make_executor
from blips.active.frames import digest, from_json, to_json
from blips.active.labeller import close_labeller, label, read_label
from blips.active.select import choose, predicted_std, screen_candidates
from blips.active.store import CampaignStore, Pick
from blips.active.summary import campaign_summary
from blips.active.training import errors_on, force_mae_bound, model_file, train_round
from blips.active.worker import walk
from blips.config import dump_config
from blips.data.structures import check_structures, read_structures
from blips.errors import ConfigError
from blips.files import write_atomically
from blips.train.released import load_once


def run_campaign(config: CampaignConfig, *, display: bool = True) -> dict[str, Any]:
    """Run a campaign, or the rest of it; returns `campaign_summary` of its folder."""
    with CampaignStore(config.folder) as store:
        store.begin(config)
        write_atomically(store.folder / "config.yaml", dump_config(config).encode())
        console = Console(force_jupyter=False)
        if not display:
            console = Console(quiet=True, force_terminal=False)
        shown = CampaignDisplay(f"campaign in {store.folder}", console)
        with make_executor(config.executor) as executor, shown:
            try:
                Campaign(store, config, executor, shown).run()
            finally:
                close_labeller()
    return campaign_summary(config.folder)


@dataclass(frozen=True)
class Campaign:
    """One campaign, from where its store, open for writing, says it is."""

    store: CampaignStore
    config: CampaignConfig
    executor: Executor
    display: CampaignDisplay

    def run(self) -> None:
        """Run until the campaign has ended."""
        if self.store.read("select") is None:
            self.display.stage(0, "choosing initial structures")
            picks = initial_picks(self.config)
            self.store.add_picks(picks, 0, {"chosen": len(picks)})
        self._label(0)
        for round in count(1):
            model = self._train(round)
            reason = self._evaluate(round, model) or self._select(round, model)
            if reason:
                self.store.write("end", {"reason": reason}, round)
                self.display.stage(round, f"the campaign has ended: {reason}")
                return
            self._label(round)
            self._surprise(round, model)

    # Stages

    def _train(self, round: int) -> Path:
        model = model_file(self.store, round)
        if self.store.read("train", round) is None or not model.is_file():
            self.display.stage(round, "training")  # a model whose file is lost is the same again
            train_round(self.store, self.config, round)
        return model

    def _evaluate(self, round: int, model: Path) -> str:
        """Judge the model on the test structures, if any; returns a reason to stop, or nothing."""
        errors, file = self.store.read("evaluate", round), self.config.evaluate.structures
        if errors is None:
            self.display.stage(round, "evaluating")
            errors = {}
            if file is not None:
                errors = errors_on(load_once(model), read_structures(file), self.config)
            self.store.write("evaluate", errors, round)
        labels = len(self.store.labelled(before=round))
        if errors:
            self.display.finished({"round": round, "labels": labels, **errors})
        stop, force_mae = self.config.stop, errors.get("force_mae")
        if stop.force_mae is not None and force_mae is not None and force_mae <= stop.force_mae:
            return f"force MAE {force_mae:.3g} eV/A reached the target {stop.force_mae:g}"
        if round > stop.rounds:
            return f"{stop.rounds} rounds are done"
        if stop.labels is not None and labels >= stop.labels:
            return f"the budget of {stop.labels} labels is spent"
        return ""

    def _surprise(self, round: int, model: Path) -> None:
        """Judge the model of a round by the labels that it asked for, before it is trained on them.

        They are the candidates that it was least certain of, so its errors are large there; but
        every campaign has them, and they fall as it learns.
        """
        found, known = self._foreseen(round), len(self.store.labelled(before=round))
        if self.store.read("surprise", round) is None:
            labelled, potential = self.store.labelled(before=round + 1)[known:], load_once(model)
            found = errors_on(potential, labelled, self.config) if labelled else {}
            select, seed = self.config.select, self.config.seed
            if labelled and select.rule == "auto":
                rows = labelled_rows(potential, labelled, rows=select.rows, seed=seed)
                found["trial"] = trial(*rows, seed)
            self.store.write("surprise", found, round)
        if found and not self.store.read("evaluate", round):
            self.display.finished({"round": round, "labels": known, **found})

    def _select(self, round: int, model: Path) -> str:
        """Explore and select; returns a reason to stop, or nothing."""
        result = self.store.read("select", round)
        if result is None:
            largest_std, typical_force = self._limits(round)
            candidates = self._explore(round, model, largest_std, typical_force)
            config = self._with_rule(round)
            self.display.stage(round, "screening candidates")
            screening = screen_candidates(
                candidates, model, config, self.store, self.executor, round, largest_std
            )
            ratios = self._foreseen(round - 1).get("ratios", [])
            bound = force_mae_bound(ratios, screening.mean_std, config.stop.confidence)
            if reason := self._certain(screening.largest.get("force_std", np.inf), bound):
                return reason
            self.display.stage(round, "selecting")
            batch, budget = config.select.batch, config.stop.labels
            if budget is not None:
                batch = min(batch, budget - self.store.count("labelled"))
            picks = choose(candidates, screening, model, batch)
            result = {
                "rule": config.select.rule,
                "chosen": len(picks),
                "seen": screening.seen,
                "excluded": dict(sorted(screening.excluded.items())),
                "largest": screening.largest,
                "force_mae_bound": bound,
                "predicted_std": predicted_std(picks, model, config),
            }
            self.store.add_picks(picks, round, result)
        if result["chosen"] > 0:
            return ""
        return f"all {result['seen']} candidates were thrown out ({result['excluded']})"

    def _foreseen(self, round: int) -> dict[str, Any]:
        """Return what the labels of a round told about the model that asked for them, if known."""
        return self.store.read("surprise", round) or {}

    def _certain(self, largest: float, bound: float | None) -> str:
        """Return a reason to stop where candidates are certain enough; with another target go on.

        The bound on their force MAE decides where there is no test set.
        """
        stop = self.config.stop
        target = stop.force_mae if self.config.evaluate.structures is None else None
        if target is not None and bound is not None and bound <= target:
            return (
                f"the force MAE on the candidates is below {bound:.3g} eV/A with "
                f"{100 * stop.confidence:.0f} % confidence (target {target:g})"
            )
        if stop.force_std is not None and largest <= stop.force_std:
            return f"no candidate is less certain than {largest:.3g} eV/A"
        return ""

    def _with_rule(self, round: int) -> CampaignConfig:
        """Return the configuration, its rule chosen by the labels so far where it is "auto"."""
        if self.config.select.rule != "auto":
            return self.config
        rule = chosen_rule([self._foreseen(n).get("trial", {}) for n in range(round)])
        select = self.config.select.model_copy(update={"rule": rule})
        return self.config.model_copy(update={"select": select})

    def _limits(self, round: int) -> tuple[float | None, float]:
        """Return the limit of the force std, and the root-mean-square force of the labels, eV/A.

        An error bar larger than any force that was ever labelled is that of a structure which the
        model knows nothing about: that is the automatic limit.
        """
        limit = self.config.limits.force_std
        forces = np.concatenate([a.get_forces() for a in self.store.labelled(before=round)])
        if limit == "auto":
            limit = float(np.linalg.norm(forces, axis=1).max()) or None
        return limit, float(np.sqrt((forces**2).mean()))

    def _explore(
        self, round: int, model: Path, largest_std: float | None, typical_force: float
    ) -> Candidates:
        explore = self.config.explore
        if explore.kind == "pool":
            return Pool(explore.pool or "")
        self.display.stage(round, "exploring")
        done = self.store.read_all("walk", round)
        left = [walker for walker in range(explore.walkers) if (round, walker) not in done]
        given = explore.structures
        starts = read_structures(given) if given else self.store.labelled(before=round)

        def start(walker: int) -> tuple[int, str]:
            rng = np.random.default_rng([self.config.seed, 1, round, walker])
            return walker, to_json(starts[int(rng.integers(len(starts)))])

        common = {"largest_std": largest_std, "typical_force": typical_force}
        work = partial(walk, model=model, config=self.config, round=round, **common)
        for place, frames in self.executor.run(work, map(start, left)):
            if isinstance(frames, JobLost):
                raise frames
            self.store.write("walk", frames, round, left[place])
            self.display.stage(round, "exploring", f"{left[place] + 1} of {explore.walkers}")
        walks = self.store.read_all("walk", round).values()
        return [(from_json(text), origin) for frames in walks for text, origin in frames]

    # Labels

    def _label(self, round: int) -> None:
        """Label the open picks of a round; set aside those that fail too often."""
        (self.store.folder / "journal").mkdir(exist_ok=True)
        for pick in self.store.picks(round, "open"):
            if finished := read_label(self._file(pick)):  # when an earlier process ended
                self._keep(pick, finished)
        common = self.config.label.model_dump(exclude={"retries"})
        common["threads"] = self.config.executor.threads
        while picks := self.store.picks(round, "open"):
            self.display.stage(round, "labelling")
            self._tell()
            jobs = (
                {**common, "structure": to_json(pick.atoms), "file": str(self._file(pick))}
                for pick in picks
            )
            for place, answer in self.executor.run(label, jobs):
                self._settle(picks[place], answer)
                self._tell()
        if not self.store.count("labelled"):
            failed = self.store.picks(round, "quarantined")
            log = self.store.attempts(failed[-1])[-1] if failed else ""
            raise CampaignError(f"none of the first structures could be labelled. The last:\n{log}")

    def _settle(self, pick: Pick, answer: Any) -> None:
        if isinstance(answer, JobLost):
            answer = {"error": str(answer), "final": False}
        if "setup" in answer:
            raise ConfigError(f"no structure can be labelled: {answer['setup']}")
        if "results" in answer:
            self._keep(pick, answer)
            return
        tried = len(self.store.attempts(pick)) + 1
        final = answer["final"] or tried > self.config.label.retries
        self.store.add_attempt(pick, answer["error"], quarantine=final)

    def _keep(self, pick: Pick, finished: dict[str, Any]) -> None:
        """Move a finished label from the journal into the database."""
        self.store.add_label(pick, **finished)
        for suffix in (".json", ".lock"):
            self._file(pick).with_suffix(suffix).unlink(missing_ok=True)

    def _file(self, pick: Pick) -> Path:
        """Name the file of the journal in which a finished label waits for the database."""
        folder = self.store.folder.absolute() / "journal"
        return folder / f"{pick.name}-{digest(pick.atoms)}.json"

    def _tell(self) -> None:
        chosen, labelled, aside = map(self.store.count, ("pick", "labelled", "quarantined"))
        self.display.labels(labelled, chosen - labelled - aside, aside, self.config.stop.labels)


def initial_picks(config: CampaignConfig) -> list[Pick]:
    """Choose the first structures, determined by the file and the seed."""
    initial = config.initial
    path = Path(initial.structures or "")
    frames = check_structures(read_structures(path), path)
    total, displaced = len(frames), initial.displacement > 0
    if not displaced and total < initial.count:
        raise ConfigError(
            f"{path} has {total} structures, fewer than initial.count = {initial.count}; "
            "displace copies of them with initial.displacement > 0"
        )
    order = np.random.default_rng([config.seed, 0]).permutation(total).tolist()
    picks = []
    for number in range(initial.count):
        frame = number % total if displaced else order[number]
        atoms = from_json(to_json(frames[frame]))  # no labels, constraints or other attributes
        origin: dict[str, Any] = {"file": path.name, "frame": frame}
        if displaced:
            rng = np.random.default_rng([config.seed, 0, number])
            atoms.positions += rng.normal(scale=initial.displacement, size=(len(atoms), 3))
            origin["displacement"] = initial.displacement
        picks.append(Pick(0, number, atoms, None, {"score": "initial", "origin": origin}))
    return picks
