"""`make test-faults`: all faults, bounded and seeded, and one table of what came of them."""

import sys
import time

from faults.damage import try_damage
from faults.inputs import FULL, try_inputs
from faults.kills import try_kills, try_starts
from faults.messages import try_messages
from faults.network import try_network
from faults.table import to_text

SEED = 0


def main() -> int:
    began = time.monotonic()
    rows = [
        *try_network(),
        *try_messages(3, SEED),
        *try_damage(500, SEED),
        *try_kills(100, SEED),
        *try_starts(50, SEED),
        *try_inputs(FULL, SEED),
    ]
    print(to_text(rows))
    bad = [line for row in rows for line in row.bad]
    print(*bad, sep="\n")
    print(f"{sum(row.tries for row in rows):,} tries, {len(bad)} bad, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
