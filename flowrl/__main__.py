"""`python -m flowrl` is the command `flowrl`."""

from flowrl.cli import entry

if __name__ == "__main__":
    entry()
