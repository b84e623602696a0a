"""The report of the demo in a real browser."""

import time

import pytest

from blips.report import write_report
from report.browser import CHROMIUM, DRIVER, Browser

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Debian's packages chromium and chromium-driver",
)


@pytest.fixture(scope="module")
def file(demo_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    tests = [demo_run / f"test_{where}.extxyz" for where in ("near", "far")]
    return write_report(
        demo_run / "conditioned",
        folder / "report.html",
        structures=tests,
        samples=8,
        bootstrap=20,
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def opened(browser, file):
    browser.screen(1280, 800)
    load(browser, file)
    return browser


def load(browser, file):
    browser.console()
    browser.open(file)
    until(lambda: browser.run("return document.documentElement.dataset.ready") == "true")


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this does not happen"
        time.sleep(0.1)


def problems(browser):
    """Errors and blocked resources; remarks of the graphics driver are none of ours."""
    return [m for m in browser.console() if "GL Driver Message" not in m["message"]]


# Pixels of the 3D canvas that have a colour of the sigma scale (the background is nearly grey).
COLOURED = """
const canvas = document.querySelector("#viewer canvas"), copy = document.createElement("canvas");
copy.width = canvas.width; copy.height = canvas.height;
const context = copy.getContext("2d");
context.drawImage(canvas, 0, 0);
const pixels = context.getImageData(0, 0, copy.width, copy.height).data;
let count = 0;
for (let i = 0; i < pixels.length; i += 4) {
  const rgb = [pixels[i], pixels[i + 1], pixels[i + 2]];
  if (pixels[i + 3] > 0 && Math.max(...rgb) - Math.min(...rgb) > 40) count += 1;
}
return count;
"""
VISIBLE_CANVAS = "const box = document.querySelector('#viewer canvas').getBoundingClientRect(); "
VISIBLE_CANVAS += "return box.width * box.height"


def test_it_opens_without_a_message(opened):
    assert problems(opened) == []
    assert (
        opened.run("return document.querySelectorAll('#plot-parity_forces circle.dot').length") > 50
    )
    violations = "return performance.getEntriesByType('resource').length"
    assert opened.run(violations) == 0  # nothing was fetched


def test_the_viewer_shows_atoms_and_turns(opened):
    assert opened.run(VISIBLE_CANVAS) > 50_000
    before = opened.run("document.querySelector('[data-act=left]').click(); " + COLOURED)
    assert before > 500
    said = opened.text("#said")
    opened.click("[data-act=next]")
    assert opened.text("#said") != said
    assert opened.run("document.querySelector('[data-act=up]').click(); " + COLOURED) > 500
    opened.click("#labels")
    opened.click("[data-act=reset]")
    assert problems(opened) == []


def test_a_plot_answers_to_a_click_and_to_keys(opened):
    readout = "#plot-parity_forces .readout"
    assert opened.text(readout) == "No point chosen."
    opened.click("#plot-parity_forces svg")
    clicked = opened.text(readout)
    assert clicked.startswith("Structure ")
    assert "reference (eV/Å)" in clicked
    opened.type("#plot-parity_forces svg", "ArrowRight")
    assert opened.text(readout) != clicked
    opened.click("#plot-rejection svg")
    assert "dropped" in opened.text("#plot-rejection .readout")


def test_a_chosen_point_shows_its_structure(opened):
    shown = (
        "return [...document.querySelectorAll('#which option')].map((o) => o.text.split(':')[0])"
    )
    wanted = opened.run(shown)[-1]  # not the one in the view
    script = """
    const svg = document.querySelector("#plot-parity_energy svg");
    const readout = document.querySelector("#plot-parity_energy .readout");
    const press = (key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key }));
    press("Home");
    for (let i = 0; i < 14 && !readout.textContent.startsWith(arguments[0]); i += 1) {
      press("ArrowRight");
    }
    press("Enter");
    return document.querySelector("#said").textContent;
    """
    assert opened.run(script, f"Structure {wanted}.").startswith(f"Structure {wanted},")


def test_the_sets_can_be_exchanged(opened):
    before = opened.text("#plot-parity_forces .note")
    opened.click("input[name=set][value='1']")
    assert opened.text("#plot-parity_forces .note") != before
    assert opened.run("return document.querySelector('input[name=set3d][value=\"1\"]').checked")
    assert problems(opened) == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it_within_its_width(browser, file, dark):
    browser.screen(390, 844, dark=dark, mobile=True)
    load(browser, file)
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    assert browser.run("return document.documentElement.dataset.theme") == (
        "dark" if dark else "light"
    )
    assert problems(browser) == []
    small = """
    return [...document.querySelectorAll("button, select")].filter((node) => {
      const box = node.getBoundingClientRect();
      return box.width < 24 || box.height < 24;
    }).length"""
    assert browser.run(small) == 0


# Contrast of every text with the background behind it, after WCAG 2.
CONTRAST = """
const channels = (text) => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => {
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const part = [r, g, b].map((v) => linear(v / 255));
  return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
};
const behind = (node) => {
  for (let n = node; n; n = n.parentElement) {
    const colour = channels(getComputedStyle(n).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const bad = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || node.closest("script, noscript, #viewer") || !node.getClientRects().length) continue;
  const style = getComputedStyle(node);
  const ink = channels(node instanceof SVGElement ? style.fill : style.color);
  const [high, low] = [luminance(ink), luminance(behind(node))].sort((a, b) => b - a);
  const ratio = (high + 0.05) / (low + 0.05);
  if (ratio < 4.5) bad.push([node.tagName, node.textContent.slice(0, 30), ratio]);
}
return bad;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_enough_contrast(browser, file, dark):
    browser.screen(1280, 800, dark=dark)
    load(browser, file)
    assert browser.run(CONTRAST) == []


def test_the_button_changes_the_colours(opened):
    background = "return getComputedStyle(document.body).backgroundColor"
    before = opened.run(background)
    opened.click("#theme")
    assert opened.run(background) != before
    assert opened.run("return document.querySelector('#theme').textContent") == "Light"


def test_tab_reaches_plots_and_viewer(opened):
    script = """
    const reachable = "a, button, select, input, summary, [tabindex='0']";
    const nodes = [...document.querySelectorAll(reachable)];
    return nodes.map((n) => n.id || n.className.baseVal || n.className || n.tagName)"""
    reached = opened.run(script)
    assert "viewer" in reached
    assert reached.count("plot") == 6
    opened.type("body", "Tab")
    focused = "return getComputedStyle(document.activeElement).outlineStyle"
    assert opened.run(focused) == "solid"
    assert opened.run("return document.activeElement.className") == "skip"
