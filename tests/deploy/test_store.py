"""What a server decided is read again whole; only an end that was half written is cut off."""

from pathlib import Path

import pytest

from pfedhn.deploy.store import append_record, records
from pfedhn.errors import RunError

RECORDS = [({"kind": "accept", "party": f"party-{number}"}, bytes([number]) * 300) for number in range(4)]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    for record in RECORDS:
        append_record(tmp_path / "journal", *record)
    return tmp_path / "journal"


@pytest.mark.parametrize("tail", [b"", b"\0", b"\0" * 60, b"\xff" * 500])
def test_an_end_that_was_half_written_is_cut_off(journal: Path, tail: bytes) -> None:
    """The power goes while the last record is written: what is there may be short, or have blocks without content."""
    whole = journal.read_bytes()
    length = len(whole) // 4
    for kept in (0, 7, 41, length - 5):
        journal.write_bytes(whole[: 3 * length + kept] + (tail if kept < length - 5 else b""))
        assert list(records(journal)) == RECORDS[:3]
        assert journal.read_bytes() == whole[: 3 * length]
    append_record(journal, *RECORDS[3])
    assert list(records(journal)) == RECORDS


@pytest.mark.parametrize("place", [0, 3, 5, 20, 60, 200])
def test_damage_before_the_end_is_said_and_nothing_is_cut(journal: Path, place: int) -> None:
    """Lengths, digest, table or message of the second record: the records after it are sound, and must not be lost."""
    content = bytearray(journal.read_bytes())
    content[len(content) // 4 + place] ^= 0x40
    journal.write_bytes(content)
    with pytest.raises(RunError, match="is damaged at byte 3"):
        list(records(journal))
    assert journal.read_bytes() == content


def test_an_older_journal_has_no_end_that_is_half_written(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-5])
    with pytest.raises(RunError, match="is damaged"):
        list(records(journal, is_last=False))
