"""The doctor's findings with PyTorch: its build, the GPU, compiling, and low-precision products."""

import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec

import torch
from torch.cuda.nccl import version as nccl_version

from library.compiler import cache, torch_private
from library.compiler.blocks import compile_error_cause
from library.compiler.checks import find_compile_problems
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, join_messages
from library.config.sections import Compile
from library.doctor import kernels
from library.doctor.finding import MachineFinding, bad, hint, ok
from library.runs import machine
from library.setup.installation import SETUP

SWITCHED_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # set to 1, torch.compile silently does nothing


def check_torch_build() -> MachineFinding:
    """Report the build of PyTorch."""
    target = f"CUDA {torch.version.cuda}" if torch.version.cuda else Message("the CPU")
    text = Message("{version}, built for {target}", version=torch.__version__, target=target)
    data = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11):
        return bad(
            "torch", Message("{build}; 2.11 or newer is needed: run {setup} install", build=text, setup=SETUP), **data
        )
    if shutil.which("nvidia-smi") and not torch.version.cuda:
        template = "{build}, though this machine has an NVIDIA GPU; run {setup} install"
        return bad("torch", Message(template, build=text, setup=SETUP), **data)
    return ok("torch", text, **data)


def gpu() -> MachineFinding:
    """Report the GPUs that PyTorch can use."""
    if not torch.cuda.is_available():
        if torch.version.cuda and shutil.which("nvidia-smi"):
            reason = (
                "none can be used: the NVIDIA driver is too old or not loaded; check nvidia-smi, and update the driver"
            )
            return bad("gpu", Message(reason), devices=[])
        return hint("gpu", Message("none found; training runs on the CPU, which is too slow for full-size models"))
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": properties.name,
                "memory_gb": round(total / 2**30, 1),
                "free_gb": round(free / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
                "bf16": torch.cuda.is_bf16_supported(including_emulation=False) if index == 0 else None,
            }
        )
    template = "{name}, {memory_gb} GB ({free_gb} free), capability {capability}"
    return ok("gpu", join_messages([Message(template, **device) for device in devices], "; "), devices=devices)


def driver() -> MachineFinding:
    """Report the GPU's driver, and the CUDA version of PyTorch."""
    version = machine.driver_version()
    if not version:
        return ok("driver", "")
    usable = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    cudnn, nccl = torch.backends.cudnn.version(), ".".join(map(str, nccl_version())) if usable else ""
    parts = [f"NVIDIA {version}", *([f"cuDNN {cudnn}"] if cudnn else []), *([f"NCCL {nccl}"] if nccl else [])]
    return ok("driver", "; ".join(parts), driver=version, cudnn=cudnn, nccl=nccl)


def compiler() -> MachineFinding:
    """Report the C++ compiler that torch.compile needs on the CPU."""
    try:
        path = torch_private.cpp_compiler()
    except Exception:
        template = "no C++ compiler found; --compile on the CPU needs one: {how}"
        return hint("compiler", Message(template, how=how_to_get_compiler()))
    completed = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False)
    lines = completed.stdout.splitlines()  # in the system's language and encoding
    return ok("compiler", lines[0] if lines else str(path), path=str(path))


def how_to_get_compiler() -> MessageLike:
    """Return the command that installs a compiler on this system."""
    if sys.platform == "win32":
        return Message("install the Visual Studio Build Tools with C++")
    if sys.platform == "darwin":
        return "xcode-select --install"
    return "sudo apt-get install g++" if shutil.which("apt-get") else Message("install g++ with your package manager")


def compile_cpu() -> MachineFinding:
    return compile_on("cpu")


def compile_gpu() -> MachineFinding:
    return compile_on("cuda") if torch.cuda.is_available() else ok("compile", "")


def compile_on(device: str) -> MachineFinding:
    """Compile with inductor, forward and backward."""
    # A real compilation is what a training with --compile will do on this device.
    if reason := _compile_obstacle(device):
        text = Message("does not work on {device}: {reason}", device=device, reason=reason)
        return hint("compile", text, device=device, works=False)

    def tiny(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x) @ x.T).sin().mean()

    sample = torch.randn(32, 32, device=device, requires_grad=True)
    began, stats = time.perf_counter(), torch_private.compile_counters("stats")
    graphs = stats["unique_graphs"]
    try:
        plain, compiled = tiny(sample), torch.compile(tiny, backend="inductor", fullgraph=True)(sample)
        (expected_grad,), (compiled_grad,) = torch.autograd.grad(plain, sample), torch.autograd.grad(compiled, sample)
        if not (torch.allclose(plain, compiled, atol=1e-4) and torch.allclose(expected_grad, compiled_grad, atol=1e-4)):
            raise RuntimeError("the compiled function computes something else")
        if stats["unique_graphs"] == graphs:  # PyTorch may fall back to running the function uncompiled
            raise RuntimeError("it was run, and not compiled")
    except Exception as error:
        template = "does not work on {device}: {reason}; train without --compile"
        return hint(
            "compile", Message(template, device=device, reason=compile_error_cause(error)), device=device, works=False
        )
    seconds = time.perf_counter() - began
    text = Message("works on {device} ({seconds} s)", device=device, seconds=f"{seconds:.1f}")
    return ok("compile", text, device=device, works=True, seconds=round(seconds, 2))


def _compile_obstacle(device: str) -> MessageLike:
    """Return a known obstacle to compiling, "" if there is none."""
    if off := next((name for name in SWITCHED_OFF if os.environ.get(name, "0") not in ("", "0")), ""):
        return Message("{name} in the environment switches it off; unset it", name=off)
    default_options = Compile()
    try:
        cache.use_cache(None, torch.device(device))
        obstacles = [
            problem.about if problem.option else problem
            for problem in find_compile_problems(default_options, torch.device(device))
        ]
    except ConfigError as error:
        return error.said
    return obstacles[0] if obstacles else ""


def check_attention() -> MachineFinding:
    """Report which attention kernels work, and how fast each is in training."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timings = kernels.time_attention(device)
    extras = [name for module, name in kernels.KERNEL_PACKAGES.items() if find_spec(module)]
    data: JsonObject = {"device": device, "works": list(timings), "packages": extras}
    if device == "cpu":
        return ok("attention", "", **data)
    data["ms"] = milliseconds = {name: round(ms, 3) for name, ms in timings.items() if ms != float("inf")}
    if not milliseconds:
        return hint("attention", Message("only the plain kernel works, which is slow and takes much memory"), **data)
    times = ", ".join(f"{name} {ms} ms" for name, ms in milliseconds.items())
    times += f"; {', '.join(extras)}" if extras else ""
    return ok("attention", Message("{times} (1 image of 4096 tokens, forward and backward)", times=times), **data)


def tf32() -> MachineFinding:
    """Report whether float32 products can use TF32."""
    if not torch.cuda.is_available():
        return ok("tf32", "")
    works = torch.cuda.get_device_capability() >= (8, 0)
    text = Message("works; cuda_allow_tf32 switches it on, for what is computed in float32")
    return ok("tf32", text if works else Message("this GPU has none, so float32 is slow: use fp16"), works=works)


def check_fp8() -> MachineFinding:
    """Report whether the GPU multiplies fp8."""
    if not torch.cuda.is_available():
        return ok("fp8", "")
    works = torch.cuda.get_device_capability() >= (8, 9) and kernels.fp8_works()
    text = Message("fp8 matrix products work (fp8_compute)")
    return ok(
        "fp8",
        text if works else Message("no fp8 matrix products on this GPU; fp8_base still saves memory"),
        works=works,
    )
