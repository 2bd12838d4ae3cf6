"""The report in a real browser, as a person uses it: no error, no network, and text that stays text."""

from __future__ import annotations

import shutil
import time

import pytest

from cluster.run.metrics import read_metrics
from cluster.run.report import build_report
from tests.pure.synthetic_run_folder import write_run

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
if CHROMIUM is None:
    pytest.skip("needs Debian's chromium (apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")


class Opened:
    """A page with everything it said and asked for."""

    def __init__(self, context, file):
        self.said: list[tuple[str, str]] = []
        self.asked: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append((message.type, message.text)))
        self.page.on("pageerror", lambda error: self.said.append(("error", str(error))))
        self.page.on("request", lambda request: self.asked.append(request.url))
        began = time.monotonic()
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]")
        self.seconds = time.monotonic() - began
        self.file = file

    @property
    def errors(self):
        return [text for kind, text in self.said if kind in ("error", "warning")]

    def count(self, selector):
        return self.page.locator(selector).count()

    def text(self, selector):
        return self.page.locator(selector).first.inner_text()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, headless=True)
        yield launched
        launched.close()


@pytest.fixture
def opened(browser):
    """Opens files; afterwards nothing may have gone wrong and nothing may have been fetched."""
    pages = []

    def open_file(file, **context):
        context = {"viewport": {"width": 1300, "height": 900}, "color_scheme": "light"} | context
        pages.append(Opened(browser.new_context(**context), file))
        return pages[-1]

    yield open_file
    for each in pages:
        assert each.errors == []
        assert [url for url in each.asked if not url.startswith(("data:", "blob:"))] == [each.file.as_uri()]
        each.page.context.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def healthy(folder):
    return write_run(folder / "healthy", rounds=50)


@pytest.fixture(scope="module")
def collapsed(folder):
    return write_run(folder / "collapsed", rounds=80, collapse=45, seed=1, group_rounds=20)


def test_a_run_of_fifty_rounds_opens_with_all_its_curves(opened, healthy):
    shown = opened(build_report([healthy]))
    page = shown.page
    assert shown.text("#title") == "healthy"
    assert "50" in shown.text(".tile .value")
    assert "healthy" in shown.text("#findings .badge")
    assert shown.count(".chart") >= 15
    for at in range(shown.count(".chart")):
        chart = page.locator(".chart").nth(at)
        chart.scroll_into_view_if_needed()
        chart.locator(".plot[data-drawn=yes]").wait_for()
        assert chart.locator("canvas").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_findings_are_marked_on_the_curves_and_lead_there_and_back(opened, collapsed):
    shown = opened(build_report([collapsed]))
    page = shown.page
    page.locator("#chart-kl .chips a", has_text="kl-takeover").click()
    assert page.evaluate("location.hash").startswith("#finding-0-")
    finding = page.locator(page.evaluate("location.hash"))
    assert "kl-takeover" in finding.inner_text()
    assert "since round 4" in finding.inner_text()
    finding.get_by_role("button", name="policy/kl", exact=True).click()
    page.wait_for_selector("#chart-kl.flash")
    page.wait_for_selector("#chart-kl .plot[data-drawn=yes]")


def test_groups_are_browsed_by_round_kind_and_order(opened, healthy):
    page = opened(build_report([healthy])).page
    assert page.locator("#groups output").inner_text() == "round 50"
    page.get_by_role("button", name="Earlier round").click()
    assert page.locator("#groups output").inner_text() == "round 49"
    page.locator("#groups input[type=range]").fill("0")
    assert page.locator("#groups output").inner_text() == "round 1"
    assert page.get_by_role("button", name="Earlier round").is_disabled()

    def means():
        return [float(text) for text in page.locator(".item .head b").all_inner_texts()]

    everything = means()
    page.get_by_role("button", name="Best", exact=True).click()
    assert means()[0] == max(everything)
    page.get_by_role("button", name="Worst", exact=True).click()
    assert means()[0] == min(everything)
    page.get_by_role("button", name="Most disputed").click()
    item = page.locator(".item").nth(1)
    prompt = item.locator(".prompt").inner_text()
    item.click()
    assert page.locator(".prompt-box .text").inner_text() == prompt
    assert page.locator(".item[aria-current=true] .prompt").inner_text() == prompt
    assert page.locator(".response:not(.visit)").count() == 8
    numbers = page.locator("#groups .response header > span:first-child")
    page.get_by_label("Order of the responses").select_option("k")
    assert numbers.all_inner_texts() == [f"#{k}" for k in range(8)]
    page.get_by_label("Order of the responses").select_option("reward")
    totals = [float(text) for text in page.locator("#groups .response header > b").all_inner_texts()]
    assert totals == sorted(totals, reverse=True)
    assert page.locator("#groups .text .think").count() > 0
    assert page.locator("#groups .text .answer").first.inner_text().startswith("\\boxed{")


def test_search_finds_text_in_all_rounds_and_marks_it(opened, healthy):
    page = opened(build_report([healthy])).page
    page.get_by_label("Search", exact=True).fill("CARRY 9")
    assert "groups with a hit" in page.locator("#groups .hint").first.inner_text()
    assert {text.split()[0] for text in page.locator(".item .head span:first-child").all_inner_texts()} == {"round"}
    assert page.locator("#groups .hit").first.inner_text() == "carry 9"
    page.get_by_label("Search", exact=True).fill("nothing has this")
    assert page.locator(".item").count() == 0
    assert page.locator("#groups .detail").inner_text() == "No group fits."
    page.get_by_label("Search", exact=True).fill("")
    assert page.locator(".item").count() > 0


def test_a_prompt_can_be_followed_over_the_rounds(opened, healthy):
    page = opened(build_report([healthy])).page
    assert page.locator(".followed").count() > 3
    second = page.locator(".followed").nth(1)
    second.locator("summary").click()
    second.locator(".visit").nth(1).wait_for()
    rounds = [int(text.split()[1]) for text in second.locator(".visit header b").all_inner_texts()]
    assert rounds == sorted(set(rounds))


def test_runs_are_compared_side_by_side(opened, healthy, collapsed):
    shown = opened(build_report([healthy, collapsed]))
    page = shown.page
    assert page.locator("#summary th").all_inner_texts() == ["", "healthy", "collapsed"]
    assert "nothing found" in page.locator("#summary tbody tr").last.inner_text()
    assert "kl-takeover" in page.locator("#summary tbody tr").last.inner_text()
    assert "kl.kind" in page.locator("#settings .card").first.inner_text()
    page.locator("#chart-entropy").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-entropy .plot[data-drawn=yes]")
    assert page.locator("#chart-entropy .legend button").all_inner_texts() == ["healthy", "collapsed"]
    page.locator("#group-run").select_option(label="collapsed")
    assert page.locator("#groups output").inner_text() == "round 77"
    page.locator("#group-run").select_option(label="healthy")
    assert page.locator("#groups output").inner_text() == "round 50"


def test_a_legend_hides_a_line_and_dragging_zooms_every_curve(opened, healthy):
    page = opened(build_report([healthy])).page
    page.locator("#chart-reward").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-reward .plot[data-drawn=yes]")
    page.wait_for_selector("#chart-accuracy .plot[data-drawn=yes]")
    button = page.locator("#chart-reward .legend button").first
    before = page.locator("#chart-reward .plot").screenshot()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    page.wait_for_timeout(300)
    hidden = page.locator("#chart-reward .plot").screenshot()
    assert hidden != before
    button.click()
    other = page.locator("#chart-accuracy .plot")
    whole = other.screenshot()
    box = page.locator("#chart-reward .plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 120, steps=8)
    page.mouse.up()
    page.wait_for_timeout(400)
    zoomed = other.screenshot()
    assert zoomed != whole
    page.locator("#chart-reward .plot").dblclick(position={"x": box["width"] * 0.5, "y": 80})
    page.mouse.move(5, 5)
    page.wait_for_timeout(400)
    assert other.screenshot() == whole


def test_the_pointer_reads_the_values_of_a_round(opened, healthy):
    page = opened(build_report([healthy])).page
    page.locator("#chart-reward").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-reward .plot[data-drawn=yes]")
    page.wait_for_selector("#chart-accuracy .plot[data-drawn=yes]")
    box = page.locator("#chart-reward .plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    said = page.locator("#chart-reward .readout").inner_text().split("\n")
    round_ = int(said[0].removeprefix("round "))
    assert 20 <= round_ <= 30
    (row,) = [row for row in read_metrics(healthy) if row["round"] == round_]
    shown = dict(zip(said[1::2], said[2::2], strict=True))
    assert list(shown) == ["reward/total", "reward/correctness", "reward/format"]
    for key, value in shown.items():
        assert float(value) == pytest.approx(row[key], rel=1e-2)
    assert page.locator("#chart-accuracy .cursor").is_visible()
    page.mouse.move(5, 5)
    assert not page.locator("#chart-reward .readout").is_visible()


def test_light_and_dark_follow_the_system_and_the_button(opened, healthy):
    file = build_report([healthy])
    dark = opened(file, color_scheme="dark").page

    def background():
        return dark.evaluate("getComputedStyle(document.body).backgroundColor")

    assert background() == "rgb(18, 22, 28)"
    dark.locator("#theme").click()
    assert background() == "rgb(246, 247, 249)"
    dark.locator("#chart-kl, #chart-reward").first.locator(".plot[data-drawn=yes]").wait_for()


def test_it_fits_a_phone(opened, healthy, collapsed):
    shown = opened(
        build_report([healthy, collapsed]), viewport={"width": 390, "height": 800}, is_mobile=True, has_touch=True
    )
    page = shown.page
    for section in ("summary", "curves", "groups", "settings", "around"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator(".item").nth(1).tap()
    assert page.locator("#groups .response").first.is_visible()


def test_hostile_text_is_shown_and_does_nothing(opened, folder):
    run = write_run(folder / "hostile", rounds=6, hostile=True)
    shown = opened(build_report([run]))
    page = shown.page
    page.wait_for_timeout(300)
    assert page.evaluate("window.stolen") is None
    assert page.locator("main script, main img, main iframe").count() == 0
    assert page.locator("main svg[onload]").count() == 0
    page.get_by_label("Order of the responses").select_option("k")
    texts = page.locator("#groups .response .text").all_inner_texts()
    assert "<script>window.stolen=1</script>" in texts[0]
    assert "<img src=x onerror=window.stolen=2>" in texts[0]
    assert "ESC]0;ownedBELESC[31mredU+009B0m" in texts[1]
    assert "U+202EgnihtonU+202C" in texts[1]
    assert "U+2028U+2029</SCRIPT ><!--<script>&lt;b&gt;" in texts[2]
    shown_text = page.locator("main").inner_text()
    assert not set(shown_text) & set("\x1b\x07\x9b\u202e\u202c\u2028\u200b\ufeff")


def test_a_thousand_rounds_load_in_seconds(opened, folder):
    run = write_run(folder / "long", rounds=1000, prompts=8, size=16, group_rounds=60, words=400)
    file = build_report([run])
    shown = opened(file)
    assert file.stat().st_size < 10_000_000
    assert shown.seconds < 20  # 2 s on a machine that does nothing else; measured in the scripts, not here
    shown.page.locator("#chart-memory").scroll_into_view_if_needed()
    shown.page.wait_for_selector("#chart-memory .plot[data-drawn=yes]")
