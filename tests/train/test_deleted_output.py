"""The output folder is deleted during a training: it continues, saves its result, and its record is whole."""

import os
import shutil

import pytest

from library.runs.record import Record
from tests.training import config_of, train


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file")
@pytest.mark.parametrize("script", ["sdxl_train_network", "flux_train"])
def test_the_result_and_the_record_are_there_at_the_end(demo, tmp_path, monkeypatch, script):
    tell = Record.step

    def step(self, values):
        tell(self, values)
        if values["step"] == 3:
            shutil.rmtree(tmp_path / "out")

    monkeypatch.setattr(Record, "step", step)
    outcome = train(
        config_of(
            demo,
            script,
            output_dir=tmp_path / "out",
            max_train_steps=5,
            save_every_n_steps=2,
            save_state=True,
            save_last_n_steps=2,
        )
    )
    assert outcome.file.is_file() and len(outcome.losses) == 5
    assert outcome.facts["state"] == "finished" and outcome.facts["restored"]
    assert sum("was deleted" in str(event["text"]) for event in outcome.events("warning")) == 1
