"""Several trainings in the same processes, one after another: `accelerate launch` this with pairs of script and TOML."""

import sys

from accelerate.state import AcceleratorState

from library.config.shell import main
from library.families import config_class

if __name__ == "__main__":
    for script, toml in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        AcceleratorState._reset_state(True)
        if code := main(config_class(script), ["--config_file", toml]):
            sys.exit(code)
