"""The generated pages match the recorded results."""

import json
import re

import pytest

from bench import RESULTS, report
from bench.decode_step import breakdown as step_breakdown
from rjax.benchmarks.records import load


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("path", report.pages(), ids=lambda path: path.stem)
def test_pages_are_up_to_date(path):
    assert path.read_text(encoding="utf-8") == report.pages()[path], "run python -m bench.report"


def test_the_pages_show_every_result_and_their_pictures_exist():
    pages = report.pages()
    assert sorted(pages) == sorted(RESULTS.glob("*.md"))
    shown = "".join(pages.values())
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert f"`{found['command']}`" in shown
        assert f"[{path.name}]({path.name})" in shown
    for picture in re.findall(r"\]\(([^)]+\.png)\)", shown):
        assert (RESULTS / picture).exists()


def test_links_to_results_lead_to_sections():
    """The pages of the benchmarks link to each page of results, and to headings that exist."""
    readme, kernels = (
        (RESULTS.parent / name).read_text(encoding="utf-8")
        for name in ("README.md", "kernels/README.md")
    )
    link = r"results/(\w+\.md)(?:#([\w-]+))?\)"
    linked = re.findall(r"\(" + link, readme)
    assert {name for name, _ in linked} == {path.name for path in RESULTS.glob("*.md")}
    for name, heading in linked + re.findall(r"\(\.\./" + link, kernels):
        titles = re.findall(r"^#+ (.+)$", (RESULTS / name).read_text(encoding="utf-8"), re.M)
        slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert not heading or heading in slugs, (name, heading)


def test_results_name_no_machine():
    for path in RESULTS.glob("*.json"):
        assert not re.search(r"/(?:work|root|tmp|home)/", path.read_text(encoding="utf-8")), path


def test_a_changed_number_changes_the_page(tmp_path):
    kept = {
        "benchmark": "rjax bench latency",
        "command": "rjax bench latency",
        "environment": {"device": "a device", "versions": {"jax": "1"}, "date": "2026-01-01"},
        "rows": [{"model": "m", "batch": 2, "prefix": 64, "each_ms": 1.5}],
    }
    path = tmp_path / "latency_cpu.json"
    path.write_text(json.dumps(kept))
    before = report.render(tmp_path)["engine"]
    assert "| m | 2 | 64 | 1.5 |" in before
    kept["rows"][0]["each_ms"] = 1.75
    path.write_text(json.dumps(kept))
    assert report.render(tmp_path)["engine"] != before
    report.draw_all(tmp_path)
    assert "latency_cpu.png" in report.render(tmp_path)["engine"]
    (tmp_path / "other.json").write_text("{}")
    assert "- [other.json]" in report.render(tmp_path)["other"]


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="lacks benchmark, command, environment"):
        load(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("decode_step_growth", ("products", "attention", "logits", "norms", "writes", "rest")),
        ("decode_step", ("layers", "logits", "rest")),
        ("decode_step_fp8", ("layers", "logits", "rest")),
    ],
)
def test_the_parts_of_steps_are_whole(name, kinds):
    """Rooflines add up to those of the steps, kinds of kernels to the busy time of the device."""
    found = load(RESULTS / f"{name}.json")
    shown = step_breakdown.breakdown(found)
    covered = [row for row in found["rows"] if step_breakdown.is_covered(row)]
    for row, part in zip(covered, shown, strict=True):
        floors = [value for key, value in part.items() if key.endswith("_floor")]
        assert sum(floors) == pytest.approx(row["floor_ms"], rel=1e-6)
        assert all(part[kind] > 0 for kind in kinds)
        every = (*kinds, "norms") if "norms" in part else kinds
        assert sum(part[kind] for kind in set(every)) == pytest.approx(row["busy_ms"])


def test_rows_with_many_unknown_kernels_have_no_parts():
    """The table was profiled with the four longest kernels of each step."""
    found = load(RESULTS / "decode_step.json")
    assert 0 < len(step_breakdown.breakdown(found)) < len(found["rows"])


def test_kernels_are_told_by_name_and_a_product_that_runs_once_is_that_of_the_logits():
    longest = [
        ("nvjet_sm90_tst", 64.0, 3e-3),
        ("nvjet_sm90_tss", 1.0, 4e-4),
        ("gated_product_kernel", 32.0, 1e-3),
        ("attention_kernel", 32.0, 2e-3),
        ("merge_kernel", 32.0, 1e-3),
        ("loop_gather_fusion", 1.0, 5e-4),
    ]
    row = {"model": "llama-3-8b", "batch": 64, "shared": 2048, "own": 256, "busy_ms": 8.2}
    row["longest"] = [{"name": n, "count": c, "seconds": t} for n, c, t in longest]
    rates = {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": 8e14}
    [part] = step_breakdown.breakdown({"rows": [row, row | {"longest": []}], **rates})
    times = {key: part[key] for key in ("products", "attention", "logits", "norms", "rest")}
    assert times == pytest.approx(
        {"products": 4.0, "attention": 3.0, "logits": 0.4, "norms": 0.0, "rest": 0.8}
    )
