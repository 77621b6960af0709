"""`python -m outrider.serve MODEL` is `outrider serve MODEL`."""

import sys

from outrider.cli import main

main(["serve", *sys.argv[1:]])
