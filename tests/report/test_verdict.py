"""Verdicts on fabricated runs: the right answer is planted in them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.testing import CliRunner

from pfedhn.cli.app import app
from pfedhn.cli.endings import LEARNED_NOTHING
from pfedhn.experiments.spec import Cell
from pfedhn.report.entries import Entry, Report, collect, compare
from pfedhn.report.failures import Failure, failure_texts
from pfedhn.report.gains import Measure, Pairs
from pfedhn.report.page import best_cells, to_html
from pfedhn.report.tables import details, details_caption, to_markdown
from pfedhn.report.verdict import Verdict, to_json, to_text, verdicts
from pfedhn.storage.schema import Clients, Curve, DetailedScores, Environment, Measures, Result, Scores, Yardstick

NUM_CLIENTS = 30
EXAMPLES = tuple(10 + client % 5 for client in range(NUM_CLIENTS))
STEPS = (0, 10, 20, 40)


def noise(seed: int, scale: float = 0.05) -> Any:
    return numpy.random.default_rng(seed).normal(0, scale, NUM_CLIENTS)


def detailed(losses: Sequence[float], validation: float) -> DetailedScores:
    weighted = float(numpy.average(losses, weights=EXAMPLES))
    measures = {"log_loss": weighted, "accuracy": 0.7, "auc": 0.8}
    return DetailedScores(measures, {"accuracy": 0.75}, tuple(map(float, losses)), validation)


def result(method: str, seed: int, losses: Sequence[float], validation: float, /, **more: Any) -> Result:
    """Log losses of clients on test examples, and the mean one on validation."""
    total = sum(EXAMPLES)
    test = Scores(0.5, total, 0.75, 0.75, tuple(0.75 * size for size in EXAMPLES), EXAMPLES)
    values: dict[str, Any] = {
        "chosen_step": 20,
        "bytes_up": 0,
        "validation": Scores(validation, total, 0.75, 0.75),
        "test": test,
        "bytes_down": 0 if method == "local" else 1_000,
        "clients": Clients(classes=({"0": 6, "1": 6},) * NUM_CLIENTS),
        "detailed": detailed(losses, validation),
        "select": "loss",
    }
    return Result(
        method, "made", {}, {}, seed, steps=40, rounds=8, seconds=1.0, unused_examples={},
        partition_sha256=f"split {seed}", command="pfedhn run mine.toml --seeds 0", environment=Environment("cpu", 1),
        **{**values, **more},
    )  # fmt: skip


def entry(method: str, losses: Mapping[int, Any], validation: float, /, **more: Any) -> Entry:
    """A method whose clients have these losses, by seed."""
    results = {seed: result(method, seed, values, validation, **more) for seed, values in losses.items()}
    curve = Curve(STEPS, *[Measures((0.7,) * 4, (0.7,) * 4)] * 2)
    cell = Cell(method=method, dataset="stroke.csv", clients=NUM_CLIENTS, settings={"local_lr": 0.1})
    return Entry(method, cell, results, dict.fromkeys(results, curve), len(results))


def level(loss: float, seeds: int = 3, scale: float = 0.05, luck: int = 0) -> dict[int, Any]:
    """Losses around a mean; those of a seed share the luck of its split."""
    return {seed: loss + noise(seed, 0.2) + noise(100 * luck + seed, scale) for seed in range(seeds)}


def yardstick(name: str, loss: float, validation: float, needs_all_data: bool = False) -> Yardstick:
    scores = detailed(loss + noise(0, 0.2), validation)
    return Yardstick(name, f"the {name} model", needs_all_data, validation, scores)


def the_verdict(*entries: Entry, yardsticks: Sequence[Yardstick] = ()) -> Verdict:
    splits = {f"split {seed}": tuple(yardsticks) for seed in range(3)} if yardsticks else {}
    (found,) = verdicts(Report("made", list(entries), yardsticks=splits))
    for sentence in to_text(found):
        assert len(sentence.split()) <= 25, sentence
    return found


LOCAL = entry("local", level(0.60, luck=1), 0.60)
FEDAVG = entry("fedavg", level(0.55, luck=2), 0.55)
FEDPER = entry("fedper", level(0.50, luck=3), 0.50)


def test_validation_chooses_and_test_does_not() -> None:
    """FedPer has the best test scores by far, and the worst validation scores."""
    lucky = entry("fedper", level(0.10, luck=3), 0.65)
    assert the_verdict(LOCAL, FEDAVG, lucky).recommended == "fedavg"
    assert the_verdict(LOCAL, FEDAVG, FEDPER).recommended == "fedper"


def test_of_methods_that_noise_cannot_tell_apart_the_simplest_is_recommended() -> None:
    noisy = entry("pfedhn", level(0.50, scale=0.5, luck=4), 0.4999)
    assert the_verdict(noisy, FEDPER).recommended == "fedper"
    clear = entry("pfedhn", level(0.50, scale=0.01, luck=4), 0.40)
    assert the_verdict(clear, FEDPER).recommended == "pfedhn"
    small, large = (entry(name, level(0.5), 0.5, bytes_up=sent) for name, sent in (("ditto", 10), ("apfl", 99)))
    assert the_verdict(large, small).recommended == "ditto"


def test_the_gain_is_that_of_the_tables_and_its_interval_holds_what_was_planted() -> None:
    found = the_verdict(LOCAL, FEDAVG, FEDPER).difference("local")
    assert found is not None
    ours, theirs = (
        numpy.mean([one.detailed.examples["log_loss"] for one in made.results.values() if one.detailed])
        for made in (FEDPER, LOCAL)
    )
    assert found.gain == pytest.approx(theirs - ours)
    assert found.value == pytest.approx(theirs)
    assert found.interval is not None
    low, high = found.interval
    assert 0 < low < 0.1 < high
    assert high - low < 0.08
    assert found.better + found.worse == found.num_clients == NUM_CLIENTS
    assert found.better > 25
    assert found.num_seeds == 3


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Clients are drawn from a population with a gain of 0.1; few of them make the interval wider."""
    for num_clients, least in ((5, 0.86), (40, 0.9)):
        covered = 0
        for trial in range(100):
            random = numpy.random.default_rng([trial, num_clients])
            theirs = 0.1 + random.normal(0, 0.3, num_clients)[None]
            pairs = Pairs(numpy.zeros_like(theirs), theirs, numpy.ones_like(theirs), Measure("loss"))
            low, high = pairs.interval() or (0.0, 0.0)
            covered += low <= 0.1 <= high
        assert covered / 100 >= least
    assert pairs._replace(ours=pairs.ours[:, :1], theirs=theirs[:, :1], weights=pairs.weights[:, :1]).interval() is None


def test_clients_without_test_examples_and_other_splits_are_left_out() -> None:
    holes = {seed: numpy.where(numpy.arange(NUM_CLIENTS) < 3, numpy.nan, part) for seed, part in level(0.5).items()}

    def whole(made: Entry) -> Entry:
        results = {}
        for seed, one in made.results.items():
            assert one.detailed is not None
            losses = tuple(None if loss is None or math.isnan(loss) else loss for loss in one.detailed.client_loss)
            scores = DetailedScores(one.detailed.examples, one.detailed.clients, losses, 0.5)
            results[seed] = result("fedper", seed, [0.0] * NUM_CLIENTS, 0.5, detailed=scores)
        return Entry(made.label, made.cell, results, made.curves, 3)

    found = the_verdict(LOCAL, whole(entry("fedper", holes, 0.5))).difference("local")
    assert found is not None
    assert found.num_clients == NUM_CLIENTS - 3
    other = {7: result("local", 7, level(0.6)[0], 0.6)}
    apart = verdicts(Report("made", [FEDPER, Entry("local", LOCAL.cell, other, {}, 1)]))
    assert [verdict.methods for verdict in apart] == [("fedper",), ("local",)]
    assert not any(verdict.differences for verdict in apart)


def test_an_rmse_is_compared_by_its_root_and_an_accuracy_over_clients() -> None:
    pairs = Pairs(
        numpy.array([[4.0, 4.0]]), numpy.array([[9.0, 25.0]]), numpy.array([[3.0, 1.0]]), Measure("RMSE", True)
    )
    assert pairs.gain() == pytest.approx(math.sqrt((27 + 25) / 4) - 2)
    correct = {name: tuple(size * share for size in EXAMPLES) for name, share in (("local", 0.5), ("fedper", 0.75))}
    entries = [
        entry(
            name, level(0.5, seeds=1), 0.5, detailed=None,
            test=Scores(0.5, sum(EXAMPLES), mean, mean, correct[name], EXAMPLES),
            validation=Scores(0.5, sum(EXAMPLES), mean + 0.05, mean),
        )
        for name, mean in (("local", 0.5), ("fedper", 0.75))
    ]  # fmt: skip
    found = the_verdict(*entries)
    assert (found.measure, found.recommended) == ("accuracy", "fedper")
    assert [difference.gain for difference in found.differences] == [pytest.approx(25)]
    assert "It beats training alone (Local) by 25.0 points (95 %: 25.0 to 25.0); 30 of 30 clients gain, 0 lose." in (
        to_text(found)
    )


@pytest.mark.parametrize(("measure", "of_folds"), [("log loss", 0.0), ("log loss", 0.05), ("RMSE", 0.03)])
def test_intervals_over_folds_hold_the_gain_as_often_as_they_say(measure: Any, of_folds: float) -> None:
    """Gains of 20 clients in five folds, whose examples make noise; drawing folds too would hold it in 99.7 %."""
    random, hits, truth, number = numpy.random.default_rng(0), 0, 0.05, 120
    for _ in range(number):
        sizes = numpy.full((5, 20), 1.0) * random.integers(4, 20, 20)
        noise = random.normal(0, 0.5, (5, 20)) / numpy.sqrt(sizes)
        gains = truth + noise + random.normal(0, 0.05, 20) + random.normal(0, of_folds, (5, 1))
        pairs = Pairs(numpy.full((5, 20), 1.0), 1 + gains, sizes, Measure(measure, True), sizes)
        low, high = pairs.interval() or (math.nan, math.nan)
        hits += low <= (math.sqrt(1 + truth) - 1 if measure == "RMSE" else truth) <= high
    assert 0.90 <= hits / number <= 0.985


def test_methods_that_failed_alike_share_a_sentence() -> None:
    failures = [
        *(Failure(name, "guess", (0, 1), 2) for name in ("local", "fedavg", "pfedhn")),
        Failure("fedper", "exploded", (1,), 2),
    ]
    assert failure_texts(failures) == [
        "Local, FedAvg and pFedHN learned nothing: on validation, a guess from each client's labels is as good.",
        "FedPer learned nothing: the loss exploded, with 1 of 2 seeds.",
    ]


def test_the_first_table_shows_the_loss_that_the_verdict_compares() -> None:
    report = collect([Path(__file__).parents[2] / "results" / "tables" / "heart.jsonl"])[0]
    lines = details(report)
    assert lines[0][:3] == ["method", "log loss", "accuracy"]
    assert lines[1][:2] == ["local", "0.416 ± 0.026"]
    assert "the verdict compares it" in details_caption(report, "clients")
    places = best_cells(lines)
    assert [row for row, column in places if column == 1] == [2], "the lowest loss, of FedPer (intercept)"
    assert [row for row, column in places if column == 2] == [0]
    exam = collect([Path(__file__).parents[2] / "results" / "tables" / "exam.jsonl"])[0]
    assert details(exam)[0][1] == "RMSE"


def test_a_client_gains_over_the_examples_of_all_folds() -> None:
    """The first client loses in two folds of one example each, and gains in a third of ten."""
    sizes = numpy.array([[1.0, 5.0], [1.0, 5.0], [10.0, 5.0]])
    ours, theirs = numpy.array([[2.0, 1.0], [2.0, 1.0], [0.0, 1.0]]), numpy.ones((3, 2))
    pairs = Pairs(ours, theirs, numpy.ones((3, 2)), Measure("loss"))
    assert pairs.client_gains().tolist() == pytest.approx([-1 / 3, 0])
    assert pairs._replace(shares=sizes).client_gains().tolist() == pytest.approx([8 / 12, 0])

    def folded(made: Entry) -> Entry:
        return replace(made, cell=replace(made.cell, folds=3))

    local, ours_too = folded(LOCAL), folded(FEDPER)
    mine, counts = compare(ours_too, local), compare(FEDPER, LOCAL)
    assert mine is not None
    assert counts is not None
    assert (sum(mine[:3]), sum(counts[:3])) == (NUM_CLIENTS, 3 * NUM_CLIENTS)
    text = to_markdown([Report("made", [local, ours_too])])
    assert "3-fold cross-validation: each seed is a fold, and together they test every example once." in text
    assert "Folds share training examples" in text
    one = replace(local, results={0: local.results[0]})
    assert "1 of 3 folds are finished" in to_markdown([Report("made", [one])])
    assert "cross-validation" not in to_markdown([Report("made", [LOCAL, FEDPER])])


def test_yardsticks_stand_beside_it() -> None:
    guess, pooled = yardstick("own-base-rate", 0.65, 0.65), yardstick("pooled-linear", 0.45, 0.45, True)
    found = the_verdict(LOCAL, FEDAVG, FEDPER, yardsticks=[guess, pooled])
    gains = {difference.name: round(difference.gain, 1) for difference in found.differences}
    assert set(gains) == {"local", "fedavg", "own-base-rate", "pooled-linear"}
    text = to_text(found)
    assert any(sentence.startswith("It beats the own-base-rate model by 0.1") for sentence in text)
    assert "The pooled models need all data in one place." in text
    assert (found.federate, text[0].partition(":")[0]) == ("yes", "Use FedPer")


def test_where_training_alone_is_as_good_it_says_so() -> None:
    as_good = entry("local", level(0.50, luck=5), 0.50)
    found = the_verdict(as_good, FEDAVG, FEDPER)
    assert (found.federate, found.recommended) == ("no", "local")
    assert to_text(found)[0] == "Do not federate this: training alone is as good."
    alone = yardstick("own-linear", 0.40, 0.40)
    found = the_verdict(LOCAL, FEDAVG, FEDPER, yardsticks=[alone])
    assert found.federate == "no"
    assert to_text(found)[0] == "Do not federate this: the own-linear model is better."
    unclear = entry("local", level(0.51, scale=0.9, luck=6), 0.70)
    assert the_verdict(unclear, FEDAVG, FEDPER).federate in ("unclear", "no")
    assert the_verdict(FEDAVG, FEDPER).federate is None


INFINITE = Scores(math.inf, sum(EXAMPLES), 0.75, 0.75)
GUESSED = Scores(0.9, sum(EXAMPLES), 0.51, 0.51)  # of two classes that everybody has as often


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("untrained", {"chosen_step": 0}),
        ("exploded", {"validation": INFINITE}),
        ("exploded", {"validation": Scores(1.9e28, sum(EXAMPLES), 0.75, 0.75)}),
        ("guess", {"detailed": None, "validation": GUESSED}),
    ],
)
def test_a_method_that_learned_nothing_is_named_and_never_recommended(reason: str, changes: dict[str, Any]) -> None:
    bad = entry("pfedhn", level(0.3), 0.3, **changes)
    beside = the_verdict(LOCAL, FEDAVG, bad)
    assert beside.recommended in ("local", "fedavg")
    assert [(failure.label, failure.reason) for failure in beside.failures] == [("pfedhn", reason)]
    assert any(sentence.startswith("pFedHN learned nothing: ") for sentence in to_text(beside))
    assert not beside.learned_nothing
    alone = the_verdict(bad)
    assert (alone.recommended, alone.learned_nothing) == (None, True)
    advice = "The columns may say little" if reason == "guess" else "Lower the learning rates, or run"
    assert to_text(alone)[-1].startswith(advice)
    assert to_text(alone)[-1].endswith("run `pfedhn tune mine.toml`.")


def test_a_method_that_loses_to_the_base_rate_learned_nothing() -> None:
    guess = yardstick("own-base-rate", 0.40, 0.40)
    found = the_verdict(LOCAL, FEDPER, yardsticks=[guess])
    assert found.learned_nothing
    assert {failure.reason for failure in found.failures} == {"guess"}
    by_accuracy = [entry(name, level(0.5), 0.5, select="metric") for name in ("local", "fedper")]
    assert not the_verdict(*by_accuracy, yardsticks=[guess]).failures, "75 % are right, and a guess has 50"


def test_what_short_runs_show_is_not_held_against_them() -> None:
    bad = entry("pfedhn", level(0.3), 0.3, chosen_step=0)
    short = Curve((0, 20, 40), *[Measures((0.7,) * 3, (0.7,) * 3)] * 2)
    found = the_verdict(Entry("pfedhn", bad.cell, bad.results, dict.fromkeys(bad.results, short), 3))
    assert not found.learned
    assert not found.learned_nothing
    one = entry("pfedhn", level(0.3), 0.3)
    mixed = {0: one.results[0], 1: one.results[1], 2: bad.results[2]}
    assert the_verdict(Entry("pfedhn", bad.cell, mixed, bad.curves, 3)).recommended == "pfedhn"


def test_without_validation_nothing_is_recommended() -> None:
    blind = Scores(math.nan, 0, math.nan, math.nan)
    found = the_verdict(
        *(entry(name, level(0.5), math.nan, detailed=None, validation=blind) for name in ("local", "apfl"))
    )
    assert to_text(found)[0] == "No method can be recommended: no client has validation examples."


def test_what_to_try_next_is_at_most_two_things() -> None:
    late = entry("fedper", level(0.5, seeds=1), 0.5, chosen_step=40)
    assert the_verdict(LOCAL, late).suggestions == (
        "Try next: more steps; the best round is among the last.",
        "Try next: `--seeds 0,1,2`; fewer than three seeds may be luck.",
    )
    assert the_verdict(LOCAL, FEDAVG).suggestions[0].startswith('Try next: "fedper"')
    assert the_verdict(LOCAL, FEDAVG, FEDPER).suggestions == ()


def test_reports_show_it_first() -> None:
    report = Report("made", [LOCAL, FEDAVG, FEDPER])
    first = to_text(the_verdict(*report.entries))[0]
    page, markdown = to_html([report]), to_markdown([report])
    assert page.index(first) < page.index("Results</h2>")
    assert markdown.index(first) < markdown.index("| method |")
    values = json.loads(json.dumps(to_json(the_verdict(*report.entries)), allow_nan=False))
    assert (values["recommended"], values["sentences"][0]) == ("fedper", first)
    assert {part["name"] for part in values["differences"]} == {"local", "fedavg"}


TABLE = """
dataset = "visits.csv"
clients = 4
columns = {client = "site", label = "outcome"}
split = [0.5, 0.25, 0.25]
model = "mlp-4"
steps = 40
cohort_size = 4
batch_size = 8
evaluate_every = 8
seeds = [0]
[methods.fedavg]
local_steps = 5
local_lr = RATE
[methods.local]
local_steps = 5
local_lr = RATE
"""


@pytest.mark.slow
def test_a_run_that_learned_nothing_ends_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random = numpy.random.default_rng(0)
    x = random.normal(size=(400, 2))
    label = numpy.where(x.sum(1) + random.normal(0, 0.3, 400) > 0, "ill", "well")
    rows = [f"{'abcd'[i % 4]},{x[i, 0]:.3f},{x[i, 1]:.3f},{label[i]}" for i in range(400)]
    Path("visits.csv").write_text("\n".join(["site,age,dose,outcome", *rows]))
    for rate, code in (("0.1", 0), ("1e-9", LEARNED_NOTHING)):
        Path("mine.toml").write_text(TABLE.replace("RATE", rate))
        out = f"runs-{code}"
        done = CliRunner().invoke(app, ["run", "mine.toml", "--jobs", "1", "--device", "cpu", "--out", out])
        assert done.exit_code == code, done.output
        assert ("error: no method learned anything on visits, 4 clients; " in done.stderr) == bool(code)
        assert "Verdict" in done.stdout
        quiet = CliRunner().invoke(app, ["run", "--resume", out, "--quiet"])
        assert (quiet.exit_code, quiet.stdout) == (code, "")
        told = CliRunner().invoke(app, ["report", out, "--json"])
        (verdict,) = json.loads(told.stdout)["verdicts"]
        assert told.exit_code == 0
        assert verdict["learned_nothing"] == bool(code)


@pytest.mark.slow
def test_a_named_experiment_that_learns_nothing_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "run demo --only method=local --seeds 0 --jobs 1 --device cpu --set steps=200"
    done = CliRunner().invoke(app, [*words.split(), "--set", "local_lr=1e-9", "--set", "local_steps=1"])
    assert "Local learned nothing: " in done.stdout
    assert done.exit_code == 0, done.output
