"""The command line: one module a sub-command, no logic of its own."""
