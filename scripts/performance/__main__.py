"""`python -m scripts.performance`: see pages.py."""

import sys

from scripts.performance.pages import main

if __name__ == "__main__":
    sys.exit(main())
