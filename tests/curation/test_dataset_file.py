"""Dataset files as tables of a form: what is changed is written, and all else in them stays as it is."""

import json
import tomllib

import pytest

from library.config.problems import ConfigError
from library.curation import dataset_file
from library.curation.dataset_file import DatasetTable, FolderTable

TEXT = """# of Ann
[general]
enable_bucket = true  # keep shapes

# large
[[datasets]]
resolution = 1024 # square
batch_size = 2

  # the cats
  [[datasets.subsets]]
  image_dir = 'C:\\cats' # here
  num_repeats = 10     # often
  custom_attributes.diff_output_preservation = true

  # the dogs
  [[datasets.subsets]]
  image_dir = "/dogs"
  is_reg = true

# small
[[datasets]]
resolution = [768, 512]
keep_tokens = 1 # for all of its folders

[[datasets.subsets]]
image_dir = "/birds"
# the end
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sets.toml"
    path.write_text(TEXT, newline="\n")
    return path


def test_a_file_is_read_as_texts(file):
    large, small = dataset_file.read_dataset_tables(file)
    assert large.texts == {"resolution": "1024", "batch_size": "2"} and small.texts == {"resolution": "768,512"}
    assert [folder.texts for folder in large.folders] == [
        {"image_dir": "C:\\cats", "num_repeats": "10"},
        {"image_dir": "/dogs", "is_reg": "true"},
    ]
    assert [(folder.at, [inner.at for inner in folder.folders]) for folder in (large, small)] == [(0, [0, 1]), (1, [0])]


def test_what_is_not_changed_stays_to_the_letter(file):
    assert dataset_file.written(file, dataset_file.read_dataset_tables(file)) == TEXT


def test_one_number_changes_one_number(file):
    tables = dataset_file.read_dataset_tables(file)
    tables[0].folders[0].texts["num_repeats"] = "5"
    assert dataset_file.written(file, tables) == TEXT.replace("num_repeats = 10 ", "num_repeats = 5 ")
    tables[0].texts["resolution"], tables[1].texts["resolution"] = "1024,768", "512"
    text = dataset_file.written(file, tables)
    assert "resolution = [1024, 768] # square" in text and "resolution = 512\nkeep_tokens" in text


def test_several_sizes_are_one_text_and_stay_as_they_are_written(file):
    text = TEXT.replace("[768, 512]", "[512, 768, 1024]")
    file.write_text(text, newline="\n")
    tables = dataset_file.read_dataset_tables(file)
    assert tables[1].texts == {"resolution": "512;768;1024"} and dataset_file.written(file, tables) == text
    tables[1].texts["resolution"], tables[0].texts["resolution"] = "512;1024,768", "640,768,896"
    new_text = dataset_file.written(file, tables)
    assert 'resolution = "512;1024,768"\nkeep_tokens' in new_text and 'resolution = "640;768;896" # square' in new_text
    (tmp := file.with_name("made.toml")).write_text(new_text)
    assert [table.texts["resolution"] for table in dataset_file.read_dataset_tables(tmp)] == [
        "640;768;896",
        "512;1024,768",
    ]
    tables[1].texts["resolution"] = "512;512"
    with pytest.raises(ConfigError, match="512 more than once"):
        dataset_file.written(file, tables)


def test_comments_go_with_the_table_below_them(file):
    large, small = dataset_file.read_dataset_tables(file)
    kept = [DatasetTable(large.texts, large.folders[:1], 0), small]
    text = dataset_file.written(file, kept)
    assert "the dogs" not in text and "# small\n[[datasets]]" in text and "# the end" in text
    text = dataset_file.written(file, [small])
    assert "# of Ann" in text and "enable_bucket = true  # keep shapes" in text and "large" not in text
    assert tomllib.loads(text)["datasets"] == [tomllib.loads(TEXT)["datasets"][1]]


def test_new_folders_and_values_stand_where_one_looks_for_them(file):
    large, small = dataset_file.read_dataset_tables(file)
    large.texts["enable_bucket"], large.folders[1].texts["flip_aug"] = "false", "true"
    large.folders.append(FolderTable({"image_dir": "D:\\it's new", "num_repeats": "3", "caption_extension": "txt"}))
    new = DatasetTable({"resolution": "640"}, [FolderTable({"metadata_file": "a.json", "caption_dropout_rate": "0.1"})])
    text = dataset_file.written(file, [large, small, new])
    assert "batch_size = 2\nenable_bucket = false\n\n  # the cats" in text
    assert '  is_reg = true\n  flip_aug = true\n\n  [[datasets.subsets]]\n  image_dir = "D:' in text
    datasets = tomllib.loads(text)["datasets"]
    assert datasets[0]["subsets"][2] == {"image_dir": "D:\\it's new", "num_repeats": 3, "caption_extension": ".txt"}
    assert datasets[2] == {"resolution": 640, "subsets": [{"metadata_file": "a.json", "caption_dropout_rate": 0.1}]}
    assert datasets[0]["subsets"][0]["custom_attributes"] == {"diff_output_preservation": True}
    assert text.index("# small") > text.index("new") and text.endswith("# the end\n")


def test_a_new_folder_of_the_last_data_set_and_new_data_sets_are_added_at_once_and_in_order(file):
    large, small = dataset_file.read_dataset_tables(file)
    small.folders.append(FolderTable({"image_dir": "/fish"}))
    new = [DatasetTable({"resolution": size}, [FolderTable({"image_dir": f"/{size}"})]) for size in ("640", "896")]
    text = dataset_file.written(file, [large, small, *new])
    assert 'image_dir = "/birds"\n\n[[datasets.subsets]]\nimage_dir = "/fish"\n\n[[datasets]]\nresolution = 640' in text
    assert text.index("/fish") < text.index("/640") < text.index("resolution = 896") < text.index("/896")
    assert [len(table["subsets"]) for table in tomllib.loads(text)["datasets"]] == [2, 2, 1, 1]


def test_a_value_that_is_emptied_is_taken_out(file):
    large, small = dataset_file.read_dataset_tables(file)
    del large.texts["batch_size"]
    large.folders[1].texts["is_reg"] = " "
    text = dataset_file.written(file, [large, small])
    assert "batch_size" not in text and "is_reg" not in text and "# the dogs" in text


def test_a_new_file_is_begun(tmp_path):
    path = tmp_path / "new.toml"
    wanted = [DatasetTable({}, [FolderTable({"image_dir": "C:\\cats", "num_repeats": "2"})])]
    text = dataset_file.written(path, wanted)
    assert text.startswith("# ") and "image_dir = 'C:\\cats'" in text
    path.write_text(text)
    assert dataset_file.read_dataset_tables(path)[0].folders[0].texts == {"image_dir": "C:\\cats", "num_repeats": "2"}


@pytest.mark.parametrize(
    "text",
    [
        'datasets = [{resolution = 512, subsets = [{image_dir = "/a", num_repeats = 2}]}] # in a line\n',
        '[[ datasets ]]\n[[datasets . subsets]] # odd\nimage_dir = "/a"\nnum_repeats = 2\n',
        "[[datasets]]\nresolution = [\n  512,\n  512,\n]\nsubsets = [\n  # 1\n  "
        '{image_dir = "/a", num_repeats = 2},\n]\n',
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = """\n/a"""\nnum_repeats = 2\n'
        "[general]\nkeep_tokens = 1 # last\n",
    ],
)
def test_whatever_toml_allows_is_changed_rightly(tmp_path, text):
    path = tmp_path / "odd.toml"
    path.write_text(text)
    tables = dataset_file.read_dataset_tables(path)
    tables[0].folders[0].texts["num_repeats"] = "7"
    tables[0].folders.append(FolderTable({"image_dir": "/b"}))
    new_text = dataset_file.written(path, tables)
    expected = tomllib.loads(text)
    expected["datasets"][0]["subsets"][0]["num_repeats"] = 7
    expected["datasets"][0]["subsets"].append({"image_dir": "/b"})
    assert tomllib.loads(new_text) == expected
    assert new_text.count("#") == text.count("#")


def test_line_ends_and_json_stay_what_they_are(tmp_path):
    windows, plain = tmp_path / "windows.toml", tmp_path / "sets.json"
    windows.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    tables = dataset_file.read_dataset_tables(windows)
    tables[0].folders[0].texts["num_repeats"] = "5"
    assert dataset_file.written(windows, tables) == TEXT.replace("= 10 ", "= 5 ").replace("\n", "\r\n")
    plain.write_text(json.dumps(tomllib.loads(TEXT)))
    tables = dataset_file.read_dataset_tables(plain)
    tables[0].folders[0].texts["num_repeats"] = "5"
    text = json.loads(dataset_file.written(plain, tables))
    assert text["datasets"][0]["subsets"][0] == {
        "image_dir": "C:\\cats",
        "num_repeats": 5,
        "custom_attributes": {"diff_output_preservation": True},
    }


def test_every_value_that_is_wrong_is_named_and_nothing_is_made(file):
    large, small = dataset_file.read_dataset_tables(file)
    large.texts["resolution"], large.folders[0].texts["num_repeats"] = "wide", "-1"
    small.folders[0].texts["flip_aug"] = "perhaps"
    with pytest.raises(ConfigError) as refused:
        dataset_file.written(file, [large, small])
    assert all(name in str(refused.value) for name in ("resolution", "num_repeats", "flip_aug", "data set 2"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "datasets = 3"),
        ("a.toml", "[[datasets]]\nsubsets = ['a']"),
        ("a.toml", "]["),
        ("a.json", "[1]"),
        ("a.json", '{"datasets": [3]}'),
        ("a.json", "{"),
        ("a.toml", "\udc80"),
    ],
)
def test_what_is_no_dataset_file_is_refused(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError):
        dataset_file.read_dataset_tables(path)


@pytest.mark.parametrize("places", [(3,), (1, 0), (0, 0)])
def test_tables_that_are_not_there_are_refused(file, places):
    tables = dataset_file.read_dataset_tables(file)
    wanted = [DatasetTable(tables[0].texts, [], at) for at in places]
    with pytest.raises(ConfigError, match="load it again"):
        dataset_file.written(file, wanted)
