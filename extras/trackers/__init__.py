"""Sends metrics of runs to Weights & Biases, trackio and OpenTelemetry."""

_FOLLOW = "extras.trackers.follow:send_rows"

PROVIDES = {
    "trackers": {"wandb": _FOLLOW, "trackio": _FOLLOW, "otlp": _FOLLOW},
    "commands": {"track": "extras.trackers.command:track"},
}
