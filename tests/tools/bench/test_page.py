"""The page of a measurement: what it says, that it asks nobody for anything, and (slow) what a browser makes of it."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from benchmarks.page_screenshot import boxes, find_browser, screenshot
from stepfloor.errors import UserError
from stepfloor.tools.bench import metrics
from stepfloor.tools.bench.charts import charts, labels, place
from stepfloor.tools.bench.exchange.files import import_file
from stepfloor.tools.bench.page import page, write_page
from stepfloor.tools.bench.plot import Axis, Plot, short
from stepfloor.tools.bench.result import Device, Flag, Item, Metric, Result, Target, Telemetry
from stepfloor.tools.bench.verdict import Asked, Comparison, Margin, Series, judge
from tests.tools.bench.picture import read_png

DATA = Path(__file__).with_name("data")
TARGET = Target("http://127.0.0.1:8000", "a <model> & more", "stepfloor", "0.1.0")


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals take most of the time of an import."""
    monkeypatch.setattr(metrics, "RESAMPLES", 1)


def one() -> Result:
    (result,) = import_file(DATA / "vllm-closed.json")
    columns = {
        "sm_clock_mhz": (1980.0, None, 1950.0),
        "temperature_c": (50.0, 51.0, 52.0),
        "power_w": (None, None, None),
    }
    return replace(result, telemetry=Telemetry("NVML", None, (Device("GPU 0", (0.0, 1.0, 2.0), columns),)))


def matrix() -> list[Result]:
    cells = []
    for context in (0, 16384):
        for concurrency in (1, 4, 16):
            rate = 60 * concurrency**0.8 / (1 + context / 60000)
            spoiled = concurrency == 16 and context > 0
            flags = (Flag("underfilled", "11.2 of 16 were in flight"),) if spoiled else (Flag("warm_up", "4 requests"),)
            figures = {
                "output_throughput": Metric("tokens/s", {"value": rate}, {"value": (0.97 * rate, 1.03 * rate)}),
                "tpot_ms": Metric("ms", {"mean": 1000 * concurrency / rate}),
            }
            load = {"concurrency": concurrency, "context": context}
            cells.append(Result("matrix cell", TARGET, load, figures, flags))
    return cells


def pairs() -> tuple[Comparison, ...]:
    random = np.random.default_rng(0)
    base = 100 + random.normal(0, 2, 11)
    arm = base + 3 + random.normal(0, 0.5, 11)
    series = Series("output_throughput", "tokens/s", "k=0", "k=3", tuple(range(11)), tuple(base), tuple(arm))
    return judge([series], {"output_throughput": Asked("output_throughput", True, Margin(1, True))})


def accuracy() -> Result:
    items = tuple(Item(f"{'recall' if i % 2 else 'docstring'}/{i}", i % 5 > 0, "<b>", "right") for i in range(40))
    figures = {"accuracy": Metric("ratio", {"value": 0.8}, {"value": (0.65, 0.9)}, 40)}
    return Result("accuracy", TARGET, {"profile": "stdlib"}, figures, items=items)


def pages() -> dict[str, str]:
    return {
        "one": page([one()]),
        "matrix": page(matrix()),
        "ab": page([one(), replace(one(), load={**one().load, "k": 3})], pairs()),
        "accuracy": page([accuracy()]),
    }


class Elements(HTMLParser):
    """The tags and attributes of a page; raises if they are not nested as they are opened."""

    empty = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.empty:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["one", "matrix", "ab", "accuracy"])
def test_a_page_is_whole_and_asks_nobody(name: str) -> None:
    """No script, no address, nothing unclosed; what a server calls itself is text and never markup."""
    text = pages()[name]
    elements = Elements(text).found
    tags = {tag for tag, _ in elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "video", "form"}
    for tag, attributes in elements:
        for key in ("src", "href", "action", "style", "srcset"):
            value = attributes.get(key) or ""
            assert value == "" or value == "data:," or value.startswith("--heat:"), (tag, key, value)
        assert not any(key.startswith("on") for key in attributes)
    assert not re.search(r"@import|url\(", text)
    assert "<model>" not in text
    assert "nan" not in re.findall(r'd="([^"]*)"', text)
    assert "NaN" not in text


@pytest.mark.parametrize("name", ["one", "matrix", "ab", "accuracy"])
def test_a_page_speaks(name: str) -> None:
    """A reader that cannot see gets a name for every chart and a heading for every row and column."""
    elements = Elements(pages()[name]).found
    plots = [a for tag, a in elements if tag == "svg" and a.get("class") == "plot"]
    assert plots
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)
    assert all(a.get("scope") in ("col", "row") for tag, a in elements if tag == "th")
    assert ("html", {"lang": "en"}) in elements


def test_a_result_that_does_not_count_is_marked_wherever_it_is() -> None:
    text = page(matrix())
    assert "✗ 1 of 6 invalid" in text
    assert text.count('class="void"') == 1
    assert text.count('<tr class="invalid">') == 1
    assert "11.2 of 16 were in flight" in text
    assert text.count(" hollow") == 2  # once in each of two charts
    single = replace(one(), flags=(Flag("errors", "2 of 12 requests failed"),))
    assert "✗ invalid" in page([single])
    assert "✓ valid" in page([one()])


def test_a_page_is_titled_by_what_it_holds() -> None:
    assert "<h1>Matrix: a &lt;model&gt;" in page(matrix())
    assert "<h1>Accuracy, 2 results: " in page([accuracy(), accuracy()])
    assert "<h1>k=3 against k=0" in page([one(), one()], pairs(), ["k=0", "k=3"])
    assert "<h1>Imported: stub" in page([one()])


def test_flags_of_many_results_stand_once() -> None:
    text = page(matrix())
    assert text.count("<b>warm up</b>") == 1
    assert "5 of 6 results" in text
    assert text.index("<b>underfilled</b>") < text.index("<b>warm up</b>")


def test_every_chart_that_the_data_has_is_there() -> None:
    ids = [c.id for c in charts([one()])]
    assert ids == [
        "ttft",
        "itl",
        "e2e",
        "concurrency",
        "throughput",
        "acceptance",
        "device-sm_clock_mhz",
        "device-temperature_c",
    ]
    assert [c.id for c in charts(matrix())] == ["matrix-throughput", "matrix-tpot"]
    assert next(iter(charts([one()], pairs()))).id == "pairs-output_throughput-k=3"
    assert [c.id for c in charts([accuracy()])] == ["accuracy"]
    assert list(charts([replace(one(), requests=(), metrics={}, telemetry=None)])) == []


def test_a_verdict_shows_its_pairs() -> None:
    text = page([], pairs())
    assert "effect (better)" in text
    (chart,) = charts([], pairs())
    assert chart.svg.count("<circle") == 11
    assert chart.svg.count('class="end') == 2
    assert "would not matter" in chart.svg
    assert ">11</text>" in chart.svg
    assert ">0</text>" not in chart.svg.partition("round")[0].rpartition("tick")[2]


def test_the_rounds_of_an_arm_share_a_line_and_have_a_row_each() -> None:
    rounds = [one(), one(), one(), one()]
    text = page(rounds, pairs(), ["k=0", "k=3", "k=3", "k=0"])
    for name in ("k=0, 1", "k=0, 2", "k=3, 1", "k=3, 2"):
        assert f'<th scope="row">{name}</th>' in text
    assert text.count("Load and configuration") == 2
    found = {c.id: c for c in charts(rounds, (), ["k=0", "k=3", "k=3", "k=0"])}
    assert found["ttft"].legend == ("k=0", "k=3")
    assert "24 values" in page(rounds[:2], (), ["k=0", "k=0"])


def test_a_result_is_named_by_what_it_differs_in() -> None:
    """Two runs differ in their seeds always; that is no name."""
    first, second = one(), one()
    differs = [replace(first, load={"seed": 1, "k": 0}), replace(second, load={"seed": 2, "k": 3})]
    assert labels(differs) == ("k 0", "k 3")
    same = [replace(r, load={"seed": i}) for i, r in enumerate((first, second))]
    assert labels(same) == ("stub 1", "stub 2")
    arms = [replace(r, target=replace(r.target, config={"argv": f"--k {i}"})) for i, r in enumerate(same)]
    assert labels(arms) == ("argv --k 0", "argv --k 1")


def test_requests_in_flight_and_tokens_are_those_of_the_requests() -> None:
    """12 requests of 30 tokens, two at a time: the line reaches 2, the area under the rate is 360 tokens."""
    from stepfloor.tools.bench.charts import _in_flight, _tokens_over_time

    requests = one().requests
    line = _in_flight(requests)
    assert max(n for _, n in line) == 2
    assert line[-1][1] == 0
    rate = _tokens_over_time(requests)
    width = rate[1][0] - rate[0][0]
    assert sum(v for _, v in rate) * width == pytest.approx(360)


def test_axes_have_round_ticks_inside() -> None:
    assert [label for _, label in Axis.around("s", [0, 7]).marks()] == ["0", "2", "4", "6"]
    assert [label for _, label in Axis.around("ms", [322.0, 324.0], zero=False).marks()] == [
        "322.0", "322.5", "323.0", "323.5", "324.0",
    ]  # fmt: skip
    assert [label for _, label in Axis.around("n", [0, 2], whole=True).marks()] == ["0", "1", "2"]
    assert [label for _, label in Axis.around("ms", [3.0, 900.0], log=True).marks()][:4] == ["5", "10", "20", "50"]
    assert Axis.around("ms", [5.0, 5.0], zero=False).share(5.0) == pytest.approx(0.5, abs=0.5)
    assert Axis.around("ms", []).marks()


def test_a_single_value_and_none_can_be_drawn() -> None:
    plot = Plot("x", "y", Axis.around("s", [1.0]), Axis.around("n", [0.0]))
    plot.line([], 0, "nothing")
    plot.area([(0.0, 1.0)], 0)
    plot.dot(1.0, 0.0, 0, "here")
    assert "nan" not in plot.svg()
    assert short(1234567.0) == "1,234,567"
    assert short(float("inf")) == "inf"


def test_a_cell_stands_where_its_load_says() -> None:
    assert place({"concurrency": 4, "context": 16384}) == (4.0, 16384.0)
    assert place({"max_concurrency": 2}) == (2.0, 0.0)
    assert place({"input_len": "512"}) == (None, 0.0)


def test_a_page_needs_no_scipy() -> None:
    """Only comparisons do; bench serve --html must not ask for it."""
    blocked = "import sys; sys.modules['scipy'] = None; import stepfloor.tools.bench.page, stepfloor.tools.bench.speed"
    subprocess.run(
        [sys.executable, "-c", blocked], check=True, env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    )


def test_nothing_to_show_and_nowhere_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one result"):
        page([])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_page([accuracy()], tmp_path / "file" / "page.html")


@pytest.fixture(scope="module")
def browser() -> str:
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["one", "matrix", "ab", "accuracy"])
def test_a_browser_draws_every_chart(browser: str, tmp_path: Path, name: str, dark: bool) -> None:
    """Each plot's place in the picture holds axes, text and colour; nothing is logged, nobody is asked."""
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(pages()[name], encoding="utf-8")
    assert screenshot(file, picture, dark=dark) == []
    found = boxes(file)
    assert len(found) == pages()[name].count("<figure")
    image = read_png(picture).astype(int)
    ground = image[:8].reshape(-1, 3).mean(0)
    assert (ground.mean() < 60) == dark
    for box in found:
        part = image[box.top : box.bottom, box.left : box.right]
        colours, counts = np.unique(part.reshape(-1, 3), axis=0, return_counts=True)
        card = colours[counts.argmax()]
        drawn = (np.abs(part - card).max(-1) > 24).mean()
        # the smallest plot has one thin line; measured 1.3 % and more
        assert drawn > 0.005, (box.id, drawn)
        vivid = (part.max(-1) - part.min(-1) > 60).sum()
        assert vivid > 100, (box.id, vivid)


@pytest.mark.slow
def test_the_browser_test_would_notice(browser: str, tmp_path: Path) -> None:
    """A script's error and a request to somewhere are found, and so is a plot without marks."""
    (tmp_path / "bad.html").write_text("<img src='http://example.com/x.png'><script>throw new Error('boo')</script>")
    complaints = screenshot(tmp_path / "bad.html", tmp_path / "bad.png")
    assert any("boo" in line for line in complaints)
    assert "request to http://example.com/x.png" in complaints
