"""Files and folders whose names are not UTF-8, as archives from other systems leave them: told of, and trained."""

import os
import shutil
import sys

import pytest

from library import data
from library.adapter_files.storage import header_bytes
from library.config.problems import Message
from library.curation import sources
from library.data import encoding
from library.data.loading import Batches
from library.families.base import LatentCache
from library.files import json_text, write_atomic
from library.outputs.dataset_stats import dataset_stats
from tests.data import make

pytestmark = pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="all names there are Unicode")
ODD = "caf\udce9"  # Latin-1's é, as Python reads it
MUSUBI = LatentCache("_zi.safetensors", keyed_by_size=True, architecture="z_image")


@pytest.fixture
def odd(tmp_path):
    """A folder of which name, an image and its caption are in Latin-1."""
    folder = make.folder(tmp_path, f"1_{ODD}")
    shutil.copy(folder / "00.png", folder / f"{ODD}.png")
    (folder / f"{ODD}.txt").write_text("a cup")
    (folder / "01.txt").unlink()
    return tmp_path


OPTIONS = {
    "nothing cached": {},
    "in memory": {"cache_latents": True, "cache_text_encoder_outputs": True, "network_train_unet_only": True},
    "on disk": {
        "cache_latents_to_disk": True,
        "cache_text_encoder_outputs_to_disk": True,
        "network_train_unet_only": True,
    },
    "remembered": {"cache_info": True},
    "validated": {"validation_split": 0.4},
}


@pytest.mark.parametrize("cache", [make.SDXL, MUSUBI], ids=["npz", "safetensors"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_odd_file_names_are_reported_and_trained(odd, kind, cache):
    config = make.config(odd, **OPTIONS[kind])
    for _ in range(2):  # again with what the first time left
        checked = data.check_data(config, 32)
        assert not checked.problems
        said = [str(warning) for warning in checked.warnings if "UTF-8" in str(warning)]
        assert len(said) == 1 and "caf\\xe9.png" in said[0]
        assert all(str(warning).encode() for warning in checked.warnings)
        images, run = data.scan(config), make.Run()
        encoding.encode_missing_caches(images, make.Family(cache), make.parts(), config, run, run.phase)
        batches = Batches(images, config, 0)
        assert batches.state_dict()["images or captions"]
        batches_seen = [batch for batch, _ in zip(batches, range(len(batches)), strict=False)]
        assert all(words.encode() for batch in batches_seen for words in batch.captions)
    everything = [image.path for part in (images, images.validation) if part for image in part.items]
    assert sum(ODD in os.path.basename(path) for path in everything) == 1
    assert sources.scan_sources(config).count()["images"]


def test_the_file_that_is_saved_has_its_metadata(odd):
    config = make.config(odd)
    stats = dataset_stats(data.scan(config), config, 1, 1, 1)
    assert header_bytes({}, {"ss_dataset_dirs": json_text(stats["dataset_dirs"]), "folder": f"1_{ODD}"})


def test_texts_and_records_hold_them(tmp_path):
    said = Message("{path} is missing", path=ODD)
    assert str(said) == "caf\\xe9 is missing"
    path = write_atomic(tmp_path / f"{ODD}.json", json_text({"path": ODD, "words": "é"}))
    assert path.exists() and '"\\u00e9"' in path.read_text() and json_text({"words": "é"}) == '{"words": "é"}'


def test_an_image_folder_of_such_a_name_is_refused_in_a_sentence(odd):
    (problem,) = data.check_data(make.config(odd / f"1_{ODD}"), 32).problems
    assert "rename the folder" in str(problem) and str(problem).encode()
