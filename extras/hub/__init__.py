"""Environments and tasks of other packages: verifiers, OpenEnv, Harbor, gymnasium, reasoning-gym."""

PROVIDES = {
    "settings": {"hub": "extras.hub.settings:HubSections"},
    "environments": {"harbor": "extras.hub.harbor_episode:make_world"},
    "servers": {"openenv": "extras.hub.openenv:make_world", "gymnasium": "extras.hub.gymnasium:make_world"},
    "datasets": {
        "verifiers": "extras.hub.verifiers.tasks:rows",
        "reasoning_gym": "extras.hub.reasoning_gym:rows",
        "harbor": "extras.hub.harbor:rows",
    },
    "graders": {"reasoning_gym": "extras.hub.reasoning_gym:load_scorer"},
    "workflows": {"verifiers": "extras.hub.verifiers.environment:Verifiers"},
}
