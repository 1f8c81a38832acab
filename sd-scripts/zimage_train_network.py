"""Train a LoRA for Z-Image: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.zimage.options import ZImageLora

if __name__ == "__main__":
    run(ZImageLora)
