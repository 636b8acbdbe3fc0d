"""The page of a report in a real browser."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from report.test_html import entry

from pfedhn.report.entries import Entry, Report
from pfedhn.report.page import to_html
from pfedhn.storage.schema import Clients, Curve, Measures, Scores

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here to open the page in (on Debian: apt-get install chromium)"
)
CITIES = ("Berlin", "Lyon", "Rome", "Oslo", "Madrid", "Porto")


def named(made: Entry, is_mapped: bool = False) -> Entry:
    """Clients with names; each holds two of six classes, and lies on a line in the map."""
    number = made.cell.clients
    who = Clients(
        CITIES if number == len(CITIES) else None,
        ("ant", "bee", "cat", "dog", "elk", "fox"),
        tuple({str(client % 6): 10 + client, str((client + 1) % 6): 5} for client in range(number)),
        tuple((float(client), float(client % 3)) for client in range(number)) if is_mapped else None,
        0.8,
    )
    return replace(made, results={seed: replace(result, clients=who) for seed, result in made.results.items()})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    entries = [named(entry("pfedhn", 6, num_seeds=2), is_mapped=True), named(entry("local", 6, num_seeds=2))]
    (folder / "report.html").write_text(to_html([Report("made", entries)]))
    return folder / "report.html"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def browser(window: Browser, page: Path) -> Browser:
    window.open(page)
    return window


# Where the middle of an element is in the window, once it is in sight.
MIDDLE = """(selector => {
  const found = document.querySelector(selector);
  found.scrollIntoView({block: "center"});
  const box = found.getBoundingClientRect();
  return {x: box.x + box.width / 2, y: box.y + box.height / 2, left: box.x, top: box.y, width: box.width};
})"""
# How many different colors a canvas has: one if nothing was drawn.
COLORS = """(selector => {
  const canvas = document.querySelector(selector);
  const bytes = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(bytes).size;
})"""
NAMES = "[...document.querySelectorAll('.clients tbody tr')].map(row => row.cells[0].textContent)"
TIPS = "[...document.querySelectorAll('.tip')].filter(tip => tip.style.display === 'block').map(tip => tip.textContent)"


def middle(browser: Browser, selector: str) -> dict[str, float]:
    found: dict[str, float] = browser.evaluate(f"{MIDDLE}({selector!r})")
    return found


def test_everything_is_drawn_and_nothing_leaves_the_page(browser: Browser, page: Path) -> None:
    assert browser.evaluate("document.querySelectorAll('.curves path.line').length") == 2
    assert browser.evaluate("document.querySelectorAll('.curves path.band').length") == 2
    for canvas in (".dots canvas", ".classes canvas", ".map canvas"):
        assert browser.evaluate(f"{COLORS}({canvas!r})") > 10, canvas
    assert browser.complaints == []
    assert [address for address in browser.requests if not address.startswith("data:")] == [page.resolve().as_uri()]


def test_tables_are_sorted_by_a_click(browser: Browser) -> None:
    # Of 6 clients, each has one example more right than the one before: the worst is first, by name.
    assert browser.evaluate(NAMES) == list(CITIES)
    place = middle(browser, ".clients thead th:nth-child(2)")
    browser.click(place["x"], place["y"])
    assert browser.evaluate(NAMES) == list(reversed(CITIES))
    place = middle(browser, ".clients thead th:first-child")
    browser.click(place["x"], place["y"])
    assert browser.evaluate(NAMES) == sorted(CITIES)
    cells = "[...document.querySelectorAll('table.sortable tbody th')].slice(0, 2).map(cell => cell.textContent)"
    assert browser.evaluate(cells) == ["pFedHN", "Local"]
    place = middle(browser, "table.sortable thead th:first-child")
    browser.click(place["x"], place["y"])
    assert browser.evaluate(cells) == ["Local", "pFedHN"]


def test_a_client_is_found_by_its_name_or_a_class(browser: Browser) -> None:
    find = "(() => { const box = document.querySelector('input[type=search]'); box.value = %r; "
    find += "box.dispatchEvent(new Event('input')); return %s })()"
    assert browser.evaluate(find % ("osl", NAMES)) == ["Oslo"]
    assert browser.evaluate(find % ("ant", NAMES)) == ["Berlin", "Porto"]  # the two that hold ants


def test_the_mouse_is_told_what_it_points_at(browser: Browser) -> None:
    place = middle(browser, ".curves svg")
    browser.move_to(place["x"], place["y"])
    (text,) = browser.evaluate(TIPS)
    assert text.startswith("step ")
    assert "pFedHN  25.0" in text  # on average 2.5 of 10
    browser.move_to(1, 1)
    assert browser.evaluate(TIPS) == []

    place = middle(browser, ".classes canvas")
    browser.move_to(place["left"] + place["width"] - 10, place["y"])
    (text,) = browser.evaluate(TIPS)
    assert text.startswith("Porto\n")
    assert "15 training, 10 test examples" not in text  # 10 + 5 of one class, 5 of another
    assert "20 training, 10 test examples\nfox 15, ant 5" in text


def test_a_client_on_the_map_says_who_it_is_and_is_marked_everywhere(browser: Browser) -> None:
    middle(browser, ".map canvas")
    find = """(() => {
      const canvas = document.querySelector(".map canvas"), box = canvas.getBoundingClientRect();
      for (let y = 10; y < box.height; y += 6) for (let x = 10; x < box.width; x += 6) {
        const event = new PointerEvent("pointermove", {clientX: box.x + x, clientY: box.y + y});
        canvas.dispatchEvent(event);
        if (canvas.style.cursor === "pointer") return {x: box.x + x, y: box.y + y + 6};  // well inside
      }
    })()"""
    place = browser.evaluate(find)
    browser.move_to(place["x"], place["y"])
    (text,) = browser.evaluate(TIPS)
    assert text.split("\n")[0] in CITIES
    assert "pFedHN" in text
    browser.click(place["x"], place["y"])
    marked = "[...document.querySelectorAll('.clients tr.marked th')].map(cell => cell.textContent)"
    assert browser.evaluate(marked) == [text.split("\n")[0]]


def put(browser: Browser, folder: Path, *entries: Entry) -> None:
    (folder / "report.html").write_text(to_html([Report("made", list(entries))]))
    browser.open(folder / "report.html")


def learning(made: Entry, *means: float, is_sent: bool = True) -> Entry:
    """With this curve; the result is what it was."""
    measures = Measures(means, means)
    results = {
        seed: replace(result, bytes_up=100 * is_sent, bytes_down=100 * is_sent) for seed, result in made.results.items()
    }
    curve = Curve(tuple(range(len(means))), measures, measures)
    return replace(made, curves=dict.fromkeys(made.curves, curve), results=results)


def regression(made: Entry, *losses: float) -> Entry:
    """Each client's squared error is a thousand more than that of the one before."""
    number = made.cell.clients
    sums = tuple(10 * (1_000.0 * client + 600.0) for client in range(number))
    scores = Scores(sum(sums) / (10 * number), 10 * number, clients=sums, client_examples=(10,) * number)
    measures = Measures(loss=losses)
    curve = Curve(tuple(range(len(losses))), measures, measures)
    results = {seed: replace(result, test=scores, validation=scores) for seed, result in made.results.items()}
    return replace(made, curves=dict.fromkeys(made.curves, curve), results=results, is_squared=True)


AGAINST = """(value => {
  const select = document.querySelectorAll("select")[1];
  select.value = value;
  select.dispatchEvent(new Event("change"));
  const named = [...document.querySelectorAll(".curves .named")].map(text => text.textContent);
  return [document.querySelectorAll(".curves .thin").length, named];
})"""


def test_a_method_that_sends_nothing_stands_at_its_result(browser: Browser, tmp_path: Path) -> None:
    local = learning(entry("local", 6), 0.1, 0.3, 0.2, is_sent=False)  # whose result is 25 %
    put(browser, tmp_path, learning(entry("pfedhn", 6), 0.1, 0.4, 0.5), local)
    assert browser.evaluate(f"{AGAINST}('steps')") == [0, []]  # its own curve is there, to the end
    assert browser.evaluate(f"{AGAINST}('bytes')") == [1, ["Local 25.0"]]
    put(browser, tmp_path, learning(entry("pfedhn", 6), 0.1, 0.4, 0.5, 0.6, 0.6), local)
    assert browser.evaluate(f"{AGAINST}('steps')") == [1, ["Local 25.0"]]


def test_one_seed_marks_no_best_client_and_a_whole_map_has_no_remark(browser: Browser, tmp_path: Path) -> None:
    best = "[document.querySelectorAll('.clients .best').length, document.body.innerText.includes('Green: ')]"
    for num_seeds in (1, 2):
        better, worse = entry("pfedhn", 6, num_seeds), entry("local", 6, num_seeds)
        none_right = replace(worse.results[0].test, clients=(0,) * 6, client_mean=0.0, sample_mean=0.0)
        results = {seed: replace(result, test=none_right) for seed, result in worse.results.items()}
        put(browser, tmp_path, better, replace(worse, results=results))
        assert browser.evaluate(best) == ([5, True] if num_seeds > 1 else [0, False])
    says = "document.body.innerText.includes('of their variance')"
    mapped = named(entry("pfedhn", 6), is_mapped=True)
    who = mapped.results[0].clients
    assert who is not None
    for variance in (0.8, 1.0):
        shown = replace(mapped.results[0], clients=replace(who, map_variance=variance))
        put(browser, tmp_path, replace(mapped, results={0: shown}))
        assert browser.evaluate(says) is (variance < 1)


def test_a_scale_that_cuts_curves_off_says_so(browser: Browser, tmp_path: Path) -> None:
    hint = "document.querySelector('.hint').textContent"
    methods = ("pfedhn", "fedper", "fedavg")
    put(browser, tmp_path, *(learning(entry(m, 6), 0.1, 0.9, 0.88 - at / 100) for at, m in enumerate(methods)))
    assert browser.evaluate(hint).startswith("The scale follows the competing methods")
    browser.evaluate("document.querySelector('input[type=checkbox]').click()")
    assert browser.evaluate(hint) == ""


def test_a_regression_is_read_at_a_glance(browser: Browser, tmp_path: Path) -> None:
    stopped = replace(regression(entry("local", 6), 2e6), results={})
    put(browser, tmp_path, regression(entry("pfedhn", 6), 2e6, 4e5, 2e4, 1.2e4, 1.0e4), stopped)
    boxes = "[...document.querySelectorAll('label')].filter(label => !label.hidden)"
    boxes += ".map(label => [label.textContent.trim(), label.firstChild.checked])"
    assert browser.evaluate(boxes) == [["logarithmic scale", True]]
    height = "(() => { const box = document.querySelector('.curves path.line').getBBox(); return box.height })()"
    numbers = "document.querySelector('.curves path.line').getAttribute('d').split(/[ML]/).slice(1)"
    heights = [float(point.split()[1]) for point in browser.evaluate(numbers)]
    assert (heights[-1] - heights[2]) > 0.1 * browser.evaluate(height)  # the end is not flat
    assert browser.evaluate("document.querySelectorAll('.curves circle').length") == 1  # of a curve of one point
    scores = "[...document.querySelectorAll('.clients tbody td:nth-child(2)')].map(cell => cell.textContent)"
    assert browser.evaluate(scores) == ["5600", "4600", "3600", "2600", "1600", "600"]
    edge = """(() => {
      const canvas = document.querySelector(".dots canvas"), width = 4;
      const data = canvas.getContext("2d").getImageData(canvas.width - width, 0, width, canvas.height).data;
      return data.every(byte => byte === 0);
    })()"""
    assert browser.evaluate(edge)  # the mean at the right is whole


def test_who_holds_what_fills_the_page_and_has_a_scale(browser: Browser) -> None:
    assert middle(browser, ".classes canvas")["width"] > 600  # of six clients
    scale = "document.querySelector('.classes').previousElementSibling.textContent"
    assert browser.evaluate(scale) == "1 15 training examples"


CHOICES = """[...document.querySelectorAll("select")].map(select => {
  for (const option of [...select.options]) { select.value = option.value; select.dispatchEvent(new Event("change")); }
  return select.getAttribute("aria-label");
})"""


def test_every_choice_can_be_made(browser: Browser) -> None:
    made = browser.evaluate(CHOICES)
    assert made == ["what is drawn", "against what", "seed", "order of clients", "method", "colored by"]
    assert browser.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("is_dark", [False, True])
def test_a_phone_shows_it_all_without_scrolling_sideways(page: Path, tmp_path: Path, is_dark: bool) -> None:
    with Browser(tmp_path, width=390, is_dark=is_dark) as phone:
        phone.open(page)
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390
        ground = phone.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is not is_dark
        fades = "document.querySelector('.clients').classList.contains('more')"
        assert phone.evaluate(fades)  # there are more columns at the right
        phone.evaluate("document.querySelector('.clients').scrollLeft = 1e6")
        phone.until(lambda: not phone.evaluate(fades))
        frames = "[...document.querySelectorAll('.table')]"
        cut = f"{frames}.filter(frame => frame.scrollWidth > frame.clientWidth + 1 && !frame.matches('.more')).length"
        assert phone.evaluate(cut) == 0
        put(phone, tmp_path, entry("pfedhn", 6), entry("local", 6))
        assert phone.evaluate("document.querySelectorAll('.table.more').length") == 0  # one seed's fit
        assert phone.complaints == []


@pytest.mark.slow
def test_a_thousand_clients_and_ten_thousand_points(tmp_path: Path) -> None:
    methods = ("pfedhn", "local", "fedavg", "fedper", "pfedme", "lg-fedavg", "per-fedavg", "ditto", "fedrep", "fedbabu")
    entries: list[Any] = [named(entry(m, 1_000, num_evaluations=1_000), is_mapped=m == "pfedhn") for m in methods]
    (tmp_path / "large.html").write_text(to_html([Report("large", entries)]))
    with Browser(tmp_path / "home") as browser:
        browser.open(tmp_path / "large.html")
        assert browser.evaluate("document.querySelectorAll('.curves path.line').length") == len(methods)
        rows = "document.querySelectorAll('.clients tbody tr').length"
        assert browser.evaluate(rows) == 100  # more come as one scrolls
        browser.evaluate("document.querySelector('.clients').scrollTop = 1e6")
        browser.until(lambda: browser.evaluate(rows) == 200)
        assert browser.complaints == []
