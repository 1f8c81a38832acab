"""`debug_dataset`: what a training would see is printed, and nothing is trained or written."""

import pytest

from library.cli import train_script
from library.config.formats import to_toml
from library.families import config_class
from library.runs import reader
from tests.training import config_of, pictures, runs_in, untouched

SCRIPT = "sdxl_train_network"
SIZES = ((64, 64), (64, 64), (64, 64), (128, 64))


@pytest.fixture
def shown(demo, tmp_path, capsys):
    """What a shell prints of a data set, line by line."""
    folder = pictures(tmp_path / "images", SIZES)

    def show(**values):
        base = {
            "debug_dataset": True,
            "train_batch_size": 2,
            "min_bucket_reso": 64,
            "seed": 1,
            "cache_info": True,
            "resolution": 96,
        }
        base |= {"pretrained_model_name_or_path": None, "output_dir": tmp_path / "out", "train_data_dir": folder}
        config = config_of(demo, SCRIPT, **base | values)
        (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
        with untouched(folder, demo.folder):
            code = train_script.main(config_class(SCRIPT), ["--config_file", str(tmp_path / "run.toml")])
        assert code == 0
        return capsys.readouterr().out.splitlines()

    show.folder, show.out = folder, tmp_path / "out"
    return show


def test_buckets_captions_and_sizes_are_printed_and_nothing_is_written(shown):
    lines = shown(caption_prefix="by me,", flip_aug=True, cache_text_encoder_outputs=False)
    assert not shown.out.exists()
    assert "4 images (0 of them regularisation), seen 8 times in 4 batches per epoch" in lines
    assert [line.strip() for line in lines if line.startswith("  bucket")] == [
        "bucket 64x64: 3 images, 3 batches",
        "bucket 128x64: 1 image, 1 batch",
    ]
    assert sum(line.startswith("batch ") for line in lines) == 4
    wide = [line for line in lines if "3.png" in line]
    assert len(wide) == 2 and all("(128x64, scaled to 128x64" in line for line in wide)
    captions = [line for line in lines if line.startswith('    "')]
    assert len(captions) == 8 and all(line.startswith('    "by me, zorb toy, ') for line in captions)
    assert 0 < sum("mirrored" in line for line in lines) < 8


def test_captions_that_are_cached_are_shown_as_they_are_cached(shown):
    lines = shown(caption_prefix="by me,", cache_text_encoder_outputs=True, validation_split=0.25)
    captions = [line for line in lines if line.startswith('    "')]
    assert captions and all(line.startswith('    "by me, zorb toy, ') for line in captions)
    assert "used for validation: 1" in lines


def test_what_is_wrong_with_the_data_is_reported(shown, capsys):
    with pytest.raises(SystemExit) as ended:
        shown(train_data_dir=shown.folder / "2_zorb toy")
    assert ended.value.code == 1 and "give the folder above it" in capsys.readouterr().err


def test_a_run_of_the_page_is_over_then(shown, tmp_path, monkeypatch):
    from library.runs import layout

    folder = tmp_path / "out" / "runs" / "cat"
    folder.mkdir(parents=True)
    layout.store(folder / layout.RUN, {"id": "cat", "state": "starting"})
    monkeypatch.setenv("KOHYA_RUN_DIR", str(folder))
    assert shown()
    assert runs_in(shown.out) == {folder} and reader.run_at(folder).state == "finished"
