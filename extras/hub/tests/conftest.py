"""The sandbox that Harbor's tasks are played in."""

from tests.integration.envgateway.conftest import pool as pool
