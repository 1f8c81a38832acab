"""`kohya doctor`: what this machine has, whether it can compile, and what to do where it cannot.

Each finding is a line with a verdict. Only findings that keep a training from running make the exit code 1; what merely
makes it slower, or a tool less, is a hint. The last one says which settings suit this machine. `--json` says the
same to a program.
"""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

import psutil

from library.config import environment as surroundings
from library.config.arguments import Arguments
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, listed
from library.doctor import advice
from library.doctor.finding import MachineFinding, bad, hint, ok
from library.jobs.work import joined
from library.packages import PACKAGES as OPTIONAL
from library.packages import locked as locked_versions
from library.setup import installation

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "gradio", "numpy")
EXTRAS = ("triton", *OPTIONAL.values(), "torchao")


def main(argv: list[str] | None = None) -> int:
    """Print the report; 0 when a training can run here, else 1."""
    parser = Arguments("kohya doctor", description="Check this machine: GPU, PyTorch, packages, compiling.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quick", action="store_true", help="leave out the compile check, which takes a few seconds")
    asked = parser.parse_args(argv)
    found: list[MachineFinding] = []
    with joined("doctor") as work:
        for finding in examine(quick=asked.quick):
            found.append(finding)
            if not asked.json:
                print(line(finding), flush=True)
            work.phase(Message(finding.topic), len(found))
            work.store({"kind": "doctor", "finished": False, **report(found)})
        work.store({"kind": "doctor", "finished": True, **report(found)})
    healthy = report(found)["healthy"]
    if asked.json:
        print(json.dumps(report(found), indent=1, default=str))
    else:
        print("\n" + closing(found))
    return 0 if healthy else 1


def closing(found: list[MachineFinding]) -> str:
    """The last line: whether a training can run here, and what is left out of it."""
    if not report(found)["healthy"]:
        return "Fix what is marked with ✗, then run this again."
    without = [name for finding in found for name in finding.data.get("without", ())]
    return f"This machine can train, but without {', '.join(without)}." if without else "This machine can train."


def report(found: list[MachineFinding]) -> JsonObject:
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

    def findings(checks: Iterable[Callable[[], MachineFinding]]) -> Iterator[MachineFinding]:
        for check in checks:
            try:
                finding = check()
            except ConfigError as error:
                finding = bad(check.__name__.replace("_", " "), error.said)
            except Exception as error:  # a check that breaks is a finding, not the end of the report
                finding = bad(check.__name__.replace("_", " "), f"{type(error).__name__}: {error}")
            if finding.text:
                found.append(finding)
                yield finding

    yield from findings([system, packages, foreign_library, environment, network])
    try:  # loads torch, which is only now known to find its folders
        from library.doctor import disk, hardware, optional
    except Exception as error:
        template = "cannot be loaded ({error}); run ./setup.sh install"
        yield bad("torch", Message(template, error=f"{type(error).__name__}: {error}"))
        return
    yield from findings([hardware.torch_build, hardware.gpu, hardware.driver, optional.optimizers, hardware.compiler])
    yield from findings([] if quick else [hardware.compile_cpu, hardware.compile_gpu])
    yield from findings([hardware.attention, hardware.tf32, hardware.fp8])
    yield from findings([disk.disk, disk.folders, disk.compiled_code, home_page, lambda: settings(found)])


def system() -> MachineFinding:
    """Operating system, Python, processors, memory."""
    memory = psutil.virtual_memory().total / 2**30
    version, cpus = platform.python_version(), os.cpu_count()
    template = "{platform}, Python {version}, {cpus} CPUs, {memory} GB memory"
    text = Message(template, platform=platform.platform(), version=version, cpus=cpus, memory=f"{memory:.0f}")
    data = {"platform": platform.platform(), "python": version, "cpus": cpus, "memory_gb": round(memory, 1)}
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return bad("system", Message("{system}; Python 3.11, 3.12 or 3.13 is needed", system=text), **data)
    return ok("system", text, **data)


def packages() -> MachineFinding:
    """What is installed, and whether it is what was tested."""
    found = {name: installed(name) for name in (*PACKAGES, *EXTRAS)}
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    missing = [name for name in PACKAGES if not found[name]]
    if missing:
        return bad("packages", Message("missing: {names}; run ./setup.sh install", names=", ".join(missing)), **found)
    locked = locked_versions()
    other = [
        Message("{name} {version} (tested: {locked})", name=name, version=version, locked=locked[name])
        for name, version in found.items()
        if version and name in locked and version.split("+")[0] != locked[name]
    ]
    if other:
        template = "not the tested versions: {versions}; ./setup.sh install sets them"
        return hint("packages", Message(template, versions=listed(other)), **found)
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
    return bad("packages", listed(found, "; ")) if found else ok("packages", "")


def environment() -> MachineFinding:
    """A cache folder in the environment that cannot be made, at which PyTorch ends while it is imported."""
    wanted = os.environ.get(surroundings.CACHE)
    try:
        surroundings.check()
    except ConfigError as error:
        del os.environ[surroundings.CACHE]  # all else is looked at as it would be without
        return bad("environment", error.said, folder=wanted)
    return ok("environment", "", folder=wanted)


def network() -> MachineFinding:
    """Variables of proxies and certificates with which nothing can be downloaded. Their values may hold passwords."""
    import httpx  # comes with huggingface_hub, which downloads with it

    given = {name: value for name, value in os.environ.items() if name.lower() in surroundings.NETWORK and value}
    wrong: list[Message] = []
    for name, value in given.items():
        with surroundings.without_network_settings():
            os.environ[name] = value
            try:
                httpx.Client().close()
            except Exception as error:  # each kind of wrong value has one of its own
                wrong.append(
                    Message("{name} ({why})", name=name, why=f"{type(error).__name__}: {error}".replace(value, ""))
                )
            finally:
                del os.environ[name]
    if not wrong:
        return ok("network", "")
    template = "models cannot be downloaded nor results uploaded with {variables}; correct what is wrong, or unset it"
    return hint("network", Message(template, variables=listed(wrong)), variables=list(given))


def settings(found: list[MachineFinding]) -> MachineFinding:
    """Which settings suit this machine, judged by the other findings."""
    said = {finding.topic: finding.data for finding in found}
    first: JsonMapping = next(iter(said.get("gpu", {}).get("devices") or ()), {})
    compiles = {f.data.get("device"): bool(f.data.get("works")) for f in found if f.topic == "compile"}
    major, minor = map(int, first.get("capability", "0.0").split("."))
    known = advice.MachineFacts(
        memory_gb=first.get("memory_gb", 0.0),
        capability=(major, minor),
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
