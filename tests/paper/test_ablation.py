"""The ablation of the stronger recipe as a ladder, drawn from a few lines of results."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pfedhn.experiments.build import cell_algorithm
from pfedhn.paper.ablation import HIGHER_RATE, LADDER, LEFT_OUT, RECIPES, Recipe, cell, recipes, signature
from pfedhn.paper.studies import STUDIES
from pfedhn.report.results import Runs, read_file, to_line
from pfedhn.report.study import findings
from pfedhn.storage.schema import Curve, Environment, Measures, Result, Scores, SplitScores

STUDY = STUDIES["ablation-cifar10"]
NOT_AVERAGED: Recipe = ("pfedhn-plus", {"averaging": "none"})


def scores(percent: float) -> Scores:
    return Scores(0.5, 1_000, percent / 100, percent / 100, (percent * 10,), (1_000,))


def runs_of(accuracies: dict[int, tuple[Recipe, float, float]], seeds: tuple[int, ...] = (0, 1, 2)) -> Runs:
    """Lines of results: by number a recipe, its accuracy as served and what own steps add; a seed adds its number."""
    experiment = STUDY.experiment()
    results: dict[str, Result] = {}
    for recipe, served, added in accuracies.values():
        wanted = cell("cifar10", recipe)
        for run in experiment.runs(seeds):
            if run.cell == wanted:
                before, after = scores(served + run.seed), scores(served + run.seed + added)
                results[run.name] = Result(
                    run.name,
                    experiment.name,
                    asdict(run.cell),
                    asdict(cell_algorithm(run.cell)),  # type: ignore[call-overload]
                    run.seed,
                    chosen_step=0,
                    steps=run.cell.steps,
                    rounds=1,
                    validation=after,
                    test=after,
                    bytes_down=1,
                    bytes_up=1,
                    seconds=1.0,
                    unused_examples={},
                    partition_sha256=str(run.seed),
                    command="pfedhn run ablation-cifar10",
                    environment=Environment("cuda: Abacus", 1),
                    unadapted=SplitScores(before, before),
                )
    measures = Measures((0.5,), (0.5,))
    curves = {name: Curve((0,), measures, measures) for name in results}
    return Runs(experiment, experiment.runs(seeds), results, curves)


WHOLE = {
    number: (recipe, 85.0 + number, 0.5) for number, recipe in enumerate(LADDER.values())
} | {
    10: (NOT_AVERAGED, 86.5, 2.0),
    11: (("pfedhn-plus", {"embedding_scale": 1.0}), 88.0, 0.25),
    12: (("fedavg", {}), 60.0, 28.0),
    13: (("fedavg", {"averaging": 0.99}), 65.0, 24.0),
    14: (("ditto", {}), 89.0, 0.0),
}  # fmt: skip


def test_every_recipe_is_run_once_and_can_be_told_from_the_others() -> None:
    cells = STUDY.experiment().cells
    assert len(cells) == len(recipes()) == 25
    found = [signature(one) for one in cells]
    assert all(found.count(mine) == 1 for mine in found)
    shown = [*LADDER.values(), *LEFT_OUT.values(), *HIGHER_RATE.values()]
    shown += [recipe for pair in RECIPES.values() for recipe in pair if recipe is not None]
    assert all(recipe in shown for recipe in recipes())


def test_the_ladder_shows_what_each_part_adds(tmp_path: Path) -> None:
    runs = runs_of(WHOLE)
    lines = [{"kind": "experiment", **asdict(runs.experiment)}]
    lines += [to_line(result, runs.curves[name]) for name, result in runs.results.items()]
    (tmp_path / "ablation-cifar10.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finding,) = findings(read_file(tmp_path / "ablation-cifar10.jsonl"))
    (ladder, caption), (chances, _) = finding.tables
    assert [line[0] for line in ladder[1:]] == [
        *LADDER,
        *("without the average", "embeddings not small", "without decay"),
    ]
    assert ladder[1] == ["the recipe of 2021", "86.00 ± 1.00", "86.50 ± 1.00", "", "", "", "3"]
    assert ladder[2][3:] == ["the row above", "+1.00", "+1.00 to +1.00", "3"]
    assert ladder[6] == [
        "without the average",
        "87.50 ± 1.00",
        "89.50 ± 1.00",
        "pFedHN+",
        "-2.50",
        "-2.50 to -2.50",
        "3",
    ]
    assert "(3 seeds)" in caption
    by_method = {line[0]: line[1:] for line in chances[1:]}
    assert by_method["pFedHN+"] == ["87.50 ± 1.00", "90.00 ± 1.00", "89.50 ± 1.00", "90.50 ± 1.00", "3"]
    assert by_method["FedAvg"] == ["61.00 ± 1.00", "66.00 ± 1.00", "89.00 ± 1.00", "90.00 ± 1.00", "3"]
    assert by_method["Ditto"] == ["90.00 ± 1.00", "", "90.00 ± 1.00", "", "3"]
    assert "pFedMe" not in by_method
    assert "From the recipe of 2021 (86.0 %) to pFedHN+ (90.0 %)" in finding.sentence
    assert '"without the average" changes most (-2.5)' in finding.sentence
    assert "add +0.5 to the recipe of 2021, +0.5 to pFedHN+, +28.0 to FedAvg" in finding.sentence
    upper, lower = finding.figures[""]().axes
    assert [label.get_text() for label in upper.get_yticklabels()] == list(LADDER)
    served, adapted = (line for line in upper.lines if line.get_marker() in ("o", "D"))
    assert list(served.get_xdata()) == pytest.approx([86, 87, 88, 89, 90])
    assert list(adapted.get_xdata()) == pytest.approx([86.5, 87.5, 88.5, 89.5, 90.5])
    assert len(lower.get_yticklabels()) == 3


def test_what_is_not_run_yet_is_not_told() -> None:
    (finding,) = findings([runs_of({0: WHOLE[0]}, seeds=(0,))])
    assert finding.sentence == "50 steps of each client's own add +0.5 to the recipe of 2021."
    assert len(finding.tables[0][0]) == 2
    assert len(finding.figures[""]().axes) == 1
    two = runs_of({0: WHOLE[0], 1: WHOLE[1]}, seeds=(0, 1))
    (finding,) = findings([two])
    assert finding.tables[0][0][2][5] == "too few seeds (2)"
    (finding,) = findings([replace(runs_of({14: WHOLE[14]}), curves={})])
    assert not finding.figures
    assert [line[0] for line in finding.tables[0][0]] == ["method", "Ditto"]
