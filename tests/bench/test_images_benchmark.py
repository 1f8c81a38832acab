"""benchmarks/images.py: every family, beside diffusers, with tiny models on a CPU."""

import json

import pytest

from benchmarks import images
from library import families


def test_every_family_has_a_case():
    assert images.IMAGE_CASES.keys() == {*families.FAMILIES}, "add it to IMAGE_CASES in benchmarks/images.py"


@pytest.mark.parametrize("family", ["flux", "anima"])  # with and without a pipeline of diffusers
def test_both_ways_draw_with_the_same_settings(family):
    ways = ["ours eager", "diffusers eager"] if images.IMAGE_CASES[family].theirs else ["ours eager"]
    for way in ways:
        row = images.measure_way(family, way, tiny=True, images=1)
        assert row["step_s"] * row["steps"] > 0 and row["next_s"] > 0


def test_rows_are_printed_and_kept_as_lines_and_failures_are_rows(tmp_path, monkeypatch, capsys):
    rows = iter([{"step_s": 1.0}, {"failed": "why"}])
    monkeypatch.setattr(images, "run_way", lambda *_: next(rows))
    out = tmp_path / "rows.jsonl"
    asked = ["--family", "flux", "--ways", "diffusers eager", "ours recorded", "--out", str(out)]
    assert images.main(asked) == 1
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["way"] for row in found] == ["diffusers eager", "ours recorded"]
    assert capsys.readouterr().out.splitlines() == [json.dumps(row) for row in found]
