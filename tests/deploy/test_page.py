"""The page of a server: what it shows, to whom, and that it costs the server nothing."""

import json
import random
import re
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, Browser
from deploy.boards import Clock, board, party, results, status
from deploy.test_serve import Served, site
from support import free_port

from pfedhn.deploy import board as boards
from pfedhn.deploy import page as pages
from pfedhn.deploy.board import Board, Thinned
from pfedhn.deploy.certificates import AUTHORITY, make_certificates
from pfedhn.deploy.page import TOKEN_FILE, OpenPage, Place, read_place
from pfedhn.deploy.prometheus import to_text
from pfedhn.deploy.serve import Service
from pfedhn.deploy.site import Site
from pfedhn.errors import UserError

__all__ = ["site"]
HOSTILE = '<img src=x onerror=alert(1)>"\\\n\u202e'
FEW = {"lyon": party(), "nice": party(refused={"norm": 3}), "paris": party(is_present=False), "metz": party()}

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here to open the page in (on Debian: apt-get install chromium)"
)


def ask(page: OpenPage, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    """The answer to a request; without a Host header it is that of a browser on this machine."""
    host, port = page.listener.getsockname()[:2]
    context = False if page.address.startswith("http:") else ssl.create_default_context(cafile=page.folder / AUTHORITY)
    if context:
        context.check_hostname = False
    scheme = page.address.partition(":")[0]
    return httpx.request(
        method, f"{scheme}://{host}:{port}{path}", headers=headers, verify=context, timeout=60, trust_env=False
    )


@pytest.fixture
def page(tmp_path: Path) -> Iterator[OpenPage]:
    with OpenPage(board(FEW)[0], Place(port=0, has_metrics=True), tmp_path, "server.example.org:9443") as found:
        yield found


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[OpenPage]:
    """The page of a server that is not on loopback."""
    make_certificates(tmp_path, ["server.example.org"])
    place = Place("0.0.0.0", free_port(), is_chosen=True, has_metrics=True)
    with OpenPage(board(FEW)[0], place, tmp_path, "server.example.org:9443") as found:
        yield found


# What is shown.


def test_a_curve_keeps_its_shape_and_its_newest_point_however_long_the_run_is() -> None:
    curve = Thinned[int]()
    for number in range(100_000):
        curve.add(number)
        assert curve.points[-1] == number
        assert len(curve.points) <= boards.MAX_POINTS
    assert curve.points[0] == 0
    steps = {later - earlier for earlier, later in zip(curve.points[:-2], curve.points[1:-1], strict=True)}
    assert steps == {curve.stride}
    assert len(curve.points) > boards.MAX_POINTS / 2 - 2


def test_a_long_run_with_many_parties_stays_small() -> None:
    names = [f"clinic-{number:04d}" for number in range(1_000)]
    made, _ = board({name: party() for name in names}, rounds=60)
    for number in range(2_000):
        made.hear({"event": "gone", "party": names[number % 1_000], "why": "x" * 10_000})
    state, curves = json.dumps(made.state()), json.dumps(made.curves())
    assert len(state) < 120_000
    assert len(curves) < 120_000
    assert len(made.state()["parties"]) == boards.MAX_ROWS
    assert len(made.events) == boards.MAX_EVENTS


def test_of_many_parties_those_that_need_attention_are_listed() -> None:
    names = [f"clinic-{number:04d}" for number in range(500)]
    made, _ = board({name: party(is_aside=name == names[-1]) for name in names}, rounds=2)
    assert names[-1] in [one["name"] for one in made.state()["parties"]]
    assert made.state()["num_parties"] == 500


def test_a_party_that_was_removed_is_not_shown_as_away() -> None:
    made = Board()
    made.publish(status({"lyon": party(), "nice": party(is_present=False)}, 1), removed=["nice"])
    assert [one["name"] for one in made.state()["parties"]] == ["lyon"]
    assert "nice" not in to_text(made)


def test_rounds_do_not_push_out_what_an_operator_looks_for() -> None:
    made = Board()
    made.hear({"event": "set aside"})
    for _ in range(1_000):
        made.hear({"event": "round"})
    for _ in range(1_000):
        made.hear({"event": "refused"})
    assert [(event.kind, event.count) for event in made.events] == [("set aside", 1), ("round", 1), ("refused", 1_000)]


def test_a_server_brought_back_from_a_copy_shows_what_the_copy_has() -> None:
    made, generator = Board(clock=Clock()), random.Random(0)
    history = [{"round": number, "results": results(["lyon"], number, generator)} for number in range(9)]
    made.publish(status({"lyon": party()}, 9), history)
    made.publish(status({"lyon": party()}, 4), history[:4])
    assert made.curves()["rounds"] == [0, 1, 2, 3]


def test_parties_without_scores_have_no_points() -> None:
    made = Board()
    scores = {"validation": [0.0, 0.0, 0], "test": [0.0, 0.0, 0]}
    made.publish(status({"lyon": party()}, 1), [{"round": 1, "results": {"lyon": scores}}])
    assert made.curves()["splits"]["test"] == {
        "mean": [None],
        "low": [None],
        "high": [None],
        "parties": {"lyon": [None]},
    }


def test_whoever_reads_sees_one_state_while_it_changes() -> None:
    """Readers take no lock: each value that is published is whole."""
    made, clock = board(FEW, rounds=2)
    stop, seen = threading.Event(), list[Any]()

    def read() -> None:
        while not stop.is_set():
            curves = made.curves()
            lengths = {len(curves["rounds"]), *(len(one["mean"]) for one in curves["splits"].values())}
            seen.append((len(lengths), made.state()["status"]["round"], to_text(made)))

    reader = threading.Thread(target=read)
    reader.start()
    generator, history = random.Random(0), list[Any]()
    for number in range(200):
        history.append({"round": number, "results": results(list(FEW), number, generator)})
        made.hear({"event": "refused"})
        clock.now += 2.0
        made.publish(status(FEW, number), history)
    stop.set()
    reader.join()
    assert {lengths for lengths, _, _ in seen} == {1}


def test_publishing_takes_no_time_that_a_round_would_notice() -> None:
    made, clock = board({f"clinic-{number}": party() for number in range(50)}, rounds=400)
    history = [{"round": number, "results": {}} for number in range(made.shown.num_evaluations)]
    table, began = made.shown.status, time.perf_counter()
    for _ in range(1_000):
        clock.now += 1.0
        made.publish(table, history)
    assert (time.perf_counter() - began) / 1_000 < 0.002  # seconds; about 10 microseconds on an idle machine


# Who may see it.


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:8000", "[::1]:9480", "LOCALHOST"])
def test_this_machine_may_see_it(page: OpenPage, host: str) -> None:
    assert ask(page, "/state", Host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7", "", "localhost@evil", "[", "a:b"],
)
def test_a_name_of_somebody_else_that_leads_here_is_refused(page: OpenPage, host: str) -> None:
    """As in DNS rebinding: a page of a stranger asks its own name, which by then is this machine's address."""
    answer = ask(page, "/state", Host=host)
    assert answer.status_code == 421
    assert "lyon" not in answer.text


def test_no_other_page_may_load_frame_or_read_it(page: OpenPage) -> None:
    for path in ("/", "/state", "/page.js", "/nothing", "/metrics"):
        answer = ask(page, path, Origin="https://evil.example")
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_changes_nothing(page: OpenPage, method: str) -> None:
    assert ask(page, "/state", method).status_code == 405


def test_elsewhere_it_is_encrypted_and_asks_for_a_token(guarded: OpenPage) -> None:
    token = (guarded.folder / TOKEN_FILE).read_text()
    assert (guarded.folder / TOKEN_FILE).stat().st_mode & 0o077 == 0
    assert guarded.address.startswith("https://server.example.org:")
    for path in ("/", "/state", "/curves", "/metrics", "/page.js", "/state?token=wrong", "/state?token="):
        assert ask(guarded, path).status_code == 401, path
    assert ask(guarded, "/state", Cookie="pfedhn-page=x", Authorization="Bearer wrong").status_code == 401
    assert ask(guarded, "/state", Host="evil.example", Authorization=f"Bearer {token}").status_code == 421
    assert ask(guarded, "/metrics", Authorization=f"Bearer {token}").status_code == 200
    for host in ("server.example.org", "10.0.0.7:9480"):  # no name of somebody else's can be an address
        assert ask(guarded, "/state", Host=host, Authorization=f"Bearer {token}").status_code == 200
    entered = ask(guarded, f"/?token={token}")
    assert (entered.status_code, entered.headers["Location"]) == (303, "/")
    cookie = entered.headers["Set-Cookie"]
    assert {"HttpOnly", "Secure", "SameSite=lax"} <= set(re.split("; *", cookie))
    assert ask(guarded, "/state", Cookie=cookie.partition(";")[0]).status_code == 200


def test_the_token_outlasts_a_restart(tmp_path: Path) -> None:
    assert pages.load_or_make_token(tmp_path) == pages.load_or_make_token(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("127.0.0.1", 9480, True)),
        ("8080", ("127.0.0.1", 8080, True)),
        ("localhost:8080", ("localhost", 8080, True)),
        ("[::1]:80", ("::1", 80, True)),
        ("0.0.0.0:80", ("0.0.0.0", 80, False)),
        ("server.example.org:80", ("server.example.org", 80, False)),
    ],
)
def test_where_the_page_is(text: str | None, expected: tuple[str, int, bool]) -> None:
    place = read_place(text)
    assert (place.host, place.port, place.is_loopback) == expected


@pytest.mark.parametrize("text", ["", "x", "host:", "host:x", "0", "70000", "1:2:x"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="must be PORT or HOST:PORT"):
        read_place(text)


def test_a_port_that_is_taken_is_replaced_unless_it_was_chosen(page: OpenPage, tmp_path: Path) -> None:
    taken = page.listener.getsockname()[1]
    with OpenPage(Board(), Place(port=taken), tmp_path, "") as other:
        assert other.listener.getsockname()[1] != taken
    with pytest.raises(UserError, match="give another --page or --no-page"):
        OpenPage(Board(), Place(port=taken, is_chosen=True), tmp_path, "")


# Metrics.

LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (NaN|[+-]Inf|[-+0-9.e]+)')


def metrics(text: str) -> dict[str, float]:
    """The values of an answer to Prometheus; what does not fit the format is an error."""
    found, types = {}, dict[str, str]()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types
            types[name] = kind
            continue
        match = LINE.fullmatch(line)
        assert match, line
        name, labels, value = match.groups()
        assert name.startswith("pfedhn_")
        assert types[name] in ("counter", "gauge")
        assert (types[name] == "counter") == name.endswith("_total")
        key = name if labels is None else f"{name}{{{labels}}}"
        assert key not in found
        found[key] = float(value)
    return found


def test_prometheus_reads_the_metrics(page: OpenPage) -> None:
    answer = ask(page, "/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = metrics(answer.text)
    assert found["pfedhn_rounds_total"] == 120
    assert found["pfedhn_updates_accepted_total"] == 480
    assert found["pfedhn_parties_connected"] == 3
    assert found['pfedhn_party_connected{party="paris"}'] == 0
    assert found['pfedhn_answers_refused_total{party="nice",reason="norm"}'] == 3
    assert found['pfedhn_messages_bytes_total{direction="up"}'] == 250_000 * 120
    assert found["pfedhn_seconds_since_update"] == pytest.approx(12.0)
    assert 0.5 < found['pfedhn_party_accuracy{party="lyon",split="test"}'] <= 1


def test_names_cannot_break_out_of_labels() -> None:
    made, _ = board({HOSTILE: party(refused={HOSTILE: 1})}, rounds=2)
    made.about = {"name": HOSTILE}
    found = metrics(to_text(made))
    assert sum(key.startswith("pfedhn_answers_refused_total") for key in found) == 1


def test_a_server_that_has_just_started_has_metrics() -> None:
    assert metrics(to_text(Board({"name": "clinics"})))["pfedhn_parties_known"] == 0


def test_without_metrics_there_are_none(tmp_path: Path) -> None:
    with OpenPage(Board(), Place(port=0), tmp_path, "") as page:
        assert ask(page, "/metrics").status_code == 404


# With a server.


def test_a_server_shows_itself(site: Site) -> None:
    with Served(site, Place(port=0, has_metrics=True)) as served:
        (said,) = [event for event in served.said if event["event"] == "page"]
        state = httpx.get(f"{said['address']}state", trust_env=False).json()
        assert state["about"] == {
            "name": "state", "run": site.run, "address": site.address, "method": "pfedhn", "network": "mlp-4",
            "version": state["about"]["version"],
        }  # fmt: skip
        assert (state["status"]["round"], state["num_parties"]) == (0, 0)
        assert [event["kind"] for event in state["events"]] == ["running", "serving", "page"]
        assert state["counts"] == {"strangers": 0, "connections_refused": 0}
    with pytest.raises(httpx.ConnectError):
        httpx.get(said["address"], trust_env=False)


def test_a_port_of_the_page_that_is_taken_ends_the_start(site: Site, page: OpenPage) -> None:
    place = Place(port=page.listener.getsockname()[1], is_chosen=True)
    with pytest.raises(UserError, match="give another --page"):
        Service(site, True, lambda event: None, place).run(threading.Event())
    with Served(site) as served:  # its own port is free again
        assert served.ask("/health")["is_up"]


# In a browser.


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "home") as found:
        yield found


ROWS = "[...document.querySelectorAll('#parties tbody tr')].map(row => row.cells[0].textContent)"
EVENTS = "[...document.querySelectorAll('#events span')].map(span => span.textContent)"


def opened(browser: Browser, page: OpenPage) -> None:
    browser.open(page.address)
    browser.until(lambda: bool(browser.evaluate(ROWS)))


@needs_browser
def test_everything_is_shown_and_nobody_else_is_asked(page: OpenPage, browser: Browser) -> None:
    opened(browser, page)
    assert browser.evaluate(ROWS) == sorted(FEW)
    assert browser.evaluate("document.querySelectorAll('#scores path.line').length") == len(FEW) + 1
    assert browser.evaluate("document.querySelectorAll('#traffic path.line').length") == 2
    assert "norm" in browser.evaluate("document.getElementById('reasons').textContent")
    assert browser.evaluate("document.getElementById('standing').textContent") == (
        "Training: round 120 of 300; 1 party is away."
    )
    assert browser.complaints == []
    assert {address.removeprefix(page.address) for address in browser.requests} == {
        "", "page.css", "page.js", "state", "curves",
    }  # fmt: skip


@needs_browser
def test_it_follows_the_run_and_survives_its_server(browser: Browser, tmp_path: Path) -> None:
    made, clock = board(FEW)
    place = Place(port=free_port(), is_chosen=True)
    with OpenPage(made, place, tmp_path, "") as page:
        opened(browser, page)
        clock.now += 5.0
        made.hear({"event": "gone", "party": "lyon"})
        made.publish(status(FEW, 121, wire_down=1), [{"round": number, "results": {}} for number in range(60)])
        browser.until(lambda: "round 121 of 300" in browser.evaluate("document.body.textContent"))
        assert browser.evaluate(EVENTS)[0] == "gone: lyon"
        nodes = browser.evaluate("document.querySelectorAll('*').length")
        time.sleep(7)  # two more answers
        assert browser.evaluate("document.querySelectorAll('*').length") == nodes
    is_hidden = "document.getElementById('away').hidden"
    browser.until(lambda: not browser.evaluate(is_hidden))
    assert browser.evaluate(ROWS) == sorted(FEW)  # as it was
    with OpenPage(made, place, tmp_path, ""):
        browser.until(lambda: browser.evaluate(is_hidden))


@needs_browser
def test_words_of_others_stay_words(browser: Browser, tmp_path: Path) -> None:
    made, _ = board({HOSTILE: party(architecture=HOSTILE, refused={HOSTILE: 2})}, rounds=4)
    made.about = dict.fromkeys(("name", "run", "address", "method", "network", "version"), HOSTILE)
    made.hear({"event": "refused", "sentence": HOSTILE})
    with OpenPage(made, Place(port=0), tmp_path, "") as page:
        opened(browser, page)
        assert browser.evaluate("document.images.length + document.scripts.length") == 1
        assert "onerror" in browser.evaluate("document.getElementById('parties').textContent")
        assert "\u202e" not in browser.evaluate("document.getElementById('events').textContent")
        assert browser.complaints == []


@needs_browser
def test_a_party_is_found_among_many(browser: Browser, tmp_path: Path) -> None:
    names = [f"clinic-{number:03d}" for number in range(60)]
    with OpenPage(board({name: party() for name in names})[0], Place(port=0), tmp_path, "") as page:
        opened(browser, page)
        colors = "document.querySelectorAll('#scores path.tint-%s').length"
        assert browser.evaluate(colors % "context") == boards.MAX_LINES
        assert browser.evaluate("document.querySelectorAll('#scores .band').length") == 1
        browser.evaluate("document.querySelector('#parties tbody tr').click()")
        assert browser.evaluate(colors % "second") == 1
        label = "[...document.querySelectorAll('#scores .named')].map(text => text.textContent)"
        assert sorted(browser.evaluate(label)) == ["all", names[0]]


@needs_browser
def test_the_models_at_every_site_are_a_table(browser: Browser, tmp_path: Path) -> None:
    made, _ = board(FEW, rounds=4)
    parts = {right: {"validation": [1.0, right, 100], "test": [1.0, right, 100]} for right in (40.0, 90.0)}
    made.across = {
        "round": 3,
        "scores": {"lyon": {"lyon": parts[40.0], HOSTILE: parts[90.0]}, "nice": {"nice": parts[40.0]}},
    }
    with OpenPage(made, Place(port=0), tmp_path, "") as page:
        opened(browser, page)
        cells = "[...document.querySelectorAll('#matrix tbody td')].map(cell => [cell.textContent, cell.className])"
        first, second = [["90.0", "best"], ["40.0", "own"], ["", ""]], [["", ""], ["", ""], ["40.0", "best own"]]
        assert browser.evaluate(cells) == [*first, *second]
        assert "better served" in browser.evaluate("document.getElementById('findings').textContent")
        assert browser.evaluate("document.images.length") == 0


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("is_loss", [False, True])
def test_a_phone_shows_it_all_without_scrolling_sideways(tmp_path: Path, is_dark: bool, is_loss: bool) -> None:
    with (
        OpenPage(board(FEW, is_loss=is_loss)[0], Place(port=0), tmp_path, "") as page,
        Browser(tmp_path / "home", width=390, is_dark=is_dark) as phone,
    ):
        opened(phone, page)
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390
        ground = phone.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is not is_dark
        assert phone.complaints == []


@needs_browser
@pytest.mark.slow
def test_a_browser_enters_with_the_token(guarded: OpenPage, browser: Browser) -> None:
    browser.ask("Security.setIgnoreCertificateErrors", ignore=True)  # as whoever has not imported ca.crt clicks
    address = guarded.address.replace("server.example.org", "127.0.0.1")
    browser.open(address)
    assert "needs its token" in browser.evaluate("document.body.textContent")
    token = json.dumps((guarded.folder / TOKEN_FILE).read_text())
    browser.evaluate(f"document.forms[0].token.value = {token}; document.forms[0].submit()")
    browser.until(lambda: bool(browser.evaluate(ROWS)))
    assert browser.evaluate("location.search") == ""


@needs_browser
@pytest.mark.slow
def test_a_page_that_stays_open_keeps_its_size(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many answers as in half an hour, each with something new."""
    monkeypatch.setattr(pages, "SECONDS_BETWEEN_RENDERINGS", 0.0)
    made, clock = board(FEW)
    history = [{"round": number, "results": {}} for number in range(60)]
    ask_now = "document.dispatchEvent(new Event('visibilitychange'))"

    def answers(number: int) -> float:
        for _ in range(number):
            clock.now += 3.0
            made.hear({"event": "gone", "party": f"clinic-{clock.now}"})
            made.publish(status(FEW, 120, wire_down=int(clock.now)), history)
            newest = made.events[-1].text
            browser.evaluate(ask_now)
            while browser.evaluate(EVENTS)[0] != newest:
                time.sleep(0.002)
        browser.events.clear()
        browser.ask("HeapProfiler.collectGarbage")
        return float(browser.ask("Runtime.getHeapUsage")["usedSize"])

    with OpenPage(made, Place(port=0), tmp_path, "") as page:
        opened(browser, page)
        before = answers(50)
        assert answers(600) < 1.5 * before  # it levels off at about a megabyte
