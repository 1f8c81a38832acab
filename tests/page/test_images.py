"""The data set tab's handlers: their answers, and that nothing outside of the roots is reached."""

import random

import pytest

from kohya_gui.dataset import settings as tab
from kohya_gui.dataset.images import DatasetTab
from kohya_gui.server.json_api import ApiRequest
from library.config.problems import ConfigError
from tests.curation.conftest import data, picture  # noqa: F401 (a fixture)
from tests.curation.test_trash import tree

SMALL = {
    "resolution": "64",
    "min_bucket_reso": "32",
    "max_bucket_reso": "128",
    "bucket_reso_steps": "32",
    "enable_bucket": True,
}


@pytest.fixture
def images(data, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    return DatasetTab([data.parent.resolve()])


def ended(images, answer):
    while "work" in answer:
        answer = images.work(ApiRequest({"work": answer["work"]}))
    return answer


def opened(images, folder, **more):
    return ended(images, images.open(ApiRequest({"folder": str(folder), "settings": SMALL, **more})))


def test_a_folder_is_opened_looked_through_and_changed(images, data):  # noqa: F811
    start = tree(data)
    overview = opened(images, data, trigger="zorb")
    assert "turned" in overview["calm"]  # a rotation by EXIF is only a mistake where it is ignored
    as_stored = {"folder": str(data), "settings": {**SMALL, "exif_rotation": False}}
    assert "turned" not in ended(images, images.open(ApiRequest(as_stored)))["calm"]
    overview = opened(images, data, trigger="zorb")
    assert overview["kinds"]["broken"] == 1 and overview["kinds"]["trigger"] == 7 and overview["captioned"] == 5
    assert overview["count"]["images"] == 8 and overview["past"] == [] and overview["folder"] == str(data)
    scope = {"folder": str(data), "collection": overview["collection"]}
    page = images.page(ApiRequest({**scope, "show": "all", "start": 2, "count": 3, "trigger": "zorb"}))
    assert page["total"] == 11 and [r["name"] for r in page["rows"]] == ["10_cat/1.png", "10_cat/2.png", "10_cat/3.png"]
    assert page["rows"][0]["caption"] == "zorb, cat, red hat, 1" and page["rows"][0]["trigger"] is True
    assert images.tags(ApiRequest({**scope, "place": "10_cat"}))["tags"][0] == ("cat", 4)
    stored = images.caption(
        ApiRequest({**scope, "name": "10_cat/1.png", "text": "new", "expected": "zorb, cat, red hat, 1"})
    )
    assert stored["row"]["caption"] == "new" and len(stored["past"]) == 1
    again = images.caption(
        ApiRequest({**scope, "name": "10_cat/1.png", "text": "lost", "expected": "zorb, cat, red hat, 1"})
    )
    assert "changed elsewhere" in again["said"] and again["row"]["caption"] == "new"
    edit = {**scope, "action": "replace_tag", "find": "red hat", "put": "blue hat", "show": "all"}
    assert images.edit(ApiRequest(edit))["changes"] == 4
    assert ended(images, images.edit(ApiRequest({**edit, "apply": True})))["done"] == 4
    removed = ended(images, images.remove(ApiRequest({**scope, "names": ["10_cat/2.png"]})))
    assert removed["done"] == 1 and removed["kinds"]["all"] == 10
    renamed = ended(
        images, images.prepare(ApiRequest({**scope, "how": "rename", "place": "2_dog", "repeats": 5, "words": "dog"}))
    )
    assert renamed["made"] == "5_dog" and [p["title"] for p in renamed["past"]][0] == "Renamed 2_dog to 5_dog"
    doubles = ended(images, images.compare(ApiRequest(scope)))
    assert doubles["kinds"]["double"] == 4
    for _ in range(4):
        last = ended(images, images.undo(ApiRequest(scope)))
    assert last["past"] == [] and tree(data) == start
    assert str(ended(images, images.undo(ApiRequest(scope)))["error"]) == "there is nothing to undo"


def test_wrong_settings_are_reported_with_the_trainers_messages(images, data):  # noqa: F811
    for settings, says in (({"resolution": "foo"}, "resolution"), ({"train_batch_size": "0"}, "train_batch_size")):
        with pytest.raises(ConfigError, match=says):
            images.open(ApiRequest({"folder": str(data), "settings": settings}))


def test_files_that_describe_images_lead_nowhere_else(images, data, tmp_path):  # noqa: F811
    """No dataset file outside of the roots, and none that names such a place; described images are not changed."""
    away, here = tmp_path.parent / f"{tmp_path.name}-away", tmp_path / "sets.toml"
    away.mkdir()
    picture(1).save(away / "a.png")
    (away / "sets.toml").write_text("secret = 1\n")

    def answer(**settings):
        request = ApiRequest({"folder": str(data), "settings": {**SMALL, **settings}, "script": "flux_train"})
        try:
            return ended(images, images.open(request))
        except ConfigError as wrong:
            return {"error": str(wrong)}

    for name in ("dataset_config", "in_json", "reg_data_dir"):
        assert "outside" in answer(**{name: str(away / "sets.toml")})["error"]
    subset = '[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = "{}"\n'
    here.write_text(subset.format(away.as_posix()))
    assert "--root" in answer(dataset_config=str(here))["error"]
    here.write_text(subset.format((data / "10_cat").as_posix()))
    overview = answer(dataset_config=str(here))
    assert overview["count"]["images"] == 4 and overview["places"][0]["path"] == (data / "10_cat").as_posix()
    scope = {"folder": overview["folder"], "collection": overview["collection"]}
    row = images.page(ApiRequest(scope))["rows"][0]
    assert (
        "describes" in images.caption(ApiRequest({**scope, "name": row["name"], "text": "x", "expected": None}))["said"]
    )
    for change in (images.undo, images.remove, images.prepare):
        with pytest.raises(ConfigError, match="describes"):
            change(ApiRequest({**scope, "names": [row["name"]], "how": "gather", "words": "x"}))


def test_thumbnails_come_from_the_roots_only(images, data, tmp_path):  # noqa: F811
    thumbnail = images.thumb({"path": str(data / "10_cat" / "0.png"), "side": "320"})
    assert thumbnail.media_type == "image/webp" and thumbnail.body[:4] == b"RIFF"
    outside = tmp_path.parent / "outside.png"
    picture(1).save(outside)
    (data / "10_cat" / "link.png").symlink_to(outside)
    (data / "words.txt").write_text("secret")
    for path in (outside, data / "10_cat" / "link.png", data / "words.txt", data / "10_cat", "", None, "a\0b.png"):
        with pytest.raises(ConfigError):
            images.thumb({"path": str(path) if path is not None else None})
    with pytest.raises(ConfigError, match="cannot"):
        images.thumb({"path": str(data / "2_dog" / "broken.png")})


def test_nothing_that_is_sent_breaks_or_leads_out(images, data, tmp_path):  # noqa: F811
    """Every request, with hostile fields: an answer or a problem, and no file is touched."""
    collection = opened(images, data)["collection"]
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "a.txt").write_text("mine")
    picture(1).save(secret / "a.png")
    before, chance = tree(tmp_path), random.Random(2)
    values = [
        "",
        "..",
        "../secret",
        str(secret),
        str(data),
        "10_cat/0.png",
        "../../secret/a.png",
        "/etc/passwd",
        "\0",
        "all",
        "trigger",
        3,
        -1,
        2**80,
        None,
        True,
        [],
        ["a"],
        ["../secret/a.png"],
        {},
        {"resolution": "9" * 400},
        "x" * 5000,
    ]
    names = [
        "folder",
        "settings",
        "trigger",
        "show",
        "place",
        "words",
        "start",
        "count",
        "name",
        "text",
        "expected",
        "put",
        "action",
        "find",
        "names",
        "how",
        "repeats",
        "source",
        "work",
        "prefix",
    ]
    changing = ("images_caption", "images_prepare", "images_edit", "images_remove")
    safe = set(images.handlers) - {"images_compare"}
    for _ in range(1500):
        question = chance.choice(sorted(safe))
        fields = {name: chance.choice(values) for name in chance.sample(names, 6)}
        if chance.random() < 0.6:
            fields |= {"folder": str(data), "collection": collection}
        if fields.get("folder") == str(data) and question in changing:  # otherwise the request would be valid
            wrong_place = {"name": "../secret/a.png", "names": ["../../x"], "words": "../x"}
            fields |= {"folder": str(secret)} if chance.random() < 0.5 else wrong_place
            fields["apply"] = False
        try:
            answer = images.handlers[question](ApiRequest(fields))
        except ConfigError as wrong:
            answer = {"error": str(wrong)}
        assert isinstance(ended(images, answer), dict)
    after = {name: held for name, held in tree(tmp_path).items() if not name.startswith("home/")}
    assert after == before


def test_the_tab_shows_the_trainings_own_options():
    markup = tab.dataset_tab_html()
    for name in tab.COUNTING_OPTIONS:
        assert f'data-setting="{name}"' in markup
    assert 'data-command="caption"' in markup and "<!-- " not in markup
