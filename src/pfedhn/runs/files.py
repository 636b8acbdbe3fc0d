"""The files of a run while it goes on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pfedhn.engine.simulate import Simulation
from pfedhn.runs.result import result_of
from pfedhn.runs.run import Run
from pfedhn.storage.checkpoint import load_state, remove_old, save_state
from pfedhn.storage.history import (
    METRICS,
    MendableError,
    append_moment,
    has_whole_history,
    history_digest,
    read_result,
    write_history,
    write_result,
)
from pfedhn.storage.schema import Moment, Result, from_json, to_json
from pfedhn.storage.spec import DIVERGED, Spec, identity, open_directory
from pfedhn.system.files import flush, write_atomically, writing


@dataclass
class Files:
    """The files of a run that goes on."""

    directory: Path
    spec: Spec

    @staticmethod
    def open(directory: Path, simulation: Simulation, run: Run, say: Callable[[str], None]) -> "Files":
        """Claim a directory, and let the run stand where the newest intact checkpoint there left it."""
        spec = open_directory(directory, simulation, run.origin)
        with writing(directory / DIVERGED):
            (directory / DIVERGED).unlink(missing_ok=True)
        stored = load_state(directory, simulation, identity(spec))
        for sentence in stored.refused:
            say(sentence)
        if stored.state is not None:
            run.state = stored.state
        run.history = [from_json(Moment, table) for table in stored.history]
        run.seconds = run.history[-1].seconds if run.history else 0.0
        write_history(directory, run.history)
        return Files(directory, spec)

    def append(self, moment: Moment) -> None:
        append_moment(self.directory, moment)

    def tell_divergence(self, sentence: str) -> None:
        write_atomically(self.directory / DIVERGED, f"{sentence}\n".encode())

    def save(self, run: Run) -> None:
        """Write a checkpoint, once everything that it vouches for is on the disk."""
        flush(self.directory / METRICS)
        save_state(self.directory, run.state, run.plan, identity(self.spec), to_json(run.history))

    def finish(self, run: Run, say: Callable[[str], None]) -> Result:
        """The result that is there, if it is sound and of this run, or else a new one."""
        try:
            result = read_result(self.directory, self.spec)
            if result is not None and has_whole_history(self.directory, result):
                return result
        except MendableError as error:
            say(f"{error} It was written anew from the last checkpoint.")
            result = None
        is_made_elsewhere = (self.directory / "result.json").exists()
        made = result_of(run, identity(self.spec), history_digest(self.directory))
        if is_made_elsewhere:  # by an earlier process, of whose environment the spec tells
            made = replace(made, environment=replace(self.spec.environment, finished=made.environment.finished))
        self.save(run)
        write_result(self.directory, made)
        remove_old(self.directory, 1)  # nothing goes on from the one before any more
        return made
