"""`pfedhn export`: a party's own model, to take home."""

from pathlib import Path
from typing import Annotated

import typer

from pfedhn.cli.federation import need_the_extra
from pfedhn.cli.join import FolderOption
from pfedhn.screen import say


def export(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The invitation that the party joined with.")],
    data: Annotated[Path, typer.Option("--data", metavar="PATH", help="The party's data, as for `pfedhn join`.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the weights go.")] = Path(
        "model.safetensors"
    ),
    size: Annotated[str, typer.Option("--size", metavar="S", help="The network that the party runs.")] = "",
    folder: FolderOption = None,
) -> None:
    """Write a party's own model of the chosen round: plain weights in safetensors.

    \b
    [bold]Example[/]
      pfedhn export lyon.invite --data visits.csv --out lyon.safetensors
    """
    need_the_extra()
    from safetensors.torch import save

    from pfedhn.deploy.invitations import read_bundle
    from pfedhn.deploy.join import load_party
    from pfedhn.files import given_path, write_atomically

    given = read_bundle(given_path(bundle))
    own = (folder or Path(f"pfedhn-{given.name}")).absolute()
    model = load_party(own, given.name, data, size).personal_model()
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    write_atomically(out, save(weights))
    say(f"{given.name}'s own model: {out}")
