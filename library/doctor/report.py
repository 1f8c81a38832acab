"""`kohya doctor`: what this machine has, whether it can compile, and what to fix.

Each finding is a line with a verdict. Only findings that prevent training make the exit code 1; a slower training, or a
missing tool, is a hint. The last one recommends settings. `--json` prints the same for programs.
"""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

import psutil

from library.config import environment
from library.config.arguments import Arguments
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, join_messages
from library.doctor import advice
from library.doctor.finding import MachineFinding, bad, hint, ok
from library.jobs.work import join_work
from library.packages import PACKAGE_NAMES
from library.packages import locked as locked_versions
from library.setup import installation
from library.setup.installation import SETUP

REPORTED_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "gradio", "numpy")
EXTRAS = ("triton", *PACKAGE_NAMES.values(), "torchao")


def main(argv: list[str] | None = None) -> int:
    """Print the report; return 0 if a training can run here, else 1."""
    parser = Arguments("kohya doctor", description="Check this machine: GPU, PyTorch, packages, compiling.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quick", action="store_true", help="leave out the compile check, which takes a few seconds")
    arguments = parser.parse_args(argv)
    findings: list[MachineFinding] = []
    with join_work("doctor") as work:
        for finding in examine_machine(quick=arguments.quick):
            findings.append(finding)
            if not arguments.json:
                print(finding_line(finding), flush=True)
            work.phase(Message(finding.topic), len(findings))
            work.store({"kind": "doctor", "finished": False, **findings_as_json(findings)})
        work.store({"kind": "doctor", "finished": True, **findings_as_json(findings)})
    healthy = findings_as_json(findings)["healthy"]
    if arguments.json:
        print(json.dumps(findings_as_json(findings), indent=1, default=str))
    else:
        print("\n" + closing_line(findings))
    return 0 if healthy else 1


def closing_line(findings: list[MachineFinding]) -> str:
    """Return the last line: whether a training can run here, and its limitations."""
    if not findings_as_json(findings)["healthy"]:
        return "Fix what is marked with ✗, then run this again."
    without = [name for finding in findings for name in finding.data.get("without", ())]
    return f"This machine can train, but without {', '.join(without)}." if without else "This machine can train."


def findings_as_json(findings: list[MachineFinding]) -> JsonObject:
    healthy = all(finding.verdict != "bad" for finding in findings)
    return {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}


def finding_line(finding: MachineFinding) -> str:
    """Return a finding as a line of text: a mark, the topic, and the text."""
    mark = {"ok": "✓", "hint": "·", "bad": "✗"}[finding.verdict]
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        mark = {"ok": "ok  ", "hint": "hint", "bad": "BAD "}[finding.verdict]
    return f"{mark} {finding.topic:<12} {finding.text}"


def examine_machine(quick: bool = False) -> Iterator[MachineFinding]:
    """Yield all findings in reading order."""
    # A generator, since loading torch takes seconds.
    reported: list[MachineFinding] = []

    def findings(checks: Iterable[Callable[[], MachineFinding]]) -> Iterator[MachineFinding]:
        for check in checks:
            try:
                finding = check()
            except ConfigError as error:
                finding = bad(check.__name__.removeprefix("check_").replace("_", " "), error.said)
            except Exception as error:  # a crashed check is a finding, not the end of the report
                finding = bad(
                    check.__name__.removeprefix("check_").replace("_", " "), f"{type(error).__name__}: {error}"
                )
            if finding.text:
                reported.append(finding)
                yield finding

    yield from findings([system, check_packages, foreign_library, check_environment, network])
    try:  # loads torch, after its cache folder is known to exist
        from library.doctor import disk, hardware, optional
    except Exception as error:
        template = "cannot be loaded ({error}); run {setup} install"
        yield bad("torch", Message(template, error=f"{type(error).__name__}: {error}", setup=SETUP))
        return
    yield from findings(
        [hardware.check_torch_build, hardware.gpu, hardware.driver, optional.optimizers, hardware.compiler]
    )
    yield from findings([] if quick else [hardware.compile_cpu, hardware.compile_gpu])
    yield from findings([hardware.check_attention, hardware.tf32, hardware.check_fp8])
    yield from findings(
        [
            disk.check_disk,
            disk.check_folders,
            disk.compiled_code,
            home_page,
            lambda: suggest_settings(reported),
            lambda: suggest_for_images(reported),
        ]
    )


def system() -> MachineFinding:
    """Report operating system, Python, processors, memory."""
    memory = psutil.virtual_memory().total / 2**30
    version, cpus = platform.python_version(), os.cpu_count()
    template = "{platform}, Python {version}, {cpus} CPUs, {memory} GB memory"
    text = Message(template, platform=platform.platform(), version=version, cpus=cpus, memory=f"{memory:.0f}")
    data = {"platform": platform.platform(), "python": version, "cpus": cpus, "memory_gb": round(memory, 1)}
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return bad("system", Message("{system}; Python 3.11, 3.12 or 3.13 is needed", system=text), **data)
    return ok("system", text, **data)


def check_packages() -> MachineFinding:
    """Report the installed packages, and whether they are the tested versions."""
    versions = {name: installed_version(name) for name in (*REPORTED_PACKAGES, *EXTRAS)}
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name in REPORTED_PACKAGES if not versions[name]]
    if missing:
        return bad(
            "packages",
            Message("missing: {names}; run {setup} install", names=", ".join(missing), setup=SETUP),
            **versions,
        )
    locked = locked_versions()
    different = [
        Message("{name} {version} (tested: {locked})", name=name, version=version, locked=locked[name])
        for name, version in versions.items()
        if version and name in locked and version.split("+")[0] != locked[name]
    ]
    if different:
        template = "not the tested versions: {versions}; {setup} install sets them"
        return hint("packages", Message(template, versions=join_messages(different), setup=SETUP), **versions)
    return ok("packages", text, **versions)


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# Other trainers also install a package called `library`, which would shadow ours in a shared environment.
# Why: docs/decisions/2026-11-20-one-environment-in-the-projects-folder.md
def foreign_library() -> MachineFinding:
    clashes = list(installation.foreign())
    return bad("packages", join_messages(clashes, "; ")) if clashes else ok("packages", "")


def check_environment() -> MachineFinding:
    """Report a cache folder in the environment that cannot be created."""
    # PyTorch exits at it on import.
    cache_folder = os.environ.get(environment.CACHE)
    try:
        environment.check_cache_variables()
    except ConfigError as error:
        del os.environ[environment.CACHE]  # continue the other checks without it
        return bad("environment", error.said, folder=cache_folder)
    return ok("environment", "", folder=cache_folder)


def network() -> MachineFinding:
    """Report invalid proxy and certificate variables."""
    # Their values may contain passwords, so only names are shown.
    import httpx  # used by huggingface_hub for downloads

    variables = {
        name: value for name, value in os.environ.items() if name.lower() in environment.NETWORK_VARIABLES and value
    }
    invalid: list[Message] = []
    for name, value in variables.items():
        with environment.without_network_settings():
            os.environ[name] = value
            try:
                httpx.Client().close()
            except Exception as error:  # each invalid value raises a different error
                invalid.append(
                    Message("{name} ({why})", name=name, why=f"{type(error).__name__}: {error}".replace(value, ""))
                )
            finally:
                del os.environ[name]
    if not invalid:
        return ok("network", "")
    template = "models cannot be downloaded nor results uploaded with {variables}; correct what is wrong, or unset it"
    return hint("network", Message(template, variables=join_messages(invalid)), variables=list(variables))


def suggest_settings(findings: list[MachineFinding]) -> MachineFinding:
    """Recommend settings for this machine, based on the other findings."""
    facts = machine_facts(findings)
    data = {"options": advice.advised_for_machine(facts), "presets": advice.fitting_presets(facts)}
    return ok("settings", advice.advice_sentence(facts), **data)


def suggest_for_images(findings: list[MachineFinding]) -> MachineFinding:
    """Recommend settings for generating images, with the reasons."""
    facts = machine_facts(findings)
    options = {name: value for each, _ in advice.settings_for_images(facts) for name, value in each.items()}
    return ok("images", advice.images_sentence(facts), options=options)


def machine_facts(findings: list[MachineFinding]) -> advice.MachineFacts:
    """Return what advice depends on, from the other findings."""
    data_by_topic = {finding.topic: finding.data for finding in findings}
    first_gpu: JsonMapping = next(iter(data_by_topic.get("gpu", {}).get("devices") or ()), {})
    compiles = {f.data.get("device"): bool(f.data.get("works")) for f in findings if f.topic == "compile"}
    major, minor = map(int, first_gpu.get("capability", "0.0").split("."))
    return advice.MachineFacts(
        memory_gb=first_gpu.get("memory_gb", 0.0),
        capability=(major, minor),
        bf16=bool(first_gpu.get("bf16")),
        fp8=bool(data_by_topic.get("fp8", {}).get("works")),
        # Untested in a quick look; compiling falls back by itself if it fails.
        compiles=compiles.get("cuda" if first_gpu else "cpu", not compiles),
    )


def home_page() -> MachineFinding:
    version = installed_version("gradio")
    return ok("page", f"gradio {version}: kohya gui" if version else "", gradio=version)
