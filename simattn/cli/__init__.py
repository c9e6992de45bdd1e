"""``python -m simattn``: every variant at one problem, counted, predicted and compared.

A command is two functions: one turns parsed arguments into a `Report`, the other adds its parser
and stands in `COMMANDS`. What is wrong with the arguments is a `UsageError`, one line that names
the argument, its value and the rule. Exit codes: 0; 1 a count differs from its closed form or an
error is above its bound; 2 usage, or nothing fits the SRAM; 130 interrupted.
"""

from simattn.cli.shell import main, parser

__all__ = ["main", "parser"]
