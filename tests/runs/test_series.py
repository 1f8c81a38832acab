"""The columns of charts: read step by step, thinned, and continued after a resume."""

import json

import pytest

from library.runs import layout, registry, series


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))


def make(tmp_path, name, **facts):
    folder = tmp_path / "out" / "runs" / name
    folder.mkdir(parents=True)
    layout.store(folder / "run.json", {"id": name, "state": "finished", "started": 100.0, **facts})
    registry.add_pointer(folder)
    return folder


def write(folder, *events):
    with (folder / layout.PROGRESS).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def step(number, at, **values):
    return {"kind": "step", "step": number, "t": at, "loss": 0.5, **values}


def test_a_reader_gets_only_new_points_and_all_after_a_repetition(tmp_path):
    folder = make(tmp_path, "cat")
    write(folder, step(1, 10.0, lr={"unet": 1e-4, "te": 1e-4}, data_s=0.1, transfer_s=0.1, compute_s=0.3))
    write(folder, step(2, 11.0, lr={"unet": 1e-4, "te": 2e-5}, grad_norm=float("nan"), s_it=0.5))
    write(folder, {"kind": "validation", "step": 2, "t": 12.0, "loss": 0.4}, {"kind": "step", "step": "x"})
    run = series.series_of(folder).update()
    first = run.since(0, 0, 0)
    values = first["steps"]["values"]
    assert first["steps"]["steps"] == [1, 2] and first["steps"]["seconds"] == [0, 1]
    assert values["loss"] == [0.5, 0.5] and values["pace"] == [pytest.approx(0.5), 0.5] and "gradient" not in values
    assert values["rate"] == [1e-4, None] and values["rate te"] == [None, 2e-5]
    assert first["checks"]["values"]["loss"] == [0.4]
    write(folder, step(3, 13.0))
    news = run.update().since(first["generation"], 2, 1)
    assert news["steps"]["steps"] == [3] and news["checks"]["steps"] == [] and news["from"] == [2, 1]
    write(folder, step(2, 20.0))  # steps are repeated
    news = run.update().since(first["generation"], 3, 1)
    assert news["from"] == [0, 0] and news["steps"]["steps"] == [1, 2]


def test_a_long_run_is_thinned_and_a_resumed_one_goes_on(tmp_path):
    before = make(tmp_path, "before")
    write(before, *(step(n, float(n)) for n in range(1, 2 * series.MAX_POINTS)))
    run = series.series_of(before).update()
    assert len(run.steps.steps) <= series.MAX_POINTS and run.steps.steps[-1] > 1.99 * series.MAX_POINTS
    after = make(tmp_path, "after", started=200.0, resumes="before")
    write(after, step(1001, 9000.0), step(1002, 9001.0))
    columns = series.series_of(after).update().since(0, 0, 0)
    assert columns["resumed"] == [1000] and columns["steps"]["steps"][-1] in (1001, 1002)
    assert columns["steps"]["steps"][0] == 1 and 990 < columns["steps"]["seconds"][-1] < 1010


def test_likeness_comes_from_the_newest_comparison(tmp_path):
    folder = make(tmp_path, "cat")
    for name, likeness in (("compare-1", [0.1, 0.2]), ("compare-2", [0.5, None, 0.7])):
        (folder / name).mkdir()
        columns = ["step 100", "step 100, average", "step 1,200"]
        (folder / name / "comparison.json").write_text(json.dumps({"columns": columns, "likeness": likeness}))
    assert series.likeness_of_files(folder) == [(100, 0.5), (1200, 0.7)]
    (folder / "compare-3").mkdir()
    (folder / "compare-3" / "comparison.json").write_text('{"columns": 3')
    assert series.likeness_of_files(folder) == [(100, 0.5), (1200, 0.7)]
