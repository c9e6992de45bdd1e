"""``python -m simattn``."""

import sys

from simattn.clash import clash
from simattn.cli import main

if __name__ == "__main__":
    hidden = clash()
    if hidden:
        print(f"python -m simattn: warning: {hidden}", file=sys.stderr)
    sys.exit(main())
