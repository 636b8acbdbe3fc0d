"""Experiment trackers: each is a callback of `pfedhn.train`, behind an extra."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pfedhn.errors import UserError, closest, missing_extra
from pfedhn.storage.identity import settings_of
from pfedhn.storage.schema import Moment


class Callback(Protocol):
    """Called with the run and its newest evaluation, after every one.

    If it has a method `close`, that is called when the run ends, however it does.
    """

    def __call__(self, run: Any, moment: Moment, /) -> None: ...


def settings(run: Any) -> dict[str, Any]:
    """The parameters of a run, for a tracker's table."""
    plan, schedule = run.plan, run.plan.schedule
    return {
        "method": run.origin.method,
        "dataset": run.origin.dataset or "",
        "clients": plan.num_clients,
        "seed": plan.seed,
        "steps": schedule.steps,
        "cohort_size": schedule.cohort_size,
        "batch_size": schedule.batch_size,
        **settings_of(plan.algorithm),
    }


class TensorBoard:
    """Write a run's evaluations for TensorBoard.

    Args:
        folder: The folder for `tensorboard --logdir`; every run has its own folder in it.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_extra("TensorBoard", "tensorboard") from error
        self.folder, self.make = Path(folder), SummaryWriter
        self.writer: Any = None

    def __call__(self, run: Any, moment: Moment, /) -> None:
        if self.writer is None:
            self.writer = self.make(str(self.folder / run.origin.name))
            lines = "\n".join(f"    {name} = {value}" for name, value in settings(run).items())
            self.writer.add_text("settings", lines, 0)
        for name, value in moment.numbers().items():
            self.writer.add_scalar(name, value, moment.step)
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class MLflow:
    """Write a run's evaluations to MLflow's server, or to the folder that MLFLOW_TRACKING_URI names.

    Args:
        experiment: MLflow's name for runs that belong together.
    """

    def __init__(self, experiment: str = "pfedhn") -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise missing_extra("MLflow", "mlflow") from error
        self.client, self.experiment = MlflowClient(), experiment  # no run is "the" run: several take turns
        self.run_id: str | None = None

    def __call__(self, run: Any, moment: Moment, /) -> None:
        if self.run_id is None:
            found = self.client.get_experiment_by_name(self.experiment)
            number = self.client.create_experiment(self.experiment) if found is None else found.experiment_id
            self.run_id = self.client.create_run(number, run_name=run.origin.name).info.run_id
            for name, value in settings(run).items():
                self.client.log_param(self.run_id, name, value)
        for name, value in moment.numbers().items():
            self.client.log_metric(self.run_id, name, value, step=moment.step)

    def close(self) -> None:
        if self.run_id is not None:
            self.client.set_terminated(self.run_id)


class WandB:
    """Write a run's evaluations to Weights & Biases.

    Args:
        project: The name of the project there.
        folder: The folder for the files of Weights & Biases.
    """

    def __init__(self, project: str = "pfedhn", folder: str | Path | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing_extra("Weights & Biases", "wandb") from error
        self.library, self.project, self.folder = wandb, project, folder
        self.run: Any = None

    def __call__(self, run: Any, moment: Moment, /) -> None:
        if self.run is None:
            self.run = self.library.init(
                project=self.project, name=run.origin.name, config=settings(run), dir=self.folder, reinit="create_new"
            )
        self.run.log(moment.numbers(), step=moment.step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


TRACKERS: dict[str, Callable[[str, Path], Callback]] = {
    "tensorboard": lambda experiment, folder: TensorBoard(folder / "tensorboard"),
    "mlflow": lambda experiment, folder: MLflow(experiment),
    "wandb": lambda experiment, folder: WandB(experiment, folder),
}
"""Makers of a run's callback, from the name and directory of its experiment."""


def tracker(name: str, experiment: str, folder: Path) -> Callback:
    if name not in TRACKERS:
        raise UserError(f"there is no tracker {name!r}; {closest(name, TRACKERS)}")
    return TRACKERS[name](experiment, folder)
