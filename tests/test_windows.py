"""What behaves otherwise on Windows is done where it is cared for: read from the source, as few tests run there."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests import source

TEXT_MODE = re.compile(r"[rwax+t]*")
# Output of programs that know no UTF-8, or of Python in the system's encoding: only ASCII of it is used.
NATIVE_OUTPUT = {
    "library.doctor.hardware",
    "library.runs.gpu_log",
    "library.setup.installer",
    "library.setup.locked_packages",
}
RENAMING = ("os.rename", "os.replace", "os.renames", "shutil.move")
RENAMED_OPTIONS = re.compile(r"builder|changes|^self\.rename$")  # of imported configs, not files
RENAMES = {"library.files": "the one place", "library.setup.installer": "runs before any package is there"}
POSIX_ONLY = re.compile(
    r"os\.(fork|forkpty|getuid|geteuid|getgid|getgroups|getpgid|setsid|killpg|nice|statvfs|sync|chown|mkfifo|uname"
    r"|posix_f\w+|sched_\w+|sysconf|getloadavg|WNOHANG|wait\w*)|signal\.(SIGKILL|SIGUSR\d|SIGHUP|SIGCHLD|alarm|pause)"
    r"|mmap\.(MAP_\w+|PROT_\w+)|select\.(poll|epoll)"
)
# By module, what keeps Windows from it.
GUARDED = {
    ("library.train.compiling.compile_worker", "os.nice"): "suppresses AttributeError",
    ("library.train.compiling.process_room", "os.sched_getaffinity"): "looks whether it is there",
    ("library.train.saving.state_files", "os.posix_fallocate"): "hasattr",
    ("library.train.saving.state_files", "mmap.MAP_SHARED"): "behind it",
}


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """All calls with their modules and what is called."""
    for path in source.files():
        for node in ast.walk(source.tree(path)):
            if isinstance(node, ast.Call):
                yield source.module(path), node, ast.unparse(node.func)


def place(module: str, node: ast.AST) -> str:
    return f"{module}:{node.lineno} {ast.unparse(node)[:100]}"  # pyrefly: ignore[missing-attribute]


def is_text(node: ast.Call, name: str) -> bool:
    """Whether a call reads or writes text: a file or the output of a program."""
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    if name.startswith("subprocess."):
        return any(key in options for key in ("text", "universal_newlines", "errors"))
    if name.rpartition(".")[2] in ("read_text", "write_text"):
        return not name.startswith(("caches.", "package."))  # those of files alone: packages' lists are UTF-8
    if name not in ("open", "os.fdopen") and not name.endswith((".open", "NamedTemporaryFile")):
        return False
    if name == "Image.open":
        return False
    first = 0 if name.endswith(".open") else 1
    mode = options.get("mode", node.args[first] if len(node.args) > first else None)
    if mode is None:
        return len(node.args) <= first
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and bool(TEXT_MODE.fullmatch(mode.value))


def test_text_is_read_and_written_in_a_named_encoding():
    """Windows' own is a code page of the country, in which most characters cannot be written."""
    texts = [(module, node) for module, node, name in calls() if is_text(node, name)]
    assert len(texts) > 60
    missing = [
        place(module, node)
        for module, node in texts
        if module not in NATIVE_OUTPUT
        and not any(keyword.arg == "encoding" for keyword in node.keywords)
        and not ast.unparse(node).endswith("open('x')")  # an empty file
    ]
    assert not missing


def test_files_are_renamed_with_the_attempts_that_windows_needs():
    """Else a reader or a virus scanner that holds a file for a moment ends the work."""
    elsewhere = [
        place(module, node)
        for module, node, name in calls()
        if (name in RENAMING or name.endswith(".rename") and not RENAMED_OPTIONS.search(name)) and module not in RENAMES
    ]
    assert not elsewhere, "use replace or move of library.files"


def test_what_only_posix_has_is_asked_for_nowhere_else():
    used = {
        (source.module(path), ast.unparse(node))
        for path in source.files()
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.Attribute) and POSIX_ONLY.fullmatch(ast.unparse(node))
    }
    assert used == GUARDED.keys()


def test_times_of_records_are_converted_in_the_one_way_that_windows_takes():
    """There the call fails for times before 1970, which damaged records have."""
    own_clock = {"library.curation.trash", "library.runs.dates"}
    converted = {module for module, _, name in calls() if name in ("time.localtime", "time.gmtime")}
    assert converted == own_clock, "use local_time of library.runs.dates"


def test_killing_by_number_is_left_to_psutil():
    """On Windows os.kill ends a process whatever the signal, even 0."""
    assert not [place(module, node) for module, node, name in calls() if name in ("os.kill", "os.killpg")]


def test_a_checkout_on_windows_has_the_line_ends_of_linux():
    """It is also run in WSL and copied into containers, whose shells take a CR for a part of the word."""
    lines = (source.ROOT / ".gitattributes").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "* text=auto eol=lf" and "*.bat text eol=crlf" in rules


@pytest.mark.parametrize("command", ["gui", "demo", "doctor", "install", "update", "help"])
def test_both_set_ups_have_the_commands_of_users(command):
    shell = (source.ROOT / "setup.sh").read_text(encoding="utf-8")
    batch = (source.ROOT / "setup.bat").read_text(encoding="ascii")
    assert re.search(rf"^ +(\w+ \| )*{command}\b.*\)", shell, re.M) and f"\n:{command}\n" in batch
