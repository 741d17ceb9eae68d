"""Solutions of our own to ten contest problems, by data set and row, and a wrong one for each.

The wrong ones make the mistake that a person would: an edge forgotten, an index off by one.
"""

from __future__ import annotations

#: (data set, row): (right, wrong)
SOLUTIONS: dict[tuple[str, int], tuple[str, str]] = {
    ("deepcoder_codeforces", 0): (
        "for _ in range(int(input())):\n    print(*sorted(map(int, input().split())))",
        "for _ in range(int(input())):\n    print(*map(int, input().split()))",
    ),
    ("deepcoder_codeforces", 96): (
        "for _ in range(int(input())):\n    a, b = input().split()\n    print(b[0] + a[1:], a[0] + b[1:])",
        "for _ in range(int(input())):\n    a, b = input().split()\n    print(b[0] + a[1:], a[1] + b[1:])",
    ),
    ("deepcoder_codeforces", 180): (
        "for _ in range(int(input())):\n    print((int(input()) + 2) // 4)",
        "for _ in range(int(input())):\n    print(int(input()) // 4)",
    ),
    ("deepcoder_codeforces", 303): (
        """
for _ in range(int(input())):
    n, k = map(int, input().split())
    if k == 1:
        print(n)
        continue
    steps = 0
    while n:
        n, digit = divmod(n, k)
        steps += digit
    print(steps)
""",
        """
for _ in range(int(input())):
    n, k = map(int, input().split())
    steps, power = 0, 1
    while k > 1 and power * k <= n: power *= k
    while n and k > 1:
        n, steps, power = n % power, steps + n // power, power // k
        if power == 0: break
    print(steps)
""",
    ),
    ("deepcoder_codeforces", 88): (
        """
for _ in range(int(input())):
    x = input().strip()
    print("YES" if x[0] == "1" and x[-1] != "9" and "0" not in x[1:-1] else "NO")
""",
        """
for _ in range(int(input())):
    x = input().strip()
    print("YES" if x[0] == "1" and "0" not in x[1:-1] else "NO")
""",
    ),
    ("code_contests", 140): (
        """
liked = sorted({i * i for i in range(1, 31623)} | {i ** 3 for i in range(1, 1001)})
import bisect
for _ in range(int(input())):
    print(bisect.bisect_right(liked, int(input())))
""",
        """
for _ in range(int(input())):
    n = int(input())
    print(int(n ** 0.5) + round(n ** (1 / 3)) - int(n ** (1 / 6)))
""",
    ),
    ("code_contests", 50): (
        """
M = 998244353
n = int(input())
a = list(map(int, input().split()))
# f(i, v): ways with b_i = v; sum over v of f(i, v) = S_i - f(i - 1, v): kept as signed steps of heights
sign, steps, area = 1, [(a[0], 1)], a[0] % M
S = area
for height in a[1:]:
    dropped = 0
    while steps and steps[-1][0] >= height:
        h, c = steps.pop()
        area = (area - h * c) % M
        dropped = (dropped + c) % M
    steps.append((height, dropped))
    area = (area + height * dropped) % M
    # values up to height become S - old: the last step takes S with the sign turned
    sign = -sign
    h, c = steps.pop()
    area = (area - h * c) % M
    c = (c + sign * S) % M
    steps.append((h, c))
    area = (area + h * c) % M
    S = (sign * area) % M
print(S)
""",
        """
n = int(input())
a = list(map(int, input().split()))
answer = a[0]
for x in a[1:]:
    answer = answer * (x - 1) % 998244353
print(answer)
""",
    ),
    ("code_contests", 113): (
        """
def key(x, p):
    return len(x) + p, (x + "0" * 7)[:7]
for _ in range(int(input())):
    (x, p), (y, q) = input().split(), input().split()
    first, second = key(x, int(p)), key(y, int(q))
    print("<" if first < second else ">" if first > second else "=")
""",
        """
for _ in range(int(input())):
    (x, p), (y, q) = input().split(), input().split()
    first, second = (len(x) + int(p), x), (len(y) + int(q), y)
    print("<" if first < second else ">" if first > second else "=")
""",
    ),
    ("code_contests", 132): (
        """
for _ in range(int(input())):
    b = list(map(int, input().split()))
    print(b[0], b[1], b[6] - b[0] - b[1])
""",
        """
for _ in range(int(input())):
    b = list(map(int, input().split()))
    print(b[0], b[1], b[2])
""",
    ),
    ("code_contests", 27): (
        """
for _ in range(int(input())):
    n, m, k = map(int, input().split())
    full = n * (n - 1) // 2
    if m < n - 1 or m > full:
        print("NO")
    elif n == 1:
        print("YES" if k > 1 else "NO")
    elif k <= 2:
        print("NO")
    elif k == 3:
        print("YES" if m == full else "NO")
    else:
        print("YES")
""",
        """
for _ in range(int(input())):
    n, m, k = map(int, input().split())
    print("YES" if n - 1 <= m <= n * (n - 1) // 2 and k > 2 else "NO")
""",
    ),
}
