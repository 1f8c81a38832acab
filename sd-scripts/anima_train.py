"""Fine-tune Anima: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

import sys

from library.cli.train_script import main
from library.families.anima.options import AnimaTrain

if __name__ == "__main__":
    sys.exit(main(AnimaTrain))
