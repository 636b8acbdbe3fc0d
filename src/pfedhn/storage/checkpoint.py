"""Checkpoints: tensors in safetensors, the rest in JSON, written atomically and verified on load.

The JSON file is written last and carries digests of both files: if it is missing or does not match, the checkpoint does
not count and the one before it is used. Runs and servers of a federation (`deploy.store`) write the same two files.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.plan import Plan
from pfedhn.engine.state import Best, Diverged, Evaluation, Flight, Memories, State, Work, lower_rates
from pfedhn.errors import RunError
from pfedhn.params import take
from pfedhn.storage.files import DamagedError, filled, named, sealed_json, unsealed_json
from pfedhn.storage.schema import Moment, from_json, to_json
from pfedhn.system.files import read_bytes, write_atomically
from pfedhn.system.fingerprint import differ

FORMAT = 3
CHECKPOINT = re.compile(r"checkpoint-\d+")
NUM_KEPT = 2  # the newest, and the one before it in case the newest is damaged


class CheckpointError(RunError):
    """No checkpoint in a directory can be trusted."""


class Loaded(NamedTuple):
    """The state of a directory's checkpoints."""

    state: State | None  # of the newest intact one; None if there is none at all
    refused: list[str]  # a sentence for each that cannot be trusted
    history: list[Moment]  # of that state


def save_state(
    directory: Path, state: State, plan: Plan, run: Mapping[str, str] | None = None, history: Sequence[Moment] = ()
) -> None:
    """Write a checkpoint and keep the one before it. A state that has diverged is not written.

    Args:
        run: Digests of what the run is made of; a checkpoint of a run with other digests is refused.
        history: The evaluations so far.
    """
    if plan.device.type == "cuda":
        # A captured run writes on a stream of its own, which nothing here would wait for.
        torch.cuda.synchronize(plan.device)
    if state.bad is not None and int(state.bad[0]) >= 0:
        return  # its rounds count on while its memories stand still; the next evaluation notices
    if not all(bool(leaf.isfinite().all()) for leaf in pytree.tree_leaves(state.memories.shared)):
        raise Diverged(
            f"training diverged before round {state.round}: the server's numbers are no longer finite; "
            f"{lower_rates(plan.algorithm)}. The last good checkpoint is kept."
        )
    step = state.round * plan.clients_per_round
    tensors, slots = _memories_to_tensors("now", state.memories)
    record: dict[str, Any] = {
        "format": FORMAT,
        "run": dict(run or {}),
        "history": to_json(list(history)),
        "round": state.round,
        "step": step,
        "bytes_down": state.bytes_down,
        "bytes_up": state.bytes_up,
        **({"num_updates": sorted(state.num_updates.items())} if state.num_updates else {}),
        **({"flight": _flight_record(state.flight)} if state.flight.num_sent else {}),
        **({"robust": state.robust} if state.robust else {}),
        "slots": slots,
        "best": None,
    }
    for work in state.flight.working:
        tensors |= named(f"flight/{work.number}", (work.reply, work.kept))
    if state.best is not None:
        best_tensors, best_slots = _memories_to_tensors("best", state.best.memories)
        tensors |= best_tensors
        evaluation = state.best.evaluation
        record["best"] = {"step": evaluation.step, "round": evaluation.round, "slots": best_slots}
        for split, result in evaluation.splits.items():
            for name in ("loss", "metric", "count"):
                if (value := getattr(result, name)) is not None:
                    tensors[f"evaluation/{split}/{name}"] = value
    write_checkpoint(directory, step, record, tensors)
    remove_old(directory, NUM_KEPT)


def write_checkpoint(
    directory: Path, number: int, record: Mapping[str, Any], tensors: Mapping[str, Tensor], mode: int = 0o666
) -> None:
    """Write the two files of a checkpoint; the one with the highest number is the newest."""
    content = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    record = {**record, "tensors_sha256": hashlib.sha256(content).hexdigest()}
    name = f"checkpoint-{number:09d}"
    write_atomically(directory / f"{name}.safetensors", content, mode=mode)
    write_atomically(directory / f"{name}.json", sealed_json(record), mode=mode)


def remove_old(directory: Path, num_kept: int) -> None:
    """Remove all but the newest checkpoints, which are large: four times a hypernetwork, or twice a model."""
    oldest = min((path.stem for path in checkpoints(directory)[:num_kept]), default=None)
    for file in sorted(directory.glob("checkpoint-*")):  # the JSON file first: without it a checkpoint does not count
        if CHECKPOINT.fullmatch(file.stem) and (oldest is None or file.stem < oldest):
            file.unlink(missing_ok=True)


def checkpoints(directory: Path) -> list[Path]:
    """List the JSON files of the checkpoints, newest first."""
    found = [path for path in directory.glob("checkpoint-*.json") if CHECKPOINT.fullmatch(path.stem)]
    return sorted(found, reverse=True)


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON file of a checkpoint, or refuse a damaged one."""
    try:
        return unsealed_json(read_bytes(path))
    except DamagedError as error:
        raise CheckpointError(f"{path.name} {error} and was not used.") from None


def read_checkpoint_tensors(path: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint, or refuse damaged ones."""
    file = path.with_suffix(".safetensors")
    if not file.exists():
        raise CheckpointError(f"{file.name} is missing, so its checkpoint was not used.")
    content = read_bytes(file)
    if hashlib.sha256(content).hexdigest() != record["tensors_sha256"]:
        raise CheckpointError(f"{file.name} is truncated or was changed, and was not used.")
    return load(content)


def load_state(directory: Path, plan: Plan, run: Mapping[str, str] | None = None) -> Loaded:
    """Read the newest checkpoint that is intact and of this run."""
    refused = []
    for path in checkpoints(directory):
        try:
            record = _verified(path, run)
            tensors = read_checkpoint_tensors(path, record)
        except CheckpointError as error:
            refused.append(str(error))
            continue
        history = [from_json(Moment, table) for table in record["history"]]
        return Loaded(_to_state(tensors, record, plan), refused, history)
    if refused:
        raise CheckpointError(
            f"{refused[0]} No intact checkpoint is left in {directory}; move or remove that folder, and the same "
            "command runs it anew."
        )
    return Loaded(None, [], [])


def newest_history(directory: Path, run: Mapping[str, str]) -> list[Any]:
    """The evaluations that the newest intact checkpoint knows, as JSON holds them."""
    for path in checkpoints(directory):
        try:
            history: list[Any] = _verified(path, run)["history"]
            return history
        except CheckpointError:
            continue
        except RunError:  # the run goes on, and has removed it meanwhile
            break
    return []


def _verified(path: Path, run: Mapping[str, str] | None) -> dict[str, Any]:
    """Read the JSON file of a checkpoint, or refuse a damaged one and that of another run."""
    record = read_record(path)
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{path.name} has format {record.get('format')}; this version of pfedhn reads {FORMAT}.")
    if f"checkpoint-{record['step']:09d}" != path.stem:
        raise CheckpointError(f"{path.name} is the checkpoint of step {record['step']} and was not used.")
    if differing := differences(record["run"], run or {}):
        raise CheckpointError(f"{path.name} is of another run (its {', '.join(differing)} differ) and was not used.")
    return record


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The parts whose digests differ between two runs."""
    return [part for part in dict.fromkeys([*one, *other]) if differ(one.get(part, ""), other.get(part, ""))]


def _memories_to_tensors(prefix: str, memories: Memories) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    trees = {"shared": memories.shared, "rows": memories.rows}
    slots = {}
    for name, table in memories.private.items():
        slots[name] = sorted(table.slots, key=table.slots.__getitem__)
        trees[f"private/{name}"] = () if table.tree is None else take(table.tree, slice(len(table.slots)))
    return {name: leaf for part, tree in trees.items() for name, leaf in named(f"{prefix}/{part}", tree).items()}, slots


def _to_state(tensors: Mapping[str, Tensor], record: Mapping[str, Any], plan: Plan) -> State:
    memories = _to_memories("now", tensors, record["slots"], plan)
    best = None
    if record["best"] is not None:
        splits = {
            split: SplitResult(
                tensors[f"evaluation/{split}/loss"],
                tensors.get(f"evaluation/{split}/metric"),
                tensors[f"evaluation/{split}/count"],
            )
            for split in ("validation", "test")
        }
        evaluation = Evaluation(record["best"]["step"], record["best"]["round"], splits)
        best = Best(evaluation, _to_memories("best", tensors, record["best"]["slots"], plan, on_host=True))
    num_updates = Counter(dict(record.get("num_updates", [])))
    flight = _to_flight(tensors, record.get("flight"), plan, memories)
    sent, robust = (record["bytes_down"], record["bytes_up"]), record.get("robust", {})
    return State(record["round"], memories, best, *sent, num_updates, flight, robust)


def _flight_record(flight: Flight) -> dict[str, Any]:
    """The clients at work, as JSON can hold them; between rounds no reply waits for a step."""
    assert not flight.replies
    table = {name: value for name, value in vars(flight).items() if name not in ("working", "replies")}
    return table | {"working": [work[: Work._fields.index("reply")] for work in flight.working]}


def _to_flight(
    tensors: Mapping[str, Tensor], record: Mapping[str, Any] | None, plan: Plan, memories: Memories
) -> Flight:
    if record is None:
        return Flight()
    working = []
    for client, number, *rest in record["working"]:
        form = plan.form_of_work(memories, client)
        working.append(Work(client, number, *rest, *filled(f"flight/{number}", form, tensors, plan.device)))
    return Flight(**{**record, "working": working})


def _to_memories(
    prefix: str,
    tensors: Mapping[str, Tensor],
    slots: Mapping[str, Sequence[int]],
    plan: Plan,
    on_host: bool = False,
) -> Memories:
    def fill(part: str, form: Any) -> Any:
        return filled(f"{prefix}/{part}", form, tensors, None if on_host else plan.device)

    shared, rows = fill("shared", plan.form.shared), fill("rows", plan.form.row)
    private = plan.private_tables(shared, rows)
    for name, table in private.items():
        table.slots = {client: slot for slot, client in enumerate(slots[name])}
        table.tree = fill(f"private/{name}", table.make(slots[name][0])) if slots[name] else None
    return Memories(shared, rows, private)
