"""`pfedhn join`: take part in a federation, with data that stay here."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pfedhn.cli.agree import need_consent, print_study
from pfedhn.cli.federation import JsonOption, need_the_extra, sayer
from pfedhn.cli.options import DeviceOption
from pfedhn.errors import UserError
from pfedhn.system.screen import say


def join(
    bundle: Annotated[Path, Argument(metavar="BUNDLE", help="The invitation.")],
    data: Annotated[
        Path | None, Option(metavar="PATH", help="A folder with x.npy and y.npy, or a table (.csv, .parquet).")
    ] = None,
    show: Annotated[bool, Option("--show", help="Print the study and its digest; enroll nothing.")] = False,
    accept: Annotated[
        str | None,
        Option(metavar="DIGEST", envvar="PFEDHN_ACCEPT", help="Agree to the study with this digest without a prompt."),
    ] = None,
    policy: Annotated[
        Path | None, Option(metavar="FILE", help="Your policy: what this party refuses. It is kept in its folder.")
    ] = None,
    replace_model: Annotated[
        bool, Option("--replace-model", help="Let the server replace the model of a run that has ended.")
    ] = False,
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
    min_group: Annotated[
        int, Option(metavar="N", help="Statistics before training: withhold numbers of groups with fewer rows.")
    ] = 5,
    statistics_epsilon: Annotated[
        float | None, Option(metavar="E", help="Statistics before training: add noise, and spend so much epsilon.")
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

    Shows the study before anything is enrolled, and asks whether you agree to it.
    Waits for the server as long as it takes, and resumes after any interruption.

    \b
    [bold]Examples[/]
      pfedhn join lyon.invite --show
      pfedhn join lyon.invite --data visits.csv
      pfedhn join lyon.invite --data visits.csv --policy policy.toml --accept DIGEST
      pfedhn join lyon.invite --data visits.csv --clip 1 --noise 8 --epsilon 10
      pfedhn join lyon.invite --data visits.csv --clip 1 --noise 1.2 --epsilon 8 --level example
    """
    need_the_extra()
    import threading

    from pfedhn.data.summaries import Noise
    from pfedhn.deploy.across import SHARE, TEST
    from pfedhn.deploy.guard import check_plan, check_spec
    from pfedhn.deploy.invitations import read_bundle
    from pfedhn.deploy.join import Joined, enroll, find_study, keep_policy, load_party, remember, settle_first
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
    given, stop, tell = read_bundle(given_path(bundle)), threading.Event(), sayer(as_json)
    own, own_key = (folder or Path(f"pfedhn-{given.name}")).absolute(), None if key is None else given_path(key)
    if show:
        study = find_study(given, own, stop, tell, own_key, is_patient=False)
        assert study is not None, "nobody stops it"
        print_study(study, privacy, as_json)
        return
    if data is None:
        raise UserError("give your data: --data PATH, a folder with x.npy and y.npy, or a table.")
    make_folder(own, mode=0o700)
    with claimed(own, 5.0), stop_requests(lambda number: stop.set()):
        study = find_study(given, own, stop, tell, own_key)
        if study is None:
            return
        bounds = keep_policy(own, None if policy is None else given_path(policy))
        check_spec(bounds, study.spec)
        check_plan(bounds, study.plan, privacy)
        need_consent(own, study, privacy, accept, f"pfedhn join {bundle} --show")
        enroll(given, own, stop, tell, own_key, study)
        if stop.is_set():
            return
        place_of_data = given_path(data, is_resolved=True)
        remember(own, given.name, place_of_data, size)
        noise_of_statistics = None if statistics_epsilon is None else Noise(statistics_epsilon)
        if not settle_first(given, own, place_of_data, stop, tell, min_group, noise_of_statistics):
            return
        party = load_party(own, privacy=privacy, device=place, may_replace=replace_model)
        party.consents = consents
        spent = "none" if party.budget is None else str(party.budget)
        tell(
            {
                "event": "taking part",
                "party": given.name,
                "examples": int(party.local.size),
                "device": place,
                "privacy": spent,
            }
        )
        with nullcontext() if place == "cpu" else computing_on_gpu("fp32", is_deterministic=False):
            Joined(party, given, own, tell).run(stop, stay or bool(consents))
    if not as_json and party.files.has_chosen:
        say(f"Your model: pfedhn export {own} --to model.safetensors")
