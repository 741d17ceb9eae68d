"""A page of our own text from which the tiny tokenizer learns its merges: prose, formulas, programs, rooms, shops."""

from __future__ import annotations

TEXT = r"""
What is the smallest whole number that leaves a remainder of 3 when it is divided by 7 and a remainder of 5 when divided by 11?
Let $x$ and $y$ be real numbers such that $x^2 + y^2 = 25$ and $xy = 12$. Find the value of $\frac{x}{y} + \frac{y}{x}$.
A triangle has sides of length $13$, $14$ and $15$. Compute the area of the triangle and the radius of its incircle.
Suppose that $f(x) = ax^3 + bx^2 + cx + d$ for all integers $x$, and $f(1) = 10$. Determine the sum of all possible values.
How many different ways are there to place 8 balls into 3 boxes so that no box is empty? Express your answer as a fraction
$\frac{m}{n}$, where $m$ and $n$ are relatively prime positive integers, and find $m + n$. \sqrt{2} \cdot \pi \left( \right)
The final answer is \boxed{204}. Therefore the probability is \boxed{\frac{1}{2}}. Reason step by step and put the answer
into the box. <answer>\boxed{70}</answer> Explain what you found. <verdict>approve</verdict> <verdict>reject</verdict>
Check the proposed solution of the problem and look for the first mistake. Solve the problem again from the beginning.

You are given an array of n integers and q queries. Each query contains two numbers l and r. Print the maximum of the sum
of the elements between them. The first line of the input contains a single integer t (1 <= t <= 100), the number of test
cases. Input: the only line contains two space-separated integers. Output: for each test case, print one integer, the
answer to the problem. Constraints: all values are integers. Example 1: Input: nums = [1,2,3], target = 4. Output: [0, 2]
Given a string s, return the longest substring of s without repeating characters. Write the whole program into one block.

```python
import sys
from typing import List, Optional, Dict, Tuple

class Solution:
    def maximumValue(self, nums: List[int], target: int) -> int:
        result = 0
        for i in range(len(nums)):
            for j in range(i + 1, len(nums)):
                if nums[i] + nums[j] == target:
                    return True
                else:
                    result = max(result, nums[i] - nums[j])
        return result

def check(candidate):
    assert candidate([1, 2, 3], 4) == 2
    assert candidate("abc", "") == False

def main() -> None:
    n, m = map(int, input().split())
    values = list(map(int, sys.stdin.readline().split()))
    count = {key: value for key, value in enumerate(values) if value > 0}
    while n > 0 and not count:
        n -= 1
    print(" ".join(str(value) for value in sorted(values)))
    print(n // 2, m % 10, sep="\n", end="")

if __name__ == "__main__":
    main()
```
```json
[{"input": "1 2\n", "output": "3\n"}, {"args": [[1, 2], 3], "expected": true}]
```
<tool_call>{"name": "python_code_with_standard_io", "arguments": {"code": "print(2 + 2)", "input": ""}}</tool_call>

You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, a drawer 3, a drawer 2, a shelf 1, a
cabinet 4, a countertop 1, a fridge 1, a garbagecan 1, a microwave 1, a sinkbasin 1, a stoveburner 2, and a toaster 1.
Your task is to: put a clean mug in the coffee machine. AVAILABLE ACTIONS: go to shelf 1, open drawer 2, take mug 1 from desk 1,
move mug 1 to cabinet 4, heat potato 1 with microwave 1, examine bed 1, inventory, look, help. You arrive at desk 1. On the
desk 1, you see a book 1 and a pencil 2. The drawer 2 is closed. You open the drawer 2. Nothing happens. You pick up the mug 1
from the desk 1. THOUGHT: I should look for it first. ACTION: go to desk 1

WebShop [SEP] Instruction: [SEP] i am looking for a wireless speaker that is fast charging, and price lower than 130.00 dollars
[SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP] Next > [SEP] Rating: N.A. [SEP] Description [SEP] Features
[SEP] Reviews [SEP] Buy Now. Observation: Available Actions: {'has_search_bar': True, 'clickables': ['search', 'buy now']}
Thought: I think the first one fits; I look at it. Action: search[wireless speaker] Action: click[Buy Now] color: blue, size: large
You may call tools to help with the task. Write one JSON object with the name of the function and its arguments.
"""
