"""Compiled code is kept where it lasts, and does not grow without end."""

import os
import pickle
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import codecache
from torch._inductor.utils import clear_caches

from library.compiler import cache, prewarm, pruning, torch_private
from library.compiler.log import CompileLog
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families import config_class
from library.memory import checkpointing
from tests.training import PLAIN_CODE


def test_the_environment_wins_then_the_option_then_the_users_cache(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert cache.use_cache(str(tmp_path / "given"), cpu) == tmp_path / "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert cache.use_cache(str(tmp_path / "given"), cpu) == tmp_path / "given"
    # PyTorch writes its own default into the environment when it is imported, which is nobody's request.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache.default_cache_dir())
    strange = tmp_path / "cé中" / "xy"
    assert cache.use_cache(str(strange), cpu) == strange and strange.is_dir()
    # What an earlier training of this process asked for is nobody's request, either.
    monkeypatch.setattr(cache, "default_root", lambda: tmp_path / "user")
    used = cache.use_cache(None, cpu)
    assert used.parent == tmp_path / "user" and used.is_dir()
    assert torch.__version__.split("+")[0] in used.name


def test_for_a_folder_that_cannot_be_used_another_stands_in_and_the_check_names_both(tmp_path, monkeypatch):
    cpu, file, own = torch.device("cpu"), tmp_path / "file", tmp_path / "own"
    file.write_text("in the way")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache.default_cache_dir())
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setattr(cache, "default_root", lambda: own)
    assert cache.use_cache(str(file / "in"), cpu).parent == own
    (told,) = cache.find_cache_problems(str(file / "in"), cpu)  # in the check, where nothing is made
    assert told.option == "compile_cache_dir" and "file is not a folder); compiled code is kept in " in str(told)
    assert not [*cache.find_cache_problems(str(tmp_path / "new" / "one"), cpu)] and not (tmp_path / "new").exists()
    assert cache.use_cache(str(tmp_path / "x y"), cpu).parent == own  # the linker cannot take a blank
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "in"))
    assert cache.use_cache(None, cpu).parent == own and os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(own))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "in"))
    assert [cache.use_cache(str(tmp_path / "option"), cpu) for _ in "12"] == [tmp_path / "option"] * 2
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "in"))
    monkeypatch.setattr(cache, "default_root", lambda: file)
    (told,) = cache.find_cache_problems(None, cpu)
    assert str(told).startswith("TORCHINDUCTOR_CACHE_DIR: ") and str(told).endswith(cache.default_cache_dir())
    assert str(cache.use_cache(None, cpu)) == cache.default_cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_a_key_does_not_tell_which_module_has_imported_torch_first(monkeypatch):
    from torch._inductor.codecache import FxGraphCachePickler

    cache.use_cache(None, torch.device("cpu"))
    graph, fake = torch.fx.symbolic_trace(nn.Identity()), torch_private.FakeTensorMode()
    tensor = fake.from_tensor(torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last))
    before, loaded_modules = FxGraphCachePickler(graph).dumps(tensor), dict(sys.modules)
    first = types.ModuleType("imported_first")
    first.torch = torch
    monkeypatch.setattr(sys, "modules", {"imported_first": first, **loaded_modules})
    assert FxGraphCachePickler(graph).dumps(tensor) == before
    monkeypatch.undo()
    assert pickle.loads(pickle.dumps(torch.channels_last)) is torch.channels_last


def test_the_compiler_gets_up_while_something_is_loaded_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.INDUCTOR, str(tmp_path))
    # As in the other tests that compile: headers are compiled once for each choice of instructions.
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", PLAIN_CODE["ATEN_CPU_CAPABILITY"])
    prewarm._compile_small_graph.cache_clear()
    clear_caches()  # of code that an earlier training of this process has prepared
    options = build_config(config_class("flux_train_network"), {"compile": True}, notes=[]).compile
    before = dict(counters["stats"])
    with prewarm.prewarm_inductor(options, torch.device("cpu")):
        assert any(thread.name == "compiler" for thread in threading.enumerate())
    assert list(tmp_path.rglob("*.so")), "nothing was compiled"
    log = CompileLog()
    log.listen()
    assert dict(counters["stats"]) == before and not log.drain()


def test_the_key_has_the_gpu_and_its_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200 (x)")
    assert isinstance(cache._driver_cuda(), int)
    monkeypatch.setattr(cache, "_driver_cuda", lambda: 13000)
    monkeypatch.setattr(cache.metadata, "version", lambda _: "3.7.1+git")
    assert cache.cache_key(torch.device("cuda")).endswith("-nvidia-h200-x-triton3.7.1-driver13000")


def test_on_windows_the_key_leaves_room_for_what_is_below_it(monkeypatch):
    """Paths end at 260 there, and Triton's are 190 long."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(cache.sys, "platform", "win32")
    keys = set()
    for driver in (13000, 13010):
        monkeypatch.setattr(cache, "_driver_cuda", lambda driver=driver: driver)
        keys.add(cache.cache_key(torch.device("cuda")))
    assert len(keys) == 2 and all(len(key) < 20 for key in keys)


def test_old_folders_go_first_and_the_one_in_use_stays(tmp_path):
    for age, name in enumerate(("old", "newer", "used")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "code").write_bytes(b"x" * 100)
        os.utime(folder, (1000 + age, 1000 + age))
    cache.prune_cache(tmp_path, keep=tmp_path / "used", max_bytes=250)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["newer", "used"]
    cache.prune_cache(tmp_path, keep=tmp_path / "used", max_bytes=0)
    assert [f.name for f in tmp_path.iterdir()] == ["used"]


def test_in_the_folder_in_use_single_graphs_go_and_nothing_that_is_not_pytorchs(tmp_path):
    mine = [tmp_path / "notes.txt", tmp_path / "my" / "own", tmp_path / "ab" / "short"]
    entries = [
        *(tmp_path / kind / "ab" / "f" / "code" for kind in pruning.CACHE_FOLDERS),
        tmp_path / "cd" / f"{'c' * 52}.so",
    ]
    for age, file in enumerate([*mine, *entries]):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 100)
        os.utime(file, (1000 + age, 1000 + age))
    cache.prune_cache(tmp_path, keep=tmp_path, max_bytes=250)  # of what is PyTorch's
    assert [file.exists() for file in (*mine, *entries)] == [True] * 3 + [False] * 2 + [True] * 2
    cache.prune_cache(tmp_path, keep=tmp_path, max_bytes=0)
    assert [file.exists() for file in (*mine, *entries)] == [True] * 3 + [False] * 4


def test_code_that_is_damaged_is_made_anew(tmp_path, monkeypatch, forget):
    """PyTorch takes it as it is, and would fail at every start."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", PLAIN_CODE["ATEN_CPU_CAPABILITY"])
    (torn := tmp_path / "triton" / "0" / "kernel" / "kernel.json").parent.mkdir(parents=True)
    torn.touch()
    for _ in range(2):
        torch._dynamo.reset()
        cache.use_cache(str(tmp_path), torch.device("cpu"))
        assert not torn.exists()
        assert torch.compile(torch.sin)(torch.zeros(3)).tolist() == [0, 0, 0]
        sources = [file for file in tmp_path.glob("??/*.py") if file.read_text(encoding="utf-8")]
        for file in sources:
            file.write_bytes(b"")
    assert sources and pruning.repair(tmp_path) == len(sources)


def test_code_with_the_line_ends_of_windows_is_kept(tmp_path):
    """PyTorch names it by its text, and writes it as text: all of it was deleted at every start."""
    name, path = codecache.write("def call():\n    return 1\n", "py", specified_dir=str(tmp_path / "ab"))
    text = Path(path).read_bytes()
    assert len(name) == pruning.NAME_LENGTH and not pruning.repair(tmp_path)
    Path(path).write_bytes(text.replace(b"\n", b"\r\n"))
    assert not pruning.repair(tmp_path) and Path(path).exists()
    Path(path).write_bytes(text[:-3])
    assert pruning.repair(tmp_path) == 1


@pytest.fixture
def filled(tmp_path):
    for age, name in enumerate(("old", "newer", "used")):
        (tmp_path / name / "triton").mkdir(parents=True)
        (tmp_path / name / "triton" / "code").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    return tmp_path


def test_the_cache_can_be_looked_at_and_cleaned(filled):
    assert cache.cache_folders(filled) == {"used": 100, "newer": 100, "old": 100}
    assert cache.clean_cache(filled) == 300 and cache.cache_size(filled) == 0
    assert cache.clean_cache(filled / "never") == 0


def test_a_limit_is_kept_and_holds_at_once_and_at_the_next_start(filled):
    assert cache.cache_limit(filled) == cache.USUAL_LIMIT
    cache.limit_cache(250, filled)
    assert cache.cache_limit(filled) == 250
    assert list(cache.cache_folders(filled)) == ["used", "newer"]
    (filled / "used" / "more").write_bytes(b"x" * 100)
    cache.prune_cache(filled, keep=filled / "used")
    assert list(cache.cache_folders(filled)) == ["used"]
    (filled / cache.LIMIT_FILE).write_text("torn", encoding="utf-8")
    assert cache.cache_limit(filled) == cache.USUAL_LIMIT
    with pytest.raises(ConfigError):
        cache.limit_cache(-1, filled)


class Attends(nn.Module):
    """A block that does nothing but attend."""

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("how", [{"keep_attention": True}, {"own_gradients": True}], ids=str)
def test_checkpoints_that_are_asked_of_every_operation_are_found_again(how, tmp_path, monkeypatch, forget):
    """PyTorch passes its cache by where it does not know what a policy decides."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(checkpointing, "_keeps_function_outputs", lambda: True)
    counted = torch._dynamo.utils.counters["aot_autograd"]
    for counters_case in ({"autograd_cache_miss": 1, "autograd_cache_saved": 1}, {"autograd_cache_hit": 1}):
        torch._dynamo.reset()
        counted.clear()
        block = Attends()
        checkpointing.checkpoint_blocks([[block]], **how)
        block.compile(fullgraph=True)
        block(torch.randn(1, 1, 2, 8, requires_grad=True)).sum().backward()
        assert {name: number for name, number in counted.items() if "cache" in name and number} == counters_case
