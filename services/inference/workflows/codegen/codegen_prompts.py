"""Default prompts of ``codegen_verifier`` for coder and verifier.

``{problem}`` is the task's text (for the verifier without its examples), ``{entry_point}`` the function that is called,
``{num_cases}`` the number of requested cases, ``{program}`` the coder's first program and ``{report}`` its results on the
cases.
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

TEST_PROGRAM = """You test programs. Below are a programming problem without its examples, and a candidate program that \
may be right or wrong. Read the program and look for inputs that it gets wrong: smallest and unusual values, ties, limits, \
what the statement says only once. Keep them small enough to work out the right output by hand, and work it out step by \
step from the statement, never from the program: a test whose output is wrong rejects right programs.

Problem:
{problem}

Candidate program:

```python
{program}
```

After your reasoning write exactly {num_cases} different test cases as one JSON list in a block that begins with ```json \
and ends with ```. "input" is all that the program reads from standard input and "output" all that it must print:

```json
[{"input": "...\\n", "output": "...\\n"}]
```"""

TEST_FUNCTION = """You test programs. Below are a programming problem without its examples, and a candidate program that \
may be right or wrong. Read the program and look for arguments that it gets wrong: smallest and unusual values, ties, \
limits, what the statement says only once. Keep them small enough to work out the right value by hand, and work it out \
step by step from the statement, never from the program: a test whose value is wrong rejects right programs.

Problem:
{problem}

Candidate program:

```python
{program}
```

After your reasoning write exactly {num_cases} different test cases as one JSON list in a block that begins with ```json \
and ends with ```. "args" is the list of positional arguments of `{entry_point}` and "expected" the value that it must \
return:

```json
[{"args": [...], "expected": ...}]
```"""

TRY_AGAIN = """{problem}

An earlier program of yours for this problem was not accepted. A tester wrote test cases, and your program was run on them:

{report}

The tester may be wrong about what is right. Solve the problem again, and write the whole code into one block that begins \
with ```python and ends with ```."""
