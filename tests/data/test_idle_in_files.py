"""Keys of a dataset file that nothing reads where they stand: each is named, and those that act are not."""

import pytest

from library import data
from tests.data import make

NOT_SPLIT = "shuffle_caption and caption_tag_dropout_rate are off"
REMARK = "{} has no effect here: {}"


def remarks(tmp_path, general, subset, table="", script="sdxl_train_network", **options):
    """What is reported of a file of one subset, apart from remarks on its images."""
    folder, file = make.folder(tmp_path, "cats", ((64, 64),) * 2).as_posix(), tmp_path / "images.toml"
    head = f"[general]\nresolution = 64\ncaption_extension = '.txt'\n{general}[[datasets]]\n{table}"
    file.write_text(f"{head}[[datasets.subsets]]\nimage_dir = '{folder}'\n{subset}", encoding="utf-8")
    unset = dict.fromkeys(("resolution", "min_bucket_reso", "max_bucket_reso", "caption_extension"))
    config = make.config(None, script, **unset | options, dataset_config=str(file))
    return [text for text in map(str, data.check_data(config, 32).warnings) if "effect" in text]


@pytest.mark.parametrize(
    ("key", "switch", "reason"),
    [
        ("keep_tokens = 1\n", "shuffle_caption = true\n", NOT_SPLIT),
        ("keep_tokens = 1\n", "token_warmup_step = 0.5\n", NOT_SPLIT),
        ("caption_separator = ';'\n", "secondary_separator = ';;'\n", NOT_SPLIT),
        ("token_warmup_min = 2\n", "token_warmup_step = 9\n", "token_warmup_step is 0"),
    ],
)
@pytest.mark.parametrize("level", range(3))
def test_a_key_about_tags_is_idle_while_nothing_splits_them(tmp_path, key, switch, reason, level):
    def at_level(text):
        return {"general": text * (level == 0), "table": text * (level == 1), "subset": text * (level == 2)}

    assert remarks(tmp_path, **at_level(key)) == [REMARK.format(key.split()[0], reason)]
    assert not remarks(tmp_path, **at_level(key + switch))


@pytest.mark.parametrize(
    ("key", "switch", "reason"),
    [
        ("bucket_no_upscale = true\n", "enable_bucket = true\nmin_bucket_reso = 64\n", "enable_bucket is off"),
        ("validation_seed = 3\n", "validation_split = 0.5\n", "validation_split is 0"),
    ],
)
def test_a_key_of_a_data_set_is_idle_without_what_it_belongs_to(tmp_path, key, switch, reason):
    assert remarks(tmp_path, "", "", key) == [REMARK.format(key.split()[0], reason)]
    assert not remarks(tmp_path, "", "", key + switch)


def test_an_option_of_the_run_is_idle_where_no_subset_uses_it(tmp_path):
    assert remarks(tmp_path, "", "", keep_tokens=2) == [REMARK.format("keep_tokens", NOT_SPLIT)]
    assert not remarks(tmp_path, "", "shuffle_caption = true\n", keep_tokens=2)


def test_an_attribute_that_nothing_reads_is_named(tmp_path):
    attributes = (
        "custom_attributes = { diff_output_preservation = true, diff_output_preservatoin = true, note = 'x' }\n"
    )
    (told,) = remarks(tmp_path, "", attributes)
    expected = "diff_output_preservatoin and note without effect, as only diff_output_preservation is read"
    assert told == f"custom_attributes: {expected}"
