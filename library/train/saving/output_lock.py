"""One training at a time writes the files of an output name, also where several start in the same moment."""

import contextlib
import os
from collections.abc import Iterator

from library.config.environment import first_process
from library.config.problems import ConfigError, Message, Problem
from library.config.run_config import RunConfig
from library.outputs import paths
from library.runs import locking

PATIENCE = 0.5  # seconds; another training that is just ending may still hold the lock


@contextlib.contextmanager
def held(config: RunConfig) -> Iterator[None]:
    """Hold the output name of a training, by a lock in its output folder that ends with the process.

    Raises ConfigError when another training holds it, or has written files of that name since they were checked. Of
    several processes only the first holds it. Where the file system has no locks, nothing is held.
    """
    if not config.save.output_dir or not first_process():
        yield
        return
    here = paths.names(config)
    # Of the name alone: files of other endings have states of the same name.
    place = here.folder / f".{here.last.name.removesuffix(here.extension)}.lock"
    with contextlib.ExitStack() as stack:
        mine: bool | None = None
        with contextlib.suppress(OSError, NotImplementedError):  # a disk without locks, or that cannot be written to
            mine = stack.enter_context(locking.held(place, PATIENCE))
        if mine is False:
            template = ": a training that writes these files is {state}; stop it, or choose another name"
            raise ConfigError(Problem("output_name", template, state=Message("running"), fix=paths.free_name(config)))
        try:
            if written := [*paths.problems(config)]:  # by one that ended after this one was checked
                raise ConfigError(*written)
            yield
        finally:
            if (
                mine and os.name != "nt"
            ):  # while it is held, so that nobody's lock is removed; Windows removes it itself
                place.unlink(missing_ok=True)
