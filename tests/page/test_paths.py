"""The path guard: nothing that a browser sends leads to a file outside of the chosen folders.

Ten thousand hostile paths go through it in tests/promises.
"""

import os

import pytest

from kohya_gui import paths
from library.config.schema import ConfigError


@pytest.fixture
def root(tmp_path):
    (tmp_path / "home" / "configs").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.toml").write_text("a = 1")
    (tmp_path / "home" / "cat.toml").write_text("a = 1")
    return (tmp_path / "home").resolve()


def test_what_is_meant_well_passes(root):
    assert paths.config_file(str(root / "cat.toml"), [root]) == root / "cat.toml"
    assert paths.config_file(f"  {root}/configs/../new Name.TOML ", [root]) == root / "new Name.TOML"
    assert paths.readable(str(root / "cat.toml"), [root]) == root / "cat.toml"


@pytest.mark.parametrize("text", ["", "  ", None, 7, ["a.toml"], "a\0b.toml", "a\nb.toml", "x" * 5000 + ".toml"])
def test_what_is_no_path_is_refused(root, text):
    with pytest.raises(ConfigError):
        paths.config_file(text, [root])


@pytest.mark.parametrize(
    "text",
    ["cat.json", "cat.toml/../../secret/key.toml", "../secret/key.toml", ".ssh/a.toml", "configs/.a.toml", "NUL.toml",
     "con.x.toml", "a.toml:b.toml", "cat", "configs", "/etc/passwd", "/etc/a.toml", "~nobody-here/a.toml"],
)  # fmt: skip
def test_what_leads_elsewhere_is_refused(root, text):
    with pytest.raises(ConfigError):
        paths.config_file(str(root / text) if not text.startswith(("/", "~")) else text, [root])


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_links_are_followed_before_they_are_judged(root):
    (root / "link").symlink_to(root.parent / "secret")
    (root / "key.toml").symlink_to(root.parent / "secret" / "key.toml")
    (root / "loop").symlink_to(root / "loop")
    for text in ("link/key.toml", "key.toml", "link/new.toml", "loop/a.toml"):
        with pytest.raises(ConfigError):
            paths.config_file(str(root / text), [root])


def test_a_file_must_be_there_and_be_small(root):
    (root / "large.toml").write_bytes(b"#" * (paths.LARGEST + 1))
    (root / "folder.toml").mkdir()
    for name, words in (("no.toml", "does not exist"), ("large.toml", "too large"), ("folder.toml", "not a file")):
        with pytest.raises(ConfigError, match=words):
            paths.readable(str(root / name), [root])


def test_the_roots_are_home_here_and_what_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = paths.roots([tmp_path / "more"])
    assert tmp_path.resolve() in found and (tmp_path / "more").resolve() in found and len(found) == 3


def test_folders_and_files_of_each_kind_go_through_the_same_guard(root):
    assert paths.inside(str(root), [root]) == paths.folder(f"{root}/configs/..", [root]) == root
    assert paths.file(f"{root}/new.PNG", [root], (".png",), "image") == root / "new.PNG"
    for call, words in (
        (lambda: paths.folder(str(root.parent / "secret"), [root], "image folder"), "^image folder: .*outside"),
        (lambda: paths.folder(str(root / "none"), [root]), "does not exist"),
        (lambda: paths.folder(str(root / "cat.toml"), [root]), "is not a folder"),
        (lambda: paths.file(str(root / "cat.toml"), [root], (".png", ".jpg")), "must end in .png or .jpg"),
        (lambda: paths.present(str(root / "none.png"), [root], (".png",)), "does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
