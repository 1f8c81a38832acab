"""Cache text encoder outputs of a data set; --help says how. `kohya cache text` starts it on one or several GPUs."""

import sys

from library.cli.cache_data import main

if __name__ == "__main__":
    sys.exit(main("text", sys.argv[1:]))
