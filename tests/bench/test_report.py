"""What a bench says of its numbers: the best way, the table, the image."""

from xml.etree import ElementTree

from library.bench import chart, report
from library.config.problems import Message
from library.measuring import candidates


def test_the_best_is_the_fastest_at_all_sizes_and_of_equals_the_smaller(result):
    best = result["best"]
    assert best["candidate"] == "compiled"  # 2 % slower than with checkpointing, and with less memory
    assert best["options"] == {**candidates.BASELINE_CHANGES, "compile": True}
    assert "250 ms a step at 512 instead of 400 ms (1.60 times as fast)" in str(best["sentence"])
    assert "28.0 GB instead of 30.0 GB, compiled in 9 s, which are saved after 60 steps" in str(best["sentence"])
    assert "1.00 s a step at 1024 with 44.0 GB" in str(best["sentence"])  # eager did not fit there


def test_a_way_that_did_not_fit_everywhere_is_not_the_best(result):
    fast = {**result["results"][0], "ms": {"p50": 1.0, "p90": 1.0, "min": 1.0}}
    assert report.best({**result, "results": [fast, *result["results"][1:]]})["candidate"] == "compiled"
    assert report.best({**result, "results": []}) is None


def test_the_table_has_every_measurement_and_every_failure(result):
    text = report.measurements_table(result)
    lines = [line for line in text.splitlines() if line.startswith(("step", "block"))]
    assert len(lines) == len(result["results"]) + 1  # and why one failed
    assert (
        "bfloat16 matrix products: 700 TFLOP/s" in text and "36.0%" in text and "step 1024 eager: out of memory" in text
    )
    assert "0.77x" in text  # checkpointing at 512
    assert "stopped" not in text and "stopped before its end" in report.measurements_table(
        {**result, "finished": False}
    )


def test_uneven_times_are_reported(result):
    assert not report.noise_warning(result)
    for row in report.measured_rows(result):
        row["ms"]["p90"] = 3 * row["ms"]["p50"]
    assert "another program used this machine" in report.measurements_table(result)


def test_the_chart_has_a_bar_for_each_measurement(result):
    chart_svg = ElementTree.fromstring(chart.svg(result))
    space = "{http://www.w3.org/2000/svg}"
    bars = [r for r in chart_svg.iter(f"{space}rect") if r.get("class") in ("bar", "best")]
    assert len(bars) == len(report.measured_rows(result))
    widths = {r.get("class"): float(r.get("width")) for r in bars[:4]}
    assert widths["best"] < widths["bar"]
    words = "".join(chart_svg.itertext())
    assert "GPU <1>" in words and words.index("Training step at 512") < words.index("Block DoubleStreamBlock at 512")


def test_rates_are_those_of_the_time():
    assert report.compute_rates(10**12, 10.0, {"tflops": 200.0}) == {"flops": 10**12, "tflops": 100.0, "mfu": 0.5}
    assert report.compute_rates(None, 10.0, {"tflops": 200.0}) == {}
    assert "mfu" not in report.compute_rates(10**12, 10.0, {})


def test_what_the_lab_shows_of_a_measurement_is_made_of_sentences_to_translate():
    result = {
        "kind": "bench",
        "subject": {"title": "FLUX.1, tiny size", "size": "tiny", "batch": 1},
        "machine": {"name": "x", "torch": "2", "device": "cpu", "threads": 1},
        "results": [
            {"part": part, "resolution": 64, "candidate": "eager", "status": "ok", "ms": {"p50": 1.0, "p90": 3.0}}
            for part in ("step", "vae-encode")
        ],
    }
    titles = [title for title, _ in chart.groups(result)]
    assert [str(title) for title in titles] == ["Training step at 64", "Other parts"]
    texts = [*titles, report.subject_title(result["subject"]), *report.noise_warning(result)]
    assert all(isinstance(text, Message) for text in texts) and str(texts[2]) == "FLUX.1, tiny size"


def test_a_compilation_says_whether_a_part_came_from_the_cache():
    compiled = {"num_graphs": 12, "recompiles": 0, "seconds": 115.9, "cache_hits": 0}
    assert str(report.compiled_summary({"compile": compiled})) == "12 graphs in 115.9 s"
    cached = {"compile": {**compiled, "cache_hits": 3}}
    assert str(report.compiled_summary(cached)) == "12 graphs in 115.9 s, partly from the cache"
    assert report.compiled_summary({}) == ""
