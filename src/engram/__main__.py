"""`python -m engram` is the command `engram`."""

from engram.cli import main

if __name__ == "__main__":
    main()
