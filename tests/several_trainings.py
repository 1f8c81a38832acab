"""Train several times in the same processes, one training after another. Start this once per process.

Arguments: script, TOML and a free port of each training.
"""

import os
import sys

from accelerate.state import AcceleratorState

from library.cli.train_script import main
from library.families import config_class

if __name__ == "__main__":
    for script, toml, port in zip(*[iter(sys.argv[1:])] * 3, strict=True):
        os.environ["MASTER_PORT"] = port
        AcceleratorState._reset_state(True)
        if code := main(config_class(script), ["--config_file", toml]):
            sys.exit(code)
