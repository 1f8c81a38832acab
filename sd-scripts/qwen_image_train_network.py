"""Train a LoRA for Qwen-Image: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.qwen_image.options import QwenLora

if __name__ == "__main__":
    run(QwenLora)
