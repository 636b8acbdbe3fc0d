"""What the server needs for targets of many weights: python benchmarks/server_memory.py

Each line is a process of its own that makes a target and its hypernetwork on a CPU, runs two rounds of one client and
evaluates before and after each. "state" is what a checkpoint holds of the server (phi, its momentum, the layers that
are one for all), "peak" the largest memory of the process less what it had before. It needs Linux.
"""

import resource
import subprocess
import sys
from pathlib import Path

from torch import nn

TARGETS = {0.1e6: (316, 1), 1e6: (500, 4), 10e6: (1000, 10), 100e6: (3162, 10)}  # (width, layers)
LIMIT = 1.2e9  # bytes remembered; larger servers are worked out and not run


def target(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def measure(head: str, size: float) -> None:
    import numpy

    import pfedhn
    from pfedhn.engine.memory import bytes_of_shared
    from pfedhn.engine.simulate import Simulation
    from pfedhn.engine.state import Schedule
    from pfedhn.model import Model
    from pfedhn.models import squared_error

    width, layers = TARGETS[size]
    x = numpy.zeros((12, width), dtype="float32")
    federation = pfedhn.Federation.from_clients([(x, x)] * 4)
    algorithm = pfedhn.ALGORITHMS["pfedhn"](head=head, local_steps=1).for_clients(50)
    model = Model("model", lambda: target(width, layers), squared_error)
    simulation = Simulation(algorithm, {"model": model}, Schedule(2, 1, 1, 1), executor="loop", federation=federation)
    remembered = bytes_of_shared(simulation)
    peak = "not run"
    if remembered < LIMIT:
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        list(simulation.rounds(simulation.initial_state()))
        peak = f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e6:,.0f}"
    num_weights = sum(shape.numel() for shape in model.shapes.values())
    print(f"| {num_weights:,} | {head} | {remembered / 1e6:,.1f} | {peak} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(sys.argv[1], float(sys.argv[2]))
    else:
        print("| generated weights | head | state, MB | peak, MB |\n|---|---|---|---|", flush=True)
        for size in TARGETS:
            for head in ("dense", "low-rank", "chunked"):
                subprocess.run([sys.executable, __file__, head, str(size)], check=True)
