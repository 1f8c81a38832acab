"""The figure and the tables of presets are those that the measurements make."""

import re
from xml.etree import ElementTree

from benchmarks import figure


def row(**other):
    values = {"family": "flux", "method": "lora", "preset": None, "trainer": "here", "how": "compile", "batch": 1}
    return values | {"s_it": 0.5, "gpu_gib": 20.0, "compile_s": None, "gpu_busy_s": None, "shown": True} | other


MACHINE = {"gpu": "GPU X", "processor": "CPU Y", "cores": 8, "torch": "2.13.0", "note": "Read it with care."}


def texts(svg):
    return [(e.get("class"), e.text) for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text")]


def test_both_are_up_to_date_with_the_measurements_and_presets():
    every = figure.load_measurements()
    again = "run: python -m benchmarks.figure"
    assert figure.FIGURE.read_text(encoding="utf-8") == figure.figure(figure.newest(every)), again
    for path, lines in figure.document_tables(every).items():
        page = path.read_text(encoding="utf-8")
        assert figure.TABLE.search(page) and page == figure.with_table(page, lines), again
    rows = figure.presets_table(every)[2:]
    assert all("s per step" in row or "not measured" in row for row in rows)
    assert len(rows) == len(
        [
            path
            for path in (figure.PROJECT_ROOT / "presets").glob("*/*.toml")
            if path.parent.name not in ("compile", "recipes")
        ]
    )


def test_the_overview_has_a_column_for_each_size_and_names_what_was_gained():
    head, _, *rows = figure.overview(figure.load_measurements())
    assert [int(cell.split()[0]) for cell in head.strip("| ").split("|")] == sorted(
        {size for path in figure._presets() if (size := figure._gigabytes(path))}
    )
    rows_by_name = {row.split("|")[1].strip(): row for row in rows}
    assert re.search(r"\(\d+\.\d x; busy \d\.\d+ x\)", rows_by_name["SDXL LoRA"])
    assert not any("DreamBooth" in title for title in rows_by_name)


def test_a_bar_shows_how_long_the_gpu_was_busy():
    measurement = {
        "machine": MACHINE,
        "rows": [row(trainer="sd-scripts", s_it=1.0, gpu_busy_s=0.25), row(gpu_busy_s=0.5)],
    }
    svg = figure.figure(measurement)
    wide = [int(e.get("width")) for e in ElementTree.fromstring(svg).iter() if e.get("class") in ("theirs", "ours")]
    assert wide == [figure.PICTURE_WIDTH // 4, figure.PICTURE_WIDTH // 2]
    said = " ".join(text for _, text in texts(svg))
    assert "1.000 s, 20.0 GiB, busy 0.250 s" in said and "The filled part of a bar" in said


def test_what_was_not_measured_is_reported():
    measurement = {"machine": MACHINE | {"processor": None}, "rows": [row(trainer="sd-scripts"), row()]}
    said = " ".join(text for _, text in texts(figure.figure(measurement)))
    assert "GPU X, 8 cores of a processor that was not recorded, torch 2.13.0" in said
    assert "Read it with care. The GPU's busy time was not measured." in said


def test_the_figure_can_be_read_aloud_and_on_a_phone():
    svg = figure.FIGURE.read_text(encoding="utf-8")
    root = ElementTree.fromstring(svg)
    named = {e.get("id") for e in root.iter() if e.tag.rpartition("}")[2] in ("title", "desc") and e.text}
    assert root.get("role") == "img" and set(root.get("aria-labelledby").split()) == named
    assert "prefers-color-scheme:dark" in svg
    # At a phone's 360 pixels the smallest letters have at least 8.
    smallest = min(int(size) for size in re.findall(r"(\d+)px", svg))
    assert smallest * 360 / float(root.get("width")) >= 8
    for kind, text in texts(svg):
        assert len(text) * 6.2 < figure.PICTURE_WIDTH, (kind, text)


def test_a_preset_stands_beside_the_fastest_that_fits_into_its_memory():
    theirs = [row(trainer="sd-scripts", s_it=0.9, gpu_gib=11.0), row(trainer="sd-scripts", s_it=0.3, gpu_gib=70.0)]
    measurement = {"machine": MACHINE, "rows": [*theirs, row(preset="flux/lora-12gb", gpu_gib=10.5, compile_s=20.4)]}
    older = {"machine": MACHINE, "rows": [row(preset="flux/lora-12gb", s_it=9.0)]}
    said = figure._result("flux/lora-12gb", 12, [measurement, older])
    assert said == "0.5 s per step (sd-scripts: 0.9 s), batch size 1, 10.5 GiB, 20 s of compiling, GPU X"
    assert figure._result("flux/lora-8gb", 8, [measurement, older]) == ""


def test_every_factor_is_one_of_wall_time_and_one_of_the_gpus_busy_time():
    theirs = row(trainer="sd-scripts", s_it=1.0, gpu_busy_s=0.4)
    measurement = {"machine": MACHINE, "rows": [theirs, row(s_it=0.25, gpu_busy_s=0.2)]}
    assert "4.0 x; busy 2.0 x" in [text for _, text in texts(figure.figure(measurement))]
    assert figure.factors(theirs, row(s_it=0.8)) == "1.25 x; busy not measured"


def test_a_family_stands_beside_another_trainer_in_no_more_memory():
    theirs = row(trainer="sd-scripts", s_it=1.0, gpu_gib=10.0, gpu_busy_s=0.5)
    fast, fair = row(s_it=0.1, gpu_gib=30.0, gpu_busy_s=0.1), row(s_it=0.5, gpu_gib=9.0, gpu_busy_s=0.25)
    old = {"machine": MACHINE, "rows": [theirs, fast, fair]}
    new = {"machine": MACHINE, "rows": [row(trainer="musubi-tuner", gpu_gib=10.0), row(s_it=0.4, gpu_gib=9.0)]}
    assert figure.comparison("flux", [new, old]) == (old, theirs, fair)  # busy times count more than being new
    assert figure.comparison("flux", [new])[0] == new
    assert figure.comparison("flux", [{"machine": MACHINE, "rows": [theirs, fast]}]) is None


def test_the_overview_by_family_has_a_row_for_each_and_names_the_processor():
    lines = figure.by_family(figure.load_measurements())
    assert [line.split("|")[1].strip() for line in lines[2 : 2 + len(figure.TITLES)]] == list(figure.TITLES.values())
    assert "cores of " in lines[-1] and lines[-1].startswith("- ")
