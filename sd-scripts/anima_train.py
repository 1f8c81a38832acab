"""Fine-tune Anima: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.anima.options import AnimaTrain

if __name__ == "__main__":
    run(AnimaTrain)
