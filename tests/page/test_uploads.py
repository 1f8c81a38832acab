"""Uploads of images: in pieces, resumed, verified, and without writing anything else."""

import io
import shutil
import zlib

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from kohya_gui.app import application, build_page
from kohya_gui.server.json_api import ApiRequest
from kohya_gui.server.uploads import ImageUploads
from library.config.problems import ConfigError
from tests.training import listing

PIECE = {"content-type": "application/octet-stream"}


def picture(seed=0, side=64):
    buffer, pixels = io.BytesIO(), np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def uploads(tmp_path):
    (tmp_path / "root").mkdir()
    return ImageUploads([tmp_path / "root"])


class Browser:
    """Does what uploads.js does, over a network that may fail."""

    def __init__(self, uploads, folder):
        self.uploads, self.folder = uploads, str(folder)

    def ask(self, *files, modified=1):
        """Ask what to do with files; sends the checksums that are requested."""
        facts = [{"name": n, "size": len(content), "modified": modified, "sums": {}} for n, content in files]
        for _ in range(5):
            verdicts = self.uploads.begin(ApiRequest({"folder": self.folder, "files": facts}))["files"]
            if all(verdict["state"] != "check" for verdict in verdicts):
                return verdicts
            for verdict, fact, (_, content) in zip(verdicts, facts, files, strict=True):
                if verdict["state"] == "check":
                    fact["sums"][str(verdict["bytes"])] = zlib.crc32(content[: verdict["bytes"]])
        raise AssertionError("asked for sums without end")

    def send(self, verdict, content, size=1000, max_pieces=10**9):
        at, answer = verdict["offset"], {}
        while at <= len(content) and max_pieces > 0:
            piece = content[at : at + size]
            whole = str(zlib.crc32(content)) if at + len(piece) == len(content) else ""
            answer = self.uploads.take({"id": verdict["id"], "offset": str(at), "sum": whole}, piece)
            if answer.get("offset") == at or "offset" not in answer:
                return answer
            at, max_pieces = answer["offset"], max_pieces - 1
        return answer


@pytest.fixture
def browser(uploads, tmp_path):
    return Browser(uploads, tmp_path / "root" / "cats")


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "root" / "cats").iterdir())


def test_files_arrive_whole_and_are_not_sent_twice(browser, tmp_path):
    files = [("cat.PNG", picture()), ("cat.txt", b"a cat")]
    first, second = browser.ask(*files)
    assert (first["name"], first["offset"]) == ("cat.png", 0)
    for verdict, (_, content) in zip((first, second), files, strict=True):
        assert "done" in browser.send(verdict, content)
    assert names(tmp_path) == ["cat.png", "cat.txt"]
    assert (tmp_path / "root/cats/cat.png").read_bytes() == files[0][1]
    assert [verdict["state"] for verdict in browser.ask(*files)] == ["there", "there"]


def test_an_upload_goes_on_where_it_broke_off_also_after_a_restart(browser, tmp_path):
    content = picture(side=128)
    (verdict,) = browser.ask(("cat.png", content))
    browser.send(verdict, content, max_pieces=3)
    browser.uploads = ImageUploads(browser.uploads.roots)
    assert browser.send(verdict, content) == {"again": True}
    (verdict,) = browser.ask(("cat.png", content))
    assert verdict["offset"] == 3000
    assert browser.send(verdict, content) == {"done": "cat.png"} and names(tmp_path) == ["cat.png"]


def test_another_file_of_that_name_and_size_does_not_go_on_with_the_first(browser, tmp_path):
    content = picture(side=128)
    other = bytes([content[0]]) + content[1:2000] + bytes(len(content) - 2000)
    (first,) = browser.ask(("cat.png", content))
    browser.send(first, content, max_pieces=1)
    (second,) = browser.ask(("cat.png", b"x" * len(other)))
    assert second["id"] != first["id"] and second["offset"] == 0
    (third,) = browser.ask(("cat.png", other))  # its end differs, which the checksum will show
    assert third["id"] == first["id"] and third["offset"] == 1000
    browser.send(third, other, max_pieces=1)
    assert browser.send(first | {"offset": 1000}, content) == {"again": True}
    (fourth,) = browser.ask(("cat.png", content))
    assert browser.send(fourth, content) == {"done": "cat.png"}
    assert (tmp_path / "root/cats/cat.png").read_bytes() == content


def test_what_was_changed_on_its_way_is_not_kept(browser, tmp_path):
    content = picture()
    (verdict,) = browser.ask(("cat.png", content))
    with pytest.raises(ConfigError, match="changed on its way"):
        browser.uploads.take({"id": verdict["id"], "offset": "0", "sum": "1"}, content)
    assert names(tmp_path) == []


def test_nothing_is_written_over_and_pairs_stay_together(browser, tmp_path):
    folder = tmp_path / "root" / "cats"
    folder.mkdir()
    (folder / "image.png").write_bytes(b"mine")
    (folder / "image.txt").write_bytes(b"mine")
    files = [("image.png", picture(1)), ("image.txt", b"new"), ("IMAGE.png", picture(2)), ("image.png", picture(3))]
    verdicts = browser.ask(*files)
    done = []
    for verdict, (name, content) in zip(verdicts, files, strict=True):
        answer = browser.send(verdict, content)
        if answer.get("again"):  # two files of equal name, length and date: the second has to be requested again
            answer = browser.send(browser.ask((name, content))[0], content)
        done.append(answer["done"])
    assert done[:2] == ["image_2.png", "image_2.txt"] and len({name.lower() for name in done}) == 4
    assert (folder / "image.png").read_bytes() == (folder / "image.txt").read_bytes() == b"mine"
    assert (folder / "image_2.txt").read_bytes() == b"new" and len(names(tmp_path)) == 6


def test_two_browsers_with_one_name(browser, tmp_path):
    first_content, second_content = picture(1, 128), picture(2, 96)
    (first,), (second,) = browser.ask(("a.png", first_content)), browser.ask(("a.png", second_content))
    browser.send(first, first_content, max_pieces=1)
    assert (
        browser.send(second, second_content)["done"] == "a_2.png"
        and browser.send(first | {"offset": 1000}, first_content)["done"]
    )
    assert {(tmp_path / "root/cats" / name).read_bytes() for name in names(tmp_path)} == {first_content, second_content}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.png", b"no image at all"),
        ("a.txt", b"\xff"),
        ("a.txt", b"a\0"),
        ("a.jpg", b"GIF89a\x01\x00\x01\x00;"),
    ],
)
def test_what_is_not_what_it_says_is_deleted(browser, tmp_path, name, content):
    (verdict,) = browser.ask((name, content))
    with pytest.raises(ConfigError, match=name):
        browser.send(verdict, content)
    assert names(tmp_path) == []


def test_unsupported_kinds_are_reported_at_once(browser, tmp_path):
    verdicts = browser.ask(("a.exe", b"x"), ("a.png", b""), ("b.txt", b"x" * 1_000_001), ("metadata_cache.json", b"{}"))
    assert [verdict["state"] for verdict in verdicts] == ["refused"] * 4


def test_names_from_outside_stay_inside(browser, tmp_path):
    before = listing(tmp_path)
    for name in (
        "../../a.png",
        "..\\a.png",
        "C:\\a.png",
        "/etc/a.png",
        "CON.png",
        "a\0.png",
        ".a.png",
        "x" * 999 + ".png",
    ):
        content = picture(len(name))
        (verdict,) = browser.ask((name, content))
        if verdict["state"] == "send":
            browser.send(verdict, content)
    new_paths = set(listing(tmp_path)) - set(before)
    assert new_paths and all("root" in str(path) for path in new_paths)
    assert {path.parent.name for path in tmp_path.rglob("*.png")} == {"cats"}


def test_folders_outside_are_not_read(uploads, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root" / "link").symlink_to(outside)
    (tmp_path / "root" / "file").write_text("x")
    for folder in (
        outside,
        "/etc",
        tmp_path / "root/../outside",
        tmp_path / "root/link/x",
        tmp_path / "root/.ssh/x",
        tmp_path / "root" / "file",
        tmp_path / "root" / "con",
        "",
        "\0",
        "C:\\x",
    ):
        with pytest.raises(ConfigError):
            Browser(uploads, folder).ask(("a.png", picture()))
    assert [*outside.iterdir()] == []


def test_links_in_the_folder_are_left_alone(browser, tmp_path):
    folder, secret = tmp_path / "root" / "cats", tmp_path / "secret.png"
    folder.mkdir()
    secret.write_bytes(picture(7))
    (folder / "a.png").symlink_to(secret)
    (verdict,) = browser.ask(("a.png", picture(7)))  # the answer must not reveal whether it has the same contents
    assert verdict["state"] == "send" and browser.send(verdict, picture(7))["done"] == "a_2.png"
    (verdict,) = browser.ask(("b.png", picture(8)))
    (folder / verdict["id"]).symlink_to(secret)
    (other,) = browser.ask(("b.png", picture(8)))
    assert other["id"] != verdict["id"] and secret.read_bytes() == picture(7)


def test_a_full_disk_is_reported_and_left_as_it_was(browser, tmp_path, monkeypatch):
    content = picture()
    (verdict,) = browser.ask(("a.png", content))
    monkeypatch.setattr("builtins.open", full_disk(open))
    with pytest.raises(ConfigError, match="disk is full"):
        browser.send(verdict, content)
    monkeypatch.undo()
    assert names(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 10))
    with pytest.raises(ConfigError, match="not enough disk space"):
        browser.ask(("a.png", content))


def full_disk(real):
    def opened(path, mode="r", *arguments, **how):
        if "a" in mode:
            raise OSError(28, "No space left on device")
        return real(path, mode, *arguments, **how)

    return opened


FACT = {"name": "a.png", "size": 1, "modified": 1, "sums": {}}


@pytest.mark.parametrize(
    "files",
    [
        None,
        "a",
        [3],
        [{}],
        [{**FACT, "name": 3}],
        [FACT] * 3000,
        [{**FACT, "size": -1}],
        [{**FACT, "size": 1.5}],
        [{**FACT, "sums": {"1": "x"}}],
        [{**FACT, "sums": 3}],
        [{**FACT, "name": "a" * 9999}],
    ],
)
def test_what_the_page_does_not_send_is_refused(uploads, tmp_path, files):
    with pytest.raises(ConfigError, match="load it again"):
        uploads.begin(ApiRequest({"folder": str(tmp_path / "root" / "x"), "files": files}))
    assert not (tmp_path / "root" / "x").exists()


def test_the_route_takes_pieces_only_from_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = application(build_page([tmp_path]), {"host": "127.0.0.1"})
    own_headers = {"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:7860"}
    content = picture()
    with TestClient(app, "http://127.0.0.1:7860", raise_server_exceptions=False, headers=own_headers) as client:
        fact = {"name": "猫.png", "size": len(content), "modified": 1, "sums": {}}
        answer = client.post("/own/upload", json={"folder": str(tmp_path / "猫"), "files": [fact]}).json()
        query = {"id": answer["files"][0]["id"], "offset": "0", "sum": str(zlib.crc32(content))}
        assert client.post("/own/upload", params=query, content=content).status_code == 415
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
            assert (
                client.post("/own/upload", params=query, content=content, headers={"content-type": kind}).status_code
                == 415
            )
        assert client.post("/own/list", content=b"x", headers=PIECE).status_code == 415
        assert client.post("/own/upload", content=b"x" * 4_600_000, headers=PIECE).status_code == 413
        for odd in (
            {},
            {"id": "../../x"},
            {**query, "offset": "-1"},
            {**query, "offset": "x"},
            {**query, "offset": "9"},
        ):
            assert client.post("/own/upload", params=odd, content=content, headers=PIECE).json()["again"] is True
        evil = {**PIECE, "origin": "https://evil.test"}
        assert client.post("/own/upload", params=query, content=content, headers=evil).status_code == 403
        assert client.post("/own/upload", params=query, content=content, headers=PIECE).json()["done"] == "猫.png"
    assert (tmp_path / "猫" / "猫.png").read_bytes() == content
