"""Fine-tune Krea 2: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.krea_2.options import Krea2Train

if __name__ == "__main__":
    run(Krea2Train)
