"""Writes the table of docs/networks.md: what each executor makes of the networks that people have.

`make docs` runs it. The table stands between two markers, and a test compares it with what the executors do.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, MARKER = ROOT / "docs" / "networks.md", "<!-- networks -->\n"

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]
    from targets import table

    before, _, after = PAGE.read_text().split(MARKER)
    PAGE.write_text(f"{before}{MARKER}\n{table()}\n\n{MARKER}{after}")
