"""Train a LoRA for FLUX.3: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.flux_3.options import Flux3Lora

if __name__ == "__main__":
    run(Flux3Lora)
