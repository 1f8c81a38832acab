"""Train a LoRA for the toy."""

import sys

from library.families.toy.options import ToyLora

from library.cli.train_script import main

if __name__ == "__main__":
    sys.exit(main(ToyLora))
