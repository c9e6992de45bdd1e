"""``python -m simattn``."""

import sys

if __name__ == "__main__":
    try:
        from simattn.clash import clash
        from simattn.cli import main
    except KeyboardInterrupt:  # while NumPy is still being imported
        sys.exit(130)
    hidden = clash()
    if hidden:
        print(f"python -m simattn: warning: {hidden}", file=sys.stderr)
    sys.exit(main())
