"""Train a word for SD 1.5: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.sd15.options import Sd15TextualInversion

if __name__ == "__main__":
    run(Sd15TextualInversion)
