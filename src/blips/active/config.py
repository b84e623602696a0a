"""Configuration of a campaign: strict, every field with a default but the structures."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from blips.config import (
    ModelConfig,
    Section,
    Source,
    TrainingConfig,
    load_as,
    merge_sources,
)
from blips.sim.reference import check_trust, needs_trust

Rule = Literal["information", "expected_reduction", "force_std", "energy_std", "random", "auto"]
CLOSED_FORM = ("information", "expected_reduction", "auto")  # need the conditioned posterior


class InitialConfig(Section):
    """The first structures to label: frames of a file, or displaced copies of them."""

    structures: str | None = Field(default=None, description="any file that ASE reads")
    count: int = Field(default=20, ge=2, description="structures to begin with")
    displacement: float = Field(
        default=0.1, ge=0, description="A, normal, of every coordinate; 0 takes frames as they are"
    )


class ExploreConfig(Section):
    """Where candidates come from."""

    kind: Literal["md", "pool"] = "md"
    pool: str | None = Field(default=None, description="pool: file of structures, streamed")
    structures: str | None = Field(
        default=None, description="md: starting points; default: what is labelled"
    )
    potential: Literal["mean", "member"] = Field(
        default="mean", description="md: the plain model, or a member for each trajectory"
    )
    temperatures: list[float] = Field(default=[300.0, 600.0], min_length=1, description="K")
    pressure: float | list[float] | None = Field(
        default=None, description="GPa, one or several, for periodic structures; else NVT"
    )
    walkers: int = Field(default=4, ge=1, description="trajectories in a round")
    steps: int = Field(default=500, ge=1, description="of a trajectory")
    timestep: float = Field(default=0.5, gt=0, description="fs")
    friction: float = Field(default=0.02, gt=0, description="1/fs")
    every: int = Field(default=10, ge=1, description="steps between frames, and guards' looks")

    def conditions(self, walker: int) -> tuple[float, float | None]:
        """Return temperature (K) and pressure (GPa) of a trajectory, cycling through all pairs."""
        several = self.pressure if isinstance(self.pressure, list) else [self.pressure]
        pressures = several or [None]
        round, place = divmod(walker, len(self.temperatures))
        return self.temperatures[place], pressures[round % len(pressures)]


class LimitsConfig(Section):
    """What the model may be asked about: beyond it trajectories end and candidates are left out."""

    force_std: float | Literal["auto"] | None = Field(
        default="auto", description="of an atom, eV/A; auto: the largest force of a label"
    )
    energy_std_per_atom: float | None = Field(default=None, gt=0, description="eV")
    force: float | None = Field(default=100.0, gt=0, description="largest predicted force, eV/A")
    closest: float | None = Field(default=0.5, gt=0, description="in sums of covalent radii")
    farthest: float | None = Field(default=None, gt=0, lt=6, description="A")

    @model_validator(mode="after")
    def _is_positive(self) -> "LimitsConfig":
        if isinstance(self.force_std, float) and not self.force_std > 0:
            raise ValueError(f"limits.force_std is {self.force_std}; expected more than 0, or auto")
        return self


class SelectConfig(Section):
    """Which candidates are labelled."""

    rule: Rule = "expected_reduction"
    batch: int = Field(default=10, ge=1, description="labels in a round")
    samples: int = Field(default=16, ge=2, description="posterior samples for a candidate")
    method: Literal["auto", "conditioned", "mc", "frozen"] = "auto"
    rows: int = Field(default=4, ge=1, description="random sums of a candidate's forces")
    target: str | None = Field(
        default=None, description="expected_reduction: structures that matter; else the candidates"
    )
    cost: float = Field(
        default=0.0, ge=0, description="power of the number of atoms that a label costs"
    )
    keep: int = Field(default=50, ge=1, description="best candidates kept, in batches")
    chunk: int = Field(default=64, ge=1, description="candidates screened in one job")


class LabelConfig(Section):
    """Who answers: an ASE calculator, in a process of its own."""

    calculator: str = Field(
        default="gfn2-xtb",
        description="gfn2-xtb, gfn1-xtb, pyscf, espresso, emt, or package.module:Name",
    )
    options: dict[str, Any] = Field(default={}, description="of its constructor")
    trust: bool = Field(
        default=False, description="let classes, commands and paths that this file names run"
    )
    stress: bool = Field(default=False, description="also ask for the stress")
    timeout: float = Field(default=3600.0, gt=0, description="s, then the process is killed")
    retries: int = Field(default=1, ge=0, description="of a label that failed")
    max_force: float | None = Field(
        default=None, gt=0, description="eV/A; a label with a larger one is set aside"
    )


class ExecutorConfig(Section):
    """Where jobs run: in this process, on a local Dask cluster, or on a batch system's."""

    kind: Literal["inline", "local", "slurm", "pbs"] = "local"
    workers: int = Field(default=2, ge=1, description="processes; batch system: jobs")
    threads: int = Field(default=1, ge=1, description="of a worker, for its labels")
    processes: bool = Field(default=True, description="local: False for threads of this process")
    memory: str = Field(default="4GB", description="batch system: of a job")
    walltime: str = Field(default="01:00:00", description="batch system: of a job")
    queue: str | None = Field(default=None, description="batch system: its name")
    account: str | None = Field(default=None, description="batch system: who pays")
    trust: bool = Field(default=False, description="let lines that this file names run")
    prologue: list[str] = Field(default=[], description="batch system: lines before the worker")
    extra: list[str] = Field(default=[], description="batch system: further directives")
    shared_folder: str = Field(
        default="~", description="batch system: where workers find the keys of this run"
    )
    interface: str | None = Field(default=None, description="network interface, such as ib0")


class EvaluateConfig(Section):
    """How a round's model is judged."""

    structures: str | None = Field(
        default=None, description="labelled file; else only the labels of each round judge"
    )


class StopConfig(Section):
    """When the campaign ends; whatever comes first."""

    rounds: int = Field(default=10, ge=0, description="rounds of selection")
    labels: int | None = Field(default=None, ge=1, description="budget, the initial ones included")
    force_mae: float | None = Field(
        default=None, gt=0, description="eV/A, of the evaluation; without one a bound on candidates"
    )
    confidence: float = Field(default=0.9, gt=0, lt=1, description="of that bound")
    force_std: float | None = Field(
        default=None, gt=0, description="eV/A: no candidate is less certain"
    )


class CampaignConfig(Section):
    """Everything that `blips active` needs."""

    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    valid: float = Field(default=0.15, gt=0, lt=1, description="fraction of labels held out")
    retrain: Literal["scratch", "continue"] = Field(
        default="scratch", description="continue: from the weights of the round before"
    )
    reference_energies: Literal["fit", "none"] | dict[str, float] = Field(
        default="fit", description="as data.reference_energies of training"
    )
    initial: InitialConfig = InitialConfig()
    explore: ExploreConfig = ExploreConfig()
    limits: LimitsConfig = LimitsConfig()
    select: SelectConfig = SelectConfig()
    label: LabelConfig = LabelConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    stop: StopConfig = StopConfig()
    executor: ExecutorConfig = ExecutorConfig()
    seed: int = Field(default=0, ge=0, description="the same seed, the same campaign")
    folder: str = Field(default="runs/campaign", description="where everything goes")

    @model_validator(mode="after")
    def _fits_together(self) -> "CampaignConfig":
        if self.initial.structures is None:
            raise ValueError("initial.structures is missing; name a file with structures")
        if self.explore.kind == "pool" and self.explore.pool is None:
            raise ValueError("explore.kind is pool, but explore.pool names no file")
        if not self.model.bayes.enabled:
            raise ValueError("a campaign needs error bars; set model.bayes.enabled to true")
        if self.select.rule in CLOSED_FORM and not self.training.condition:
            raise ValueError(
                f"select.rule {self.select.rule} needs the conditioned posterior; set "
                "training.condition to true, or the rule to force_std"
            )
        check_trust(self.label.calculator, self.label.options, self.label.trust)
        if (commands := shell_lines(self.executor)) and not self.executor.trust:
            raise ValueError(
                f"executor.{', executor.'.join(commands)} of a file become lines of a job script, "
                "which runs them; set executor.trust to true if you trust the file, or type them "
                "on the command line"
            )
        if self.training.weights.stress > 0 and not self.label.stress:
            raise ValueError("training.weights.stress needs stresses; set label.stress to true")
        return self


def shell_lines(executor: ExecutorConfig) -> list[str]:
    """List the settings of a batch system's executor that add lines of their own to its script."""
    if executor.kind not in ("slurm", "pbs"):
        return []
    lists = [name for name in ("prologue", "extra") if getattr(executor, name)]
    words = ("memory", "walltime", "queue", "account", "shared_folder")
    return lists + [name for name in words if "\n" in str(getattr(executor, name))]


def load_campaign(*sources: Source, typed: Sequence[Source] = ()) -> CampaignConfig:
    """Merge files, mappings and `a.b=value` overrides, left to right, and validate.

    `typed` are those of them that a person typed: the values that they set need no trust.
    """
    merged, by_hand = merge_sources(*sources), merge_sources(*typed)
    as_if = load_as(CampaignConfig, merged, {"label": {"trust": True}, "executor": {"trust": True}})
    wanted = {
        "label": needs_trust(as_if.label.calculator, as_if.label.options),
        "executor": shell_lines(as_if.executor),
    }
    trust: dict[str, Any] = {}
    for section, settings in wanted.items():
        names = [f"{section}.{name}" for name in settings]
        if names and all(_at(merged, name) == _at(by_hand, name) for name in names):
            trust[section] = {"trust": True}
    return load_as(CampaignConfig, merged, trust)


def _at(merged: Any, name: str) -> Any:
    """Return the value of a dotted name; None where there is none."""
    for key in name.split("."):
        merged = merged.get(key) if isinstance(merged, Mapping) else None
    return merged
