"""Files that carry a digest of themselves."""

import pytest
from support import make_federation, simulate

import pfedhn
from pfedhn.algorithms import ALGORITHMS
from pfedhn.storage.files import DamagedError, named, sealed_json, sealed_text, unsealed_json, unsealed_text


def test_every_changed_byte_of_a_sealed_file_is_noticed() -> None:
    table = {"steps": 30, "loss": 0.1, "name": "π"}
    assert unsealed_json(sealed_json(table)) == table
    text = '[schedule]\nsteps = 30\nname = "π"\n'
    assert unsealed_text(sealed_text(text)) == text
    for content, unsealed in ((sealed_json(table), unsealed_json), (sealed_text(text), unsealed_text)):
        for place in range(len(content)):
            changed = bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]])
            with pytest.raises(DamagedError):
                unsealed(changed)
        for end in range(len(content) - 1):
            with pytest.raises(DamagedError):
                unsealed(content[:end])


def test_checkpoints_name_what_they_always_named() -> None:
    """By fields, not by classes: checkpoints of earlier versions must load."""
    method = pfedhn.with_statistics(ALGORITHMS["pfedhn-shared"](embedding_dim=3, hidden_dim=4), "shared")
    simulation = simulate(method, make_federation(), models="batchnorm", rounds=1, cohort=1)
    memories = simulation.initial_state().memories
    assert {name.partition("[")[0] for name in named("", memories.shared)} == {
        *(f".method.newest.{part}" for part in ("phi", "velocity", "square", "powers", "step", "common")),
        *(".method.average", ".method.step", ".statistics"),
    }
    assert named("", memories.rows).keys() == {".embedding", ".velocity", ".last_step"}


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"[]", b"\0" * 9, b"\xff", b"[" * 100_000, b"1" * 9_999])
def test_other_content_is_damage(content: bytes) -> None:
    for unsealed in (unsealed_json, unsealed_text):
        with pytest.raises(DamagedError):
            unsealed(content)
