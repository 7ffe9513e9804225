"""The commands of `attndiag`, one module a group; `attndiag.cli` lists them.

A command is a function with annotated parameters and a docstring that ends in examples. It imports what is heavy
inside its body, does its work through the library, writes data to standard output and everything else to standard
error (`commands.console`), and leaves through `commands.console.guarded`, which turns errors into one line and an exit
status: 0 fine, 1 some prompts failed or a self-check failed, 2 misuse, 3 a fault of this program, 130 interrupted.
"""
