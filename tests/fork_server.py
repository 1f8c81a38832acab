"""Fork training processes from a server that has loaded PyTorch, so that its import, which takes seconds, happens once.
Launchers that are forked in turn fork the processes that they start.

The server is a separate program, shared by all workers of a test run. It never trains: after a backward pass, PyTorch
would allow none in its forks. Each line that it reads describes a process to start, and is answered with the process's
id; its exit code is later written to a file. The server ends once its last client has disconnected.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

from filelock import FileLock

from tests.source import ROOT, SCRATCH

WHOLE = "KOHYA_TEST_WHOLE_PROCESSES"  # set for launchers that must start programs instead of forking
STARTED = []  # keeps the Popen objects: collecting one whose program still runs would give a warning


class Signalled:
    """The signal methods of `subprocess.Popen`."""

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since poll()
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Forked(Signalled):
    """A forked process with the part of `subprocess.Popen` that tests use."""

    def __init__(self, arguments, environment, input_text="", out=None):
        """`arguments` are those of Python: a script, or `-m` and a module, followed by its arguments. The process reads
        `input_text` from standard input; its output is appended to `out`, or to a file of its own."""
        folder = tempfile.mkdtemp(dir=_folder().name)
        self._out, self._code = Path(out or Path(folder, "out")), Path(folder, "code")
        job = {"arguments": arguments, "environment": environment, "out": str(self._out), "code": str(self._code)}
        if input_text:
            job["in"] = str(Path(folder, "in"))
            Path(job["in"]).write_text(input_text, encoding="utf-8")
        server = _server()
        server.sendall(json.dumps(job).encode() + b"\n")
        self.pid, self.returncode = int(_line(server)), None

    def poll(self):
        if self.returncode is None and self._code.is_file():
            self.returncode = int(self._code.read_text())
        return self.returncode

    def communicate(self, timeout=600):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return self.said(), None

    def wait(self):
        while self.poll() is None:
            time.sleep(0.05)
        return self.returncode

    def said(self):
        # the process itself creates the file, a moment after its id is known
        return self._out.read_text(encoding="utf-8", errors="replace") if self._out.exists() else ""


def start(arguments, **environment):
    """Start Python with these arguments, by a fork where possible; stdout and stderr are one stream."""
    full_environment = {**os.environ, **environment}
    if hasattr(os, "fork"):
        return Forked(arguments, full_environment)
    how = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=full_environment, **how)


def run(command, input, env, timeout, **how):
    """`subprocess.run`, by a fork where possible."""
    if not hasattr(os, "fork"):
        return subprocess.run(command, input=input, env=env, timeout=timeout, **how)
    process = Forked(command[1:], env, input)
    output, _ = process.communicate(timeout)
    return subprocess.CompletedProcess(command, process.returncode, output, output)


def answer_check(requests, launch):
    """`library.check.check_process.run_checks`, by a fork where possible."""
    from library.check import check_process

    command = [sys.executable, "-m", "library.check"]
    environment = check_process.environment_for_check(launch)
    done = run(command, check_process.question_of(requests, launch), environment, 120, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def detached(command, stdout, env, **how):
    """`subprocess.Popen` as `library.runs.start.detached` calls it, by a fork where possible."""
    if not hasattr(os, "fork") or command[0] != sys.executable:
        return subprocess.Popen(command, stdout=stdout, env=env, **how)
    return Forked(command[1:], dict(env), out=stdout.name)


DETACHED = SimpleNamespace(**{**vars(subprocess), "Popen": detached})  # in place of `library.runs.start.subprocess`


@functools.cache
def _folder():
    """The folder of this process's forks, which is removed when it ends."""
    return tempfile.TemporaryDirectory(prefix="kohya-forked-", ignore_cleanup_errors=True)


@functools.cache
def _server():
    """The connection to the server, which is started if it does not run, or is about to end."""
    # Only a few characters: the path of a socket has to be short.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:8]
    address = SCRATCH / f"forks-{run}"
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with FileLock(SCRATCH / "fork_server.lock"):
        while not (connection := _connected(address)):
            address.unlink(missing_ok=True)
            command = [sys.executable, "-m", "tests.fork_server", str(address)]
            # A session of its own keeps Ctrl+C from the server: it ends when the tests do, and then kills what it has
            # started. The environment sets one thread, because torch.set_num_threads creates a pool that each thread
            # of a forked process replaces when it first computes: two at once failed with "Invalid thread pool!".
            how = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "start_new_session": True}
            STARTED.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how))
            assert STARTED[-1].stdout.readline(), "the fork server did not start"
    return connection


def _connected(address):
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(address))
    except OSError:
        connection.close()
        return None
    return connection if _line(connection) else None  # no greeting comes from a server that is about to end


def _line(connection):
    """The next line from the other side; empty once that has disconnected."""
    line = b""
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n"):
            if not (part := connection.recv(2**16)):
                return b""
            line += part
        return line
    return b""


def serve(address):
    gc.disable()
    os.fsync = lambda handle: None  # as in tests/conftest.py
    import accelerate.commands.launch  # noqa: F401
    import cv2  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.distributed.tensor  # noqa: F401
    from accelerate import Accelerator  # noqa: F401

    import library.cli.train
    import library.train.loop  # noqa: F401
    from library import families
    from library.families.shared import tokenizer_classes  # noqa: F401
    from library.imports import without_optional

    with without_optional("diffusers"):  # importing diffusers takes more than half of a short training's time
        import diffusers.models.autoencoders.autoencoder_kl
        import diffusers.models.unets.unet_2d_condition  # noqa: F401
    import transformers.models.clip.modeling_clip
    import transformers.models.t5.modeling_t5  # noqa: F401

    with without_optional("transformers"):
        import transformers.optimization  # noqa: F401

    assert torch.get_num_threads() == 1, "other threads of OpenMP would be missing after a fork"
    for name in families.RUNS:
        families.family_for(families.config_class(name)())
    gc.freeze()  # a collection in a fork would write to, and so copy, every page
    gc.enable()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        print("ready", flush=True)
        running = work(door)
        os.unlink(address)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def work(door):
    """Start processes until the last client disconnects; returns those that still run: id -> file of the code."""
    running, clients = {}, []
    while True:
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = running.pop(ended[0])
            with contextlib.suppress(FileNotFoundError):  # the client has ended, and removed its folder
                code.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(ended[1])))
                code.with_suffix(".new").rename(code)
        for ready in select.select([door, *clients], [], [], 0.02 if running else None)[0]:
            if ready is door:
                clients.append(door.accept()[0])
                clients[-1].sendall(b"ready\n")
            elif line := _line(ready):
                job = json.loads(line)
                if not (pid := os.fork()):
                    for inherited in (door, *clients):
                        inherited.close()
                    os._exit(be(job["arguments"], job["environment"], job["out"], job.get("in", os.devnull)))
                running[pid] = Path(job["code"])
                ready.sendall(f"{pid}\n".encode())
            else:
                clients.remove(ready)
                if not clients:
                    return running


def be(arguments, environment, out, input_file):
    """Act as a process that Python would have started with these arguments; returns its exit code."""
    os.setsid()
    os.dup2(os.open(input_file, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if WHOLE not in environment:
        holders = [module for module in [*sys.modules.values()] if vars(module).get("Popen") is subprocess.Popen]
        for module in holders:
            module.Popen = Started
    return ran(arguments, environment)


def ran(arguments, environment):
    """Run what Python would run with these arguments; returns the exit code."""
    from library.config import environment as inherited

    os.environ.clear()
    os.environ.update(environment)
    importlib.reload(inherited)  # its PARENT is the server's
    code = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


class Started(subprocess.Popen):
    """Popen of a forked launcher: forks Python processes whose streams are no pipes, and starts all else as usual."""

    def __new__(cls, args, *more, **how):
        files = (how.get("stdout"), how.get("stderr"))
        apart = {subprocess.PIPE, subprocess.DEVNULL}
        piped = how.get("stdin") == subprocess.PIPE or any(isinstance(file, int) and file in apart for file in files)
        return Child(args, **how) if args[0] == sys.executable and not more and not piped else super().__new__(cls)


class Child(Signalled):
    """A process that a forked launcher forks, with the part of `subprocess.Popen` that launchers use."""

    def __init__(self, args, env=None, stdout=None, stderr=None, start_new_session=False, process_group=None, **_):
        self.args, self.returncode = args, None
        self.pid = os.fork()
        if self.pid:
            return
        if start_new_session:
            os.setsid()
        if process_group is not None:
            os.setpgid(0, process_group)
        for number, file in ((1, stdout), (2, stderr)):
            if file == subprocess.STDOUT:
                os.dup2(1, number)
            elif file is not None:
                os.dup2(file if isinstance(file, int) else file.fileno(), number)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # not the launcher's handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os._exit(ran([*args[1 + (args[1] == "-u") :]], dict(os.environ) if env is None else env))

    def poll(self):
        return self._reap(os.WNOHANG)

    def wait(self, timeout=None):
        if timeout is None:
            return self._reap(0)
        end = time.monotonic() + timeout
        while self._reap(os.WNOHANG) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return self.returncode

    def _reap(self, how):
        if self.returncode is None and (ended := os.waitpid(self.pid, how))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode


if __name__ == "__main__":
    serve(sys.argv[1])
