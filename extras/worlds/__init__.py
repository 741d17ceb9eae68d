"""Text worlds and shops with engines or data of their own, and AgentBench's two sides."""

PROVIDES = {
    "settings": {"worlds": "extras.worlds.settings:WorldsSections"},
    "environments": {
        "alfworld": "extras.worlds.alfworld:make_world",
        "household_toy": "extras.worlds.household_toy:make_world",
        "textworld": "extras.worlds.textworld:make_world",
        "webshop": "extras.worlds.webshop_pages:make_world",
    },
    "servers": {"agentbench": "extras.worlds.agentbench:make_world"},
    "task_server": {"agentbench": "extras.worlds.taskserver:TaskServer"},
    "task_checks": {
        "alfworld": "extras.worlds.alfworld:task_problems",
        "webshop": "extras.worlds.webshop:task_problems",
    },
    "stand_ins": {"alfworld": "extras.worlds.made:houses_here", "webshop": "extras.worlds.made:shop_here"},
}
