"""Statistics before training, over the wire: what a SPEC leaves open is that of all parties' training rows."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
from parties import KEYS
from support import free_port

from pfedhn.data.summaries import Asked, Noise
from pfedhn.deploy import survey
from pfedhn.deploy.audit import compare, sides_of
from pfedhn.deploy.join import Joined, enroll, load_party, remember, settle_first
from pfedhn.deploy.record import RECORD, read_record
from pfedhn.deploy.serve import Service
from pfedhn.deploy.signing import opened, sealed
from pfedhn.deploy.site import Site
from pfedhn.deploy.spec import read_spec
from pfedhn.deploy.statistics import asked_of, training_rows
from pfedhn.deploy.survey import SETTLED, Surveyed
from pfedhn.deploy.wire import Message, WireError
from pfedhn.errors import UserError

SPEC = """
method = "fedavg"
model = "mlp-4"
clients = 2
steps = 4
cohort_size = 2
evaluate_every = 4
batch_size = 8
seeds = [0]
settings = {local_steps = 8}
[data]
classes = "federation"
shape = [3]
mean = "federation"
std = "federation"
"""


def write(folder: Path, seed: int) -> None:
    generator = numpy.random.default_rng(seed)
    folder.mkdir(parents=True)
    numpy.save(folder / "x.npy", generator.normal(5.0 + seed, 2.0, (60, 3)).astype(numpy.float32))
    numpy.save(folder / "y.npy", numpy.array(["ill", "well", "odd"])[generator.integers(0, 2 + seed, 60)])


def test_a_federation_scales_by_what_its_parties_say(tmp_path: Path) -> None:
    spec, port = tmp_path / "spec.toml", free_port()
    spec.write_text(SPEC)
    site = Site.make(tmp_path / "state", spec, f"localhost:{port}", "127.0.0.1", port)
    stop, events = threading.Event(), list[Any]()
    server = threading.Thread(target=Service(site, True, events.append).run, args=[stop])
    server.start()
    while not any(event["event"] == "serving" for event in events):
        assert server.is_alive()
    said: dict[str, list[Any]] = {}

    def take_part(name: str, seed: int) -> None:
        data, folder = tmp_path / "data" / name, tmp_path / name
        write(data, seed)
        bundle, show = site.invite(name), said.setdefault(name, []).append
        enroll(bundle, folder, stop, show, study=site.study)
        remember(folder, name, data, "")
        assert settle_first(bundle, folder, data, stop, show)
        Joined(load_party(folder), bundle, folder, show).run(stop)

    parties = [threading.Thread(target=take_part, args=one) for one in (("lyon", 0), ("nice", 1))]
    for party in parties:
        party.start()
    for party in (*parties, server):
        party.join(120)
        assert not party.is_alive()
    rows = []
    for name in ("lyon", "nice"):
        y = numpy.load(tmp_path / "data" / name / "y.npy")
        rows.append(numpy.load(tmp_path / "data" / name / "x.npy")[training_rows(y, name, read_spec(SPEC, spec))])
    pooled = numpy.concatenate(rows).astype(numpy.float64)
    values = json.loads((site.folder / SETTLED).read_text())["values"]
    numpy.testing.assert_allclose(values["mean"], pooled.mean(0), rtol=1e-12)
    numpy.testing.assert_allclose(values["std"], pooled.std(0), rtol=1e-12)
    assert values["classes"] == ["ill", "odd", "well"]
    assert Site(site.folder).spec.data.classes == ("ill", "odd", "well")
    assert site.known()["has_ended"]
    assert load_party(tmp_path / "lyon").files.has_chosen
    assert [event["event"] for event in said["lyon"]][:3] == ["enrolled", "statistics", "settled"]
    assert site.study.description()["statistics"].endswith("which give classes and mean and std")
    found = compare(sides_of(site.folder), sides_of(tmp_path / "lyon")[0])
    assert found.num_undelivered == found.num_unreceived == 0
    kinds = [line["kind"] for line in read_record(tmp_path / "lyon" / RECORD) if line["event"] == "sent"]
    assert kinds[:2] == ["statistics", "hello"]


@pytest.fixture
def party(tmp_path: Path) -> Surveyed:
    write(tmp_path / "data", 1)
    spec = read_spec(SPEC, tmp_path / "spec.toml")
    return Surveyed(spec, "run", "lyon", tmp_path / "data", tmp_path, KEYS[0], KEYS[1].public_key())


def asked(value: Any, kind: str = "statistics", party: str = "lyon", key: Any = KEYS[1]) -> bytes:
    return sealed(Message(kind, "run", party, {"asked": value}), key)


def said_by(party: Surveyed, question: bytes) -> Message:
    answer = party.answer(question)
    assert answer is not None
    return opened(answer, KEYS[0].public_key())


def test_a_party_answers_its_server_what_the_study_says_and_nothing_more(party: Surveyed) -> None:
    wanted = asked_of(party.spec)
    assert said_by(party, asked(wanted.to_json())).values["summary"]["rows"] > 0
    more = Asked(wanted.columns, wanted.classes, {"0": (1.0, 2.0)}).to_json()
    for question in (more, Asked(("0",)).to_json(), None, 3):
        refusal = said_by(party, asked(question))
        assert refusal.kind == "refusal"
        assert "summary" not in refusal.values
    for question in (asked(wanted.to_json(), key=KEYS[2]), asked(wanted.to_json(), party="nice"), asked(0, "train")):
        with pytest.raises(WireError):
            party.answer(question)


def test_noise_is_drawn_once_however_often_it_is_asked_for(party: Surveyed) -> None:
    party.noise = Noise(epsilon=1.0)
    assert said_by(party, asked(asked_of(party.spec).to_json())).kind == "refusal"  # which needs bounds
    text = SPEC.replace('classes = "federation"', 'classes = ["ill", "odd", "well"]')
    text += "[bounds]\n" + "\n".join(f"{name} = [0, 10.0]" for name in "012")
    party.spec = read_spec(text, party.folder / "spec.toml")
    bounded = asked_of(party.spec)
    assert bounded.bounds == {name: (0.0, 10.0) for name in "012"}
    first = said_by(party, asked(bounded.to_json())).values
    again = Surveyed(**{name: getattr(party, name) for name in ("spec", "name", "data", "folder", "key", "server_key")},
                     run="run", noise=party.noise)  # fmt: skip
    assert said_by(again, asked(bounded.to_json())).values == first
    (party.folder / survey.SUMMARY).unlink()
    assert said_by(party, asked(bounded.to_json())).values != first


@pytest.mark.parametrize("values", [{}, {"mean": [0.0], "std": [1.0]}, {"mean": "federation"}, 7])
def test_what_a_server_found_is_checked_before_it_is_kept(party: Surveyed, values: Any) -> None:
    greeting = sealed(Message("hello", "run", "lyon", {"settled": values}), KEYS[1])
    with pytest.raises((WireError, UserError)):
        party.answer(greeting)
    assert not (party.folder / SETTLED).exists()


@pytest.mark.parametrize("bounds", ['"0" = 3', '"0" = [1.0]', '"0" = [2, 1]', '"0" = [0, inf]', '"0" = [true, 2]'])
def test_bounds_that_cannot_be_are_refused(bounds: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be two rising numbers"):
        read_spec(f"{SPEC}[bounds]\n{bounds}", tmp_path / "spec.toml")
