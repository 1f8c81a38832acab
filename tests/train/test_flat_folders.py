"""A folder with images directly in it trains like the folder named <repeats>_<words> that it stands for."""

import json

import pytest
from safetensors import safe_open

from tests.training import LORAS, config_of, pictures, train


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    """The same pictures twice: in 2_zorb toy, and directly in a folder."""
    folder = tmp_path_factory.mktemp("flat")
    pictures(folder / "named")
    pictures(folder / "other")
    (folder / "other" / "2_zorb toy").rename(folder / "zorb")
    return folder


@pytest.mark.parametrize("script", ["flux_train_network", "sdxl_train"])
def test_a_flat_folder_trains_the_same_and_its_metadata_names_it(demo, flat, tmp_path, script):
    named = train(config_of(demo, script, train_data_dir=flat / "named", output_dir=tmp_path / "a", max_train_steps=2))
    plain = train(
        config_of(
            demo, script, train_data_dir=flat / "zorb", dataset_repeats=2, max_train_steps=2, output_dir=tmp_path / "b"
        )
    )
    assert plain.losses == named.losses and len(plain.losses) == 2
    if script in LORAS:
        with safe_open(plain.file, "pt") as file:
            said = file.metadata()
        assert json.loads(said["ss_dataset_dirs"]) == {"zorb": {"n_repeats": 2, "img_count": 4}}
        assert json.loads(said["ss_tag_frequency"])["zorb"]["zorb toy"] == 4 and said["ss_num_train_images"] == "8"


def test_repeats_make_the_epoch_longer(demo, flat, tmp_path):
    once = train(
        config_of(
            demo,
            "flux_train_network",
            train_data_dir=flat / "zorb",
            output_dir=tmp_path,
            max_train_epochs=1,
            train_batch_size=2,
        )
    )
    assert len(once.losses) == 2
