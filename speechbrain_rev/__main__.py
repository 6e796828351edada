"""``python -m speechbrain_rev`` is the console command."""

import sys

from speechbrain_rev.cli import main

if __name__ == "__main__":
    sys.exit(main())
