"""Chosen steps are saved, intervals begin late, and a training whose held-out loss stays ends: in every script."""

import pytest

from library import families
from library.demo.images import write_references
from tests.contract.test_family import same_end
from tests.training import RELATED, RUNS, config_of, pictures, train

# Two steps an epoch, as one of the four images is held out.
DATA = """[[datasets]]
resolution = 64
batch_size = 2
validation_split = 0.25

[[datasets.subsets]]
image_dir = '{images}'
conditioning_data_dir = '{controls}'
caption_extension = ".txt"
"""
# Nothing is learned, so no validation is better than the first one, after step 2.
STILL = {"learning_rate": 1e-30, "max_train_steps": 40, "early_stop_patience": 2}
SAVES = {"save_at_steps": "2, 5", "save_every_n_epochs": 1, "save_from_step": 4, "save_state": True}


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """A function: script -> a dataset file for it, of images of which one is held out."""
    folder = tmp_path_factory.mktemp("described")
    images = pictures(folder / "images", repeats=1)
    controls = write_references(images, folder / "controls")

    def write(script):
        guided = families.config_class(script)().control_images.guided
        text = DATA.format(images=images / "1_zorb toy", controls=controls)
        path = folder / f"{script}.toml"
        path.write_text(text if guided else "".join(t for t in text.splitlines(True) if "conditioning" not in t))
        return path

    return write


@pytest.mark.parametrize("script", [*RUNS, *RELATED])
def test_chosen_steps_are_saved_and_patience_ends_a_training_also_after_a_resume(demo, described, tmp_path, script):
    def run(folder, **values):
        options = {"train_data_dir": None, "dataset_config": described(script), "output_name": "m", **STILL, **SAVES}
        options |= {"conditioning_data_dir": None} if script.endswith("lllite") else {}
        return train(config_of(demo, script, output_dir=tmp_path / folder, **options | values))

    def saved(outcome):
        files = (event["file"].replace("\\", "/").rpartition("/")[2] for event in outcome.events("saved"))
        return [name.partition(".")[0] for name in files]

    whole = run("a")
    early = whole.facts["early_stop"]
    assert whole.facts["state"] == "finished" and len(whole.losses) == 6
    assert (early["step"], early["best_step"], early["patience"]) == (6, 2, 2)
    names = ["m-step00000002", "m-000002", "m-step00000005", "m-000003", "m"]
    assert saved(whole) == [*(n for name in names[:-1] for n in (name, f"{name}-state")), "m-state", "m"]

    # The state was saved before the validation of its step, which is made up for.
    again = run("b", resume=tmp_path / "a" / "m-step00000002-state")
    assert [event["step"] for event in again.events("validation")] == [2, 4, 6]
    assert [e["loss"] for e in again.events("validation")] == [e["loss"] for e in whole.events("validation")]
    assert {**again.facts["early_stop"]} == early and saved(again) == saved(whole)[2:]
    same_end(whole, again, 2)
