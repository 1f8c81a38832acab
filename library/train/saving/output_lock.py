"""A lock that lets only one training at a time write the files of an output name."""

import contextlib
import os
from collections.abc import Iterator

from library.config.environment import first_process
from library.config.problems import ConfigError, Message, Problem
from library.config.run_config import RunConfig
from library.outputs import paths
from library.runs import locking

LOCK_TIMEOUT = 0.5  # seconds to wait for a training that is just ending


@contextlib.contextmanager
def hold_output_name(config: RunConfig) -> Iterator[None]:
    """Hold the output name of a training by a lock in its output folder, which ends with the process.

    Raises ConfigError if another training holds it or has written such files since the check. Only the first process
    takes the lock. On a file system without locks nothing is held.
    """
    if not config.save.output_dir or not first_process():
        yield
        return
    names = paths.output_names(config)
    # The extension is left out, as files of other formats have states of the same name.
    lock_file = names.folder / f".{names.last.name.removesuffix(names.extension)}.lock"
    with contextlib.ExitStack() as stack:
        holds_lock: bool | None = None
        with contextlib.suppress(OSError, NotImplementedError):  # a disk without locks or write permission
            holds_lock = stack.enter_context(locking.hold_lock(lock_file, LOCK_TIMEOUT))
        if holds_lock is False:
            template = ": a training that writes these files is {state}; stop it, or choose another name"
            raise ConfigError(
                Problem("output_name", template, state=Message("running"), fix=paths.free_output_name(config))
            )
        try:
            if written := [*paths.find_output_problems(config)]:  # by a training that ended after our check
                raise ConfigError(*written)
            yield
        finally:
            # While it is held, so that nobody's lock is removed; Windows removes it itself.
            if holds_lock and os.name != "nt":
                lock_file.unlink(missing_ok=True)
