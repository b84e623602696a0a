"""The loop: explore, select, label, train, evaluate, until a budget or a target is reached.

    round 0:  choose initial structures -> label
    round n:  train on all labels -> evaluate -> explore -> select -> label

Every stage is a function of what the store holds and of seeds, and ends with a transaction. What
an interrupted stage had finished (a label, a trajectory, a screened chunk, epochs of training) is
there when the campaign goes on, and is not done again.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from rich.console import Console

from blips.active.auto import chosen_rule, trial
from blips.active.candidates import Candidates
from blips.active.config import CampaignConfig
from blips.active.database import CampaignError
from blips.active.display import CampaignDisplay
from blips.active.evidence import labelled_rows
from blips.active.executor import Executor, JobLost, make_executor
from blips.active.frames import digest, from_json, to_json
from blips.active.label import close_labeller, label
from blips.active.labeller import journal_file, read_journal
from blips.active.select import Model, Screening, choose, predicted_std, screen_candidates
from blips.active.store import CampaignStore, Pick
from blips.active.summary import campaign_summary
from blips.active.training import (
    errors_on,
    evaluate_round,
    finished_model,
    force_mae_bound,
    train_round,
    trained,
)
from blips.active.worker import model_of, one_thread, walk
from blips.data.structures import check_structures, read_structures
from blips.errors import ConfigError
from blips.files import write_atomically


def run_campaign(config: CampaignConfig, *, display: bool = True) -> dict[str, Any]:
    """Run a campaign, or the rest of it; returns `campaign_summary` of its folder."""
    from blips.config import dump_config

    with CampaignStore(config.folder) as store:
        store.begin(config)
        write_atomically(store.folder / "config.yaml", dump_config(config).encode())
        console = Console() if display else Console(quiet=True, force_terminal=False)
        with (
            make_executor(config.executor) as executor,
            CampaignDisplay(f"campaign in {store.folder}", console) as shown,
        ):
            try:
                Campaign(store, config, executor, shown).run()
            finally:
                close_labeller()
    return campaign_summary(config.folder)


class Campaign:
    """One campaign, from where its store, open for writing, says it is."""

    def __init__(
        self,
        store: CampaignStore,
        config: CampaignConfig,
        executor: Executor,
        display: CampaignDisplay,
    ) -> None:
        self.store, self.config = store, config
        self.executor, self.display = executor, display
        self.journal = store.folder / "journal"
        self.journal.mkdir(exist_ok=True)

    def run(self) -> str:
        """Run until the campaign has ended; return why."""
        self._initial()
        self._label(0)
        round = 1
        while not (reason := self._model(round) or self._select(round)):
            self._label(round)
            self._surprise(round)
            round += 1
        self.store.finish(round, "end", {"reason": reason})
        self.display.stage(round, f"the campaign has ended: {reason}")
        return reason

    # Stages

    def _initial(self) -> None:
        if self.store.stage(0, "select") is not None:
            return
        self.display.stage(0, "choosing initial structures")
        structures = initial_structures(self.config)
        picks = [
            Pick(0, number, atoms, None, {"score": "initial", "origin": origin})
            for number, (atoms, origin) in enumerate(structures)
        ]
        self.store.add_picks(picks, 0, {"chosen": len(picks)})

    def _model(self, round: int) -> str:
        """Train and evaluate; returns a reason to stop, or nothing."""
        if trained(self.store, round) is None:  # not yet, or its file is lost: the same again
            self.display.stage(round, "training")
            self.store.finish(round, "train", train_round(self.store, self.config, round))
        model = finished_model(self.store, round)
        errors = self.store.stage(round, "evaluate")
        if errors is None:
            self.display.stage(round, "evaluating")
            errors = evaluate_round(model, self.config)
            self.store.finish(round, "evaluate", errors)
        labels = (self.store.stage(round, "train") or {})["labels"]
        if errors:
            self.display.finished({"round": round, "labels": labels, **errors})
        return self._enough(round, errors, labels)

    def _surprise(self, round: int) -> None:
        """Judge the model of a round by the labels that it asked for, before it is trained on them.

        They are the candidates that it was least certain of, so its errors are large there; but
        every campaign has them, and they fall as it learns.
        """
        found = self.store.stage(round, "surprise")
        if found is None:
            model = model_of(finished_model(self.store, round).job())
            labelled = self.store.labelled(before=round + 1)[len(self.store.labelled(round)) :]
            select, seed = self.config.select, self.config.seed
            found = errors_on(model, labelled, select.samples, seed) if labelled else {}
            if found and select.rule == "auto":
                with one_thread():
                    rows = labelled_rows(model, labelled, rows=select.rows, seed=seed)
                    found["trial"] = trial(*rows, seed)
            self.store.finish(round, "surprise", found)
        if found and not self.store.stage(round, "evaluate"):
            labels = len(self.store.labelled(before=round))
            self.display.finished({"round": round, "labels": labels, **found})

    def _enough(self, round: int, errors: dict[str, Any], labels: int) -> str:
        stop = self.config.stop
        force_mae = errors.get("force_mae")
        if stop.force_mae is not None and force_mae is not None and force_mae <= stop.force_mae:
            return f"force MAE {force_mae:.3g} eV/A reached the target {stop.force_mae:g}"
        if round > stop.rounds:
            return f"{stop.rounds} rounds are done"
        if stop.labels is not None and labels >= stop.labels:
            return f"the budget of {stop.labels} labels is spent"
        return ""

    def _select(self, round: int) -> str:
        """Explore and select; returns a reason to stop, or nothing."""
        before = self.store.stage(round, "select")
        if before is None:
            model = finished_model(self.store, round)
            limits, typical_force = self._limits(round)
            candidates = self._explore(round, model, limits, typical_force)
            config = self._with_rule(round)
            self.display.stage(round, "screening candidates")
            screening = screen_candidates(
                candidates, model, config, self.store, self.executor, round, limits
            )
            bound = self._bound(round, screening)
            if reason := self._certain(screening, bound):
                return reason
            self.display.stage(round, "selecting")
            picks = choose(candidates, screening, model, config, round, self._batch())
            before = {
                "rule": config.select.rule,
                "chosen": len(picks),
                "seen": screening.seen,
                "excluded": dict(sorted(screening.excluded.items())),
                "largest": screening.largest,
                "force_mae_bound": bound,
                "predicted_std": predicted_std(picks, model, config),
            }
            self.store.add_picks(picks, round, before)
        if before["chosen"] > 0:
            return ""
        return f"all {before['seen']} candidates were thrown out ({before['excluded']})"

    def _certain(self, screening: Screening, bound: float | None) -> str:
        """Return a reason to stop where candidates are certain enough; with another target go on.

        The bound on their force MAE decides where there is no test set.
        """
        stop, largest = self.config.stop, screening.largest.get("force_std", np.inf)
        judged = self.config.evaluate.structures is not None
        target = None if judged else stop.force_mae
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
        trials = [(self.store.stage(n, "surprise") or {}).get("trial", {}) for n in range(round)]
        select = self.config.select.model_copy(update={"rule": chosen_rule(trials)})
        return self.config.model_copy(update={"select": select})

    def _bound(self, round: int, screening: Screening) -> float | None:
        """Bound the force MAE on the candidates by what the last labels showed; None: unknown."""
        ratios = (self.store.stage(round - 1, "surprise") or {}).get("ratios", [])
        return force_mae_bound(ratios, screening.mean_std, self.config.stop.confidence)

    def _batch(self) -> int:
        batch, budget = self.config.select.batch, self.config.stop.labels
        if budget is None:
            return batch
        return min(batch, max(0, budget - self.store.count("labelled")))

    def _limits(self, round: int) -> tuple[dict[str, Any], float]:
        """Return the limits as numbers, and the root-mean-square force of the labels, eV/A.

        An error bar larger than any force that was ever labelled is that of a structure which the
        model knows nothing about: that is the automatic limit.
        """
        limits = self.config.limits.model_dump()
        forces = np.concatenate([a.get_forces() for a in self.store.labelled(before=round)])
        if limits["force_std"] == "auto":
            limits["force_std"] = float(np.linalg.norm(forces, axis=1).max()) or None
        return limits, float(np.sqrt((forces**2).mean()))

    def _explore(
        self, round: int, model: Model, limits: dict[str, Any], typical_force: float
    ) -> Candidates:
        explore = self.config.explore
        if explore.kind == "pool":
            return Candidates.of_file(explore.pool or "")
        self.display.stage(round, "exploring")
        done = self.store.finished_walkers(round)
        walkers = [number for number in range(explore.walkers) if number not in done]
        soft = self.config.limits.force_std == "auto"
        common = {"limits": limits, "soft": soft, "typical_force": typical_force}
        for place, frames in self.executor.run(walk, self._walks(round, model, walkers, common)):
            if isinstance(frames, JobLost):
                raise CampaignError(f"a trajectory lost its worker ({frames}); start again")
            found = [(from_json(structure), origin) for structure, origin in frames]
            self.store.add_frames(round, walkers[place], found)
            self.display.stage(round, "exploring", f"{walkers[place] + 1} of {explore.walkers}")
        return Candidates.of_round(self.store, round)

    def _walks(
        self, round: int, model: Model, walkers: list[int], common: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        explore, seed = self.config.explore, self.config.seed
        if explore.structures is None:
            starts = self.store.labelled(before=round)
        else:
            starts = read_structures(explore.structures)
        for walker in walkers:
            rng = np.random.default_rng([seed, 1, round, walker])
            temperature, pressure = explore.conditions(walker)
            yield model.job(
                start=to_json(starts[int(rng.integers(len(starts)))]),
                temperature=temperature,
                pressure=pressure,
                seed=[seed, 2, round, walker],
                walker=walker,
                explore=explore.model_dump(mode="json"),
                **common,
            )

    # Labels

    def _label(self, round: int) -> None:
        """Label the open picks of a round; set aside those that fail too often."""
        for pick in self.store.picks(round, "open"):
            self._take(pick)  # finished when an earlier process ended
        while picks := self.store.picks(round, "open"):
            self.display.stage(round, "labelling")
            self._tell()
            for place, answer in self.executor.run(label, (self._job(pick) for pick in picks)):
                self._settle(picks[place], answer)
                self._tell()
        if not self.store.labelled():
            failed = self.store.picks(round, "quarantined")
            log = self.store.attempts(failed[-1])[-1] if failed else ""
            raise CampaignError(f"none of the first structures could be labelled. The last:\n{log}")

    def _settle(self, pick: Pick, answer: Any) -> None:
        if isinstance(answer, JobLost):
            answer = {"error": f"the worker was lost: {answer}", "final": False}
        if "setup" in answer:
            raise ConfigError(f"no structure can be labelled: {answer['setup']}")
        if "error" not in answer:
            if self._take(pick):
                return
            text = "the finished label did not arrive in the journal; is the folder shared?"
            answer = {"error": text, "final": False}
        tried = len(self.store.attempts(pick)) + 1
        final = answer["final"] or tried > self.config.label.retries
        self.store.add_attempt(pick, answer["error"], quarantine=final)

    def _take(self, pick: Pick) -> bool:
        """Move a finished label from the journal into the database."""
        path = journal_file(self.journal, pick.name)
        entry = read_journal(path, digest(pick.atoms))
        if entry is None:
            return False
        results = {
            name: value if name == "energy" else np.array(value)
            for name, value in entry["results"].items()
        }
        self.store.add_label(pick, results, entry["seconds"])
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
        return True

    def _job(self, pick: Pick) -> dict[str, Any]:
        return {
            **self.config.label.model_dump(exclude={"retries"}),
            "name": pick.name,
            "structure": to_json(pick.atoms),
            "digest": digest(pick.atoms),
            "threads": self.config.executor.threads,
            "journal": str(self.journal.absolute()),
        }

    def _tell(self) -> None:
        counts = [self.store.count(status) for status in ("labelled", "open", "quarantined")]
        self.display.labels(*counts, budget=self.config.stop.labels)


def initial_structures(config: CampaignConfig) -> list[tuple[Atoms, dict[str, Any]]]:
    """Return the first structures and their origins, determined by the file and the seed."""
    initial = config.initial
    path = Path(initial.structures or "")
    frames = check_structures(read_structures(path), path)
    if initial.displacement == 0:
        if len(frames) < initial.count:
            raise ConfigError(
                f"{path} has {len(frames)} structures, fewer than initial.count = {initial.count}; "
                "displace copies of them with initial.displacement > 0"
            )
        order = np.random.default_rng([config.seed, 0]).permutation(len(frames))[: initial.count]
        return [(_plain(frames[i]), {"file": path.name, "frame": int(i)}) for i in order]
    found = []
    for number in range(initial.count):
        rng = np.random.default_rng([config.seed, 0, number])
        frame = number % len(frames)
        atoms = _plain(frames[frame])
        atoms.positions += rng.normal(scale=initial.displacement, size=(len(atoms), 3))
        origin = {"file": path.name, "frame": frame, "displacement": initial.displacement}
        found.append((atoms, origin))
    return found


def _plain(atoms: Atoms) -> Atoms:
    """Return a copy with the geometry only: no labels, constraints or other attributes."""
    return from_json(to_json(atoms))
