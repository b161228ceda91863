"""`python -m tenure.cli` is `tenure`."""

from tenure.cli.main import main

main()
