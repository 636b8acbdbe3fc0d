"""The earlier stage of a run: the model it starts from, and what that cost."""

from pathlib import Path

from pfedhn.errors import RunError
from pfedhn.params import Params, take
from pfedhn.runs.load import load
from pfedhn.storage.directory import read_result
from pfedhn.storage.schema import Cost


def pretrained(folder: Path, device: str) -> tuple[Cost, Params]:
    """The earlier stage of a method such as LG-FedAvg: its cost, and the model of its last round."""
    result = read_result(folder)
    if result is None:
        raise RunError(f"{folder}, which this run starts from, is not finished; run it first.")
    cost = Cost(result.name, result.steps, result.bytes_down, result.bytes_up, result.seconds)
    earlier = load(folder, device=device)
    plan, memories = earlier.plan, earlier.memories(last=True)
    model = plan.model_of(0)
    if plan.exchange.num_personal_batches(model, is_adapted=True):  # it would adapt on examples what it publishes
        shared = plan.exchange.served(memories.shared)
        return cost, plan.algorithm.publish(model, shared, take(memories.rows, 0))
    return cost, earlier.personal_weights(0, last=True)
