"""`python -m rlhf`, which is also what launchers start."""

from rlhf.cli import main

if __name__ == "__main__":
    main()
