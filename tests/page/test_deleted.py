"""A run's folder is deleted while it trains: the panel says so, and claims nothing that it cannot know."""

import os
import shutil

import pytest

from library.runs import reader, registry
from tests.training import wait_for

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file"),
]


def test_the_panel_says_so_and_the_training_goes_on(visit, tmp_path):
    visitor = visit()
    visitor.fill(
        pretrained_model_name_or_path="/models/base.safetensors",
        train_data_dir="/images",
        resolution="1024",
        output_name="cat",
        max_train_steps="4000",
        output_dir=tmp_path / "out",
    )
    visitor.click("Train")
    run = visitor.state("running")
    visitor.until("Step", ".line")

    def written():
        events = reader.read_events(registry.folder_of_run(run))
        return [event["step"] for event in events if event["kind"] == "step"]

    before = len(written())
    shutil.rmtree(tmp_path / "out")
    visitor.until("The folder of this run was deleted", ".cause")
    visitor.until("Its record was written again", ".cause")
    visitor.until("Step", ".line")
    wait_for(lambda: (tmp_path / "out" / "runs" / run / "run.toml").exists())  # needed to resume it
    visitor.click("Stop after this step")
    assert visitor.state("stopped") == run
    visitor.until("Its record was written again", ".cause")
    steps = written()
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > before
    assert (tmp_path / "out" / "cat.safetensors").exists()
