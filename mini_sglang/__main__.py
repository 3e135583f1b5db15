"""`python -m mini_sglang`: the command line, and `--model PATH --shell` for `mini-sglang chat PATH`."""

import sys

from mini_sglang.cli import main

if __name__ == "__main__":
    sys.exit(main())
