"""`kohya doctor`: what this machine has, whether it can compile, and what to do where it cannot.

Each finding is a line with a verdict. Only findings that keep a training from running make the exit code 1; what merely
makes it slower, or a tool less, is a hint. The last one says which settings suit this machine. `--json` says the
same to a program.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from library.config import environment as surroundings
from library.config.schema import ConfigError
from library.doctor import advice, installation, kernels
from library.doctor.finding import MachineFinding, bad, hint, ok
from library.doctor.optional import optimizers
from library.doctor.places import disk, folders
from library.packages import PACKAGES as OPTIONAL
from library.packages import locked as locked_versions
from library.runs import machine
from library.runs.job_work import joined

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "gradio", "numpy")
EXTRAS = ("triton", *OPTIONAL.values(), "torchao")
SWITCHED_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")  # set to 1, torch.compile silently does nothing


def main(argv: list[str] | None = None) -> int:
    """Print the report; 0 when a training can run here, else 1."""
    parser = argparse.ArgumentParser(
        "kohya doctor", description="Check this machine: GPU, PyTorch, packages, compiling."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quick", action="store_true", help="leave out the compile check, which takes a few seconds")
    asked = parser.parse_args(argv)
    found: list[MachineFinding] = []
    with joined("doctor") as work:
        for finding in examine(quick=asked.quick):
            found.append(finding)
            if not asked.json:
                print(line(finding), flush=True)
            work.phase(finding.topic, len(found))
            work.store({"kind": "doctor", "finished": False, **report(found)})
        work.store({"kind": "doctor", "finished": True, **report(found)})
    healthy = report(found)["healthy"]
    if asked.json:
        print(json.dumps(report(found), indent=1))
    else:
        print("\n" + closing(found))
    return 0 if healthy else 1


def closing(found: list[MachineFinding]) -> str:
    """The last line: whether a training can run here, and what is left out of it."""
    if not report(found)["healthy"]:
        return "Fix what is marked with ✗, then run this again."
    without = [name for finding in found for name in finding.data.get("without", ())]
    return f"This machine can train, but without {', '.join(without)}." if without else "This machine can train."


def report(found: list[MachineFinding]) -> dict[str, Any]:
    """The findings for a program."""
    healthy = all(finding.verdict != "bad" for finding in found)
    return {"healthy": healthy, "findings": [asdict(finding) for finding in found]}


def line(finding: MachineFinding) -> str:
    """A finding as a line of text: a mark, the topic, and what was found."""
    mark = {"ok": "✓", "hint": "·", "bad": "✗"}[finding.verdict]
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        mark = {"ok": "ok  ", "hint": "hint", "bad": "BAD "}[finding.verdict]
    return f"{mark} {finding.topic:<12} {finding.text}"


def examine(quick: bool = False) -> Iterator[MachineFinding]:
    """Everything that is looked at, in the order it is worth reading. Yields as it goes, since torch takes seconds."""
    found: list[MachineFinding] = []
    checks: list[Callable[[], MachineFinding]] = [system, packages, foreign_library, environment, torch_build]
    checks += [gpu, driver, optimizers, compiler]
    checks += [] if quick else [compile_cpu, compile_gpu]
    checks += [attention, tf32, fp8, disk, folders, compiled_code, home_page, lambda: settings(found)]
    for check in checks:
        try:
            finding = check()
        except ConfigError as error:
            finding = bad(check.__name__.replace("_", " "), str(error))
        except Exception as error:  # a check that breaks is a finding, not the end of the report
            finding = bad(check.__name__.replace("_", " "), f"{type(error).__name__}: {error}")
        if finding.text:
            found.append(finding)
            yield finding


def system() -> MachineFinding:
    """Operating system, Python, processors, memory."""
    import psutil

    memory = psutil.virtual_memory().total / 2**30
    version, cpus = platform.python_version(), os.cpu_count()
    text = f"{platform.platform()}, Python {version}, {cpus} CPUs, {memory:.0f} GB memory"
    data = {"platform": platform.platform(), "python": version, "cpus": cpus, "memory_gb": round(memory, 1)}
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return bad("system", f"{text}; Python 3.11, 3.12 or 3.13 is needed", **data)
    return ok("system", text, **data)


def packages() -> MachineFinding:
    """What is installed, and whether it is what was tested."""
    found = {name: installed(name) for name in (*PACKAGES, *EXTRAS)}
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    missing = [name for name in PACKAGES if not found[name]]
    if missing:
        return bad("packages", f"missing: {', '.join(missing)}; run ./setup.sh install", **found)
    locked = locked_versions()
    other = [
        f"{name} {version} (tested: {locked[name]})"
        for name, version in found.items()
        if version and name in locked and version.split("+")[0] != locked[name]
    ]
    if other:
        return hint("packages", f"not the tested versions: {', '.join(other)}; ./setup.sh install sets them", **found)
    return ok("packages", text, **found)


def installed(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# Why: docs/decisions/2026-11-20-one-environment-in-the-projects-folder.md
def foreign_library() -> MachineFinding:
    """Another project's `library` package would be imported in place of ours, or ours in place of its."""
    found = list(installation.foreign())
    return bad("packages", "; ".join(found)) if found else ok("packages", "")


def environment() -> MachineFinding:
    """A cache folder in the environment that cannot be made, at which PyTorch ends while it is imported."""
    wanted = os.environ.get(surroundings.CACHE)
    try:
        surroundings.check()
    except ConfigError as error:
        del os.environ[surroundings.CACHE]  # all else is looked at as it would be without
        return bad("environment", str(error), folder=wanted)
    return ok("environment", "", folder=wanted)


def torch_build() -> MachineFinding:
    """The build of PyTorch."""
    import torch

    text = f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}"
    data = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11):
        return bad("torch", f"{text}; 2.11 or newer is needed: run ./setup.sh install", **data)
    if shutil.which("nvidia-smi") and not torch.version.cuda:
        return bad("torch", f"{text}, though this machine has an NVIDIA GPU; run ./setup.sh install", **data)
    return ok("torch", text, **data)


def gpu() -> MachineFinding:
    """The GPUs that PyTorch can use."""
    import torch

    if not torch.cuda.is_available():
        why = "the NVIDIA driver is too old or not loaded" if torch.version.cuda and shutil.which("nvidia-smi") else ""
        if why:
            return bad("gpu", f"none can be used: {why}; check nvidia-smi, and update the driver", devices=[])
        return hint("gpu", "none found; training runs on the CPU, which is too slow for full-size models")
    devices = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": about.name,
                "memory_gb": round(total / 2**30, 1),
                "free_gb": round(free / 2**30, 1),
                "capability": f"{about.major}.{about.minor}",
                "bf16": torch.cuda.is_bf16_supported(including_emulation=False) if index == 0 else None,
            }
        )
    text = "; ".join(
        f"{d['name']}, {d['memory_gb']} GB ({d['free_gb']} free), capability {d['capability']}" for d in devices
    )
    return ok("gpu", text, devices=devices)


def driver() -> MachineFinding:
    """The GPU's driver, and what PyTorch brings for it."""
    import torch

    found = machine.driver_version()
    if not found:
        return ok("driver", "")
    usable = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    cudnn, nccl = torch.backends.cudnn.version(), ".".join(map(str, torch.cuda.nccl.version())) if usable else ""
    parts = [f"NVIDIA {found}", *([f"cuDNN {cudnn}"] if cudnn else []), *([f"NCCL {nccl}"] if nccl else [])]
    return ok("driver", "; ".join(parts), driver=found, cudnn=cudnn, nccl=nccl)


def compiler() -> MachineFinding:
    """A C++ compiler, which torch.compile needs on the CPU."""
    from library.compiler import torch_private

    try:
        path = torch_private.cpp_compiler()
    except Exception:
        return hint("compiler", f"no C++ compiler found; --compile on the CPU needs one: {how_to_get_compiler()}")
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return ok("compiler", shown[0] if shown else str(path), path=str(path))


def how_to_get_compiler() -> str:
    """The command that installs a compiler on this system."""
    if sys.platform == "win32":
        return "install the Visual Studio Build Tools with C++"
    if sys.platform == "darwin":
        return "xcode-select --install"
    return "sudo apt-get install g++" if shutil.which("apt-get") else "install g++ with your package manager"


def compile_cpu() -> MachineFinding:
    """Compile a tiny function for the CPU, and compare."""
    return compile_on("cpu")


def compile_gpu() -> MachineFinding:
    """Compile a tiny function for the GPU, and compare."""
    import torch

    return compile_on("cuda") if torch.cuda.is_available() else ok("compile", "")


def compile_on(device: str) -> MachineFinding:
    """Really compile, forward and backward, with inductor: what a training with --compile will do on this device."""
    import torch

    from library.compiler import torch_private
    from library.compiler.blocks import why

    if reason := _hindered(device):
        return hint("compile", f"does not work on {device}: {reason}", device=device, works=False)

    def tiny(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x) @ x.T).sin().mean()

    given = torch.randn(32, 32, device=device, requires_grad=True)
    began, stats = time.perf_counter(), torch_private.compile_counters("stats")
    graphs = stats["unique_graphs"]
    try:
        plain, compiled = tiny(given), torch.compile(tiny, backend="inductor", fullgraph=True)(given)
        (wanted,), (got,) = torch.autograd.grad(plain, given), torch.autograd.grad(compiled, given)
        if not (torch.allclose(plain, compiled, atol=1e-4) and torch.allclose(wanted, got, atol=1e-4)):
            raise RuntimeError("the compiled function computes something else")
        if stats["unique_graphs"] == graphs:
            raise RuntimeError("it was run, and not compiled")
    except Exception as error:
        reason = why(error)
        return hint(
            "compile", f"does not work on {device}: {reason}; train without --compile", device=device, works=False
        )
    seconds = time.perf_counter() - began
    return ok("compile", f"works on {device} ({seconds:.1f} s)", device=device, works=True, seconds=round(seconds, 2))


def _hindered(device: str) -> str:
    """What stands in the way of compiling and is known without trying, '' if nothing."""
    import torch

    from library.compiler import cache
    from library.compiler.checks import problems

    if off := next((name for name in SWITCHED_OFF if os.environ.get(name, "0") not in ("", "0")), ""):
        return f"{off} in the environment switches it off; unset it"
    usual = argparse.Namespace(compile_backend="inductor", compile_mode="default", compile_fullgraph=False)
    try:
        cache.use(None, torch.device(device))
        found = [text.removeprefix("compile: ") for text in problems(usual, torch.device(device))]
    except ConfigError as error:
        return str(error)
    return found[0] if found else ""


def attention() -> MachineFinding:
    """Which attention kernels work, and how quick each is in training."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = kernels.attention(device)
    extras = kernels.packages()
    data = {"device": device, "works": list(found), "packages": extras}
    if device == "cpu":
        return ok("attention", "", **data)
    data["ms"] = {name: round(ms, 3) for name, ms in found.items() if ms != float("inf")}
    shown = ", ".join(f"{name} {ms} ms" for name, ms in data["ms"].items()) + (
        f"; {', '.join(extras)}" if extras else ""
    )
    if not data["ms"]:
        return hint("attention", "only the plain kernel works, which is slow and takes much memory", **data)
    return ok("attention", f"{shown} (1 image of 4096 tokens, forward and backward)", **data)


def tf32() -> MachineFinding:
    """Whether float32 products can be rounded to TF32."""
    import torch

    if not torch.cuda.is_available():
        return ok("tf32", "")
    works = torch.cuda.get_device_capability() >= (8, 0)
    how = "works; cuda_allow_tf32 switches it on, for what is computed in float32"
    return ok("tf32", how if works else "this GPU has none, so float32 is slow: use fp16", works=works)


def fp8() -> MachineFinding:
    """Whether the GPU multiplies 8-bit floats."""
    import torch

    if not torch.cuda.is_available():
        return ok("fp8", "")
    works = torch.cuda.get_device_capability() >= (8, 9) and kernels.fp8()
    yes = "fp8 matrix products work (fp8_compute)"
    return ok("fp8", yes if works else "no fp8 matrix products on this GPU; fp8_base still saves memory", works=works)


def compiled_code() -> MachineFinding:
    """How much compiled code is kept."""
    from library.compiler import cache

    root = cache.default_root()
    size = cache.size(root) if root.is_dir() else 0
    text = f"{size / 1e9:.2f} GB of compiled code in {root}" + ("; kohya cache --clean removes it" if size else "")
    return ok("cache", text, folder=str(root), bytes=size)


def settings(found: list[MachineFinding]) -> MachineFinding:
    """Which settings suit this machine, judged by the other findings."""
    said = {finding.topic: finding.data for finding in found}
    first = next(iter(said.get("gpu", {}).get("devices") or ()), {})
    compiles = {f.data.get("device"): bool(f.data.get("works")) for f in found if f.topic == "compile"}
    known = advice.MachineFacts(
        memory_gb=first.get("memory_gb", 0.0),
        capability=tuple(map(int, first.get("capability", "0.0").split("."))),
        bf16=bool(first.get("bf16")),
        fp8=bool(said.get("fp8", {}).get("works")),
        # Not tried in a quick look: then it is as likely as not, and falls back by itself.
        compiles=compiles.get("cuda" if first else "cpu", not compiles),
    )
    data = {"options": advice.options(known), "presets": advice.presets(known)}
    return ok("settings", advice.sentence(known), **data)


def home_page() -> MachineFinding:
    """The page's own needs."""
    version = installed("gradio")
    return ok("page", f"gradio {version}: kohya gui" if version else "", gradio=version)
