"""The agent half: a coding agent proposes changes to one operator's kernel inside a harness that
measures, refuses, remembers and promotes.

`backends` runs an agent's turn, `sandbox` is what it runs in, `workspace` what it may see and
change. Controllers read files and measurements, never what an agent says.
"""
