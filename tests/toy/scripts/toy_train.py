"""Fine-tune the toy."""

import sys

from library.families.toy.options import ToyTrain

from library.cli.train_script import main

if __name__ == "__main__":
    sys.exit(main(ToyTrain))
