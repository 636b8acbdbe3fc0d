"""Ctrl-C before a command has begun: one line, exit code 130, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

HEADING = """
import os, signal, sys
from pfedhn.cli.interrupt import stop_in_one_line, unwinding
def interrupt(): os.kill(os.getpid(), signal.SIGINT)
stop_in_one_line()
"""
SWALLOWED = """
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""


@pytest.mark.parametrize(
    "code",
    [
        "interrupt()",
        "with unwinding():\n    import swallowing",  # a library that hides the signal, as some do
        "import swallowing",
        "with unwinding():\n    pass\ninterrupt()",
    ],
)
def test_the_process_ends_at_once(code: str, tmp_path: Path) -> None:
    (tmp_path / "swallowing.py").write_text("import os, signal\n" + SWALLOWED)
    command = [sys.executable, "-c", f"{HEADING}sys.path.append({str(tmp_path)!r})\n{code}\nprint('went on')"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped.\n")


@pytest.mark.parametrize(("code", "said"), [(130, "said\n"), (0, "said\ntaken apart\n"), (2, "said\ntaken apart\n")])
def test_a_command_that_was_stopped_leaves_at_once_and_says_all_it_had_to(code: int, said: str) -> None:
    words = f"""
import atexit, sys
from pfedhn.cli.interrupt import leaving_at_once
atexit.register(lambda: print("taken apart"))
with leaving_at_once():
    print("said")
    sys.exit({code})
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")


def test_where_somebody_waits_for_it_it_is_an_exception() -> None:
    code = "with unwinding():\n    try:\n        interrupt()\n    except KeyboardInterrupt:\n        print('closed')"
    done = subprocess.run([sys.executable, "-c", HEADING + code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
