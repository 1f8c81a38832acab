"""Train a LoRA for the toy."""

from library.families.toy.options import ToyLora

from library.cli.train_script import run

if __name__ == "__main__":
    run(ToyLora)
