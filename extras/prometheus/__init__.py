"""``GET /metrics`` of every process, for Prometheus."""

PROVIDES = {"metrics": {"prometheus": "extras.prometheus.server:MetricsServer"}}
