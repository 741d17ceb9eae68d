"""The HTTP interface that clients of Code Judge speak."""

PROVIDES = {"judge_http": {"code_judge": "extras.code_judge.server:make_server"}}
