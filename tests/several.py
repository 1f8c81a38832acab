"""Several trainings in the same processes, one after another; `accelerate launch` this.

Arguments: script, TOML and a free port for each. The store of the launcher keeps addresses of the training before.
"""

import os
import sys

from accelerate.state import AcceleratorState

from library.cli.train_script import main
from library.families import config_class

if __name__ == "__main__":
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for script, toml, port in zip(*[iter(sys.argv[1:])] * 3, strict=True):
        os.environ["MASTER_PORT"] = port
        AcceleratorState._reset_state(True)
        if code := main(config_class(script), ["--config_file", toml]):
            sys.exit(code)
