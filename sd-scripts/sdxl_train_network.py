"""Train adapters for SDXL: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.sdxl.options import SdxlLora

if __name__ == "__main__":
    run(SdxlLora)
