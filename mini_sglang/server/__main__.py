"""`python -m mini_sglang.server` is `mini-sglang serve`."""

import sys

from mini_sglang.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
