"""Files from strangers: nothing in them is run, nothing breaks, and each is refused in one sentence."""

import json
import os
import pickle
import random
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from library import families
from library.config.problems import ConfigError
from library.data import cache_files, caches, pixels
from library.data.buckets import BucketFit
from library.families.shared import raw_header, weights
from tests.training import config_of, demo, problems_and_remarks, squares, train  # noqa: F401

MEMORY = 200 * 2**20  # bytes that a hostile file may cost


# ---- pickles


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


@pytest.fixture
def canary(tmp_path):
    """A folder that comes into being when something is unpickled. It never may."""
    place = tmp_path / "unpickled"
    yield place
    assert not place.exists()


def armed(path, canary, how="pickle"):
    """A file that runs code in whoever unpickles it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "torch":
        torch.save({"state_dict": {"a": torch.zeros(2)}, "x": Bomb(canary)}, path)
    elif how == "npz":
        np.savez(path, latents=np.array([Bomb(canary)], dtype=object))
    else:
        path.write_bytes(pickle.dumps(Bomb(canary), protocol=2))  # the one that PyTorch knows
    return path


def test_the_bombs_are_real(tmp_path):
    pickle.loads(armed(tmp_path / "a.pt", tmp_path / "1").read_bytes())
    torch.load(armed(tmp_path / "b.pt", tmp_path / "2", "torch"), weights_only=False)
    np.load(armed(tmp_path / "c.npz", tmp_path / "3", "npz"), allow_pickle=True)["latents"]
    assert all((tmp_path / n).exists() for n in "123")


SLOTS = {
    "sdxl_train_network": ("pretrained_model_name_or_path", "vae", "network_weights", "base_weights"),
    "flux_train_network": ("pretrained_model_name_or_path", "clip_l", "t5xxl", "ae", "network_weights", "base_weights"),
}


@pytest.mark.parametrize(("script", "slot"), [(script, slot) for script, slots in SLOTS.items() for slot in slots])
def test_no_slot_of_a_training_unpickles(demo, squares, tmp_path, canary, script, slot):  # noqa: F811
    from library.config.formats import read_toml

    value = read_toml(demo.configs[script]).get(slot)
    place = Path(value).parent if isinstance(value, str) else tmp_path  # a model's tokenizers lie beside it
    for how, suffix in (("pickle", ".ckpt"), ("torch", ".pt"), ("torch", ".safetensors")):
        file = armed(place / f"bomb of {slot} {how}{suffix}", canary, how)
        path_value = [str(file)] if slot == "base_weights" else str(file)
        network = {"network_dim": 4} if slot == "network_weights" else {}
        config = config_of(
            demo,
            script,
            train_data_dir=squares,
            output_dir=tmp_path / "out",
            max_train_steps=1,
            **{slot: path_value},
            **network,
        )
        with pytest.raises(ConfigError) as said:
            train(config)
        file.unlink()
        assert str(file) in str(said.value) or slot in str(said.value)
        assert len(str(said.value)) < 600 and "weights_only" not in str(said.value)


def test_no_state_unpickles(demo, squares, tmp_path, canary):  # noqa: F811
    options = {"train_data_dir": squares, "output_dir": tmp_path / "out", "output_name": "m"}
    train(config_of(demo, "flux_train_network", max_train_steps=1, save_state_on_train_end=True, **options))
    state = tmp_path / "out" / "m-state"
    files = [file for file in state.iterdir() if file.suffix in (".bin", ".pt", ".safetensors")]
    assert len(files) >= 3
    for file in files:
        content = file.read_bytes()
        armed(file, canary, "torch")
        with pytest.raises(ConfigError, match="resume"):
            train(config_of(demo, "flux_train_network", max_train_steps=2, resume=str(state), **options))
        file.write_bytes(content)


def test_no_tool_unpickles(tmp_path, canary):
    from library.tools.shell import main as tools

    for how in ("pickle", "torch"):
        for suffix in (".safetensors", ".pt", ".ckpt"):
            file = str(armed(tmp_path / f"{how}{suffix}", canary, how))
            for line in (
                ["verify", file],
                ["convert", file, "--to", "peft", "-o", f"{tmp_path}/x.safetensors"],
                ["resize", file, "--rank", "2", "-o", f"{tmp_path}/x.safetensors"],
                ["metadata", file],
            ):
                try:
                    code = tools(line)
                except (ConfigError, SystemExit) as refused:
                    code = refused
                assert code not in (0, None), line
    assert not (tmp_path / "x.safetensors").exists()


def wanted(file):
    return caches.LatentEntry("", (64, 64), BucketFit((64, 64), (64, 64)), str(file), "", False, False)


def test_no_cache_unpickles(tmp_path, canary):
    for how in ("npz", "pickle", "torch"):
        file = armed(tmp_path / f"{how}.npz", canary, how)
        assert not caches.latents_are_good(wanted(file), "")
        with pytest.raises(caches.BROKEN):
            caches.read_latents(wanted(file))
        with pytest.raises(caches.BROKEN):
            caches.read_text_cache(str(file), ["latents"])


# ---- headers of safetensors


def raw(header, data=b"\0" * 64, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


MALFORMED = {
    "empty": b"",
    "short": b"\1\0\0",
    "no header": struct.pack("<Q", 0),
    "huge header": raw({"a": entry()}, length=2**63),
    "header of 4 GB": raw({"a": entry()}, length=2**32),
    "header past the end": raw({"a": entry()}, b"", length=5000),
    "cut header": raw(b'{"a": {"dtype"'),
    "not utf-8": raw(b'{"\xff\xfe": 1}'),
    "utf-16": raw('{"a": 1}'.encode("utf-16")),
    "a list": raw([1, 2]),
    "a number": raw(b"  17  "),
    "deep": raw(b'{"a":' + b"[" * 100_000),
    "deep objects": raw(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "an endless number": raw(b'{"a": ' + b"9" * 10_000 + b"}"),
    "entry is text": raw({"a": "x"}),
    "entry is null": raw({"a": None}),
    "no shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 16]}}),
    "shape is text": raw({"a": entry(shape="44")}),
    "shape is negative": raw({"a": entry(shape=(-4, -1))}),
    "shape is a fraction": raw({"a": entry(shape=(4.0,))}),
    "shape is true": raw({"a": entry(shape=(True, 4))}),
    "shape overflows": raw({"a": entry(shape=(2**62, 2**62, 4))}),
    "shape is too large": raw({"a": entry(shape=(5,))}),
    "offsets are one": raw({"a": entry(offsets=(0,))}),
    "offsets are swapped": raw({"a": entry(offsets=(16, 0))}),
    "offsets are negative": raw({"a": entry(offsets=(-16, 0))}),
    "offsets past the end": raw({"a": entry(shape=(400,), offsets=(0, 1600))}),
    "offsets are huge": raw({"a": entry(offsets=(2**64, 2**64 + 16))}),
    "overlap": raw({"a": entry(), "b": entry(offsets=(8, 24))}),
    "the same place": raw({"a": entry(), "b": entry()}),
    "hole": raw({"a": entry(), "b": entry(offsets=(32, 48))}, b"\0" * 48),
    "wrong dtype": raw({"a": entry(dtype="F99")}),
    "dtype is a number": raw({"a": entry(dtype=7)}),
    "dtype does not fit": raw({"a": entry(dtype="F64")}),
    "metadata is a list": raw({"__metadata__": [1], "a": entry()}),
    "metadata holds objects": raw({"__metadata__": {"x": {"y": 1}}, "a": entry()}),
    "trailing bytes": raw({"a": entry()}, b"\0" * 17),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_headers_are_refused_in_a_sentence(tmp_path, name):
    from library.adapter_files.storage import open_stored

    file = tmp_path / "a.safetensors"
    file.write_bytes(MALFORMED[name])
    for read in (weights.open_weights, open_stored):
        with pytest.raises(ConfigError) as said:
            read(file)
        assert str(file) in str(said.value) and "\n" not in str(said.value) and len(str(said.value)) < 500


@pytest.mark.parametrize("name", MALFORMED)
def test_metadata_of_malformed_headers_is_read_within_the_same_limits(tmp_path, name):
    file = tmp_path / "a.safetensors"
    file.write_bytes(MALFORMED[name])
    try:
        assert isinstance(raw_header.header_metadata(file), dict)
    except ConfigError as said:
        assert str(file) in str(said) and len(str(said)) < 500


def test_two_thousand_broken_files_break_nothing(demo, tmp_path):  # noqa: F811
    """Bytes of a good file's header exchanged by chance: it is opened as what it says, or refused."""
    from safetensors.torch import save

    good = save({f"layer.{i}.weight": torch.ones(2, 3) for i in range(4)}, {"format": "pt"})
    chance, file, opened = random.Random(0), tmp_path / "a.safetensors", 0
    for _ in range(2000):
        spoilt = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            spoilt[chance.randrange(min(len(spoilt), 400))] = chance.randrange(256)
        spoilt = spoilt[: chance.randint(0, len(spoilt))] if chance.random() < 0.2 else spoilt
        file.write_bytes(spoilt)
        try:
            found = weights.open_weights(file)
            assert sum(found[name].numel() for name in found) <= len(good)
            opened += 1
        except ConfigError as refused:
            assert len(str(refused)) < 500
    assert 0 < opened < 1900


# ---- bombs


def peak_memory() -> int:
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # missing on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.fixture
def modest():
    """What is done meanwhile must not cost much memory."""
    before = peak_memory()
    yield
    grown = peak_memory() - before
    assert grown < MEMORY, f"{grown / 2**20:.0f} MB"


def npy(shape, dtype="<f4"):
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


def packed(path, *names, head=b"", zeros=0):
    """An archive whose entries begin with `head` and continue with so many zeros, packed very small."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(head)
                for _ in range(zeros >> 20):
                    file.write(bytes(2**20))
    return path


@pytest.mark.parametrize("kind", ["unpacks to much", "says that it is large", "says that it is endless"])
def test_caches_that_unpack_to_gigabytes_are_not_unpacked(tmp_path, modest, kind, monkeypatch):
    monkeypatch.setattr(cache_files, "MAX_CACHE_BYTES", 2**24)  # a bomb as large as the real limit takes long to build
    names = ("latents", "made_from", "pool2")
    file = tmp_path / "a.npz"
    if kind == "unpacks to much":
        packed(file, *names, head=npy("(16, 1024, 1024)"), zeros=64 << 20)
    else:
        packed(file, *names, head=npy("(16, 100000, 100000)" if "large" in kind else f"({'9' * 30},)"))
    assert file.stat().st_size < 4 << 20
    assert not caches.latents_are_good(wanted(file), "")
    assert not caches.text_is_good(str(file), {"pool2": None}, [], {"caption": "x"})
    for read in (lambda: caches.read_latents(wanted(file)), lambda: caches.read_text_cache(str(file), ["pool2"])):
        with pytest.raises(caches.BROKEN):
            read()


def png(width, height):
    """A well-formed PNG of one colour: a few kilobytes per billion pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pack = zlib.compressobj(9)
    data = b"".join([pack.compress(bytes(2**20)) for _ in range(16)]) + pack.flush()
    ihdr = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_images_that_unpack_to_gigabytes_are_refused_in_a_sentence(tmp_path, modest):
    from library.curation import thumbs

    file = tmp_path / "bomb.png"
    file.write_bytes(png(60_000, 60_000))
    for read in (pixels.read_pixels, pixels.read_mask, lambda path: thumbs.thumb(path, 320)):
        with pytest.raises(ConfigError) as said:
            read(file)
        assert str(file) in str(said.value) and ("too many" in str(said.value) or "Bomb" in str(said.value))
    assert "too many pixels" in pixels.check_file(str(file))


def test_a_data_set_with_a_bomb_is_refused_before_a_model_is_loaded(demo, tmp_path, modest):  # noqa: F811
    (tmp_path / "set" / "1_x").mkdir(parents=True)
    (tmp_path / "set" / "1_x" / "bomb.png").write_bytes(png(60_000, 60_000))
    config = config_of(demo, "sdxl_train_network", train_data_dir=tmp_path / "set", output_dir=tmp_path / "out")
    problems, remarks = problems_and_remarks(config)
    assert any("bomb.png" in str(line) and "too many pixels" in str(line) for line in [*problems, *remarks])


def test_nothing_in_the_project_unpickles():
    """The words by which it would be done stand nowhere in the sources."""
    from tests import source

    never = (
        "import pickle",
        "pickle.load",
        "allow_pickle=True",
        "weights_only=False",
        "trust_remote_code=True",
        "shell=True",
        "os.system(",
        "joblib",
        "dill",
        "marshal.load",
        "yaml.load(",
        "eval(input",
    )
    wrong = [f"{path}: {word}" for path in source.files() for word in never if word in path.read_text("utf-8")]
    assert not wrong
    loads = [path for path in source.files() if "torch.load(" in path.read_text("utf-8")]
    assert all("weights_only=True" in path.read_text("utf-8") for path in loads)


def test_families_are_asked_through_the_same_reader(demo):  # noqa: F811
    config = config_of(demo, "flux_train_network", output_dir="/nowhere")
    assert list(families.family_for(config).problems()) == []
