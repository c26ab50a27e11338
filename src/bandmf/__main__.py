"""`python -m bandmf`: the command line."""

from bandmf.cli import main

main()
