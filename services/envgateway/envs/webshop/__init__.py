"""``webshop``: shopping on a made website, with WebShop's pages, search and reward.

catalogue (files) -> goals (drawn or read) -> shop = catalogue + goals + search + reward
                                                |
world (loads once) -> environment (a dialogue) -> visit (a state machine over pages) -> observation
"""
