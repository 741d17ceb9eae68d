"""The HTTP interface that clients of Code Judge speak."""

PROVIDES = {
    "settings": {"code_judge": "extras.code_judge.settings:CodeJudgeSections"},
    "judge_http": {"code_judge": "extras.code_judge.server:make_server"},
}
