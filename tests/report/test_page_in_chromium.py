"""The page as a browser shows it: nothing wider than the screen, no complaint, no request, values under the pointer."""

import datetime
import itertools

import pytest
import tiny_run
from browser import CHROMIUM, Browser

from gpt_oss_lite.report.page import render
from gpt_oss_lite.report.run_log import read_run

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium fonts-dejavu-core)"
)


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(run_folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    text = render([read_run(folder) for folder in run_folders], datetime.datetime.now(datetime.UTC))
    path.write_bytes(text.encode(errors="replace"))
    return path


def boxes(browser, selector):
    """[left, top, width, height] of each element, on the page."""
    return browser.evaluate(
        f"[...document.querySelectorAll({selector!r})].map(e => e.getBoundingClientRect())"
        ".map(r => [r.x + scrollX, r.y + scrollY, r.width, r.height])"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_fits_the_screen_and_complains_of_nothing(browser, page, width, dark):
    browser.open(page, width, dark)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    charts = boxes(browser, ".chart")
    assert len(charts) == 10
    assert all(w > 250 and h > 150 for _, _, w, h in charts)
    assert len({left for left, *_ in charts}) == (2 if width == 1400 else 1)
    assert all(w > 200 and h > 20 for _, _, w, h in boxes(browser, ".heat img"))
    assert browser.evaluate("[...document.images].every(image => image.naturalWidth > 1)")
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


@pytest.mark.parametrize("width", [1400, 390])
def test_labels_neither_leave_the_page_nor_cover_each_other(browser, page, width):
    browser.open(page, width)
    labels = boxes(browser, ".x-labels span, .y-labels span")
    assert all(left >= 0 and left + w <= width for left, _, w, _ in labels)
    left, _, plot, _ = boxes(browser, ".heat .plot")[0]
    assert all(at + w <= left + plot + 0.5 for at, _, w, _ in boxes(browser, ".heat .x-labels span"))
    for chart in range(browser.evaluate("document.querySelectorAll('.x-labels').length")):
        row = browser.evaluate(
            f"[...document.querySelectorAll('.x-labels')[{chart}].children].map(e => e.getBoundingClientRect())"
            ".map(r => [r.left, r.right])"
        )
        assert all(right < left for (_, right), (left, _) in itertools.pairwise(row))


def test_light_and_dark_are_different_pages(browser, page):
    grounds = []
    for dark in (False, True):
        browser.open(page, 800, dark)
        grounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        grounds.append(browser.evaluate("document.querySelector('.heat img').currentSrc.length > 100"))
    assert grounds == ["rgb(255, 255, 255)", True, "rgb(20, 23, 27)", True]


def test_the_pointer_and_the_arrow_keys_show_the_logged_values(browser, page, run_folders):
    browser.open(page, 1400)
    rates = [row["lr"] for row in tiny_run.rows(run_folders[0])]
    plots = browser.evaluate("[...document.querySelectorAll('.chart')].map(c => c.querySelector('h3').innerText)")
    number = plots.index("Learning rate")
    left, top, width, height = boxes(browser, ".chart .plot")[number]
    browser.evaluate(f"scrollTo(0, {top - 100})")
    browser.point_at(left + width * 30 / 60, 100 + height / 2)
    tip = f"document.querySelectorAll('.chart .plot')[{number}].querySelector('.tip')"
    name, value = browser.evaluate(f"{tip}.innerText").splitlines()[1].split(": ")
    assert name == "calm"
    assert float(value) == pytest.approx(rates[29], rel=1e-3)

    browser.evaluate(f"document.querySelectorAll('.chart .plot')[{number}].focus()")
    browser.press("ArrowRight")
    browser.press("ArrowLeft")
    for _ in range(2):
        browser.press("ArrowRight")
    after = float(browser.evaluate(f"{tip}.innerText").splitlines()[1].split(": ")[1])
    assert after == pytest.approx(rates[30], rel=1e-3)  # two hundredths of the axis, so a step of 60 on
    assert browser.complaints() == []


def test_the_heat_map_names_layer_expert_and_share(browser, page, run_folders):
    browser.open(page, 1400)
    left, top, width, height = boxes(browser, ".heat .plot")[0]
    browser.evaluate(f"scrollTo(0, {top - 100})")
    browser.point_at(left + width * 0.999, 100 + height * 7.5 / 9)  # rows: 4 experts, a gap, 4 experts
    words = browser.evaluate("document.querySelector('.heat .tip').innerText").splitlines()
    load = tiny_run.rows(run_folders[0])[-1]["expert_load"]
    assert words[:2] == ["layer 1, expert 2", "steps 60 to 60"]
    assert float(words[2].split()[0]) == pytest.approx(4 * load[1][2], abs=0.02)


def test_a_run_can_be_hidden(browser, page):
    browser.open(page, 1400)
    shown = "getComputedStyle(document.querySelector('.plot path.line.run1')).display"
    assert browser.evaluate(shown) == "inline"
    browser.evaluate("document.querySelectorAll('.legend input')[1].click()")
    assert browser.evaluate(shown) == "none"
    assert browser.evaluate("getComputedStyle(document.querySelector('.plot path.line.run0')).display") == "inline"


def test_the_page_is_complete_without_its_script(browser, page, tmp_path):
    text = page.read_text()
    bare = tmp_path / "bare.html"
    bare.write_text(text[: text.index("<script>")] + text[text.index("</script>") + 9 :])
    browser.open(bare, 1400)
    assert len(boxes(browser, ".chart path.line")) >= 20
