"""Pairs of a reference answer and a written one, by class, with the verdict that each must get.

A line of the table is a reference answer, right answers, and wrong answers. Used by
benchmarks/math_reward.py, which counts false verdicts by class, and by a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_Lines = tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]

TABLE: dict[str, _Lines] = {
    "bounds and relations": (
        ("7", ("7", "x=7", r"\approx 7", r"7\text{ more apples}"),
         (r"\geq 7", r"\le 7", r"\ge7", r"\not=7", r"\ne 7", r"\neq 7", r"\neg 7", ">7", "< 7", "≥7", r"\text{at least }7", r"7\text{ or more}",
          r"7 \text{ or less}", r"\text{not }7", r"8\sim 7", r"8\simeq 7", r"x\ne 7", r"\text{more than }7", r"\text{fewer than }7", r"7\text{ or fewer}", r"x=\ge 7")),
        ("3", ("3",), (r"1,\ldots,3", r"\{1,\ldots,3\}", r"3\ldots 5", r"3, \dots", "3...5", r"3\text{ or greater}")),
        (r"\{1,2\}", (r"\{1,2\}", "1,2"), (r"\{1,2,\ldots\}", r"\{1,2,\dots\}", r"\{1\},\{2\}", r"1,2,\cdots", r"\{1,2,...\}", r"\{1\},2")),
        ("(3,4)", ("(3,4)", "x=3, y=4", r"x=3\text{ and }y=4"), ("y=3, x=4", r"y=3\text{ and }x=4", "b=3, a=4")),
        (r"x\ne 2", (r"x\ne 2", r"x\neq 2"), ("2", r"x\ne 3", "x=2")),
    ),
    "names and bases": (
        ("x=1,y=2", ("x=1, y=2", "1,2", "(1,2)", r"x=1\text{ and }y=2"), ("2,1", "x=2,y=1", "y=1,x=2", "(2,1)")),
        ("11_8", ("11_8", "11", "11_{8}"), ("11_7", "9", "11_{10}", "12_8")),
        (r"1011_{2}", ("1011_2", "1011"), ("1011_3", "11", "1010_2")),
        ("11", ("11", "11_{10}"), ("11_2", "11_{8}", "3")),
        ("7", ("7", "7_8"), ("7_6", "8_9")),
    ),
    "marks": (
        ("7", (r"\boldsymbol{7}", r"\mathbf{7}", r"7 \checkmark", r"7\,\blacksquare"), (r"\boldsymbol{8}", r"8\checkmark")),
        (r"120^\circ", (r"120\degree", r"120^\circ", r"120^{\circ}"), (r"12\degree", "12")),
    ),
    "one value": (
        ("7", ("7", "7.0", "+7", "(7)", "07", r"\text{7}", "7.", r"\{7\}", r"\frac{14}{2}", "3+4"),
         ("8", "7.1", "-7", "[7,7]", "(7,7)", "7,7", "7, 8", "[7, 8]", "(6,7)", r"\{7,8\}", "77", r"\frac{7}{2}", "7;7", r"7\text{ and }7", r"7 \text{ or } 8")),
        ("-3", ("-3", "-3.0", r"-\frac{6}{2}"), ("3", "[-3,-3]", "-3,-3", "(-3,-3)")),
    ),
    "equations": (
        ("7", ("x=7", "x = 7", "7=x", "3+4=7", "x=3+4=7", "m+n=7", "f(2)=7", r"\frac{14}{2}=7"),
         ("8=7", "1=7", "x=8", "x=6=7", "0=7", "7=8", "7=1=7", r"8\to 7", r"8\equiv 7", r"8\Rightarrow 7", "-7=7", "x=7=8", "2=x")),
        ("5", ("x=5", "x=2+3=5", "5=y"), ("x=4=5", "4=5", "x=5=4", r"\frac12=5", r"\pi=5", "4=x")),
        ("x=2", ("2", "x=2", "2=x"), ("x=3", "3=2", "y=3")),
        (r"\frac{1}{2}", (r"x=\frac12", r"\frac24=\frac12", "x=0.5"), (r"1=\frac12", r"x=\frac13=\frac12", "2=0.5")),
        ("y=2x+1", ("y=2x+1", "y = 1+2x"), ("y=2x-1", "y=x+1")),
    ),
    "sets and tuples": (
        ("(1,2)", ("(1,2)", "(1, 2)", r"\left(1,2\right)", "(1.0,2)"),
         (r"\{1,2\}", "(2,1)", "(1,3)", "[1,2]", "(1,2,3)", r"\{2,1\}", "1", r"\left\{1,2\right\}")),
        (r"\{1,2\}", (r"\{1,2\}", r"\{2,1\}", r"\{ 1, 2 \}", r"\left\{1,2\right\}", "1,2", "2, 1"),
         ("(1,2)", "[1,2]", r"\{1,2,3\}", r"\{1\}", r"\{1,3\}", "(2,1)", "[1,2)")),
        ("(1,2,3)", ("(1,2,3)", r"\left(1, 2, 3\right)"), (r"\{1,2,3\}", "(3,2,1)", "(1,2)", "(1,2,4)", "6")),
        ("1,2", ("1,2", "2,1", "1, 2", r"\{1,2\}"), ("1", "1,3", "1,2,3", "3")),
        (r"\{3\}", (r"\{3\}", "3"), ("[3,3]", "(3,3)", r"\{3,4\}")),
    ),
    "intervals": (
        ("(1,2)", ("1<x<2", "2>x>1", r"x>1\text{ and }x<2", r"\{x \mid 1<x<2\}", r"\{x : 1<x<2\}", r"1 \lt x \lt 2", r"x\in(1,2)", "1<y<2", r"1<x<\frac{4}{2}"),
         (r"1\le x<2", r"1<x\le 2", r"1\leq x\leq 2", "1<x<3", r"x>1\text{ and }x>2", r"x\ge 1\text{ and }x<2", r"x<1\text{ and }x>2", "x>1", "x<2", "2<x<1", "1<2")),
        ("[1,2]", (r"1\le x\le 2", r"1\leq x\leq 2", r"2\ge x\ge 1", r"1\leqslant x\leqslant 2", "[1,2]", r"1 ≤ x ≤ 2"),
         ("1<x<2", r"1\le x<2", "(1,2)", "[1,2)", "(1,2]", r"\{1,2\}")),
        ("(1,2]", (r"1<x\le 2", r"x\in(1,2]", r"2\ge x>1"), (r"1\le x<2", "1<x<2", "[1,2)")),
        (r"(-\infty,3)", ("x<3", "3>x", r"(-\infty, 3)", r"x\in(-\infty,3)"),
         (r"x\le 3", "x>3", "x<4", r"(-\infty,3]", r"(3,\infty)", "-3>x")),
        (r"[3,\infty)", (r"x\ge 3", r"x\geq 3", r"3\le x", "x>=3"), ("x>3", r"x\le 3", r"(3,\infty)", r"x\ge 2")),
        ("x>3", (r"(3,\infty)", "3<x", "x>3"), (r"[3,\infty)", r"x\ge 3", r"(-\infty,3)", "x<3")),
        (r"(-\infty,1)\cup(2,\infty)",
         (r"x<1 \text{ or } x>2", r"x>2\text{ or }x<1", r"(2,\infty)\cup(-\infty,1)", r"x<1\cup x>2"),
         (r"x\le 1\text{ or }x>2", "x<1", r"1<x<2", r"x<2\text{ or }x>1")),
    ),
    "complex numbers": (
        ("i", (r"\sqrt{-1}", "i", "1i", "0+i"), ("-i", "1", r"\sqrt{1}", r"-\sqrt{-1}", "2i")),
        (r"\sqrt{-1}", ("i",), ("-i", "1")),
        ("2+3i", ("2+3i", "3i+2", r"2+3\sqrt{-1}", r"2+\sqrt{-9}"), ("2-3i", "3+2i", "2+3", r"2-\sqrt{-9}")),
        ("-1", ("i^2", "-1"), ("i", "i^4", "1")),
    ),
    "repeating decimals": (
        (r"\frac{1}{7}", (r"0.\overline{142857}", r".\overline{142857}", r"0.\dot{1}4285\dot{7}"),
         (r"0.\overline{142858}", r"0.\overline{14285}", "0.14", r"0.1\overline{42857}1")),
        (r"\frac{1}{3}", (r"0.\overline{3}", r"0.\bar{3}", r"0.\dot{3}", r"0.\bar3", r"0.3\overline{3}", "0.(3)", "0.333333333"),
         (r"0.\overline{33}4", "0.3", "0.333", r"0.\overline{34}", r"0.\dot{4}", r"0.0\overline{3}")),
        (r"\frac{1}{6}", (r"0.1\overline{6}", r"0.1\dot{6}"), (r"0.\overline{16}", r"0.1\overline{7}")),
        (r"-\frac{2}{3}", (r"-0.\overline{6}",), (r"0.\overline{6}", r"-0.\overline{7}")),
        (r"0.\overline{9}", ("1", r"0.\overline{9}"), ("0.9", "0.99")),
        (r"1.\overline{27}", (r"\frac{14}{11}", r"1.\overline{27}"), ("1.27", r"\frac{13}{11}")),
    ),
    "powers of ten": (
        ("3.8e27", (r"3.8\times 10^{27}", r"3.8 \cdot 10^{27}", "3.8e27", r"38\times10^{26}", "3.8E27", r"3.8\times10^{+27}"),
         (r"3.8\times 10^{26}", r"3.9\times 10^{27}", "3.8e26", "3.8", r"3.8\times 10^{-27}", r"3.80000001\times10^{27}")),
        (r"6.02\times 10^{23}", ("6.02e23", r"6.02\times10^{23}", "602000000000000000000000"), ("6.02e22", r"6.03\times10^{23}")),
        (r"1.5\times 10^{-9}", ("1.5e-9", r"15\times 10^{-10}", "0.0000000015"), ("1.6e-9", r"1.5\times10^{-8}", "0", "0.0000000016")),
        ("1000", (r"10^3", r"1\times 10^3", "1e3"), (r"10^4", "1e4", "100")),
    ),
    "mixed numbers": (
        ("3.5", (r"3\frac{1}{2}", "3 1/2", r"\frac{7}{2}", r"3 \frac12"), (r"2\frac12", "3 1/3", r"\frac{3}{2}", "31/2")),
        (r"3\frac{1}{2}", ("3.5", "7/2", "3 1/2"), ("1.5", "3", r"\frac{31}{2}")),
        ("-3.5", (r"-3\frac{1}{2}", "-3 1/2"), ("3 1/2", "-2.5")),
    ),
    "percent": (
        ("50", (r"50\%", "50", "50%"), ("0.5", r"5\%", r"500\%", "5")),
        (r"50\%", ("50", r"50\%", "0.5", r"\frac12"), ("5", r"5\%", "500", r"0.5\%")),
        ("0.5", (r"50\%", r"0.5\%"), (r"5\%", r"0.05\%", "50")),
        ("12.5", (r"12.5\%", "12.5%"), (r"12\%", r"1.25\%", "0.125")),
        (r"12.5\%", ("12.5", r"\frac18", "0.125"), ("125", "1.25")),
    ),
    "separators": (
        ("1000", ("1,000", r"1{,}000", r"1\,000", "1 000", "1000.0"), ("1,001", "1,00", "100", "1,0000", "10,000")),
        ("1,234,567", ("1234567", r"1{,}234{,}567"), ("1,234,568", "1234", "567")),
        (r"\$12,500", ("12500", "12,500", r"\$12500"), ("125", "12,501", "12.5")),
    ),
    "plus and minus": (
        (r"\pm 2", (r"\pm 2", "2,-2", "-2, 2", r"\{-2,2\}", r"x=\pm 2"), ("2", "-2", r"\pm 3", "2,2")),
        ("2", ("2",), (r"\pm 2", "2,-2", "-2")),
    ),
    "degrees and units": (
        (r"90^\circ", ("90", r"90^\circ", r"90^{\circ}"), ("91", r"9^\circ", "0")),
        ("90", (r"90^\circ",), (r"91^\circ",)),
        ("5", (r"5\text{ cm}", r"5\text{ meters}", r"5\ \text{cm}^2"), (r"6\text{ cm}", r"50\text{ cm}")),
        (r"12\text{ feet}", ("12", r"12\text{ feet}"), ("13", r"144")),
    ),
    "words": (
        (r"\text{Evelyn}", (r"\text{Evelyn}", "Evelyn"), (r"\text{Angela}", "E")),
        (r"\text{(C)}", ("C", r"\text{(C)}", r"\text{C}"), ("D", r"\text{(B)}")),
    ),
    "matrices": (
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
         (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
         (r"\begin{pmatrix}1&2\\4&3\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", "1,2,3,4", r"\{1,2,3,4\}", "(1,2,3,4)")),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", (r"\begin{pmatrix}1\\2\end{pmatrix}",), (r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", r"\{1,2\}")),
    ),
    "near values": (
        (r"\frac{1}{2^{99}}", (r"2^{-99}", r"\frac{2}{2^{100}}"), (r"\frac{1}{2^{98}}", "0", r"2^{-99}+2^{-140}")),
        ("10^{30}", ("10^{30}",), ("10^{30}+1",)),
        (r"\sqrt{2}", (r"\frac{2}{\sqrt 2}",), (r"\sqrt{2+10^{-20}}",)),
        ("0", (r"\sqrt{2}^2-2", r"\sin\pi"), (r"\frac{1}{2^{99}}",)),
        (r"\{2^{-99},1\}", (r"\{1,2^{-99}\}",), (r"\{2^{-98},1\}",)),
        ("(0.0000001, 1)", ("(0.0000001, 1)",), ("(0.0000002, 1)",)),
        (r"\begin{pmatrix}2^{-99}\\1\end{pmatrix}", (r"\begin{bmatrix}2^{-99}\\1\end{bmatrix}",), (r"\begin{pmatrix}2^{-98}\\1\end{pmatrix}",)),
        ("18", (r"18 \approx 18",), (r"18 \approx 17", r"17 \mid 18", r"17 | 18")),
    ),
    "spellings": (
        (r"\frac1e", (r"\frac{1}{\mathrm{e}}", r"\mathrm{e}^{-1}"), (r"\frac{1}{\mathrm{i}}", "e")),
        ("2i", (r"2\mathrm{i}",), (r"-2\mathrm{i}",)),
        (r"\ln 2", (r"\log_e 2", r"\log_{\mathrm{e}} 2", r"\operatorname{ln} 2", r"\mathrm{ln}(2)"), (r"\log_2 e", r"\ln 3")),
        (r"\log_{10} 2", (r"\lg 2",), (r"\lg 3",)),
        (r"\arctan 2", (r"\operatorname{arctan} 2", r"\arctg 2"), (r"\arcctg 2",)),
        (r"\emptyset", (r"\varnothing", r"\{\}", r"\text{empty set}"), (r"\{0\}", "0")),
        (r"\mathbb{R}", (r"(-\infty,\infty)", r"\R", r"\text{all real numbers}"), (r"(0,\infty)",)),
        ("(1,2)", (r"\langle 1,2\rangle",), (r"\langle 2,1\rangle",)),
        (r"\{1,2\}", (r"\lbrace 2,1\rbrace",), (r"\lbrace 1,3\rbrace",)),
        (r"10,\!080", (r"10,\!080", "10080", "10,080"), ("10,081", "10")),
    ),
    "plain words": (
        ("2.50 dollars", ("2.5", r"\$2.50", "2.50 dollars"), ("25", "2.6 dollars")),
        ("5", ("5 cm^2", "5 km/h", r"\text{5 apples}", "5 miles per hour"), ("6 cm^2", "5 xy", "5 or more", "5x apples", "5 million")),
        ("1000", ("1,000 people", "1000 people."), ("1,001 people", "1 people")),
        (r"\frac34 cups", (r"\frac{3}{4}", r"\frac{3}{4} cups"), (r"\frac{4}{3} cups",)),
    ),
    "expressions": (
        (r"\sqrt{8}", (r"2\sqrt{2}", r"\sqrt{8}"), (r"2\sqrt{3}", r"\sqrt{2}", "2.8", "2.83")),
        ("x^2+2x+1", ("(x+1)^2", "1+2x+x^2"), ("(x-1)^2", "x^2+1", "x^2+2x")),
        (r"\frac{1}{2}", ("0.5", r"\dfrac{2}{4}", "1/2", r"2^{-1}"), ("0.4999", "0.50001", r"\frac{1}{3}", "2")),
        ("10000", ("10^4", "10,000"), ("10001", "9999", "10000.01", "9999.9999999")),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """One answer and whether the answer is right."""

    kind: str
    truth: str
    answer: str
    right: bool


def pairs() -> Iterator[Pair]:
    for kind, lines in TABLE.items():
        for truth, right, wrong in lines:
            yield from (Pair(kind, truth, answer, True) for answer in right)
            yield from (Pair(kind, truth, answer, False) for answer in wrong)
