"""`python -m outrider` is `outrider`."""

from outrider.cli import main

main()
