"""Callbacks hear of every evaluation and are closed; trackers get its numbers."""

import sys
import types
from typing import Any

import numpy
import pytest

import pfedhn
from pfedhn.errors import UserError
from pfedhn.runs import tracking
from pfedhn.storage.schema import Moment


def train(**settings: Any) -> pfedhn.Run:
    random = numpy.random.default_rng(0)
    x, y = random.normal(size=(120, 4)), numpy.arange(120) % 3
    federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=4))
    common: dict[str, Any] = {"steps": 6, "evaluate_every": 2, "progress": False, "device": "cpu", "executor": "loop"}
    return pfedhn.train("fedavg", federation, lambda: pfedhn.MLP(4, 3), cohort_size=2, **(common | settings))


class Listener:
    def __init__(self) -> None:
        self.heard: list[Moment] = []
        self.closed = 0

    def __call__(self, run: pfedhn.Run, moment: Moment) -> None:
        assert run.history[-1] is moment
        self.heard.append(moment)

    def close(self) -> None:
        self.closed += 1


def test_a_callback_hears_every_evaluation_and_is_closed() -> None:
    listener = Listener()
    run = train(callbacks=[listener])
    assert listener.heard == run.history
    assert [moment.step for moment in listener.heard] == [0, 2, 4, 6]
    assert listener.closed == 1


def test_a_callback_that_fails_ends_the_run_and_the_others_are_closed() -> None:
    def fail(run: pfedhn.Run, moment: Moment) -> None:
        raise ZeroDivisionError

    listener = Listener()
    with pytest.raises(ZeroDivisionError):
        train(callbacks=[listener, fail])
    assert listener.closed == 1


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(UserError, match=r"callbacks are \[3\]; give a list of functions"):
        train(callbacks=[3])


def test_the_history_is_a_table_of_pandas() -> None:
    pytest.importorskip("pandas")
    run = train()
    frame = run.to_frame()
    assert frame.index.tolist() == [0, 2, 4, 6]
    assert frame["round"].tolist() == [0, 1, 2, 3]
    assert frame["test_client_accuracy"].iloc[-1] == run.history[-1].test.client_mean


def test_a_run_is_one_line() -> None:
    text = repr(train())
    assert "\n" not in text
    assert len(text) < 250
    assert "FedAvg" in text


def test_weights_and_biases_gets_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[bool] = []

    def init(**settings: Any) -> Any:
        made.update(settings)
        return types.SimpleNamespace(
            log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: ended.append(True)
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    run = train(callbacks=[tracking.WandB("mine")])
    assert (made["project"], made["name"], made["config"]["method"]) == ("mine", "fedavg", "fedavg")
    assert logged == [(moment.step, moment.numbers()) for moment in run.history]
    assert ended == [True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_the_numbers(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(callbacks=[tracking.TensorBoard(tmp_path)])
    events = EventAccumulator(str(tmp_path / "fedavg"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("validation_loss")}
    assert found == pytest.approx({moment.step: moment.validation.loss for moment in run.history})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_the_numbers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    run = train(callbacks=[tracking.MLflow("mine")])
    client = mlflow.MlflowClient()
    (stored,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (stored.info.status, stored.data.params["method"]) == ("FINISHED", "fedavg")
    found = {metric.step: metric.value for metric in client.get_metric_history(stored.info.run_id, "validation_loss")}
    assert found == pytest.approx({moment.step: moment.validation.loss for moment in run.history})


def test_an_unknown_or_missing_tracker_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(UserError, match="there is no tracker 'tensorbord'; did you mean 'tensorboard'"):
        tracking.tracker("tensorbord", "mine", tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'pfedhn\[wandb\]'"):
        tracking.tracker("wandb", "mine", tmp_path)
