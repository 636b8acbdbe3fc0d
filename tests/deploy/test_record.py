"""Records that both sides can show: what was changed, removed, added or denied is found."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parties import KEYS, RUN, Group, Virtual, simulation_of, small

import pfedhn
from pfedhn.cli.audit import audit
from pfedhn.deploy.audit import Side, compare, sides_of
from pfedhn.deploy.policy import Policy
from pfedhn.deploy.record import NO_HEAD, RECORD, RECORDS, Record, Records, keys_of, read_record
from pfedhn.deploy.server import Server
from pfedhn.deploy.signing import public_text
from pfedhn.errors import RunError, UserError


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def filled(path: Path, count: int = 5) -> Record:
    record = Record(path, KEYS[0])
    for number in range(count):
        record.add("asked", digest=f"{number}", round=number)
    return record


def test_a_record_is_a_chain_of_signed_lines(tmp_path: Path) -> None:
    record = filled(tmp_path / RECORD)
    record.add("exported", is_lasting=True)
    lines = read_record(tmp_path / RECORD)
    assert [line["number"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["previous"] for line in lines] == [NO_HEAD, *(line["hash"] for line in lines[:-1])]
    assert record.head == lines[-1]["hash"] == Record(tmp_path / RECORD, KEYS[0]).head
    assert list(keys_of(lines)) == [public_text(KEYS[0].public_key())]
    assert (tmp_path / RECORD).stat().st_mode & 0o077 == 0
    Record(tmp_path / RECORD, KEYS[1]).add("enrolled")  # with a new invitation
    assert len(list(keys_of(read_record(tmp_path / RECORD)))) == 2


def with_value(place: int, **values: Any) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        lines[place] = json.dumps(json.loads(lines[place]) | values)
        return lines

    return change


def signed_anew(lines: list[str]) -> list[str]:
    """By somebody without the key."""
    from pfedhn.deploy.signing import signed_line
    from pfedhn.storage.files import digest

    line = json.loads(lines[4])
    line = {name: value for name, value in line.items() if name not in ("hash", "signature")} | {"round": 9}
    return [*lines[:4], json.dumps({**line, "hash": digest(line), "signature": signed_line(KEYS[1], digest(line))})]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_value(2, round=9), "line 3 of .* was changed after it was written"),
        (with_value(2, time=1.0), "line 3 of .* was changed after it was written"),
        (with_value(3, signature="00"), "line 4 of .* has a signature of another key"),
        (lambda lines: lines[:2] + lines[3:], "line 3 of .* does not follow the line before it"),
        (lambda lines: lines[1:], "line 1 of .* does not follow"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], "line 3 of .* does not follow"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2 of .* does not follow"),
        (lambda lines: [*lines[:2], "x", *lines[3:]], "line 3 of .* cannot be read"),
        (lambda lines: [*lines[:2], "[]", *lines[3:]], "line 3 of .* cannot be read"),
        (signed_anew, "line 5 of .* has a signature of another key"),
    ],
)
def test_the_first_bad_line_is_named(change: Callable[..., list[str]], sentence: str, tmp_path: Path) -> None:
    filled(tmp_path / RECORD)
    (tmp_path / RECORD).write_text("\n".join(change(lines_of(tmp_path / RECORD))) + "\n")
    with pytest.raises(RunError, match=sentence):
        read_record(tmp_path / RECORD)


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_line_that_was_half_written_is_cut_off(kept: int, tmp_path: Path) -> None:
    record = filled(tmp_path / RECORD)
    last = lines_of(tmp_path / RECORD)[-1]
    with (tmp_path / RECORD).open("a") as file:
        file.write(last[:kept])
    assert len(read_record(tmp_path / RECORD)) == 5
    for writer in (record, Record(tmp_path / RECORD, KEYS[0])):
        writer.add("refused")
        with (tmp_path / RECORD).open("a") as file:
            file.write("{")
    assert [line["event"] for line in read_record(tmp_path / RECORD)] == ["asked"] * 5 + ["refused"] * 2
    (tmp_path / RECORD).write_text("x\n")
    with pytest.raises(RunError, match="is damaged in its last line"):
        Record(tmp_path / RECORD, KEYS[0]).add("asked")


def add_many(path: Path) -> None:
    record = Record(path, KEYS[0])
    for _ in range(30):
        record.add("asked")


def test_several_add_to_one_record(tmp_path: Path) -> None:
    """As `serve` and `invite` do, each with its own view of the file."""
    threads = [threading.Thread(target=add_many, args=[tmp_path / RECORD]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_record(tmp_path / RECORD)) == 90


ADDING = """
import sys
from pathlib import Path
from pfedhn.deploy.record import Record
from pfedhn.deploy.signing import new_key
record = Record(Path(sys.argv[1]), new_key())
while True:
    record.add("asked", text="x" * 1_000)
"""


def test_a_killed_process_leaves_a_sound_record(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(pfedhn.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", ADDING, str(tmp_path / RECORD)], env=environment)
    while not (tmp_path / RECORD).exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    process.wait()
    number = len(read_record(tmp_path / RECORD))
    Record(tmp_path / RECORD, KEYS[0]).add("asked")
    assert len(read_record(tmp_path / RECORD)) == number + 1 > 1


# Both sides.


class Recorded(Group):
    """A federation whose server and parties keep records, in the folders that the command reads."""

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def own(self, client: int) -> Path:
        return self.folder / f"pfedhn-party-{client}"

    def add(self, client: int) -> Any:
        party = super().add(client)
        self.own(client).mkdir(exist_ok=True)
        record = Record(self.own(client) / RECORD, self.keys[party.name])
        record.add("enrolled", name=party.name)
        party = replace(party, record=record)
        self.parties[party.name], self.answers[party.name] = party, party.answer
        return party

    def new_server(self) -> Server:
        self.state.mkdir(exist_ok=True)
        self.server = Server(
            self.plan, RUN, self.folder / "server", self.server_key,
            lambda: {name: key.public_key() for name, key in self.keys.items()},
            self.transport, self.policy, self.events.append, self.transport.clock,
            records=Records(self.state / RECORDS, self.server_key),
        )  # fmt: skip
        return self.server

    def sides(self) -> tuple[list[Side], Side]:
        return sides_of(self.state), sides_of(self.own(0))[0]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ran")
    simulation = simulation_of(small("pfedhn-pc"), rounds=3, cohort=2)
    Recorded(simulation, folder, Policy(start_with=2), clients=[0, 1]).server.run()
    return folder


@pytest.fixture
def folders(ran: Path, tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(ran, tmp_path / "ran")
    return tmp_path / "ran" / "state", tmp_path / "ran" / "pfedhn-party-0"


def both(folders: tuple[Path, Path]) -> Any:
    return compare(sides_of(folders[0]), sides_of(folders[1])[0])


def test_both_sides_of_a_run_are_the_same(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = both(folders)
    # A greeting, three rounds, tests before, between and after them, and the chosen model.
    assert found.num_asked == found.num_received >= 1 + 3 + 2
    assert found.num_undelivered == found.num_unreceived == 0
    events = [line["event"] for line in read_record(folders[1] / RECORD)]
    assert events[:3] == ["enrolled", "asked", "sent"]
    audit(*folders)
    said = capsys.readouterr().out
    assert f"Both sides have {found.num_asked} messages and {found.num_asked} answers; 0 messages never" in said
    audit(folders[1], folders[0], as_json=True)
    table = json.loads(capsys.readouterr().out)
    assert [record["party"] for record in table["records"]] == ["party-0", "party-0", "party-1"]
    audit(folders[1])
    with pytest.raises(UserError, match="these two are of one kind"):
        audit(folders[0], folders[0])
    with pytest.raises(UserError, match="neither the folder of a server nor"):
        audit(folders[0].parent)


def again(path: Path, key: Any, keep: Callable[[dict[str, Any]], bool]) -> None:
    """A record written anew by its own owner, who leaves lines out: every line by itself is sound."""
    lines = read_record(path)
    path.unlink()
    record = Record(path, key)
    for line in filter(keep, lines):
        written = ("number", "time", "event", "by", "previous", "hash", "signature", "key")
        record.add(line["event"], **{name: value for name, value in line.items() if name not in written})
    read_record(path)


def test_a_server_that_denies_a_message_is_found(folders: tuple[Path, Path]) -> None:
    file = folders[0] / RECORDS / "party-0.jsonl"
    again(file, KEYS[0], lambda line: line.get("round") != 1)
    with pytest.raises(RunError, match=r"party-0.jsonl was cut or begun anew: it lacks a line that line \d+ of"):
        both(folders)


def test_a_server_that_denies_its_last_message_is_found_by_its_signature(folders: tuple[Path, Path]) -> None:
    """Nobody has heard of the lines after it."""
    file = folders[0] / RECORDS / "party-0.jsonl"
    last = max(line["number"] for line in read_record(file) if line["event"] == "asked")
    file.write_text("".join(f"{line}\n" for line in lines_of(file)[: last - 1]))
    with pytest.raises(
        RunError, match=r"line \d+ of .* is a message that .*party-0.jsonl does not have and has signed"
    ):
        both(folders)


def test_a_party_that_denies_an_answer_is_found(folders: tuple[Path, Path]) -> None:
    file = folders[1] / RECORD
    file.write_text("".join(f"{line}\n" for line in lines_of(file)[:-1]))  # the last one sent
    with pytest.raises(RunError, match=r"is an answer that .*record.jsonl does not have and has signed"):
        both(folders)
    file.write_text("".join(f"{line}\n" for line in lines_of(file)[:-4]))
    with pytest.raises(RunError, match=r"record.jsonl was cut or begun anew"):
        both(folders)


def test_what_is_lost_on_the_way_is_no_lie(tmp_path: Path) -> None:
    class Lossy(Virtual):
        num_lost = 0

        def delivered(self, party: str, kind: str, content: bytes) -> Any:
            if kind == "train" and self.num_lost < 4:
                self.num_lost += 1
                if self.num_lost % 2:
                    super().delivered(party, kind, content)  # its answer is lost
                return []
            return super().delivered(party, kind, content)

    simulation = simulation_of(small("pfedhn-pc"), rounds=6, cohort=1)
    policy = Policy(start_with=1, reply_seconds=3.0, patience=9)
    group = Recorded(simulation, tmp_path, policy, clients=[0], make_transport=Lossy)
    group.server.run()
    group.new_server()
    found = compare(*group.sides())
    assert found.num_unreceived + found.num_undelivered > 0
    assert {event["reason"] for event in group.said("refused")} == {"silent"}


def test_a_line_takes_little_time(tmp_path: Path) -> None:
    """Most of it is the signature; nothing waits for the disk."""
    record = filled(tmp_path / RECORD)
    times = []
    for number in range(100):
        began = time.perf_counter()
        record.add("asked", digest="0" * 96, signed="0" * 200, theirs="0" * 64, round=number)
        times.append(time.perf_counter() - began)
    assert sorted(times)[50] < 0.005  # 0.3 ms on an idle machine
    assert os.path.getsize(tmp_path / RECORD) < 110 * 1_200
