"""`kohya bench --part sample`: every way to generate, on tiny models of every family."""

import pytest
import torch

from library import families
from library.bench import images, measure, report, subjects
from library.bench.shell import build_bench_parser, check_bench_options, choose_ways
from library.config.problems import ConfigError
from library.measuring import candidates, timing

QUICK = timing.TimingPlan(steps=1, warmup=1, seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_step_and_an_image_are_timed_in_every_way(family, home, monkeypatch):
    monkeypatch.setattr(timing, "RATE_SECONDS", 0.01)
    subject = subjects.FamilySubject(families.lora_script(family), {"compile_backend": "eager"}, "tiny")
    every_way = images.image_ways(torch.device("cpu"))
    assert {"attention flash", "attention math", "compiled+cached"} < every_way.keys()
    assert not any("recorded" in way for way in every_way)  # only a GPU records
    assert {"recorded", "compiled+recorded"} < images.IMAGE_WAYS.keys()
    ways = [*every_way] if family == "flux" else ["eager", "compiled"]  # all with the smallest
    monkeypatch.setattr(measure, "image_ways", lambda _: ways)
    run = measure.BenchRun(subject, torch.device("cpu"), [], (report.SAMPLE,), (64,), QUICK, say=lambda _: None)
    rows = [row for start, act in run._todo() for row in run._careful(start, act)]
    assert all(row["status"] == "ok" and row["ms"]["p50"] > 0 for row in rows), rows
    around = [row["part"] for row in rows if row["part"].startswith(("text encoder", "vae"))]
    assert around[-1] == report.DECODE and len(around) == 1 + len(subject.encoders())
    rows = rows[len(around) :]
    assert [row["candidate"] for row in rows] == [way for way in ways for _ in range(3)]
    assert [row["part"] for row in rows[:3]] == ["first image", "denoising step", "image of 4 steps"]
    for row in (row for row in rows if row["part"] != "first image"):
        assert ("skipped" in row) == row["candidate"].endswith("cached") and 0 <= row.get("skipped", 0) <= 0.5
    for row in (row for row in rows if row["part"] != "first image"):
        compiled = "compiled" in row["candidate"]
        assert ("compile" in row) == compiled and (not compiled or row["compile"]["num_graphs"] > 0)
        assert row["not_recorded"]  # on a CPU
        if row["part"].startswith("image"):
            assert row["first_s"] > 0 and (row["candidate"] == "eager" or 0 <= row["distance"] < 0.01)
    assert measure.measurement_title({"part": report.SAMPLE, "candidate": "eager", "resolution": 64})


# --part, --candidate -> settings of steps, and ways to generate.
CHOSEN = {
    ("sample", "compiled"): ([], ["compiled"]),
    ("sample", "attention math,eager,eager"): ([], ["attention math", "eager"]),
    ("sample,step", "eager,compiled+cached"): (["eager"], ["eager", "compiled+cached"]),
    ("sample,blocks", "checkpointing,compiled+cached"): (["checkpointing"], ["compiled+cached"]),
    ("sample", "all"): (None, ["eager", "compiled", "compiled+cached", "attention math"]),
    ("sample", ""): (None, ["eager", "compiled", "compiled+cached", "attention math"]),
}
WAYS = ["eager", "compiled", "compiled+cached", "attention math"]
REFUSED = {
    ("sample", "compild,checkpointing"): (
        "--candidate compild is not for generating images (did you mean compiled?); choose from eager",
        "--candidate checkpointing is not for generating images",
    ),
    ("sample", "recorded"): ("--candidate recorded needs a GPU",),
    ("sample,step", "attention math"): ("--candidate attention math has no variant for --part step; add one of eager",),
    ("sample,step", "checkpointing"): ("--candidate checkpointing has no variant for --part sample; add one of eager",),
    ("sample,step", "nothing,fp8"): ("--candidate nothing is not a known variant", "--candidate fp8 needs a GPU"),
}


def chosen(part, names):
    def choose(some):
        return candidates.choose_candidates(some, False, "cpu", {o for c in candidates.ALL for o in c.options})

    return choose_ways([name for name in names.split(",") if name], choose, WAYS, part != "sample")


@pytest.mark.parametrize("case", CHOSEN, ids="; ".join)
def test_only_the_named_ways_to_generate_are_timed(case):
    expected, ways = CHOSEN[case]
    settings, found = chosen(*case)
    assert found == ways and (expected is None or [candidate.name for candidate in settings] == expected)
    subject = subjects.FamilySubject(families.lora_script("flux"), {}, "tiny")
    run = measure.BenchRun(subject, torch.device("cpu"), [], (report.SAMPLE,), (64,), QUICK, ways=found)
    assert [start["candidate"] for start, _ in run._todo() if start["part"] == report.SAMPLE] == ways


@pytest.mark.parametrize("case", REFUSED, ids="; ".join)
def test_names_that_a_part_does_not_have_are_refused_at_once(case):
    with pytest.raises(ConfigError) as caught:
        chosen(*case)
    assert all(words in str(caught.value) for words in REFUSED[case])
    assert len(caught.value.problems) == len(REFUSED[case])


def test_other_transformers_have_no_images(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    words = ["--diffusers", "X", "--config", str(tmp_path / "config.json"), "--part", "sample"]
    with pytest.raises(ConfigError, match="--part sample is for --family"):
        check_bench_options(build_bench_parser().parse_args(words))
