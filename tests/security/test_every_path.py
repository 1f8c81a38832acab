"""One guard judges every path that a training names from the page: in options, arguments and files that name files.

The options are those of the option table, so that a new one cannot be forgotten.
"""

import json
import re

import pytest

from kohya_gui.server import named_paths, paths
from kohya_gui.server.named_paths import ARGUMENTS, PATHS
from library import families
from library.config import dataset
from library.config.building import Reading, build_config
from library.config.dataset import DATASET_KEYS, SUBSET_KEYS
from library.config.problems import ConfigError
from library.config.schema import option_values, options_of
from library.data import metadata
from library.families import config_class, network_args
from tests import links

SCRIPTS = [script for facts in families.all_families() for script in facts.scripts]
KINDS = ("file", "files", "folder", "code", "secret")
# Options that hold text which is neither a path nor a name of code. A new one is judged here, by whoever adds it.
PLAIN = {
    "resolution",
    "face_crop_aug_range",
    "caption_extension",
    "caption_prefix",
    "caption_suffix",
    "preserve_prompt",
    "caption_separator",
    "keep_tokens_separator",
    "secondary_separator",
    "training_comment",
    "lr_scheduler",
    "output_name",
    "compile_blocks",
    "compile_from_step",
    "metadata_title",
    "metadata_author",
    "metadata_license",
    "metadata_tags",
    "metadata_trigger_phrase",
    "metadata_usage_hint",
    "metadata_merged_from",
    "metadata_preprocessor",
    "metadata_is_negative_embedding",
    "metadata_description",
    "huggingface_repo_id",
    "huggingface_repo_type",
    "huggingface_path_in_repo",
    "huggingface_repo_visibility",
    "log_prefix",
    "log_tracker_name",
    "wandb_run_name",
    "block_lr",
    "token_string",
    "init_word",
}
PLAIN_IN_DATASETS = {
    "class_tokens",
    "caption_extension",
    "caption_separator",
    "keep_tokens_separator",
    "secondary_separator",
    "caption_prefix",
    "caption_suffix",
    "preserve_prompt",
    "image_suffix",
    "control_suffix",  # compared with the names in a folder, and no part of a path
}


@pytest.fixture
def place(tmp_path):
    for name in ("root", "outside"):
        (tmp_path / name).mkdir()
    return tmp_path.resolve()


def refused(script, root, **options):
    """The options of which the guard says that they lead outside."""
    config = build_config(config_class(script), options, notes=[])
    try:
        paths.allow(config, [root])
    except ConfigError as error:
        return {problem.option for problem in error.problems}, str(error)
    return set(), ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_text_option_is_a_path_code_an_argument_or_known_to_be_plain(script):
    for name, option in options_of(config_class(script)).items():
        closed = option.choices and not option.open
        if option.type is str and not closed and option.kind not in KINDS:
            assert name in PLAIN or name.endswith(ARGUMENTS), f"is {name} a path or a name of code? say it by its kind"
        if option.kind in KINDS:
            assert name not in PLAIN
    for name, option in {**DATASET_KEYS, **SUBSET_KEYS}.items():
        if option.type is str and not option.choices and option.kind not in KINDS:
            assert name in PLAIN_IN_DATASETS, f"is {name} a path? say it by its kind"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_with_a_path_is_judged(script, place):
    options = options_of(config_class(script))
    ways = [place / "outside" / "x", place / "root" / ".." / "outside"]
    if links.work():
        (place / "root" / "link").symlink_to(place / "outside")
        ways.append(place / "root" / "link" / "x")
    for name, option in options.items():
        if option.kind in PATHS:
            for path in ways:
                reading = Reading(build_config(config_class(script), {}, notes=[]), [], [])
                text = [str(path)] if option.many else str(path)
                wrong, said = refused_leniently(config_class(script), name, text, place / "root")
                assert wrong == {name} and "outside" in said, name
            assert reading.config


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_relative_path_is_no_id_of_the_hub_where_no_model_is_named(script, place, monkeypatch):
    monkeypatch.chdir(place / "outside")
    for name, option in options_of(config_class(script)).items():
        for text in ("../new", "..new/x", "x/..", ".hidden/new", "a/b") if option.kind in PATHS else ():
            wrong, _ = refused_leniently(config_class(script), name, [text] if option.many else text, place / "root")
            is_model = option.section == "model" and name != "tokenizer_cache_dir"
            assert wrong == (set() if text == "a/b" and is_model else {name}), (name, text)


def refused_leniently(kind, name, text, root):
    """As `refused`, whatever rules there are among the options."""
    from library.config.building import draft

    config = draft(kind, {name: options_of(kind)[name].read(text)})
    try:
        paths.allow(config, [root])
    except ConfigError as error:
        return {problem.option for problem in error.problems}, str(error)
    return set(), ""


@pytest.mark.parametrize("ending", [".toml", ".json"])
@pytest.mark.parametrize("level", ["general", "datasets", "subsets"])
@pytest.mark.parametrize("key", [name for name, one in {**DATASET_KEYS, **SUBSET_KEYS}.items() if one.kind in PATHS])
def test_every_path_of_a_data_set_file_is_judged(place, key, level, ending):
    path = place / "root" / f"data{ending}"
    value = str(place / "outside")
    value = [value] if SUBSET_KEYS[key].many else value
    own = {one: {key: value} if one == level else {} for one in ("general", "datasets", "subsets")}
    tables = {"general": own["general"], "datasets": [{**own["datasets"], "subsets": [own["subsets"]]}]}
    path.write_text(json.dumps(tables) if ending == ".json" else as_toml(tables), encoding="utf-8")
    assert dataset.read_tables(path) == tables
    wrong, said = refused("sdxl_train_network", place / "root", dataset_config=str(path))
    assert wrong == {"dataset_config"} and str(place / "outside") in said


def as_toml(tables):
    rows = [(name, json.dumps(value)) for name, value in tables["datasets"][0].items() if name != "subsets"]
    general = [(name, json.dumps(value)) for name, value in tables["general"].items()]
    inner = [(name, json.dumps(value)) for name, value in tables["datasets"][0]["subsets"][0].items()]
    parts = (("[general]", general), ("[[datasets]]", rows), ("[[datasets.subsets]]", inner))
    return "\n".join("\n".join([head, *(f"{name} = {value}" for name, value in pairs)]) for head, pairs in parts)


def test_a_data_set_file_is_toml_or_json_and_nothing_else_is_opened(place):
    for name in ("a.txt", "known_hosts", "data.yaml"):
        path = place / "root" / name
        path.write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{place / 'outside'}'\n")
        wrong, said = refused("sdxl_train_network", place / "root", dataset_config=str(path))
        assert wrong == {"dataset_config"} and "must end in" in said
        with pytest.raises(ConfigError, match=r"must end in one of \.toml, \.json"):
            dataset.read_tables(path)
    secret = place / "outside" / "x.toml"
    secret.write_text("image_dir = '/never/named'\n")
    assert "/never" not in refused("sdxl_train_network", place / "root", dataset_config=str(secret))[1]


@pytest.mark.parametrize("name", ["list.json", "list.jsonl"])
def test_the_images_of_an_image_list_are_judged_by_their_folders(place, name):
    lined = name.endswith("l")
    for image, control in ((place / "outside" / "a.png", ""), ("../outside/a.png", ""), ("a.png", "../outside/b.png")):
        about = {"caption": "x"} | ({"control_path": control} if control else {})
        text = json.dumps({"image_path": str(image), **about}) if lined else json.dumps({str(image): about})
        path = place / "root" / name
        path.write_text(text, encoding="utf-8")
        root = place / "root"
        options = {"in_json": str(path), "train_data_dir": str(root)}
        assert refused("sdxl_train", root, **options)[0] == {"in_json"}
        data = root / "data.toml"
        data.write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{root}'\nmetadata_file = '{path}'\n")
        assert refused("sdxl_train", root, dataset_config=str(data))[0] == {"dataset_config"}
        named_paths._folders_in_metadata.cache_clear()


@pytest.mark.parametrize("column", metadata.PATHS)
@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".json"])
def test_the_images_of_a_list_are_judged_in_every_format_and_by_every_name_of_their_column(place, ending, column):
    root, blank = place / "root", "\t" if ending == ".tsv" else ","
    for image, said in (
        (place / "outside" / "a.png", {"in_json"}),
        ("../outside/a.png", {"in_json"}),
        ("a.png", set()),
    ):
        row = {column: str(image), "text": "x"}
        tables = {".jsonl": json.dumps(row), ".json": json.dumps([row])}
        path = root / f"list{ending}"
        path.write_text(tables.get(ending) or f"{blank.join(row)}\n{blank.join(row.values())}\n", encoding="utf-8")
        assert refused("sdxl_train", root, in_json=str(path), train_data_dir=str(root))[0] == said
        named_paths._folders_in_metadata.cache_clear()


def test_no_folder_of_a_long_list_is_left_out(place, monkeypatch):
    root = place / "root"
    images = [*(str(root / str(number) / "a.png") for number in range(50)), str(place / "outside" / "a.png")]
    (root / "list.json").write_text(json.dumps({image: {"caption": "x"} for image in images}), encoding="utf-8")
    options = {"in_json": str(root / "list.json"), "train_data_dir": str(root)}
    assert str(place / "outside") in refused("sdxl_train", root, **options)[1]
    monkeypatch.setattr(named_paths, "MAX_FOLDERS", 50)
    wrong, said = refused("sdxl_train", root, **options)
    assert wrong == {"in_json"} and "51 folders" in said


@pytest.mark.parametrize("ending", [".txt", ".toml", ".json"])
@pytest.mark.parametrize("key", ["ci", "cim", "cn"])
def test_the_images_of_prompts_are_judged(place, key, ending):
    name = {"ci": "control_image_path", "cim": "control_image_mask_path", "cn": "controlnet_image"}[key]
    image = str(place / "outside" / "a.png")
    texts = {
        ".txt": f"a cat --{key} {image}\n",
        ".json": json.dumps([{"prompt": "a cat", name: image}]),
        ".toml": f"[prompt]\n[[prompt.subset]]\nprompt = 'a cat'\n{name} = '{image}'\n",
    }
    path = place / "root" / f"prompts{ending}"
    path.write_text(texts[ending], encoding="utf-8")
    wrong, said = refused("sdxl_train_network", place / "root", sample_prompts=str(path))
    assert wrong == {"sample_prompts"} and image in said


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_path_in_arguments_is_judged(script, place):
    kind, root = config_class(script), place / "root"
    for name in (option_name for option_name in options_of(kind) if option_name.endswith(ARGUMENTS)):
        for text in (
            f"x={place / 'outside'}",
            f"x='{place / 'outside'}'",
            "x=~/.ssh/id_rsa",
            "x=../outside/a",
            "x=a/../..",
        ):
            assert refused_leniently(kind, name, [text], root)[0] == {name}, (name, text)
        plain = ["betas=0.9,0.99", r"exclude_patterns=[r'.*\.attn\..*']", "weight_decay=1e-2", "preset=attn-mlp", "x="]
        assert refused_leniently(kind, name, plain, root) == (set(), "")


def test_on_windows_backslashes_are_of_paths_and_those_of_patterns_are_not():
    like_a_path = re.compile(named_paths.ON_WINDOWS).match
    absolute = (r"C:\a", "c:a", r"\\nas\a", r"\a", r"\\?\C:\a*", "~", "/a")
    beside = (r"..\a", r"a\..\b", r"a b\ü.toml", "a/../b", r"a*\..\..\b", r"a*\.. \b", r"a*\..", r"a*/..\b")
    for text in (*absolute, *beside):
        assert like_a_path(text), text
    for text in (r".*\.attn\..*", r"(?:q|k)_proj\.", r"blocks\.\d?", "0.9", "attn-mlp", "a*b"):
        assert not like_a_path(text), text


def test_a_preset_of_lycoris_that_is_a_file_is_judged(place):
    from library.config.building import draft

    kind = config_class("sdxl_train_network")
    for text in ("x.toml", str(place / "outside" / "x.toml")):
        config = draft(kind, {"network_module": "lycoris.kohya", "network_args": (f"preset={text}",)})
        with pytest.raises(ConfigError, match="network_args"):
            paths.allow(config, [place / "root"])
    assert all(
        draft(kind, {"network_module": "lycoris.kohya", "network_args": (f"preset={preset}",)})
        for preset in network_args.LAYER_PRESETS
    )


def test_what_is_allowed_is_left_alone(place):
    root = place / "root"
    (root / "images").mkdir()
    (root / "data.toml").write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{root / 'images'}'\n")
    (root / "p.txt").write_text(f"a cat --ci {root / 'a.png'}\n")
    options = {
        "dataset_config": str(root / "data.toml"),
        "sample_prompts": str(root / "p.txt"),
        "output_dir": str(root),
    }
    config = build_config(config_class("sdxl_train_network"), options, notes=[])
    paths.allow(config, [root])
    reading = paths.within_roots(Reading(config, [], []), [root])
    assert option_values(reading.config) == option_values(config) and not reading.problems
