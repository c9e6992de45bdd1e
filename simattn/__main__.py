"""``python -m simattn``."""

import sys

from simattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
