"""Whole trainings for tests: the demo's tiny models, pictures of known sizes, and the results of a run."""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import shutil
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from library import data, families
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import Message, Problem
from library.config.schema import options_of
from library.demo.images import write_references
from library.runs import reader
from tests import fork_server
from tests.source import ROOT, SCRATCH

# DreamBooth of SD 1.5 is its fine-tune but for the text encoder, and its words learn as SDXL's do: both have tests of
# their own, and those of tests/contract that need few seconds.
RELATED = ["train_db", "train_textual_inversion"]
RUNS = [script for script in families.RUNS if script not in RELATED]
# Trainings of adapters and of whole models; textual inversion has tests of its own.
SCRIPTS = [script for script in RUNS if families.config_class(script).kind in ("lora", "finetune")]
LORAS = [script for script in SCRIPTS if script.endswith("_network")]
# One family of each kind, a U-Net with diffusion and a transformer with flow matching, for tests of code that does not
# depend on the family. tests/contract runs with all families.
OF_EACH_KIND = [f"{family}_train{kind}" for family in ("sdxl", "flux") for kind in ("", "_network")]
LORA_OF_EACH_KIND, FULL_OF_EACH_KIND = OF_EACH_KIND[1::2], OF_EACH_KIND[::2]
# Blocks to compile: one of each kind of the U-Net, whose graphs only differ in channels; else the quicker kind.
FEW = {
    script: "transformer:0,resnet:0" if "resnet" in config.compile.kinds else f"{[*config.compile.kinds][-1]}:all"
    for script, config in ((script, families.config_class(script)()) for script in SCRIPTS)
}
# Four levels leave one pixel of a picture of 64, whose norms divide by almost nothing: gradients jump at any rounding.
STEADY = {"train_network": {"resolution": "256"}}
# network_args for a single adapter in each block of a transformer: adapters on all layers would be half of what is
# traced. In FLUX.1 and FLUX.2 the single blocks have it.
ONE_ADAPTER = ("network_reg_dims=^(?!.*(to_q|linear2|self_attn.q_proj|blocks_\\d+_attn_wq|_\\d+_q_proj)).*=0",)
# For tests that compile blocks to machine code: without vector instructions it takes a quarter less time, and the
# project's part is the same. The cache is separate, because PyTorch looks graphs up by what they compute alone, and
# code generated with vector instructions does not compile without them.
PLAIN_CODE = {"ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_CACHE_DIR": str(SCRATCH / "inductor-plain")}
SQUARES = ((64, 64),) * 4
# Three buckets, one of three pictures.
SHAPES = ((64, 64), (64, 64), (128, 64), (128, 64), (64, 128), (64, 128), (64, 128))
# Sizes of tiny models with fewer blocks; each family uses the fields that it has.
FEWER = {"unet": (32, 64), "depth": (0, 1), "double_blocks": 1, "single_blocks": 2, "blocks": 2, "adapter_blocks": 1}
FIXED_LEVELS = 4  # of a U-Net whose LoRA names count on all of its levels (SD 1.5)
CACHED: set[Path] = set()  # image folders in which trainings cache latents and texts on disk
ENCODED: dict[Any, Any] = {}  # results of VAEs in this process
ENCODING_ONCE: list[bool] = []  # not empty within `encoding_once`; elsewhere VAEs always compute


def in_english(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Message) else value for name, value in event.items()}


@dataclass(frozen=True)
class Outcome:
    """A finished training: its file, its run's folder, and what is recorded there."""

    file: Path
    folder: Path

    @property
    def facts(self) -> dict[str, Any]:
        return reader.run_at(self.folder).facts

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [in_english(event) for event in reader.read_events(self.folder) if event["kind"] == kind]

    def numbers(self, name: str = "loss") -> dict[int, float]:
        return {event["step"]: event[name] for event in self.events("step")}

    @property
    def losses(self) -> list[float]:
        return list(self.numbers().values())

    def tensors(self) -> dict[str, Any]:
        about = self.file.stat()
        return dict(_tensors(self.file, about.st_mtime_ns, about.st_size))


@functools.lru_cache(maxsize=4)  # tests compare tensor by tensor
def _tensors(file: Path, *_version: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(file)


def narrowed(tensors: dict[str, torch.Tensor], width: int, to: int) -> dict[str, torch.Tensor]:
    """A network of another width: every dimension of `width` is cut to `to`."""
    return {
        name: t[tuple(slice(to) if size == width else slice(None) for size in t.shape)].contiguous()
        for name, t in tensors.items()
    }


def pictures(folder: Path, sizes: Iterable[tuple[int, int]] = SQUARES, repeats: int = 2, seed: int = 0) -> Path:
    """Write soft random pictures with captions, as a data set of one concept; returns the folder for train_data_dir."""
    chance = np.random.default_rng(seed)
    place = folder / f"{repeats}_zorb toy"
    place.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        coarse = Image.fromarray(chance.integers(0, 255, (4, 4, 3), dtype=np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(place / f"{number}.png")
        words = chance.choice(["red", "night", "sea", "smile", "cat", "soft light"], 3, replace=False)
        (place / f"{number}.txt").write_text(", ".join(["zorb toy", *words]), encoding="utf-8")
    return folder


def references(images: Path, folder: Path) -> str:
    return str(write_references(images, folder / "references"))


def config_of(demo: Any, script: str, **values: Any) -> Any:
    """The demo's config of a script with other values: by default without compiling, and saved in full precision."""
    quick = {
        "compile": False,
        "compile_blocks": None,
        "resolution": "64",
        "max_train_steps": 4,
        "save_precision": "float",
        "logging_dir": None,
    }
    # the demo's TOML of another model of a family has its name as prefix: <model>_<script>
    kind = families.config_class(
        script if script in families.RUNS else next(run for run in families.RUNS if script.endswith(f"_{run}"))
    )
    if "t5xxl_max_token_length" in options_of(kind):
        quick["t5xxl_max_token_length"] = 32
    overrides = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    whole = read_toml(demo.configs[script]) | quick
    if values.get("train_data_dir") in CACHED:
        encoded = ("cache_latents", "cache_text_encoder_outputs")
        whole |= {f"{name}_to_disk": True for name in encoded if (whole | overrides).get(name)}
    return build_config(kind, whole | overrides, notes=[])


def problems_and_remarks(config: Any) -> tuple[list[Problem], list[Problem]]:
    """The result of the whole check of a config, as before a training."""
    from library.check import preflight

    return preflight.evaluate(config, data.check_data(config, config.grid))


def train(config: Any) -> Outcome:
    """Train in this process, as if it were the process's first training."""
    from library.cli.train import train as train_it

    _collect_what_is_young()
    fresh()
    before = runs_in(config.save.output_dir)
    with encoding_once():
        file = train_it(config)
    return Outcome(file, (runs_in(config.save.output_dir) - before).pop())


@contextlib.contextmanager
def encoding_once() -> Iterator[None]:
    """In it a VAE's answer about the same pixels is kept."""
    _encode_once()
    ENCODING_ONCE.append(True)
    try:
        yield
    finally:
        ENCODING_ONCE.pop()


@functools.cache
def _encode_once() -> None:
    """Encode the same pixels with the same VAE once per process, which saves a tenth of the trainings' time.

    Results are keyed by everything they depend on, so a changed weight, pixel, dtype or setting is encoded anew. The
    project's own code around it runs every time.
    """
    import torch

    from library.imports import without_optional

    with without_optional("diffusers"):
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
        from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
        from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage

    # network -> its modules, addresses and versions of its weights, digest of their values
    digests: Any = weakref.WeakKeyDictionary()

    def remembered(self: Any, x: torch.Tensor, encode: Any) -> torch.Tensor:
        if not ENCODING_ONCE or torch.is_grad_enabled() or self.training or x.device.type != "cpu":
            return encode(self, x)
        inner, before, digest = digests.get(self) or ([*self.modules()][1:], None, None)
        tables = [held for module in (self, *inner) for held in (module._parameters, module._buffers)]
        weights = [value for values in tables for value in values.values()]
        now = [(value.data_ptr(), value._version, value.dtype) for value in weights if value is not None]
        if before != now:
            hasher = hashlib.sha256(repr([self.config, self.encoder, self.quant_conv]).encode())
            for value in self.state_dict().values():
                hasher.update(value.reshape(-1).contiguous().view(torch.uint8).numpy())
            digest = hasher.digest()
            digests[self] = inner, now, digest
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        pixels = x.contiguous().view(torch.uint8).numpy().tobytes()
        how = self.use_slicing, self.use_tiling, x.stride(), torch.get_num_threads(), autocast
        key = digest, x.dtype, x.shape, pixels, how
        if key not in ENCODED:
            ENCODED[key] = encode(self, x).clone()
        return ENCODED[key].clone()

    for network in (AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage):
        network._encode = functools.partialmethod(remembered, encode=network._encode)


@functools.cache
def _collect_what_is_young() -> None:
    """Limit a training's garbage collections to young objects. In a process of many tests, older ones number half a
    million, a tenth of a short training's time; the networks that the collections are meant to free are young."""
    from library.distributed import world

    world.gc = SimpleNamespace(collect=functools.partial(gc.collect, 1))


def fresh() -> None:
    """Let accelerate forget the previous training; all else starts anew by itself."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


def runs_in(output: Any) -> set[Path]:
    return set((Path(output) / "runs").glob("*"))


def command(arguments: list[str], **how: Any) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, **how)


def script(name: str, *flags: Any, **how: Any) -> subprocess.CompletedProcess:
    return command([sys.executable, str(ROOT / "sd-scripts" / f"{name}.py"), *map(str, flags)], **how)


def free_port() -> int:
    """A port on which nobody listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(arguments: Iterable[object], number: int = 2) -> list[Any]:
    """Start the processes of one training directly, as `accelerate launch` would: the launcher itself takes seconds."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_MIXED_PRECISION": "no"}
    shared |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "ACCELERATE_DYNAMO_BACKEND": "no"}
    texts = [str(argument) for argument in arguments]
    return [fork_server.start(texts, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(number)]


def listing(folder: Path) -> Mapping[str, str]:
    """Every file and folder below a folder -> the hash of its content."""
    if not folder.exists():
        return {}
    return {
        path.relative_to(folder).as_posix(): "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
    }


@contextlib.contextmanager
def untouched(*folders: Path):
    """Assert that nothing in these folders changes within the `with` block."""
    before = [listing(folder) for folder in folders]
    yield
    assert [listing(folder) for folder in folders] == before


def wait_for(what: Any, seconds: float = 300) -> Any:
    """Wait until `what()` is true; returns its value."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="session")
def demo(tmp_path_factory: Any) -> Any:
    """Tiny models of all families and a TOML per script; one folder for all test files of a process."""
    from library.demo import files

    return files.prepare_demo(tmp_path_factory.getbasetemp() / "shared-demo", families.FAMILIES, compiled=True)


SHORT = 64  # tokens; more than any caption of the tests has


@pytest.fixture(scope="module", autouse=True)
def short_captions() -> Any:
    """Pad FLUX.2's captions to fewer tokens in each test file that imports this, itself or by its conftest.

    The 512 tokens are no option, and took three quarters of a tiny model's step. The family's own tests check the
    number. Tests that start other processes cannot use this: the patch does not reach those.
    """
    from library.families.flux_2 import text_encoder
    from library.families.flux_2.family import Flux2Family

    lengths = {"ctx_vec": SHORT}
    with mock.patch.object(text_encoder, "LENGTH", SHORT), mock.patch.object(Flux2Family, "text_lengths", lengths):
        yield


# For tests below tests/train that count blocks or layers: they train the demo's models with all their blocks.
several_blocks = pytest.mark.parametrize("demo", ["deep"], indirect=True)


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: Any) -> Any:
    # at least one block of each kind: enough for tests that compare trainings with each other
    return _with_fewer_blocks(tmp_path_factory.getbasetemp() / "shallow-demo", families.FAMILIES)


@pytest.fixture(scope="session")
def shallow_unet(tmp_path_factory: Any) -> Any:
    # tests that swap or choose blocks need the other families' blocks; SDXL's U-Net has many
    return _with_fewer_blocks(tmp_path_factory.getbasetemp() / "shallow-unet-demo", ("sdxl",))


def _with_fewer_blocks(folder: Path, of_families: Iterable[str]) -> Any:
    from library.demo import files

    def smaller(family: str) -> Any:
        module: Any = families.random_module(family)
        if family not in of_families:
            return module
        field_names = {field.name for field in dataclasses.fields(module.TINY)}
        if len(getattr(module.TINY, "unet", ())) == FIXED_LEVELS:
            field_names -= {"unet", "depth"}
        sizes = dataclasses.replace(module.TINY, **{name: size for name, size in FEWER.items() if name in field_names})
        return SimpleNamespace(write_random_model=functools.partial(module.write_random_model, sizes=sizes))

    with mock.patch.object(files, "random_module", smaller):
        return files.prepare_demo(folder, families.FAMILIES, compiled=True)


def copied(demo: Any, folder: Path) -> Any:
    """The demo's models copied to a folder of their own, with new pictures."""
    from library.demo import files

    files.prepare_demo(folder, (), compiled=True)
    shutil.copytree(demo.folder / "models", folder / "models")
    return files.prepare_demo(folder, (), compiled=True)


@pytest.fixture(scope="session")
def squares(tmp_path_factory: Any) -> Path:
    return pictures(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: Any) -> Path:
    return pictures(tmp_path_factory.mktemp("shapes"), SHAPES, repeats=1)


def cached(folder: Path) -> Path:
    """Mark a folder of pictures, so that trainings share the latents and texts cached in it, which saves a fifth of a
    short training's time. Not for tests of what is encoded, and when."""
    CACHED.add(folder)
    return folder


@pytest.fixture(scope="session")
def cached_squares(tmp_path_factory: Any) -> Path:
    return cached(pictures(tmp_path_factory.mktemp("squares")))


@pytest.fixture(scope="session")
def cached_shapes(tmp_path_factory: Any) -> Path:
    return cached(pictures(tmp_path_factory.mktemp("shapes"), SHAPES, repeats=1))
