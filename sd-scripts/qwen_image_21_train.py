"""Fine-tune Qwen-Image-2.1: `accelerate launch` this file with --config_file run.toml; --help lists all options."""

from library.cli.train_script import run
from library.families.qwen_image_21.options import Qwen21Train

if __name__ == "__main__":
    run(Qwen21Train)
