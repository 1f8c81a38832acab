"""The dataset file: what it says, what is looked up behind it, and every mistake in it at once."""

import json

import pytest

from library import families
from library.config import dataset
from library.config.building import Layer, build_config, read_layers
from library.config.problems import ConfigError
from library.families import config_class
from library.families.flux.variants import FLUX_VARIANTS

FILE = r"""
[general]
shuffle_caption = true
keep_tokens = 2
caption_extension = "txt"

[[datasets]]
resolution = 512
batch_size = 4
keep_tokens = 1

  [[datasets.subsets]]
  image_dir = 'C:\images\cats'
  num_repeats = 3
  shuffle_caption = false

  [[datasets.subsets]]
  image_dir = 'dogs'
  is_reg = true
  face_crop_aug_range = [2.0, 4.0]
  custom_attributes = { diff_output_preservation = true }

  [[datasets.subsets]]
  image_dir = 'dogs'
  num_repeats = 9

[[datasets]]
resolution = [1024, 768]
enable_bucket = true

  [[datasets.subsets]]
  metadata_file = "meta.jsonl"
"""


def config(script="flux_train_network", **options):
    return build_config(families.config_class(script), options, notes=[])


def written(tmp_path, text, name="data.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(tmp_path, text, script="flux_train_network", name="data.toml", **options):
    with pytest.raises(ConfigError) as e:
        dataset.load_datasets(config(script, dataset_config=written(tmp_path, text, name), **options))
    return str(e.value).splitlines()


def test_lookup_goes_from_the_subset_outwards(tmp_path):
    run = config(dataset_config=written(tmp_path, FILE), train_batch_size=2, dataset_repeats=7, caption_prefix="photo")
    first, second = dataset.load_datasets(run)
    cats, dogs = first.subsets
    assert (first.resolution, first.batch_size, first.enable_bucket) == ((512, 512), 4, False)
    assert (second.resolution, second.batch_size, second.enable_bucket) == ((1024, 768), 2, True)
    assert (cats.image_dir, cats.num_repeats, cats.shuffle_caption, cats.keep_tokens) == (
        r"C:\images\cats",
        3,
        False,
        1,
    )
    assert (dogs.num_repeats, dogs.shuffle_caption, dogs.is_reg, dogs.caption_extension) == (7, True, True, ".txt")
    assert dogs.face_crop_aug_range == (2.0, 4.0)
    assert dogs.custom_attributes == {"diff_output_preservation": True}
    assert cats.caption_prefix == "photo"
    (meta,) = second.subsets
    assert (meta.kind, cats.kind, meta.keep_tokens) == ("metadata", "folder", 2)


def test_a_no_in_a_subset_beats_a_yes_of_the_run(tmp_path):
    text = SUBSET.replace("64\n", "64\nenable_bucket = false\n") + "flip_aug = false\n"
    (sub,) = dataset.load_datasets(config(dataset_config=written(tmp_path, text), flip_aug=True, enable_bucket=True))
    assert not sub.enable_bucket
    assert not sub.subsets[0].flip_aug


def test_an_empty_text_hides_what_is_set_above_it(tmp_path):
    text = """
general.caption_suffix = "photo"
[[datasets]]
resolution = 512
subsets = [{image_dir = "a", caption_prefix = "", caption_suffix = ""}, {image_dir = "b"}]
"""
    first, second = dataset.load_datasets(config(dataset_config=written(tmp_path, text), caption_prefix="zorb"))[
        0
    ].subsets
    assert not first.caption_prefix and not first.caption_suffix
    assert (second.caption_prefix, second.caption_suffix) == ("zorb", "photo")


def test_a_folder_without_repeats_does_not_hide_the_same_folder_below(tmp_path):
    text = """
[[datasets]]
resolution = 512
subsets = [{image_dir = "a", num_repeats = 0}, {image_dir = "a", num_repeats = 5}, {image_dir = "a"}]
"""
    (data,) = dataset.load_datasets(config(dataset_config=written(tmp_path, text)))
    assert [subset.num_repeats for subset in data.subsets] == [5] and data.repeated == ("a",)


def test_json_says_the_same(tmp_path):
    tables = {"general": {"flip_aug": True}, "datasets": [{"resolution": 256, "subsets": [{"image_dir": "a"}]}]}
    (sub,) = dataset.load_datasets(config(dataset_config=written(tmp_path, json.dumps(tables), "data.json")))
    assert sub.resolution == (256, 256)
    assert sub.subsets[0].flip_aug


def test_folders_of_the_run_are_one_dataset_with_a_template():
    folders = {"train_data_dir": "img", "reg_data_dir": "reg", "resolution": "512,768"}
    more = {"train_batch_size": 3, "validation_split": 0.1, "face_crop_aug_range": "2,4"}
    run = config(caption_extension="txt", alpha_mask=True, **folders, **more)
    (sub,) = dataset.load_datasets(run)
    assert sub.subsets == ()
    assert (sub.train_data_dir, sub.reg_data_dir, sub.resolution) == ("img", "reg", (512, 768))
    assert (sub.batch_size, sub.validation_split) == (3, 0.1)
    assert (sub.template.caption_extension, sub.template.alpha_mask) == (".txt", True)
    assert sub.template.face_crop_aug_range == (2.0, 4.0)


def test_metadata_file_of_the_run_is_one_subset():
    (sub,) = dataset.load_datasets(config(train_data_dir="img", in_json="meta.json", dataset_repeats=5, resolution=64))
    (subset,) = sub.subsets
    assert (subset.image_dir, subset.metadata_file, subset.num_repeats) == ("img", "meta.json", 5)
    assert sub.train_data_dir is None


def test_all_mistakes_at_once_and_where_they_are(tmp_path):
    text = """
foo = 1
[general]
shufle_caption = true
image_dir = "x"
[[datasets]]
resolution = "big"
  [[datasets.subsets]]
  image_dirr = 3
  batch_size = 3
  caption_dropout_rate = 2
"""
    assert problems(tmp_path, text) == [
        "in data.toml: foo is not known at the top level, which has only [general] and [[datasets]]",
        "in data.toml [general]: image_dir belongs in [[datasets.subsets]]",
        "in data.toml [general]: shufle_caption is not a known key (did you mean shuffle_caption?)",
        "in data.toml dataset 1: resolution must be one size in pixels or width,height (1024 or 1024,768), or several "
        "sizes with ; between them (512;1024), got 'big'",
        "in data.toml dataset 1 subset 1: batch_size belongs in [[datasets]] or [general]",
        "in data.toml dataset 1 subset 1: image_dirr is not a known key (did you mean image_dir?)",
        "in data.toml dataset 1 subset 1: caption_dropout_rate must be at least 0.0 and at most 1.0, got 2.0",
    ]


SUBSET = "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'a'\n"


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", {}, "there is no [[datasets]] table"),
        ("[[datasets]]\nresolution = 64\n", {}, "it has no [[datasets.subsets]] table with images"),
        ("datasets = 3\n", {}, "datasets must be written as tables, [[datasets]]"),
        (SUBSET.replace("resolution = 64\n", ""), {}, "resolution is not set: 1024 is usual"),
        (
            SUBSET + "[[datasets.subsets]]\nmetadata_file = 'm.json'\n",
            {},
            "either all subsets have a metadata_file or none has: split them into two [[datasets]]",
        ),
        (SUBSET + "conditioning_data_dir = 'm'\n", {}, "conditioning_data_dir needs masked_loss in the run's options"),
        (
            SUBSET + "shuffle_caption = true\n",
            {"cache_text_encoder_outputs": True},
            "subset a: shuffle_caption cannot be used with cache_text_encoder_outputs while each caption has one "
            "variant: set cached_caption_variants above 1, or switch one of them off",
        ),
        (
            SUBSET + "color_aug = true\n",
            {"cache_latents": True},
            "subset a: color_aug cannot be used with cache_latents: switch one of them off",
        ),
        (
            SUBSET.replace("64\n", "512\nenable_bucket = true\nbucket_reso_steps = 24\n"),
            {},
            "bucket_reso_steps must be a multiple of 16 for FLUX.1 LoRA",
        ),
        (
            SUBSET.replace("64\n", "512\nenable_bucket = true\nmax_bucket_reso = 256\n"),
            {},
            "resolution must not be above max_bucket_reso (256): raise max_bucket_reso",
        ),
        (
            SUBSET + "prior_loss_weight = 0.5\n",
            {},
            "prior_loss_weight is not set for single data sets: set it in the run's options",
        ),
        (
            SUBSET.replace("image_dir", "train_data_dir"),
            {},
            "train_data_dir is not a known key (did you mean image_dir?)",
        ),
        (SUBSET + "mask_dir = 'm'\n", {}, "mask_dir is not a known key (did you mean conditioning_data_dir?)"),
        (
            SUBSET.replace("64\n", "512\nenable_bucket = true\nface_crop_aug_range = [2.0, 4.0]\n"),
            {},
            "subset a: face_crop_aug_range works only without buckets: switch enable_bucket off",
        ),
        (
            SUBSET + "custom_attributes = { diff_output_preservation = 'false' }\n",
            {},
            "subset a: custom_attributes: diff_output_preservation must be true or false, got 'false'",
        ),
        (
            SUBSET + "caption_extension = ''\n",
            {},
            "caption_extension is empty; write the ending of the caption files, such as .txt",
        ),
        (SUBSET + "caption_extension = '.'\n", {}, "caption_extension must be a file extension such as .txt, got '.'"),
        (SUBSET.replace("subsets", "subset"), {}, "dataset 1: subset is not a known key (did you mean subsets?)"),
        (
            SUBSET.replace("image_dir", "num_repeats").replace("'a'", "2"),
            {},
            "subset 1: image_dir is not set; name the folder of its images",
        ),
    ],
)
def test_mistake_is_one_sentence(tmp_path, text, options, sentence):
    (mistake,) = problems(tmp_path, text, **options)
    assert mistake.startswith("in data.toml")
    assert mistake.endswith(sentence)


def test_masks_belong_to_masked_loss(tmp_path):
    path = written(tmp_path, SUBSET + "conditioning_data_dir = 'm'\n")
    (sub,) = dataset.load_datasets(config(dataset_config=path, masked_loss=True))
    assert sub.subsets[0].kind == "masked"


TO_REFERENCES = "is for masks: name the folder of reference images in control_directory, or set masked_loss"
REMOVED = "was removed: name the folder of reference images in control_directory, and that of masks in a subset of the"
NO_MASKS = "needs masked_loss in the run's options"
# Script and model -> of each option, words about it in a data set's file, and of the run.
PAIRED = {
    ("flux_train_network", "model_type=kontext"): {"conditioning_data_dir": (TO_REFERENCES, REMOVED)},
    ("flux_train", "model_type=kontext"): {"conditioning_data_dir": (TO_REFERENCES, REMOVED)},
    ("qwen_image_train_network", "model_version=edit"): {"conditioning_data_dir": (TO_REFERENCES, REMOVED)},
    ("qwen_image_train", "model_version=edit-2511"): {"conditioning_data_dir": (TO_REFERENCES, REMOVED)},
    ("qwen_image_21_train_network", ""): {"conditioning_data_dir": (TO_REFERENCES, REMOVED)},
    ("flux_2_train_network", ""): {"conditioning_data_dir": (TO_REFERENCES, REMOVED)},
    ("flux_3_train_network", ""): {"conditioning_data_dir": (TO_REFERENCES, REMOVED)},
    ("sdxl_train_network", ""): {
        "conditioning_data_dir": (NO_MASKS, "was removed: name the mask folder in a subset of the dataset_config"),
        "control_directory": ("is for models with reference images", "is an option of flux_train_network"),
    },
    ("sdxl_train_control_net_lllite", ""): {
        "control_directory": (
            "is for reference images: name the folder of control images in conditioning_data_dir",
            "cannot be used here: name the folder of control images in conditioning_data_dir",
        )
    },
    ("flux_train_network", "model_type=fill"): {
        "control_directory": (
            "is for reference images: name the folder of masks in conditioning_data_dir",
            "FLUX.1 Fill takes masks, whose folder is conditioning_data_dir of the images",
        )
    },
}


@pytest.mark.parametrize("kind", PAIRED, ids=" ".join)
def test_a_folder_in_the_wrong_option_is_answered_with_the_right_one(tmp_path, kind):
    script, model = kind
    values = dict([model.split("=")]) if model else {}
    for option, (in_file, in_run) in PAIRED[kind].items():
        path = written(tmp_path, SUBSET + f"{option} = 'm'\n")
        cls = families.config_class(script)
        reading = read_layers(cls, [Layer({**values, "dataset_config": path})])
        _, found = dataset.drafted(reading.config)
        assert [in_file in str(one) for one in found if one.option == option] == [True]
        assert {one.option for one in found} <= {option}
        (problem,) = (
            one for one in read_layers(cls, [Layer({**values, option: "m"})]).problems if one.option == option
        )
        assert in_run in str(problem)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[]", "must hold one JSON object"),
        ("a.json", '{"datasets": [{"resolution": 64, "resolution": 96}]}', "has resolution twice in one table"),
        ("a.toml", "a =", "is not valid TOML"),
    ],
)
def test_broken_file_is_one_sentence(tmp_path, name, text, words):
    (mistake,) = problems(tmp_path, text, name=name)
    assert words in mistake


def test_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        dataset.load_datasets(config(dataset_config=str(tmp_path / "none.toml")))


def test_a_seed_of_minus_one_for_validation_is_that_of_the_training(tmp_path):
    """As for `seed`, where it means that no number is given."""
    for value, expected in ((-1, None), (-2, -2), (5, 5)):
        text = SUBSET.replace("64\n", f"64\nvalidation_seed = {value}\n")
        (read,) = dataset.load_datasets(config(dataset_config=written(tmp_path, text)))
        assert read.validation_seed == config(validation_seed=value).validation.validation_seed == expected


@pytest.mark.parametrize("variant", FLUX_VARIANTS)
def test_references_of_a_model_without_any_are_taken_out_if_its_file_is_no_other(variant):
    """The fix never trains a file as what it is not; only files of dev and Kontext look the same."""
    config = config_class("flux_train_network")
    values = {"model_type": variant, "control_directory": "references"}
    try:
        build_config(config, values, notes=[])
        fixes = []
    except ConfigError as error:
        fixes = [problem.fix for problem in error.problems if problem.option == "control_directory"]
    takes = {"kontext": [], "flux": [{"model_type": "kontext"}]}
    assert fixes == takes.get(variant, [{"control_directory": None}])
