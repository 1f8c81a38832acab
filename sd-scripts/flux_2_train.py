"""Fine-tune FLUX.2: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.flux_2.options import Flux2Train

if __name__ == "__main__":
    run(Flux2Train)
