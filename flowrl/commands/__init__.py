"""The commands of the command line, a file per subject; `flowrl.cli` puts them together."""
