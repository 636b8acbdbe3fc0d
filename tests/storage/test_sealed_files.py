"""Files that carry a digest of themselves."""

import pytest

from pfedhn.storage.files import DamagedError, sealed_json, sealed_text, unsealed_json, unsealed_text


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


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"[]", b"\0" * 9, b"\xff", b"[" * 100_000, b"1" * 9_999])
def test_other_content_is_damage(content: bytes) -> None:
    for unsealed in (unsealed_json, unsealed_text):
        with pytest.raises(DamagedError):
            unsealed(content)
