"""Client of OpenEnv servers: reset, step and state over a WebSocket, one for each episode."""
