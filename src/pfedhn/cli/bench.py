"""`pfedhn bench`: how fast the engine is on this machine."""

import json
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from pfedhn.cli.options import DeviceOption
from pfedhn.errors import UserError
from pfedhn.system.screen import Screen, say

COLUMNS = {
    "workload": "workload", "program": "code", "device": "device", "clients": "clients",
    "ms_per_round": "ms a round", "ratio_to_textbook": "x textbook", "peak_memory_mb": "peak MB",
    "bytes_per_client": "bytes a client", "kernels_per_step": "kernels a step", "equal": "equal",
}  # fmt: skip
"""The columns of the tables: what a record calls it, and its heading."""


def bench(
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line instead of a table.")] = False,
    device: DeviceOption = None,
    repeats: Annotated[int, Option(metavar="N", help="Rounds measured for each variant.")] = 7,
) -> None:
    """Measure the engine against a textbook implementation of pFedHN.

    Same data, same batches; each code runs one round in turn, in a process of its
    own, and all are checked to compute the same weights. Takes two minutes on two
    quiet cores. On a GPU the captured rounds include an evaluation of all clients
    every 30 rounds; runs side by side show the time of a round and run.

    \b
    [bold]Examples[/]
      pfedhn bench
      pfedhn bench --json > bench.jsonl
    """
    from pfedhn.bench.measure import bench as measure
    from pfedhn.runs.assemble import choose_device
    from pfedhn.storage.schema import to_json
    from pfedhn.system.environment import environment

    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; it must be at least 1.")
    chosen = choose_device(device or "auto")
    with Screen(stderr=True).status("starting") as status:
        records = measure(chosen, repeats, status.update)
    if as_json:
        for record in records:
            say(json.dumps(record | {"versions": to_json(environment(chosen))}))
        return
    for title, is_shown in (("Against the textbook", False), ("Against the number of clients", True)):
        shown = [record for record in records if ("clients" in record) == is_shown]
        used = [name for name in COLUMNS if any(name in record for record in shown)]
        if shown:
            table = Table(*(COLUMNS[name] for name in used), box=None, title=title)
            for record in shown:
                table.add_row(*(_cell(record.get(name)) for name in used))
            Screen().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)
