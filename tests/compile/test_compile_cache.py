"""Compiled code is kept where it lasts, and does not grow without end."""

import os

import torch

from library import compile_cache


def test_the_environment_wins_then_the_option_then_the_users_cache(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    assert compile_cache.use(str(tmp_path / "given"), cpu) == tmp_path / "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert compile_cache.use(str(tmp_path / "given"), cpu) == tmp_path / "given"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(compile_cache, "default_root", lambda: tmp_path / "user")
    used = compile_cache.use(None, cpu)
    assert used.parent == tmp_path / "user" and used.is_dir()
    assert torch.__version__.split("+")[0] in used.name


def test_old_folders_go_first_and_the_one_in_use_stays(tmp_path):
    for age, name in enumerate(("old", "newer", "used")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "code").write_bytes(b"x" * 100)
        os.utime(folder, (1000 + age, 1000 + age))
    compile_cache.prune(tmp_path, keep=tmp_path / "used", limit=250)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["newer", "used"]
    compile_cache.prune(tmp_path, keep=tmp_path / "used", limit=0)
    assert [f.name for f in tmp_path.iterdir()] == ["used"]
