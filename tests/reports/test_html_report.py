"""The HTML report: self-contained, safe against hostile strings, and usable in a browser."""

from __future__ import annotations

import base64
import configparser
import copy
import fnmatch
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import profile_sample
import pytest
from browser import Browser, Page

from graphllm.profiler.html import render_page
from graphllm.profiler.html.reduce import reduce_report

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "graphllm" / "profiler" / "html"
LAYERS = 4
HOSTILE = (
    "</script><img src=x onerror=alert(1)>", "<!--<script>", "{{data}} {{script}}", "a\u2028b",
    '"><b>', "&lt;i&gt;", "\\u003c/script>",
)  # fmt: skip


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return profile_sample.sample(LAYERS)


def hostile(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with strings that are special in HTML, JavaScript or the template."""
    report = copy.deepcopy(report)
    rows = report["phases"][-1]["rows"]
    for i, text in enumerate(HOSTILE):
        for key in ("scope", "origin", "kernel", "why", "shape", "op"):
            rows[i][key] = text
        report["phases"][-1]["arena"][0]["spans"][i]["name"] = text
    report["model"]["type"] = report["model"]["path"] = HOSTILE[0]
    report["settings"]["note"] = HOSTILE[0]
    return report


# ---------------------------------------------------------------------------------------- the file


class Elements(HTMLParser):
    """Tags with their attributes, and the text of elements without children."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = defaultdict(list)
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._open = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data


def test_page_needs_no_other_resource(report):
    text = render_page(report)
    found = Elements(text)
    addresses = [v for _, a in found.tags for k, v in a.items() if k in ("src", "href", "action")]
    assert addresses == ["data:,"]
    assert "@import" not in text and "url(" not in text and "eval(" not in text
    known = "http://www.w3.org/2000/svg"  # a namespace, not an address
    assert set(re.findall(r"\w+://[^\s\"'`]*", found.texts["script"][1])) == {known}


def test_content_security_policy_allows_only_own_script(report):
    found = Elements(render_page(report))
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    for kind, text in (("script", found.texts["script"][1]), ("style", found.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    for source in FOLDER.glob("*.js"):
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "Function("):
            assert word not in source.read_text("utf-8"), source


def test_hostile_strings_are_escaped(report):
    plain, found = Elements(render_page(report)), Elements(render_page(hostile(report)))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    assert found.texts["script"][1] == plain.texts["script"][1]
    held = json.loads(found.texts["script"][0])
    assert held == json.loads(json.dumps(reduce_report(hostile(report))))
    assert set(HOSTILE) <= set(held["texts"])
    assert found.texts["title"] == [f"{HOSTILE[0]}: profile"]


def test_all_files_are_package_data():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    package = "graphllm.profiler.html"
    assert package in config["options"]["packages"].split()
    patterns = config["options.package_data"][package].split()
    for path in FOLDER.iterdir():
        if path.is_file() and path.suffix != ".py":
            assert any(fnmatch.fnmatch(path.name, p) for p in patterns), path.name


# What is left of linear RGB for people without one kind of cone: Machado et al. 2009, table 1.
SIGHT = {
    "all": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Convert linear RGB [n, 3] to OKLab (Ottosson 2020), whose distances are perceptual."""
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    axes = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.cbrt(rgb @ np.transpose(cones)) @ np.transpose(axes)


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_are_distinguishable(sight):
    """Colours of ops, also with colour blindness; 0.02 is a visible difference side by side."""
    found = re.findall(r"--c\d: #(\w{6})", (FOLDER / "style.css").read_text("utf-8"))
    assert len(found) == 16
    for theme in (found[:8], found[8:]):  # light, dark
        rgb = np.array([list(bytes.fromhex(colour)) for colour in theme]) / 255
        seen = oklab(np.clip((rgb**2.2) @ np.transpose(SIGHT[sight]), 0, 1))
        apart = np.linalg.norm(seen[:, None] - seen, axis=-1)[np.triu_indices(8, 1)]
        assert apart.min() > 0.1


# --------------------------------------------------------------------------------------------- data


def test_reduced_times_keep_their_sums(report):
    held = reduce_report(report)
    for phase, small in zip(report["phases"], held["phases"]):
        columns = small["rows"]
        assert {len(column) for column in columns.values()} == {len(phase["rows"])}
        for i, row in enumerate(phase["rows"]):
            times = sorted(row["times"])
            assert columns["sum"][i] == sum(times) and columns["calls"][i] == len(times)
            assert (columns["min"][i], columns["max"][i]) == (times[0], times[-1])
            assert columns["median"][i] == times[(len(times) - 1) // 2]
            assert held["texts"][columns["scope"][i]] == row["scope"]
            assert held["texts"][columns["parts"][i]] == " + ".join(row["parts"])
            assert columns["limit"][i] == (None if row["limit"] is None else round(row["limit"]))


def test_median_run(report):
    for phase, small in zip(report["phases"], reduce_report(report)["phases"]):
        assert [run["plan"] for run in small["typical"]] == sorted(
            {r["plan"] for r in phase["rows"]}
        )
        for typical in small["typical"]:
            runs = [run for run in phase["runs"] if run["plan"] == typical["plan"]]
            rows = [row for row in phase["rows"] if row["plan"] == typical["plan"]]
            lengths = []
            for i, run in enumerate(runs):
                last = run["segments"][-1]
                steps = rows[last["first"] :][: last["count"]]
                end = last["begin"] + sum(row["times"][i] for row in steps)
                lengths.append(max(end, run["returned"]) - run["called"])
            index = typical["index"]
            assert lengths[index] == sorted(lengths)[(len(lengths) - 1) // 2]
            assert typical["times"] == [row["times"][index] for row in rows]
            assert typical["called"] == runs[index]["called"] and typical["runs"] == len(runs)


def test_arena_peak(report):
    for arena in reduce_report(report)["phases"][0]["arena"]:
        spans = arena["spans"]
        alive = [
            sum(n for n, a, b in zip(spans["nbytes"], spans["first"], spans["last"]) if a <= s <= b)
            for s in range(max(spans["last"]) + 1)
        ]
        assert arena["peak"] == max(alive) and arena["at"] == alive.index(max(alive))


@pytest.fixture(scope="module")
def large() -> str:
    return render_page(profile_sample.large(100_000))


def test_size_with_many_rows(large):
    assert len(large.encode()) < 20e6


# ------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


Opener = Callable[..., Page]


@pytest.fixture
def opened(browser, tmp_path) -> Iterator[Opener]:
    """Open pages of reports; check for errors of the page at the end."""
    pages: list[Page] = []

    def opener(text: str, **window: Any) -> Page:
        path = tmp_path / f"{len(pages)}.html"
        path.write_text(text, "utf-8")
        pages.append(browser.open(path, **window))
        pages[-1].settle()
        return pages[-1]

    yield opener
    for each in pages:
        problems = each.problems()
        each.close()
        assert not problems


def texts(shown: Page, selector: str) -> list[str]:
    return shown.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    )


def count(shown: Page, selector: str) -> int:
    return len(texts(shown, selector))


def column(shown: Page, name: str) -> list[str]:
    """Return the cells of a column of the table."""
    heads = shown.evaluate("[...document.querySelectorAll('.profile > thead th')].map(e => "
                           "e.dataset.column)")  # fmt: skip
    nth = heads.index(name) + 1
    return texts(shown, f".profile > tbody > tr:not(.detail) > :nth-child({nth})")


def numbers(cells: list[str]) -> list[float]:
    plain = (cell.replace("\u202f", "").replace("\u2212", "-") for cell in cells)
    return [float(cell) for cell in plain if cell]


def kinds(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[f"{row['op']} {row['weight']}".strip()].append(row)
    return groups


def total(rows: list[dict[str, Any]], key: str) -> float:
    return sum(sum(row["times"]) if key == "times" else row[key] or 0 for row in rows)


@pytest.mark.browser
def test_summary_adds_up(report, opened):
    shown = opened(render_page(report))
    for card, phase in zip(("1", "2"), report["phases"]):
        cells = texts(shown, f".card:nth-child({card}) tbody td:nth-child(2)")
        tokens = phase["tokens"] * len(phase["passes"])
        closing = phase["closing"]
        parts = [closing[k] for k in ("ops", "copies", "gaps", "host", "unattributed")]
        assert numbers(cells) == pytest.approx([ns / 1e3 / tokens for ns in parts], abs=6e-4)
    rates = numbers(texts(shown, ".figure b"))
    for rate, phase in zip(rates, report["phases"]):
        plain = sorted(p["plain"] for p in phase["passes"])
        assert rate == pytest.approx(1e9 * phase["tokens"] / plain[1], abs=1)
    assert texts(shown, ".card:first-child .figure")[0].endswith(
        f" ± {100 * report['phases'][0]['speed']['spread']:.1f}\u202f%"
    )
    assert not count(shown, ".busy")
    assert "loading the model1.90" in texts(shown, ".card:nth-child(3)")[0]
    assert "measured 3 days ago; measure again" in texts(shown, ".card:nth-child(3)")[0]


@pytest.mark.browser
def test_the_plot_has_a_dot_for_each_op_and_backend(report, opened):
    shown = opened(render_page(report))
    want = defaultdict(list)
    for row in report["phases"][1]["rows"]:
        if row["flops"] and row["bytes"]:
            want[f"{row['op']} {row['weight']}".strip(), row["backend"]].append(row)
    assert count(shown, ".roofline .dot") == len(want)
    assert count(shown, ".roofline .roof") == 2 and count(shown, ".roofline .roof line") == 6
    circles = shown.evaluate(  # those of the first backend
        "[...document.querySelectorAll('circle.dot:not(.edge)')].map(e => "
        "[e.getAttribute('aria-label'), ...['cx', 'cy', 'r'].map(k => +e.getAttribute(k))])"
    )
    found = {label.split(":")[0]: place for label, *place in circles}
    assert len(found) >= 4
    values = {}
    for kind in found:
        ns, flops, nbytes = (total(want[kind, "cuda"], key) for key in ("times", "flops", "bytes"))
        values[kind] = [flops / nbytes, -flops / ns, ns]  # y goes down
    for axis in range(3):
        order = sorted(values, key=lambda kind: values[kind][axis])
        assert order == sorted(found, key=lambda kind: (found[kind][axis], values[kind][axis]))
    shown.point(".roofline circle.dot")
    assert "operations per byte" in texts(shown, "#tip:not([hidden])")[0]


def crowded(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with 40 similar ops with long names, and nearly equal ceilings."""
    report = copy.deepcopy(report)
    for phase in report["phases"]:
        for i, row in enumerate(phase["rows"]):
            row["op"] = f"WIDE_OPERATION_MW{i % 40}"
            row["bytes"], row["flops"] = 1e6 * (1 + i % 7 / 10), 2e6 * (1 + i % 5 / 10)
    for roof in report["ceilings"].values():
        roof |= {"bytes_s": 9e11, "float_flop_s": 9.8e12, "integer_flop_s": 10e12}
    return report


OVERLAPS = """(() => {
    const all = Array.from(document.querySelectorAll("svg.roofline text"),
        (e) => [e.textContent, e.getBoundingClientRect()]);
    const apart = (a, b) => a.right <= b.left || b.right <= a.left ||
        a.bottom <= b.top || b.bottom <= a.top;
    return all.flatMap(([text, box], i) => all.slice(0, i)
        .filter(([, other]) => !apart(box, other)).map(([other]) => `${text} | ${other}`));
})()"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [340, 800, 1400])
def test_no_labels_of_the_plot_overlap(report, opened, width, tmp_path):
    near = copy.deepcopy(report)  # as on AVX2
    for roof in near["ceilings"].values():
        roof |= {"float_flop_s": 33.7e9, "integer_flop_s": 44.5e9}
    for each in (report, near, crowded(report), profile_sample.measured(tmp_path)):
        shown = opened(render_page(each), width=width)
        for phase in ("prefill", "decode"):
            shown.click(f"#phase input[value={phase}] + span")
            assert count(shown, ".roofline .names text") >= 1
            assert shown.evaluate(OVERLAPS) == []
            held = texts(shown, ".roofline .roof text") + texts(shown, "#roofline .about")
            for roof in each["ceilings"].values():  # labelled in the plot or below it
                assert roof["bytes_s"] == 0 or "GB/s" in " ".join(held)


@pytest.mark.browser
def test_table_sorts_by_every_column(report, opened):
    shown = opened(render_page(report))
    heads = texts(shown, ".profile > thead th")
    assert len(heads) == 10
    rows = kinds(report["phases"][1]["rows"])
    assert len(column(shown, "key")) == len(rows)
    for name in ("calls", "time", "share", "gbs", "gflops", "limit", "headroom", "key", "bound"):
        orders = []
        for _ in range(2):
            shown.click(f"th[data-column={name}] button")
            cells = column(shown, name)
            values: list[Any] = cells if name in ("key", "bound") else numbers(cells)
            orders.append(shown.evaluate(
                f"document.querySelector('th[data-column={name}]').getAttribute('aria-sort')"
            ))  # fmt: skip
            assert values == sorted(values, reverse=orders[-1] == "descending"), name
            assert len(set(values)) > 1, name
        assert set(orders) == {"ascending", "descending"}


@pytest.mark.browser
def test_table_has_the_sums_of_rows(report, opened):
    shown = opened(render_page(report))
    phase = report["phases"][1]
    tokens = phase["tokens"] * len(phase["passes"])
    names, found = column(shown, "key"), {}
    for name in ("calls", "time", "share", "gbs", "gflops"):
        found[name] = dict(zip(names, numbers(column(shown, name))))
    limits, headroom = (dict(zip(names, column(shown, n))) for n in ("limit", "headroom"))
    for kind, rows in kinds(phase["rows"]).items():
        ns = total(rows, "times")
        assert found["calls"][kind] == phase["tokens"] * len(rows)
        assert found["time"][kind] == pytest.approx(ns / 1e3 / tokens, abs=6e-4)
        assert found["share"][kind] == pytest.approx(100 * ns / phase["closing"]["wall"], abs=0.06)
        assert found["gbs"][kind] == pytest.approx(total(rows, "bytes") / ns, abs=0.06)
        assert found["gflops"][kind] == pytest.approx(total(rows, "flops") / ns, abs=0.06)
        if rows[0]["limit"] is None:
            assert limits[kind] == headroom[kind] == ""
        else:
            limit = total(rows, "limit")
            assert numbers([limits[kind]]) == pytest.approx([100 * limit / ns], abs=0.06)
            above = (ns - limit) / 1e3 / tokens
            assert numbers([headroom[kind]]) == pytest.approx([above], abs=6e-4)
    last = texts(shown, ".profile > tfoot tr:last-child > *")
    assert last[0] == "wall" and numbers([last[3]]) == [100.0]


@pytest.mark.browser
def test_grouping_and_filter(report, opened):
    shown = opened(render_page(report))
    rows = report["phases"][1]["rows"]
    keys = {
        "scope": {row["scope"] for row in rows}, "layer": {row["layer"] for row in rows},
        "backend": {"cuda", "cpu"}, "format": {row["weight"] for row in rows},
        "step": {row["step"] for row in rows}, "op": kinds(rows).keys(),
    }  # fmt: skip
    for by, own in keys.items():
        shown.click(f"#by input[value={by}] + span")
        assert len(column(shown, "key")) == len(own), by
    shown.click("#filter")
    shown.type("mlp CPU")
    wanted = [r for r in rows if ".mlp" in r["scope"] and r["backend"] == "cpu"]
    assert sorted(column(shown, "key")) == sorted(kinds(wanted))
    assert texts(shown, ".count") == [f"{len(wanted)} steps found"]
    assert numbers(texts(shown, ".profile > tfoot td:nth-child(2)")) == [5 * len(wanted)]


@pytest.mark.browser
def test_a_row_expands_to_its_steps(report, opened):
    shown = opened(render_page(report))
    rows = kinds(report["phases"][1]["rows"])["gated q5_0"]
    button = (
        "Array.from(document.querySelectorAll('.key')).find(e => e.textContent == 'gated q5_0')"
    )
    shown.evaluate(f"{button}.focus()")
    shown.key("Enter")
    lines = texts(shown, ".detail tbody tr")
    assert len(lines) == len(rows) == LAYERS
    for row in rows:
        line = next(text for text in lines if row["scope"] in text)
        for key in ("origin", "kernel", "shape", "why"):
            assert row[key] in line
        assert " + ".join(row["parts"]) in line and row["inputs"][0] in line
    assert shown.evaluate(f"{button}.getAttribute('aria-expanded')") == "true"
    shown.key("Enter")
    assert not count(shown, ".detail")


@pytest.mark.browser
def test_choice_of_phase(report, opened):
    shown = opened(render_page(report))
    assert shown.evaluate("document.querySelector('#phase input:checked').value") == "decode"
    shown.click("#phase input[value=prefill] + span")
    rows = report["phases"][0]["rows"]
    assert column(shown, "key") and sum(numbers(column(shown, "calls"))) == len(rows)
    assert texts(shown, "#timeline .about")[0].endswith("T = 512.")
    shown.click("#plan input[value='1'] + span")
    assert texts(shown, "#timeline .about")[0].endswith("T = 20.")


def pixel_colours(shown: Page, selector: str) -> dict[str, int]:
    """Count the pixels of each colour on a canvas."""
    return shown.evaluate(f"""(() => {{
        const canvas = document.querySelector({json.dumps(selector)}), seen = {{}};
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
        copy.drawImage(canvas, 0, 0);
        const all = copy.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < all.length; i += 4) {{
            const colour = all.slice(i, i + 4).join(",");
            seen[colour] = (seen[colour] || 0) + 1;
        }}
        return seen;
    }})()""")


@pytest.mark.browser
@pytest.mark.parametrize("name", ["timeline", "arena"])
def test_canvases_zoom_and_scroll_with_keys(report, opened, name):
    shown = opened(render_page(report))
    canvas = f"#{name} canvas"
    whole = pixel_colours(shown, canvas)
    assert sum(n > 100 for n in whole.values()) >= 5  # the lane, and ops in their colours
    shown.evaluate(f"document.querySelector('{canvas}').focus()")
    shown.key("ArrowRight")
    assert "embedding" in texts(shown, "#tip:not([hidden])")[0]
    shown.key("ArrowRight")
    assert "norm_quantise" in texts(shown, "#tip:not([hidden])")[0]
    shown.key("Escape")
    assert not count(shown, "#tip:not([hidden])")
    shown.key("+")
    assert pixel_colours(shown, canvas) != whole
    shown.key("0")
    shown.evaluate(f"document.querySelector('{canvas}').blur()")
    assert pixel_colours(shown, canvas) == whole


@pytest.mark.browser
def test_heat_memory_and_placement(report, opened):
    shown = opened(render_page(report))
    inside = [r for r in report["phases"][1]["rows"] if r["layer"] is not None]
    cells = {(f"{r['op']} {r['weight']}", r["layer"]) for r in inside}
    assert count(shown, ".heat .cell") == len(cells)
    cells = (
        "Array.from(document.querySelectorAll('.heat .cell'), e => e.getAttribute('fill-opacity'))"
    )
    hottest = f"Math.max(...{cells})"
    assert shown.evaluate(hottest) == pytest.approx(1.0)
    shown.click("#heat-by input[value=headroom] + span")
    assert shown.evaluate(hottest) == pytest.approx(1.0)
    assert texts(shown, ".scale")[0].endswith("headroom")
    about = texts(shown, "#arena .title .about")
    assert [text.split(":")[0] for text in about] == ["cuda", "host"]
    placed = texts(shown, "#placement")[0]
    for text in ("cuda: no kernel", "cuda: pinned by model.layers.1.*=cpu", "to cpu", "gated"):
        assert text in placed
    last = texts(shown, ".placed tfoot td")
    on = [r["backend"] for r in report["phases"][1]["rows"]]
    assert numbers(last[:2]) == [on.count("cuda"), on.count("cpu")]


@pytest.mark.browser
def test_light_and_dark(report, opened):
    shown = opened(render_page(report))
    paper = "getComputedStyle(document.body).backgroundColor"
    light, drawn = shown.evaluate(paper), pixel_colours(shown, "#timeline canvas")
    shown.colours(dark=True)
    assert shown.evaluate(paper) != light
    areas = {colour for colour, pixels in drawn.items() if pixels > 100} - {"0,0,0,0"}
    assert len(areas) >= 5 and areas.isdisjoint(pixel_colours(shown, "#timeline canvas"))


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 380, 700, 1600])
def test_page_fits_the_window(report, opened, width):
    shown = opened(render_page(hostile(report)), width=width)
    for by in ("op", "step"):
        shown.click(f"#by input[value={by}] + span")
        shown.click(".key")
        assert shown.evaluate("document.documentElement.scrollWidth") == width
    right = shown.evaluate("Math.max(...Array.from(document.querySelectorAll('svg, canvas'), "
                           "e => e.getBoundingClientRect().right))")  # fmt: skip
    assert right <= width


@pytest.mark.browser
def test_a_measured_profile_opens(opened, tmp_path):
    report = profile_sample.measured(tmp_path)
    shown = opened(render_page(report))
    assert count(shown, ".dot") > 5 and count(shown, "#timeline canvas") == 1
    calls = sum(len(row["times"]) for row in report["phases"][1]["rows"])
    assert sum(numbers(column(shown, "calls"))) == calls / 2
    assert "cpu: pinned by model.layers.1.*=reference" in texts(shown, "#placement")[0]
    costs = report["phases"][1]["requests"]
    cells = texts(shown, "#requests tbody td")
    assert numbers(cells[0::6]) == [cost["tokens"] / 2 for cost in costs] and len(costs) == 2
    assert numbers(cells[1::6]) == pytest.approx([cost["ns"] / 2e6 for cost in costs], abs=1e-3)
    bars = "Array.from(document.querySelectorAll('.requests .stack'), e => {})"
    ops = [len([op for op in cost["ops"].values() if op["ns"] > 0]) for cost in costs]
    shares = [min(12, n) + (n > 12) + (c["gaps"] > 0) + (c["host"] > 0) for n, c in zip(ops, costs)]
    assert shown.evaluate(bars.format("e.children.length")) == shares
    assert "Requests" in texts(shown, ".links")[0]


@pytest.mark.browser
def test_one_request_has_no_table_of_requests(report, opened):
    shown = opened(render_page(report))
    assert not count(shown, "#requests") and "Requests" not in texts(shown, ".links")[0]


@pytest.mark.browser
def test_hostile_strings_are_shown(report, opened):
    shown = opened(render_page(hostile(report)))
    assert texts(shown, "h1") == [HOSTILE[0]] and not count(shown, "img")
    assert {text for text in HOSTILE if "\\" not in text} <= {
        text for cell in column(shown, "key") for text in HOSTILE if cell.startswith(text)
    }


@pytest.mark.browser
def test_missing_data_is_reported(report, opened):
    shown = opened(render_page(profile_sample.sample(LAYERS, ceilings=False)))
    assert "graphllm doctor --measure" in texts(shown, "#summary")[0]
    assert count(shown, ".dot") and not count(shown, ".roof") and not count(shown, "#headroom")
    assert not numbers(column(shown, "limit"))
    busy = {**report, "busy": {"others": 0.4, "note": "the machine was busy: <b>"}}
    assert texts(opened(render_page(busy)), ".busy") == ["the machine was busy: <b>"]
    decode = {**report, "phases": report["phases"][1:]}
    assert count(opened(render_page(decode)), "#phase input") == 1
    nothing = opened(render_page({**report, "phases": []}))
    assert texts(nothing, "#head .note") == ["Nothing ran."]


@pytest.mark.browser
def test_many_rows_open(large, opened):
    shown = opened(large)
    assert texts(shown, ".count") == ["100\u202f010 steps"]
    shown.click("#by input[value=step] + span")
    assert len(column(shown, "key")) == 200
    shown.click(".more")
    assert len(column(shown, "key")) == 700
    assert count(shown, ".heat .cell") <= 16 * 96
