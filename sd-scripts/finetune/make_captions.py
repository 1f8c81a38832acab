"""Caption images with BLIP, with the flags of sd-scripts; --help lists them. The same as `kohya caption blip`."""

import sys

from library.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["caption", "blip", *sys.argv[1:]]))
