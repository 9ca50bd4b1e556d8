"""`python -m fastkernels_tuner` is `fastkernels-tune`."""

from fastkernels_tuner.cli import main

main()
