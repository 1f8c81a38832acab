"""Train adapters for FLUX.1: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.flux.options import FluxLora

if __name__ == "__main__":
    run(FluxLora)
