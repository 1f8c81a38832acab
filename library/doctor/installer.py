"""`setup.bat` of version 0.3 calls the installer by this name after it has updated the program."""

import sys

from library.setup.installer import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
