"""The report's page in headless Chromium, where one is installed: as a reader sees it, with a mouse or a keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.report.data import read_report
from actors.report.page import page_of, write_page
from tests.support.browser import CHROMIUM, Browser
from tests.support.report_runs import write_run

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=http://127.0.0.1:9/x onerror=hacked=1>"
    "<!--<script> \x1b[2J \u202e \x00 {answer}"
)
CHARTS = "[...document.querySelectorAll('.chart')]"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def opened(browser: Browser, page: Path, *runs: Path, refresh_s: float | None = None) -> None:
    """Writes and opens the report of runs; the browser must find no fault, and ask nobody for anything."""
    report = read_report(runs, refresh_s)
    write_page(report, page)
    browser.resize(1280, 900)
    browser.open(page)
    browser.run("sessionStorage.clear()")
    assert browser.run("document.body.dataset.ready") and browser.said == []
    assert browser.requests == [page.resolve().as_uri()]
    canvases = browser.run(
        "[...document.querySelectorAll('.chart')].map(chart => chart.querySelectorAll('canvas').length)"
    )
    assert canvases == [1] * len(report.charts)


def texts(browser: Browser, selector: str) -> list[str]:
    found = browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(element => element.textContent)")
    assert isinstance(found, list)
    return found


def test_the_page_holds_no_markup_of_the_runs_and_allows_no_other_script(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>run", text=HOSTILE)
    page = page_of(read_report([folder]))
    before, _, after = page.partition('<script type="application/json" id="data">')
    block = after.partition("</script>")[0]
    assert "<" not in block and not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", page)
    assert "&lt;b&gt;run" in before and "<b>run" not in page
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    responses = json.loads(block)["runs"][0]["held_out"][0]["prompts"][0]["responses"]
    assert "<img src" in responses["0"][0][0] and "\\x1b[2J" in responses["0"][0][0]


@needs_chromium
@pytest.mark.slow
def test_a_planted_hack_stands_at_the_top_of_the_page(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path / "page.html", write_run(tmp_path / "run", steps=30, prompts=8, evaluations=4, hack=True))
    found = texts(browser, ".findings li")
    assert [
        word for word in ("exact falls", "longer", "cut", "I am certain") if not any(word in text for text in found)
    ] == []
    box = "document.querySelector('#held-out-prompts select')"
    browser.run(f"{box}.value = 1, {box}.onchange({{target: {box}}})")
    assert [text[-4:] for text in texts(browser, "button[aria-pressed]") if text.startswith("became wrong")] == [" (1)"]
    links = browser.run("[...document.querySelectorAll('.findings a')].map(a => !!document.querySelector(a.hash))")
    assert links == [True] * len(found)
    assert browser.run("document.querySelector('.findings').getBoundingClientRect().bottom < innerHeight")


@needs_chromium
@pytest.mark.slow
def test_hostile_texts_are_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", text=HOSTILE)
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 12, "time": 0.0, f"eval/{HOSTILE}": 3.0}) + "\n")
    opened(browser, tmp_path / "page.html", folder)
    browser.run("document.querySelector('td.prompt button').click()")
    assert any("</script><script>window.hacked" in text for text in texts(browser, "dialog pre"))
    assert browser.run("window.hacked === undefined && document.querySelectorAll('img').length === 0")
    assert any("onerror" in heading for heading in texts(browser, ".chart h3"))
    assert browser.said == [] and len(browser.requests) == 1


@needs_chromium
@pytest.mark.slow
def test_filters_and_the_search_choose_prompts(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path / "page.html", write_run(tmp_path / "run"))

    def shown(name: str) -> list[str]:
        buttons = "[...document.querySelectorAll('button[aria-pressed]')]"
        browser.run(f"{buttons}.find(one => one.textContent.startsWith('{name} ')).click()")
        return [text.removeprefix("[user] sort ") for text in texts(browser, "td.prompt")]

    everyone = [f"{number}5281" for number in range(6)]
    assert shown("all") == everyone
    assert shown("became right") == everyone[1:] and shown("became wrong") == everyone[:1]
    assert shown("cut") == everyone[1:2] and shown("longest") == everyone[::-1] and shown("never right") == []
    shown("all")
    browser.run("document.querySelector('input[type=search]').focus()")
    browser.call("Input.insertText", text="SORT 4")
    browser.press("Enter")
    assert [text[-5:] for text in texts(browser, "td.prompt")] == ["45281"]
    assert len(texts(browser, "td.number")) == 3
    browser.run("document.querySelector('td.number button').click()")
    assert browser.run("document.querySelector('dialog').open") and "step 0" in texts(browser, "dialog strong")
    browser.press("Escape")
    assert not browser.run("document.querySelector('dialog').open")
    browser.open(tmp_path / "page.html")
    assert len(texts(browser, "td.prompt")) == 1, "the filter is kept when the page is loaded again"


@needs_chromium
@pytest.mark.slow
def test_a_keyboard_reaches_the_values_of_charts_and_the_responses(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path / "page.html", write_run(tmp_path / "run"))
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        reached.add(browser.run("document.activeElement.className || document.activeElement.tagName"))
        if browser.run("document.activeElement.matches('td.prompt button')"):
            break
    assert {"A", "INPUT", "chart"} <= reached
    browser.press("Enter")
    assert browser.run("document.querySelector('dialog').open") and len(texts(browser, "dialog pre")) == 3
    assert not any("null" in text or "undefined" in text for text in texts(browser, "dialog"))
    browser.press("Escape")
    browser.run(
        "[...document.querySelectorAll('.chart')].find(one => one.textContent.startsWith('Training reward')).focus()"
    )
    values = []
    for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
        browser.press(key)
        values.append(browser.run("document.activeElement.querySelector('li').textContent"))
    assert values == ["step 1", "step 2", "step 12", "step 11"]


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 768])
def test_a_narrow_screen_scrolls_only_downwards(width: int, browser: Browser, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, text="a_very_long_word" * 40) for name in ("first", "second")]
    opened(browser, tmp_path / "page.html", *runs)
    browser.resize(width, 800)
    browser.open(tmp_path / "page.html")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    browser.run("document.querySelector('td.prompt button').click()")
    assert browser.run("document.querySelector('dialog').scrollWidth <= innerWidth")


@needs_chromium
@pytest.mark.slow
def test_several_runs_share_charts_and_show_the_settings_that_differ(browser: Browser, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, settings={"optim": {"lr": lr}}) for name, lr in (("a", 0.1), ("b", 0.2))]
    opened(browser, tmp_path / "page.html", *runs)
    differing = browser.run(
        "[...document.querySelector('#settings table').rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert ["optim.lr", "0.1", "0.2"] in differing and all(len({*row[1:]}) == 2 for row in differing)
    chart = f"{CHARTS}.find(one => one.textContent.startsWith('Training reward'))"
    reward = f"{chart}.querySelectorAll('li').length"
    assert browser.run(reward) == 3
    browser.run("document.querySelector('#findings input').click()")
    assert browser.run(reward) == 2, "a hidden run has no line"


@needs_chromium
@pytest.mark.slow
def test_a_page_of_a_run_that_goes_on_loads_itself_again(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    report = read_report([folder])
    report.refresh_s = 5.0
    write_page(report, tmp_path / "page.html")
    # the test calls what the page's clock would call
    clock = "window.setInterval = (tick, period) => Object.assign(window, {tick, period})"
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=clock)
    browser.open(tmp_path / "page.html")
    assert browser.run("period") == 5000
    browser.run("scrollTo(0, 500)")
    browser.run("setTimeout(tick) && null")
    browser.until_loaded()
    assert browser.run("scrollY") == 500
    browser.run("document.querySelector('#findings input').click()")
    browser.run("window.same = true")
    browser.run("tick()")
    assert browser.run("new Promise(done => requestAnimationFrame(() => done(window.same)))"), "a reader can stop that"
    browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)
