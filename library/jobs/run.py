"""The process of a job: does what its folder says, and writes down how it ended."""

import sys
from pathlib import Path

from library.config.schema import ConfigError
from library.jobs import END, JOB, STOPPED
from library.runs import layout


def main(folder: Path) -> int:
    """Run the command of a job; its exit code, which is written down as well."""
    code = 1
    try:
        code = _run([str(word) for word in layout.load(folder / JOB)["command"]])
    except ConfigError as wrong:
        for line in str(wrong).splitlines():
            print(f"error: {line}", file=sys.stderr)
    except KeyboardInterrupt:
        code = STOPPED
        print("stopped: nothing unfinished is left", file=sys.stderr)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        raise
    except MemoryError:
        print("error: there is not enough memory for this", file=sys.stderr)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        raise
    finally:
        layout.store(folder / END, {"code": code})
    return code


def _run(command: list[str]) -> int:
    if command[0] == "caption":
        from library.captioning.shell import main as run
    else:
        from library.tools.shell import main as run
    return run(command[1:])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
