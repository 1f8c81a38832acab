"""Images and captions that somebody sends: their names, what is in them, and that nothing is written over."""

import io
import struct
import threading
import zlib

import pytest
from PIL import Image

from library.config.problems import ConfigError
from library.curation import incoming_files

HOSTILE = {
    "../../etc/cat.png": "cat.png",
    "..\\..\\cat.PNG": "cat.png",
    "C:\\x\\cat.png": "cat.png",
    "C:cat.png": "C_cat.png",
    "/abs/cat.png": "cat.png",
    ".hidden.png": "hidden.png",
    "..": "image",
    ".png": "png",
    "": "image",
    "con.png": "_con.png",
    "NUL.tar.png": "_NUL.tar.png",
    "com¹.jpg": "_com¹.jpg",
    "a\0b.png": "ab.png",
    "a\nb.png": "ab.png",
    "gnp.\u202etac.png": "gnp.tac.png",
    "\u200bcat.png": "cat.png",
    "cat .png": "cat.png",
    "cat...png": "cat.png",
    "e\u0301.png": "\u00e9.png",
    'a<b>|?*".png': "a_b_____.png",
    "a.png:stream": "a.png_stream",
    "\ud800.png": "png",
    "cat.png/": "image",
    "image.jpg": "image.jpg",
    "猫 1.JPG": "猫 1.jpg",
    "x" * 300 + ".png": "x" * 120 + ".png",
}


@pytest.mark.parametrize(("sent", "safe"), HOSTILE.items(), ids=ascii)
def test_names_are_safe_everywhere(sent, safe):
    assert incoming_files.safe_name(sent) == safe
    assert incoming_files.safe_name(safe) == safe or safe in ("png",)
    long = incoming_files.safe_name("é" * 300 + ".png")
    assert len(long.encode()) <= 124 and long.endswith("é.png")


def png(width=8, height=8, text=b""):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = zlib.compress(b"\0" * (1 + 3 * min(width, 1000)) * min(height, 1000))
    return b"\x89PNG\r\n\x1a\n" + head + text + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def jpeg():
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 30, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.png", png()),
        ("a.jpg", png()),
        ("a.png", jpeg()),
        ("a.txt", "猫, cat\r\nb".encode()),
        ("a.txt", b"\xef\xbb\xbfcat"),
        ("a.caption", b"x"),
    ],
)
def test_what_can_be_trained_on_is_taken(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    incoming_files.check_content(tmp_path / name, name)
    assert incoming_files.refuse_file(name, len(content)) is None


def bomb():
    """A PNG whose text would take 5 MB, and others hundreds."""
    data = b"k\0\0" + zlib.compress(b"a" * 5_000_000, 1)
    return png(text=struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data)))


GIF = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.png", b"no image", "not an image"),
        ("a.jpg", b"<svg onload=alert(1)>", "not an image"),
        ("a.png", GIF, "not an image"),
        ("a.png", POSTSCRIPT, "not an image"),
        ("a.png", b"", "not an image"),
        ("a.png", png()[:45], "not an image"),
        ("a.jpg", jpeg()[:300], "not an image"),
        ("a.png", png(60_000, 60_000), "not an image|megapixels"),
        ("a.png", png(12_000, 11_000), "132 megapixels"),
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
        ("a.txt", b"a\0b", "UTF-8"),
        ("a.txt", b"a\1b", "control"),
        ("a.txt", png(), "UTF-8|control"),
    ],
)
def test_what_only_has_the_name_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        incoming_files.check_content(tmp_path / name, name)


def test_a_bomb_is_not_unpacked(tmp_path):
    (tmp_path / "a.png").write_bytes(bomb())
    with pytest.raises(ConfigError, match="not an image"):
        incoming_files.check_content(tmp_path / "a.png", "a.png")


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("a.gif", 9, "neither"),
        ("a.py", 9, "neither"),
        ("a", 9, "neither"),
        ("a.png.exe", 9, "neither"),
        ("a.npz", 9, "neither"),
        ("a.json", 9, "neither"),
        ("a.png", 0, "empty"),
        ("a.png", 300_000_000, "more than 256"),
        ("a.txt", 1_000_001, "more than 1 MB"),
    ],
)
def test_kinds_and_sizes_are_reported_before_any_upload(name, size, words):
    assert words in (str(incoming_files.refuse_file(name, size) or ""))


def test_pairs_stay_pairs():
    free = incoming_files.free_names
    assert free(["a.png", "a.txt"], set()) == {"a.png": "a.png", "a.txt": "a.txt"}
    assert free(["a.png", "a.txt"], {"a.txt"}) == {"a.png": "a_2.png", "a.txt": "a_2.txt"}
    assert free(["A.png"], {"a.jpg", "a_2.png"}) == {"A.png": "A_3.png"}  # a.jpg's caption would be its caption
    assert free(["a.txt"], {"a.jpg"}) == {"a.txt": "a.txt"}  # which is what it is for


def test_nothing_is_written_over_however_many_come_at_once(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_text("mine")
    for number in range(8):
        (tmp_path / f"part{number}").write_text(str(number))

    def together(names):
        threads = [
            threading.Thread(target=incoming_files.put, args=(tmp_path / f"part{n}", tmp_path, "a.png")) for n in names
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together(range(4))
    monkeypatch.setattr(incoming_files.os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links on this disk")))
    together(range(4, 8))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["a.png", *(f"a_{n}.png" for n in range(2, 10))])
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == sorted(["mine", *map(str, range(8))])


def test_folders_get_safe_names_that_are_different_on_every_system():
    sent = ["x", "X", "x-2", "x_2", "aux", "", "..", "v1.5 Cats", "10_zorb cat", "a\nb", "\u202egnp", "a/../b"]
    expected = ["x", "X_2", "x-2", "x_2_2", "_aux", "image", "image_2", "v1.5 Cats", "10_zorb cat", "ab", "gnp", "b"]
    assert incoming_files.folder_names(sent) == expected
