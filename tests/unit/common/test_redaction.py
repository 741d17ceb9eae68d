"""No secret reaches a log: neither the file nor the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.common.security.keys import Role
from services.common.telemetry import logs
from services.common.telemetry.logs import HIDDEN, redacted
from tests.keys import as_role, make_keys

TOKEN = "eyJhbGciOiJFUzI1NiJ9.eyJydW4iOiJyMSJ9.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\nAgEGCCqGSM49\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"authorization: Bearer {TOKEN}", TOKEN),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA"),
        ("{'authorization': 'c2VjcmV0LWtleQ'}", "c2VjcmV0LWtleQ"),
        ("(('authorization', 'bearer opaque-value'),)", "opaque-value"),
        (f"key {TOKEN}~s3ss10n-of-the-agent.", "s3ss10n"),
        (PEM, "MIGHAgEAMBMG"),
        (PEM[:60], "MIGHAgEAMBMG"),
        ("rediss://user:pass-word@queue:6379/0", "pass-word"),
    ],
)
def test_secrets_are_told_by_their_form(text: str, secret: str) -> None:
    assert secret not in redacted(text)
    assert HIDDEN in redacted(text)


def test_what_is_no_secret_stays() -> None:
    for text in ("tokens_per_s 12", "wrote to a@b", "tcp://127.0.0.1:5", "-----BEGIN CERTIFICATE-----", "author: me"):
        assert redacted(text) == text


def test_neither_log_file_nor_terminal_has_the_secrets_of_a_real_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = as_role(make_keys(tmp_path / "keys"), Role.OPERATOR).bundle
    logs.configure("orchestrator", tmp_path)
    log = structlog.get_logger()
    log.warning(
        "a.header", headers={"authorization": f"Bearer {bundle.token}"}, pairs=[("authorization", bundle.token)]
    )
    log.warning("a.key", text=bundle.key.decode(), nested={"deep": [bundle.key.decode()]}, raw=bundle.key)
    log.warning("a.bundle", bundle=bundle, error=f"refused {bundle.token}")
    try:
        raise ValueError(f"cannot use {bundle.token}")
    except ValueError:
        log.exception("a.trace")
    written = (tmp_path / "logs" / "orchestrator.jsonl").read_text() + capsys.readouterr().err
    assert written.count("a.header") >= 1
    body = bundle.key.decode().splitlines()[1]
    for secret in (bundle.token, bundle.token.split(".")[1], bundle.token.split(".")[2], body):
        assert secret not in written


def test_a_recipe_that_is_printed_shows_no_password() -> None:
    setting = "envgateway.queue.redis_uri=rediss://user:pass-word@host:6379/0"
    result = CliRunner().invoke(app, ["check", "recipes/quickstart", "--show", "--set", setting])
    assert result.exit_code == 0, result.output
    assert f"rediss://{HIDDEN}@host:6379/0" in result.output and "pass-word" not in result.output
