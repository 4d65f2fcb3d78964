"""The page as a browser shows it: light and dark, wide and narrow, offline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gact_graph.api.report import Report
from gact_graph.support.rows import Row

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BAD = "convs.0/<img src=x onerror='document.title=`hit`'>/mul.input"
RELATION = "convs.{}/convs.<paper___cites_very_often_and_gladly___paper>/lin_{}/linear.input"

# The contrast of each text with what lies behind it, as WCAG 2.2 (1.4.3) defines it.
CONTRASTS = """
(pairs) => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => {
    const linear = numbers(color).slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = getComputedStyle(document.body).backgroundColor;
  const seen = (element) => element.textContent.trim() && element.getClientRects().length;
  const found = [];
  for (const text of document.querySelectorAll("#step text, .parts .slice text")) {
    if (!seen(text) || getComputedStyle(text).display === "none") continue;
    const sector = text.closest(".slice")?.querySelector("path.surface");
    const behind = sector ? getComputedStyle(sector).fill : ground;
    found.push([text.textContent, contrast(getComputedStyle(text).fill, behind)]);
  }
  for (const element of document.querySelectorAll("h1, h2, h3, p, dt, dd, td, th button")) {
    if (seen(element)) {
      found.push([element.textContent, contrast(getComputedStyle(element).color, ground)]);
    }
  }
  return found;
}
"""

# Names below the axis, from left to right: where each begins and ends.
TICKS = """
() => [...document.querySelectorAll("#step .xtick text")]
  .map((text) => text.getBoundingClientRect())
  .map((box) => [box.left, box.right])
  .sort((a, b) => a[0] - b[0])
"""


def row(slot: str, raw: int, stored: int, role: str = "node") -> Row:
    return Row(slot, role, "quantize", (25, 10), 250, 4, raw, stored)


def deep() -> Report:
    rows = [row("lin_in/linear.input", 10**6, 10**5)]
    for i in range(64):
        rows.append(row(f"convs.{i}/addmm.input", 10**6, 10**5))
        rows.append(row(f"norms.{i}/batch_norm.input", 10**6, 10**5))
        rows.append(row(f"relu/relu#{i}.result", 10**6, 10**4, "mask"))
    return Report(rows)


def hetero() -> Report:
    rows = [row(BAD, 5 * 10**5, 10**4, "other")]
    for i in range(3):
        rows += [row(RELATION.format(i, side), 10**6 - i, 10**5 + i, "edge") for side in "lr"]
        rows += [row(f"convs.{i}/index_select.index", 10**5, 0, "index")]
        rows += [row(f"relu#{i}.result", 10**5, 10**4, "mask")]
    return Report(rows)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((path for path in map(shutil.which, names) if path), None)
    # Chromium's sandbox refuses root.
    args = ["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
    with sync_api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=path, args=args)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium starts here: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=["deep", "hetero"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    {"deep": deep, "hetero": hetero}[request.param]().save(path)
    return path


class Opened:
    """A page in a window, its messages and its requests."""

    def __init__(self, browser: Any, path: Path, theme: str, width: int) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(
            color_scheme=theme, viewport={"width": width, "height": 900}, offline=True
        )
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        for figure in ("#step .xtick", "#stock .slice", "#now .slice"):
            self.page.wait_for_selector(figure, state="attached")

    def column(self, name: str) -> list[str]:
        cells = self.page.locator(f"#slots td.{name}")
        return cells.evaluate_all("cells => cells.map((cell) => cell.dataset.value)")


SEEN = [(theme, width) for theme in ("light", "dark") for width in (1280, 390)]


@pytest.fixture(scope="module", params=SEEN, ids=str)
def opened(request: Any, browser: Any, saved: Path) -> Iterator[Opened]:
    window = Opened(browser, saved, *request.param)
    yield window
    window.context.close()


def test_it_opens_without_network_and_fits(opened: Opened, saved: Path) -> None:
    assert opened.said == [] and opened.asked == [saved.as_uri()]
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main *")]
          .filter((one) => one.getClientRects().length)
          .filter((one) => one.getBoundingClientRect().right > window.innerWidth + 1)
          .map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert outside == []
    assert page.locator("#step .scatterlayer path.js-line").count() == 2


def test_everything_can_be_read(opened: Opened) -> None:
    contrasts = opened.page.evaluate(CONTRASTS)
    assert len(contrasts) > 50
    assert [pair for pair in contrasts if pair[1] < 4.5] == []
    ticks = opened.page.evaluate(TICKS)
    assert len(ticks) >= 2
    assert all(left[1] < right[0] for left, right in pairwise(ticks))


def test_names_are_shown_and_not_run(browser: Any, tmp_path: Path) -> None:
    hetero().save(tmp_path / "page.html")
    window = Opened(browser, tmp_path / "page.html", "light", 1280)
    try:
        assert BAD in window.page.locator("#slots td.slot").all_inner_texts()
        assert window.page.locator("main img").count() == 0
        assert "hit" not in window.page.title()
        window.page.mouse.move(*_middle_of(window.page, "#stock .slice"))
        window.page.wait_for_selector("#stock .hoverlayer text")
        assert window.page.locator("#stock .hoverlayer img").count() == 0
    finally:
        window.context.close()


def _middle_of(page: Any, selector: str) -> tuple[float, float]:
    page.locator(selector).last.scroll_into_view_if_needed()
    box = page.locator(selector).last.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_the_table_is_sorted_by_any_column(opened: Opened) -> None:
    page = opened.page
    stock = [*map(int, opened.column("stock"))]
    assert stock == sorted(stock, reverse=True)
    page.click("#slots th.now button")
    now = [*map(int, opened.column("now"))]
    assert now == sorted(now, reverse=True) and len(set(now)) >= 2
    page.click("#slots th.now button")
    assert [*map(int, opened.column("now"))] == now[::-1]
    assert page.get_attribute("#slots th.now", "aria-sort") == "ascending"
    assert page.get_attribute("#slots th.stock", "aria-sort") is None
    page.click("#slots th.slot button")
    slots = opened.column("slot")
    assert len(slots) == len(now)
    numbered = [name for name in slots if name.startswith("norms.")]
    assert numbered == sorted(numbered, key=lambda name: int(name.split("/")[0][6:]))


def test_it_follows_the_theme_while_it_is_open(browser: Any, tmp_path: Path) -> None:
    deep().save(tmp_path / "page.html")
    window = Opened(browser, tmp_path / "page.html", "light", 1280)
    try:
        before = window.page.locator("#step .xtick text").first.evaluate("e => e.style.fill")
        window.page.emulate_media(color_scheme="dark")
        window.page.wait_for_function(
            "(before) => document.querySelector('#step .xtick text').style.fill !== before",
            arg=before,
        )
        assert [pair for pair in window.page.evaluate(CONTRASTS) if pair[1] < 4.5] == []
    finally:
        window.context.close()


def test_fewer_names_stand_below_a_narrower_axis(browser: Any, tmp_path: Path) -> None:
    deep().save(tmp_path / "page.html")
    window = Opened(browser, tmp_path / "page.html", "light", 1280)
    try:
        wide = window.page.locator("#step .xtick").count()
        window.page.set_viewport_size({"width": 390, "height": 900})
        window.page.wait_for_function(
            "(wide) => document.querySelectorAll('#step .xtick').length < wide", arg=wide
        )
        ticks = window.page.evaluate(TICKS)
        assert all(left[1] < right[0] for left, right in pairwise(ticks))
    finally:
        window.context.close()


def test_a_layer_can_be_looked_into(browser: Any, tmp_path: Path) -> None:
    deep().save(tmp_path / "page.html")
    window = Opened(browser, tmp_path / "page.html", "light", 1280)
    slices = window.page.locator("#stock .slice")

    def select(name: str) -> None:
        # The strip with its name: the rest is covered by what lies inside.
        strip = slices.filter(has_text=name).first.locator("path.surface")
        strip.click(position={"x": 8, "y": 8})

    try:
        select("norms  ")
        slices.filter(has_text="norms.7").first.wait_for()
        select("norms.7")
        slices.filter(has_text="batch_norm.input").first.wait_for()
        # What was selected stands above what is inside, and leads back.
        select("norms.7")
        slices.filter(has_text="norms.8").first.wait_for()
    finally:
        window.context.close()
