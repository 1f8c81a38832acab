"""`python -m library.demo`, an alias of `kohya demo`."""

import sys

from library.demo import main

if __name__ == "__main__":
    sys.exit(main())
