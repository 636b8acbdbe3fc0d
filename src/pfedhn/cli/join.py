"""`pfedhn join`: take part in a federation, with data that stay here."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pfedhn.cli.federation import JsonOption, need_the_extra, sayer
from pfedhn.cli.options import DeviceOption
from pfedhn.errors import UserError
from pfedhn.system.screen import say


def join(
    bundle: Annotated[Path, Argument(metavar="BUNDLE", help="The invitation.")],
    data: Annotated[Path, Option(metavar="PATH", help="A folder with x.npy and y.npy, or a table (.csv, .parquet).")],
    size: Annotated[str, Option(metavar="S", help="Which of several networks to run.")] = "",
    folder: Annotated[
        Path | None,
        Option(metavar="DIR", help="The party's folder, with its key and personal layers; pfedhn-NAME by default."),
    ] = None,
    key: Annotated[Path | None, Option(metavar="FILE", help="Your own private key; created if not given.")] = None,
    clip: Annotated[
        float | None, Option(metavar="C", help="Privacy: the largest norm of an update, or of an example's gradient.")
    ] = None,
    noise: Annotated[
        float | None, Option(metavar="S", help="Privacy: noise of standard deviation S * C on every value.")
    ] = None,
    level: Annotated[
        str | None,
        Option(
            metavar="L",
            help="Privacy: protects all your data (client), or any single example (example).",
            show_default="client",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, Option(metavar="E", help="Privacy: the budget; when it is spent, nothing more is sent.")
    ] = None,
    delta: Annotated[
        float | None,
        Option(metavar="D", help="Privacy: the probability that the budget is counted at.", show_default="0.00001"),
    ] = None,
    device: DeviceOption = None,
    share_model: Annotated[
        bool,
        Option("--share-model", help="Consent: after training, other parties may test your model. Stays connected."),
    ] = False,
    test_others: Annotated[
        bool, Option("--test-others", help="Consent: after training, test other parties' models. Stays connected.")
    ] = False,
    stay: Annotated[bool, Option("--stay", help="Keep running when the run is over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take part in a federation. Data and personal layers never leave this machine.

    Waits for the server as long as it takes, and resumes after any interruption.

    \b
    [bold]Examples[/]
      pfedhn join lyon.invite --data visits.csv
      pfedhn join lyon.invite --data visits.csv --clip 1 --noise 8 --epsilon 10
      pfedhn join lyon.invite --data visits.csv --clip 1 --noise 1.2 --epsilon 8 --level example
    """
    need_the_extra()
    import threading

    from pfedhn.deploy.across import SHARE, TEST
    from pfedhn.deploy.invitations import read_bundle
    from pfedhn.deploy.join import Joined, enroll, load_party, remember
    from pfedhn.engine.gpu import computing_on_gpu
    from pfedhn.privacy import Privacy
    from pfedhn.runs.assemble import choose_device
    from pfedhn.system.files import claimed, given_path, make_folder
    from pfedhn.system.process import stop_requests

    place = choose_device(device or "auto")
    privacy, wanted = None, {"clip": clip, "noise": noise, "epsilon": epsilon, "level": level, "delta": delta}
    if any(value is not None for value in wanted.values()):
        if clip is None or noise is None or epsilon is None:
            raise UserError("privacy needs all three: --clip, --noise and --epsilon.")
        privacy = Privacy(**{name: value for name, value in wanted.items() if value is not None})  # type: ignore[arg-type]
    if test_others and privacy is not None:
        raise UserError("scores come from your data, which a privacy budget protects; leave --test-others out.")
    consents = frozenset(one for one, is_given in ((SHARE, share_model), (TEST, test_others)) if is_given)
    given, stop, show = read_bundle(given_path(bundle)), threading.Event(), sayer(as_json)
    own = (folder or Path(f"pfedhn-{given.name}")).absolute()
    make_folder(own, mode=0o700)
    with claimed(own, 5.0), stop_requests(lambda number: stop.set()):
        enroll(given, own, stop, show, None if key is None else given_path(key))
        if stop.is_set():
            return
        remember(own, given.name, given_path(data, is_resolved=True), size)
        party = load_party(own, privacy=privacy, device=place)
        party.consents = consents
        spent = "none" if party.budget is None else str(party.budget)
        show(
            {
                "event": "taking part",
                "party": given.name,
                "examples": int(party.local.size),
                "device": place,
                "privacy": spent,
            }
        )
        with nullcontext() if place == "cpu" else computing_on_gpu("fp32", is_deterministic=False):
            Joined(party, given, own, show).run(stop, stay or bool(consents))
    if not as_json and party.files.has_chosen:
        say(f"Your model: pfedhn export {own} --to model.safetensors")
