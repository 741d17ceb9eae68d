"""What coder and verifier of ``codegen_verifier`` read: our own text, all of it here.

``{problem}`` is the task's text (for the verifier without its examples), ``{entry_point}`` the function that is called,
``{num_cases}`` how many cases are asked for, ``{program}`` and ``{report}`` the earlier program and what it did.
"""

from __future__ import annotations

WRITE_PROGRAM = """Solve this programming problem in Python 3.

{problem}

Your program reads standard input and prints the answer to standard output, nothing else. Write the whole program into \
one block that begins with ```python and ends with ```."""

WRITE_FUNCTION = """Solve this programming problem in Python 3.

{problem}

Your code is called as `{entry_point}`. Write all of it, imports included and without calls of your own, into one block \
that begins with ```python and ends with ```."""

TEST_PROGRAM = """You test programs that you cannot see. Below is a programming problem without its examples. Find inputs \
that a careless solution gets wrong: smallest and unusual values, ties, limits, what the statement says only once. \
Keep them small enough to work out the right output by hand, and work it out step by step: a test whose output is \
wrong rejects right programs.

{problem}

Write at most {num_cases} test cases as one JSON list in a block that begins with ```json and ends with ```. "input" is \
all that the program reads from standard input and "output" all that it must print:

```json
[{"input": "...\\n", "output": "...\\n"}]
```"""

TEST_FUNCTION = """You test programs that you cannot see. Below is a programming problem without its examples. Find \
arguments that a careless solution gets wrong: smallest and unusual values, ties, limits, what the statement says only \
once. Keep them small enough to work out the right value by hand, and work it out step by step: a test whose value is \
wrong rejects right programs.

{problem}

Write at most {num_cases} test cases as one JSON list in a block that begins with ```json and ends with ```. "args" is \
the list of positional arguments of `{entry_point}` and "expected" the value that it must return:

```json
[{"args": [...], "expected": ...}]
```"""

TRY_AGAIN = """{problem}

An earlier answer to this problem was:

```python
{program}
```

A tester ran it and objects:

{report}

The tester may be wrong about what is right. Find out who is, and write the whole corrected code into one block that \
begins with ```python and ends with ```."""
