"""What reaches a terminal: control characters are shown and not obeyed, and no letter ends a command."""

import io
import subprocess
import sys

import pytest
from rich.table import Table

from pfedhn.errors import printable
from pfedhn.runs.progress import Display, RunFailed, Said
from pfedhn.system.screen import Screen, say

EVIL = "a\x1b[31m\x07\rb\x9b\u202ec"


@pytest.mark.parametrize("plain", ["Zürich ± 3", "東京 🙂", "two\nlines\tand a tab", "no\N{NO-BREAK SPACE}break", ""])
def test_what_can_be_read_stays(plain: str) -> None:
    assert printable(plain) == plain


def test_control_characters_become_escapes() -> None:
    assert printable(EVIL) == r"a\x1b[31m\x07\rb\x9b\u202ec"
    assert printable("\ud800") == "?"


def is_clean(text: str) -> bool:
    """No control character but the line's end and those that Rich writes for colors and the cursor."""
    return not set("\x07\r\x9b\u202e") & set(text) and "\x1b[31m" not in text


def test_no_word_of_a_file_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    screen = Screen(file=stream, force_terminal=True, color_system=None, width=200)
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    screen.print(table)
    screen.print(EVIL, markup=False)
    with Display(1, Screen(file=stream, color_system=None, width=200)) as display:
        display(Said(EVIL, EVIL))
        display(RunFailed(EVIL, EVIL))
    assert stream.getvalue().count(r"\x1b") >= 6
    assert is_clean(stream.getvalue())
    say(EVIL)
    assert is_clean(capsys.readouterr().out)


def test_a_terminal_that_knows_ascii_alone_shows_question_marks() -> None:
    code = (
        "from pfedhn.system.screen import never_fail_to_write; never_fail_to_write(); "
        "print('88.4 ± 0.3, Zürich, \\udcff')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "88.4 ? 0.3, Z?rich, ?\n"), done.stderr
