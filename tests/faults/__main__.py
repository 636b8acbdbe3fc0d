"""`make test-faults`: all faults, bounded and seeded, and one table of what came of them."""

import argparse
import sys
import time

from faults.damage import try_damage
from faults.inputs import FULL, try_inputs
from faults.kills import try_kills, try_starts
from faults.messages import try_messages
from faults.network import try_network
from faults.table import to_text

KINDS = {
    "network": lambda seed: try_network(),
    "messages": lambda seed: try_messages(3, seed),
    "files": lambda seed: try_damage(500, seed),
    "kills": lambda seed: try_kills(100, seed),
    "starts": lambda seed: try_starts(50, seed),
    "inputs": lambda seed: try_inputs(FULL, seed),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"there is no kind {unknown.pop()!r}")
    began = time.monotonic()
    rows = [row for kind in options.kinds or KINDS for row in KINDS[kind](options.seed)]
    print(to_text(rows))
    bad = [line for row in rows for line in row.bad]
    print(*bad, sep="\n")
    print(f"{sum(row.tries for row in rows):,} tries, {len(bad)} bad, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
