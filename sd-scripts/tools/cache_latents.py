"""Cache the latents of a data set; --help says how. `kohya cache latents` starts it on one or several GPUs."""

import sys

from library.cli.cache_data import main

if __name__ == "__main__":
    sys.exit(main("latents", sys.argv[1:]))
