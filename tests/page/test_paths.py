"""The path guard: no path from a browser leads to a file outside of the chosen folders.

Ten thousand hostile paths go through it in tests/security.
"""

import ntpath
import os
import posixpath
from pathlib import Path, PureWindowsPath

import pytest

from kohya_gui.form import typed_paths
from kohya_gui.server import paths
from library.config import pasted
from library.config.building import build_config, working_fix
from library.config.problems import ConfigError
from library.families import config_class


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
    assert paths.readable(f' "{root}/cat.toml"', [root]) == root / "cat.toml"  # quoted, as Windows copies a path


@pytest.mark.skipif(os.name == "nt", reason="there it is a path")
def test_a_path_of_windows_is_not_taken_for_a_name(root):
    with pytest.raises(ConfigError, match="is a path of Windows; write where this is"):
        paths.config_file('"C:\\cats\\a.toml"', [root])


@pytest.mark.skipif(os.name == "nt", reason="there it is a path")
def test_in_linux_on_windows_a_path_of_windows_leads_to_the_mounted_drive(root, monkeypatch):
    monkeypatch.setattr(paths.Path, "is_dir", lambda path: str(path) == "/mnt/d")
    problem = paths.foreign_path_problem('"D:\\my cats\\a.safetensors" ', "vae")
    assert problem and problem.fix == {"vae": "/mnt/d/my cats/a.safetensors"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("https://civitai.com/api/download/1", "is a web address, not a path; download it"),
        (' "http://x.org/a.toml" ', "http://x.org/a.toml is a web address"),
        ("https:/x.org/a.toml", "is a web address"),  # as Path normalises it
        *(
            (f"https://me:s3cret@x.org/a.toml{mark}token=s3cret", ": https://x.org/a.toml is a web address")
            for mark in "?#;"
        ),
        ("s3://bucket/a.toml", "is a web address"),
        ("file:///home/me/a.toml", "write only the path: /home/me/a.toml"),
        ("file:///C:/Users/me/a.toml", "write only the path: C:/Users/me/a.toml"),
        ("https://huggingface.co/org/model", "is a web address, not a path"),  # a folder of images cannot be a hub id
    ],
)
def test_a_web_address_is_called_one_and_not_hidden_or_reserved(root, text, words):
    with pytest.raises(ConfigError) as error:
        paths.allowed_path(text, [root], "train_data_dir")
    assert words in str(error.value) and "hidden" not in str(error.value) and "s3cret" not in str(error.value)


def test_the_page_of_a_model_leads_to_its_id(root):
    address = "https://huggingface.co/stabilityai/stable-diffusion-xl-base-1.0/tree/main"
    config = build_config(config_class("sdxl_train"), {"pretrained_model_name_or_path": address}, notes=[])
    with pytest.raises(ConfigError) as error:
        paths.allow(config, [root])
    mended = working_fix(error.value.problems[0], config)
    assert mended == {"pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0"}


@pytest.mark.parametrize("text", ["C:/x/a.toml", "c:\\x", "/a/b", "a/b", "org/name", "x:y"])
def test_a_path_is_no_web_address(text):
    assert paths.web_address(text) is None


@pytest.mark.parametrize("text", ["", "  ", None, 7, ["a.toml"], "a\0b.toml", "a\nb.toml", "x" * 5000 + ".toml"])
def test_what_is_no_path_is_refused(root, text):
    with pytest.raises(ConfigError):
        paths.config_file(text, [root])


@pytest.mark.parametrize(
    "text",
    [
        "cat.json",
        "cat.toml/../../secret/key.toml",
        "../secret/key.toml",
        ".ssh/a.toml",
        "configs/.a.toml",
        "NUL.toml",
        "con.x.toml",
        "a.toml:b.toml",
        "cat",
        "configs",
        "/etc/passwd",
        "/etc/a.toml",
        "~nobody-here/a.toml",
    ],
)
def test_what_leads_elsewhere_is_refused(root, text):
    with pytest.raises(ConfigError):
        paths.config_file(str(root / text) if not text.startswith(("/", "~")) else text, [root])


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_links_are_resolved_before_the_check(root):
    (root / "link").symlink_to(root.parent / "secret")
    (root / "key.toml").symlink_to(root.parent / "secret" / "key.toml")
    (root / "loop").symlink_to(root / "loop")
    for text in ("link/key.toml", "key.toml", "link/new.toml", "loop/a.toml"):
        with pytest.raises(ConfigError):
            paths.config_file(str(root / text), [root])


def test_a_file_must_be_there_and_be_small(root):
    (root / "large.toml").write_bytes(b"#" * (paths.MAX_CONFIG_BYTES + 1))
    (root / "folder.toml").mkdir()
    for name, words in (("no.toml", "does not exist"), ("large.toml", "too large"), ("folder.toml", "not a file")):
        with pytest.raises(ConfigError, match=words):
            paths.readable(str(root / name), [root])


def test_the_roots_are_home_here_other_disks_and_what_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("models", "empty", "hub"):
        (tmp_path / name).mkdir()
    (tmp_path / "models" / "x").write_text("")
    (tmp_path / "hub" / "x").write_text("")
    monkeypatch.setattr(paths, "PLACES", (str(tmp_path / "models"), str(tmp_path / "empty"), str(tmp_path / "none")))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("KOHYA_ROOTS", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    names = [path.name for path in paths.find_roots([tmp_path / "more"])[1:]]
    assert names == [tmp_path.name, "more", "a", "b", "hub", "models"]


def test_a_training_names_only_what_lies_below_the_roots(root):
    def config(**values):
        return build_config(config_class("sdxl_train_network"), values, notes=[])

    paths.allow(config(), [root])
    paths.allow(config(pretrained_model_name_or_path="stabilityai/sdxl", output_dir=f"{root}/out", vae=""), [root])
    paths.allow(config(base_weights=["someone/adapters/a.safetensors"]), [root])  # a file on the hub
    with pytest.raises(ConfigError, match="network_weights"):
        paths.allow(config(network_weights="someone/adapters/a.safetensors"), [root])
    with pytest.raises(ConfigError) as raised:
        of_others = [f"{root}/a.safetensors", f"{root}/../secret/b.safetensors"]
        paths.allow(
            config(pretrained_model_name_or_path="/etc/passwd", output_dir=f"{root}/.ssh", base_weights=of_others),
            [root],
        )
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["pretrained_model_name_or_path", "base_weights", "output_dir"]
    assert "start the page with --root FOLDER" in lines[0] and "hidden" in lines[2]


@pytest.mark.parametrize("text", ["images", "./images", "../images", "a/../../images"])
def test_a_relative_path_outside_is_reported_with_the_folder_that_it_is_relative_to(root, monkeypatch, text):
    elsewhere = root.parent / "started"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ConfigError) as refused:
        paths.allowed_path(text, [root], "train_data_dir")
    assert f"{text} is relative to {elsewhere}, where the page was started" in str(refused.value)


def test_the_beginning_of_a_path_is_no_mistake_in_any_case_on_windows(root, monkeypatch):
    begun, of_windows = str(root / "CAT"), ntpath.normcase
    monkeypatch.setattr(typed_paths.os.path, "normcase", posixpath.normcase)
    assert typed_paths.leads_to(str(root)[:-2], [root]) and not typed_paths.leads_to(str(root)[:-2].upper(), [root])
    assert not typed_paths.is_begun(Path(begun))
    monkeypatch.setattr(typed_paths.os.path, "normcase", of_windows)
    assert typed_paths.leads_to(str(root)[:-2].upper(), [root]) and typed_paths.is_begun(Path(begun))


def test_a_drive_of_the_network_can_be_used_on_windows_and_no_other_computer():
    """There Z: resolves to the name of its computer, and the picker gives that back."""
    allowed = [PureWindowsPath("C:\\Users\\me"), PureWindowsPath("\\\\nas\\models\\")]
    for text in (r"\\nas\models", r"\\NAS\Models\flux\a.safetensors", "//nas/models/flux", r"Z:\flux", r"C:\Users\me"):
        assert not paths.is_strange_network(text, allowed), text
    for text in (
        r"\\nas\private",
        r"\\nas",
        r"\\evil\models\a",
        "//evil/a/b",
        r"\\?\C:\Users\me",
        r"\\.\pipe\x",
        "\\\\",
    ):
        assert paths.is_strange_network(text, allowed), text


def test_a_root_in_a_hidden_folder_can_be_used(root):
    (root / ".cache" / "hub").mkdir(parents=True)
    assert paths.allowed_path(f"{root}/.cache/hub/x", [root, root / ".cache" / "hub"])
    with pytest.raises(ConfigError):
        paths.allowed_path(f"{root}/.cache/x", [root, root / ".cache" / "hub"])


def test_folders_and_files_of_each_kind_go_through_the_same_guard(root):
    assert paths.allowed_path(str(root), [root]) == paths.existing_folder(f"{root}/configs/..", [root]) == root
    assert paths.file(f"{root}/new.PNG", [root], (".png",), "image") == root / "new.PNG"
    for call, words in (
        (
            lambda: paths.existing_folder(str(root.parent / "secret"), [root], "image folder"),
            "^image folder: .*outside",
        ),
        (lambda: paths.existing_folder(str(root / "none"), [root]), "does not exist"),
        (lambda: paths.existing_folder(str(root / "cat.toml"), [root]), "is not a folder"),
        (lambda: paths.file(str(root / "cat.toml"), [root], (".png", ".jpg")), "must end in .png or .jpg"),
        (lambda: paths.existing_file(str(root / "none.png"), [root], (".png",)), "does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_paths_that_only_windows_takes_otherwise_are_explained_there(root, monkeypatch):
    for module in (paths, pasted):
        monkeypatch.setattr(module, "WINDOWS", True)
    for text, words in {
        "D:images": r"has no backslash after the drive, 'D:images': write D:\\images",
        "\\\\nas\\share\\images": "is on another computer; give that share a drive letter",
        "//nas/share": "is on another computer",
    }.items():
        with pytest.raises(ConfigError, match=words):
            paths.existing_folder(text, [root], "image folder")
    monkeypatch.setenv("USERPROFILE", str(root))
    for text in ("%USERPROFILE%", f'"{root}"', f'{root}"', f"{root}/"):
        assert paths.existing_folder(text, [root]) == root
