"""`python -m finwhale` is the `finwhale` command."""

import sys

from finwhale.cli import main

sys.exit(main())
