"""Why blocks cannot be compiled on this machine or in this model."""

import contextlib
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.compiler import torch_private
from library.compiler.torch_settings import torch_version
from library.config.problems import ConfigError, Message, MessageLike, Problem
from library.config.values import quoted

MINIMUM_TORCH = (2, 11)
ALWAYS = {"inductor", "eager", "aot_eager"}  # backends of every supported PyTorch
FALLBACK = {"compile_fallback": True}
# Backends that PyTorch lists although they are in another package -> that package.
BACKEND_PACKAGES = {"tvm": "tvm", "openxla": "torch_xla", "openxla_eval": "torch_xla"}
# PyTorch does not guard on hooks, so a compiled block would silently ignore them.
# Why: docs/decisions/2026-11-20-no-hooks-inside-compiled-blocks.md
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_compile_problems(args: Any, device: torch.device, disable_linear: bool = False) -> Iterator[Problem]:
    """Yield why blocks cannot be compiled here. Loads no model."""
    if torch_version() < MINIMUM_TORCH:
        need = ".".join(map(str, MINIMUM_TORCH))
        yield Problem(
            "compile",
            ": needs PyTorch {need} or newer, this is {version}; update it, or switch compile off",
            need=need,
            version=torch.__version__,
            fix=FALLBACK,
        )
        return
    if unknown := [*_unknown_backends(args)]:
        yield from unknown
        return
    if args.compile_backend != "inductor" and args.compile_mode not in (None, "default"):
        yield Problem(
            "compile_mode",
            ": {mode} only exists for the inductor backend; use default",
            mode=args.compile_mode,
            fix={"compile_mode": "default"},
        )
    if disable_linear and args.compile_fullgraph:
        yield Problem("compile_fullgraph", ": cannot hold while Linear layers are kept out of the graph; switch it off")
    if args.compile_backend == "inductor" and (why := _no_inductor(device)):
        yield Problem("compile", ": {why}", why=why, fix=FALLBACK)


def _unknown_backends(args: Any) -> Iterator[Problem]:
    block_backends = []
    with contextlib.suppress(ConfigError):  # unknown blocks have a message of their own
        block_backends = [backend for _, _, backend in args.choices() if backend] if hasattr(args, "choices") else []
    if {args.compile_backend, *block_backends} <= ALWAYS:  # listing them loads torch._dynamo, which takes seconds
        return
    # PyTorch does not list backends whose names begin with an underscore.
    missing = {name for name, package in BACKEND_PACKAGES.items() if find_spec(package) is None}
    all_backends, listed = (
        {*torch.compiler.list_backends(exclude_tags=tags)} - missing for tags in ((), ("debug", "experimental"))
    )
    choices = ", ".join(sorted(listed))
    for option, names in (("compile_backend", [args.compile_backend]), ("compile_blocks", block_backends)):
        fix = {"compile_backend": "inductor"} if option == "compile_backend" else {}
        for name in dict.fromkeys(names):
            if name in missing:
                yield Problem(
                    option,
                    ": the backend {name} is in the package {package}, which is not installed; choose one of {known}",
                    name=name,
                    package=BACKEND_PACKAGES[name],
                    known=choices,
                    fix=fix,
                )
            elif name not in all_backends:
                yield Problem(
                    option,
                    ": PyTorch has no backend called {name}; choose one of {known}",
                    name=quoted(name),
                    known=choices,
                    fix=fix,
                )


def find_hooks(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[Problem]:
    """Reject hooks inside of blocks: compiled code silently ignores hooks that are added or removed later.

    Hooks of a block itself run outside of its compiled code and are allowed.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks:
        for inner in block.modules():
            if inner is not block and any(getattr(inner, kind) for kind in HOOKS):
                name = names.get(id(inner)) or type(inner).__name__
                yield Problem(
                    "compile",
                    ": {name} has a hook, which compiled code would not run; remove it, or switch compile off",
                    name=name,
                    fix=FALLBACK,
                )


def _no_inductor(device: torch.device) -> MessageLike:
    """Return why inductor lacks a tool chain for this device, "" if it has one."""
    if device.type == "cpu":
        try:
            torch_private.cpp_compiler()
        except Exception:
            return Message(
                "no C++ compiler was found, and inductor needs one on the CPU; "
                "install one (Debian: apt install g++, Windows: Visual Studio Build Tools), or switch compile off"
            )
        # Inductor's C++ wrapper is a Python extension.
        if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            return (
                "Python's header files were not found (Debian: apt install python3-dev); install them, or switch it off"
            )
        if " " in torch.__file__:
            return "PyTorch cannot compile below a folder with a blank in its name; move the project, or switch it off"
        return ""
    if torch_private.has_triton():
        return ""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        return Message(
            "{gpu} is too old for it (needs compute capability 7.0); switch compile off",
            gpu=torch.cuda.get_device_name(device),
        )
    return "Triton was not found; install it (Windows: pip install triton-windows), or switch compile off"
