"""Tasks of AgentBench's task servers that the reference recipes train and evaluate on, as indices into the servers'
lists.

ALFWorld counts in the 4,699 games of ``data/alfworld/standard.json`` of AstraFlow's AgentBench: 4,649 training games by
type of task, then 50 of ``valid_unseen``. WebShop counts in its 12,087 goals, shuffled with seed 233.
"""

from __future__ import annotations

from itertools import chain

# The reference leaves out 547 of the training games, without a stated reason.
_ALFWORLD_TRAIN = """
0-21 42-102 108-109 111-114 116 118-143 145-162 164-182 184-190 192-202 204-205 207-208 210-279 283-336 338-422
424-428 430-455 457-556 558-612 632-698 700-701 703-711 713-723 725-730 732-817 835-880 882-914 916-944 955-969
971-977 979-984 986-989 991-1113 1115-1156 1158-1173 1175-1180 1182-1200 1202-1332 1334-1476 1478-1558 1560-1565
1567-1599 1602-1617 1619-1633 1635-1638 1640-1659 1661-1740 1742-1889 1891-1927 1929-1970 1972-2017 2019-2025
2027-2132 2134-2136 2138-2173 2175-2205 2207-2211 2213-2354 2356-2475 2477-2481 2483-2487 2489-2611 2613-2824
2827-2853 2855 2857-2937 2939-2953 2955 2978-3009 3011-3031 3033-3035 3060-3092 3100-3108 3129-3133 3190-3193
3241-3260 3273-3291 3309-3326 3332-3354 3361-3407 3415-3417 3474-3484 3527-3536 3543-3546 3559-3564 3605-3643
3646-3726 3728-3759 3761-3766 3769-3824 3826-3830 3837-3932 3934-4019 4022-4038 4040-4067 4069-4164 4166-4394
4396-4441 4443 4445-4494 4496-4563 4565-4574 4576-4587 4589-4622 4626-4648
"""


def _numbers(ranges: str) -> tuple[int, ...]:
    """The whole numbers of ranges like ``0-21 116``, both ends included."""
    ends = (tuple(map(int, part.split("-"))) for part in ranges.split())
    return tuple(chain.from_iterable(range(pair[0], pair[-1] + 1) for pair in ends))


ALFWORLD_TRAIN = _numbers(_ALFWORLD_TRAIN)
ALFWORLD_VALID = range(4649, 4699)
WEBSHOP_TRAIN = range(200, 12_087)
WEBSHOP_VALID = range(200)
