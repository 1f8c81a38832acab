"""Fine-tune the toy."""

from library.families.toy.options import ToyTrain

from library.cli.train_script import run

if __name__ == "__main__":
    run(ToyTrain)
