"""How fast a report opens in a headless Chromium: apt-get install chromium chromium-driver, pip install selenium

    python benchmarks/report_page.py report.html

Times are since the navigation began: the median of several fresh loads by the clock, and by the processor time of the page's
main thread. The latter counts all of it, the charts in view included, and hardly depends on what else the machine does.
"""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

from _record import parser_of, show
from selenium import webdriver

MEASURE = """
const done = arguments[1];
const inView = (chart) => chart.getBoundingClientRect().top < innerHeight + 400;
const step = () => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  const page = performance.getEntriesByType("navigation")[0];
  const charts = [...document.querySelectorAll("[data-chart]")].filter(inView);
  const drawn = document.documentElement.dataset.charts === "ready" && charts.every(chart => chart.querySelector(".main-svg"));
  if (!paint || !page.loadEventEnd || (arguments[0] && !drawn)) return setTimeout(step, 5);
  done(arguments[0] ? performance.now() : [paint.startTime, page.loadEventEnd]);
};
step();
"""
"""Waits for the load event, or with true for the charts."""


def main() -> None:
    """Open the page several times and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for word in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver"))
    browser.execute_cdp_cmd("Performance.enable", {})

    def thread_ms() -> float:
        metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return 1e3 * float(next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime"))

    loads: list[tuple[float, ...]] = []
    try:
        for _ in range(arguments.repeat):
            browser.get("about:blank")
            begun_ms = thread_ms()
            browser.get(arguments.report.absolute().as_uri())
            paint_ms, load_ms = browser.execute_async_script(MEASURE, False)
            drawn_ms = browser.execute_async_script(MEASURE, True)
            loads.append((paint_ms, load_ms, drawn_ms, thread_ms() - begun_ms))
        rows = browser.execute_script("return document.querySelectorAll('#trials tbody tr').length")
    finally:
        browser.quit()
    paint, load, drawn, processor = (f"{statistics.median(times):.0f}" for times in zip(*loads, strict=True))
    size = arguments.report.stat().st_size
    columns = (f"{rows:,} trials, {size / 1e6:.2f} MB, until", "clock, ms", "processor, ms")
    table = [
        ("first contentful paint", paint, ""),
        ("load event, the table can be used", load, ""),
        ("charts in view drawn", drawn, processor),
    ]
    show("report-page", columns, table, record=arguments.record)


if __name__ == "__main__":
    main()
