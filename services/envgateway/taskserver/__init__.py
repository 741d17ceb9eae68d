"""Episodes for AgentBench's clients over HTTP: its classic controller's protocol, and that of task-server adapters.

classic (sessions by number) ---.
                                 >-- conversations -- EpisodeManager -- environments
adapter (episodes by uuid) -----'         |
                                   tasks: names, indices, rows
"""
